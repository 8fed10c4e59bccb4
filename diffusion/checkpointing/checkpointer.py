"""Saving and loading of checkpoints that can be resumed on any number of devices with any parallelism strategy."""

import datetime
import logging
import shutil
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from composer.callbacks import CheckpointSaver
from composer.core import Event, State, Time
from composer.loggers import Logger
from composer.utils import dist, reproducibility
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.utils._pytree import tree_leaves

from diffusion.callbacks.preemption import is_last_batch
from diffusion.checkpointing import checkpoint_store, retention, sharded_state
from diffusion.checkpointing.rank_agreement import raise_on_all_ranks, run_on_rank_zero
from diffusion.checkpointing.save_interval import timed_interval
from diffusion.checkpointing.shared_folder import open_run_folder
from diffusion.checkpointing.storage_faults import SaveFailed, describe_fault, storage_fault, way_out
from diffusion.checkpointing.trainer_state import gather_state, load_checkpoint
from diffusion.checkpointing.verification import newest_intact
from diffusion.config.checkpointing import KeepConfig
from diffusion.launch.run_id import check_run_id
from diffusion.storage.atomic import remove
from diffusion.storage.retry import DISK_FULL_ERRORS

log = logging.getLogger(__name__)

MAX_FAILED_SAVES = 3
"""Number of saves in a row that may fail; the last of them ends the run."""
LAST_SAVE_PAUSES_SECONDS = (2.0, 8.0, 20.0, 30.0)
"""Pauses between the tries of a required save: the save at the end of the run, one before the run stops, and the last
one allowed after others have failed."""


def _ignore(message: str) -> None:
    """Do nothing about a failed save."""


class Checkpointer(CheckpointSaver):
    """Callback that saves checkpoints atomically (`checkpoint_store`) and resumes from one.

    A storage fault of any rank, such as a full disk, fails the save on all ranks: the unfinished checkpoint is removed,
    the metric `checkpoint/failed_saves` counts it, and training continues to the next save. The run ends if
    MAX_FAILED_SAVES in a row fail, or the save at the end of training, or one that was requested because the run stops;
    these are retried for a minute first. Composer uses this callback instead of creating its own CheckpointSaver.

    Args:
        folder: The run's folder, on a file system that all nodes share.
        save_interval: A Composer time string, a time such as `10m`, or `auto`, which chooses the time from the
            duration of saves and the failures of the run. The end of training is always saved.
        keep: Checkpoints to keep (`retention`); None keeps all.
        sharded: If True, each rank writes its shards of model, optimizer and weight averages, which requires FSDP2;
            otherwise rank 0 writes them unsharded. Both formats can be read by any number of ranks with any strategy.
        resume: Checkpoint to resume from; None starts a new run.
        run_id: The run's id, as `open_run_folder` returns it; if empty, the folder is opened when training is set up.
        recipe_text: The resolved recipe, saved in each checkpoint as recipe.yaml; empty for a run without a recipe.
        on_failed_save: Called on rank 0 with the message of each failed save.
    """

    # A subclass of Composer's CheckpointSaver, since the Trainer looks for one by type and asks it when to save. Its
    # saving is replaced: Composer 0.32.1 writes to the final name, without a flush, so that a process killed during a
    # save leaves a truncated file.

    def __init__(
        self,
        folder: str | Path,
        *,
        save_interval: str | int | Time = '1ep',
        keep: KeepConfig | None = None,
        sharded: bool = False,
        resume: Path | None = None,
        run_id: str = '',
        recipe_text: str = '',
        on_failed_save: Callable[[str], None] = _ignore,
    ) -> None:
        self._timed = timed_interval(save_interval, Path(folder))
        super().__init__(
            folder=str(folder),
            filename='{batch}',
            remote_file_name=None,
            latest_filename=None,
            latest_remote_file_name=None,
            save_interval=self._timed or save_interval,
            overwrite=True,
        )
        self.tmp_dir_for_symlink.cleanup()  # used for uploads only, which this class does not do
        self.run_folder = Path(folder)
        self.keep = keep
        self.sharded = sharded
        self.resume = resume
        self.run_id = run_id
        self.recipe_text = recipe_text
        self.on_failed_save = on_failed_save
        self.failed_saves = 0
        """Number of saves of this process that failed."""
        self._failed_in_a_row = 0
        self._random_state: list[dict[str, Any]] | None = None

    def init(self, state: State, logger: Logger) -> None:
        self.run_id = self.run_id or open_run_folder(self.run_folder)
        with raise_on_all_ranks(str(self.run_folder)):
            if dist.get_global_rank() == 0:
                checkpoint_store.remove_unfinished_saves(self.run_folder)

    def before_load(self, state: State, logger: Logger) -> None:
        if self.resume is None:
            return
        self._random_state = load_checkpoint(state, logger, self.resume)
        self.last_checkpoint_batch = state.timestamp.batch
        self.saved_checkpoints.append(str(self.resume))
        log.info('resumed from %s', self.resume)

    def batch_start(self, state: State, logger: Logger) -> None:
        # Noise and timesteps come from counter-based generators keyed by sample ID; this is for layers that draw from
        # torch's generator, such as dropout. Composer 0.32.1 restores its state only at the start of an epoch when the
        # dataset is resumable, so it is restored here in the middle of an epoch, after the loader has started, which
        # draws from the generator too. The states are per rank, so they are dropped if the number of ranks has changed.
        if self._random_state is not None:
            states, self._random_state = self._random_state, None
            if len(states) == dist.get_world_size() and state.timestamp.batch_in_epoch.value:
                reproducibility.load_rng_state(states)

    # Composer's saver stores its list of saved checkpoints; here the run's folder is listed instead.
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        self._save_at_interval(state, logger, Event.BATCH_CHECKPOINT)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        self._save_at_interval(state, logger, Event.EPOCH_CHECKPOINT)

    def iteration_checkpoint(self, state: State, logger: Logger) -> None:
        self._save_at_interval(state, logger, Event.ITERATION_CHECKPOINT)

    def _save_at_interval(self, state: State, logger: Logger, event: Event) -> None:
        """Save a checkpoint if one is due. After a failed save training continues, unless this save is required."""
        if not self.save_interval(state, event) or self.last_checkpoint_batch == state.timestamp.batch:
            return
        if is_last_batch(state) or self._failed_in_a_row + 1 >= MAX_FAILED_SAVES:
            self._save_checkpoint(state, logger)
            return
        try:
            self._try_to_save(state)
        except SaveFailed as error:
            count = self._count_failure(logger)
            self._report(f'{error}; training continues to the next save (failed save {count} of {MAX_FAILED_SAVES})')

    def _save_checkpoint(self, state: State, logger: Logger) -> None:
        """Save a checkpoint that the run cannot continue without, with retries; a collective.

        Composer and `save_now` call this too.

        Raises:
            SaveFailed: Every try failed; on every rank. The message has the newest checkpoint and the way out.
        """
        for pause in (*LAST_SAVE_PAUSES_SECONDS, None):
            try:
                self._try_to_save(state)
                return
            except SaveFailed as error:
                if pause is None:
                    count = self._count_failure(logger)
                    row = f' ({count} saves in a row have failed)' if count > 1 else ''
                    newest = self.saved_checkpoints[-1] if self.saved_checkpoints else 'none'
                    message = f'{error}{row}; newest checkpoint: {newest}; {way_out(error.errno)}'
                    self._report(message)
                    raise SaveFailed(error.errno, message) from error
                if dist.get_global_rank() == 0:
                    log.warning('%s; trying again in %g s', error, pause)
                time.sleep(pause)

    def _try_to_save(self, state: State) -> None:
        """Save a checkpoint and remove old ones; a collective.

        Raises:
            SaveFailed: A rank met a storage fault; on every rank.
        """
        began = time.monotonic()
        try:
            final = self._write(state)
        except SaveFailed as error:
            # The ranks may have met different faults, but only together can they make room and try again.
            full = any(dist.all_gather_object(error.errno in DISK_FULL_ERRORS))
            if not full or not self._make_room(state):
                raise
            final = self._write(state)
        if self._timed is not None:
            self._timed.saved(time.monotonic() - began)
        # After the save: `save_now` saves a batch again unless this is its number.
        self.last_checkpoint_batch = state.timestamp.batch
        self.saved_checkpoints.append(str(final))
        self._failed_in_a_row = 0
        if dist.get_global_rank() == 0 and self.keep is not None:
            try:
                retention.prune(self.run_folder, self.keep)
            except OSError as error:  # the next save tries again
                log.warning('%s: old checkpoints are not removed (%s)', self.run_folder, error)

    def _write(self, state: State) -> Path:
        return save_checkpoint(
            state,
            self.run_folder,
            run_id=self.run_id,
            sharded_tensors=self.sharded,
            recipe_text=self.recipe_text,
        )

    def _make_room(self, state: State) -> bool:
        """Remove the checkpoints that the run would not keep after a save; return True if there was one."""
        # The newest checkpoint stays in any case.
        removed = [False]
        if dist.get_global_rank() == 0 and self.keep is not None:
            try:
                removed = [bool(retention.make_room(self.run_folder, self.keep, state.timestamp.batch.value))]
            except OSError as error:
                log.warning('%s: old checkpoints are not removed (%s)', self.run_folder, error)
        dist.broadcast_object_list(removed, src=0)
        return removed[0]

    def _count_failure(self, logger: Logger) -> int:
        """Count a failed save and log the metric; return the number of saves in a row that have failed."""
        self.failed_saves += 1
        self._failed_in_a_row += 1
        logger.log_metrics({'checkpoint/failed_saves': self.failed_saves})
        return self._failed_in_a_row

    def _report(self, message: str) -> None:
        """Log the message of a failed save, and call `on_failed_save` with it, on rank 0."""
        if dist.get_global_rank() == 0:
            log.error('%s', message)
            self.on_failed_save(message)


def save_checkpoint(
    state: State, folder: Path, *, run_id: str, sharded_tensors: bool = False, recipe_text: str = ''
) -> Path:
    """Save a checkpoint of a trainer's state and return its path; a collective, which every rank must call.

    Args:
        state: The trainer's state.
        folder: The run's folder.
        run_id: Id of the run, which the folder's run.json must have.
        sharded_tensors: Each rank writes its shards of the tensors; otherwise rank 0 writes all of them.
        recipe_text: The resolved recipe, stored as recipe.yaml; empty for none.

    Raises:
        SaveFailed: A rank met a storage fault. Every rank raises, no checkpoint appears under the final name, and the
            files written so far are removed.
    """
    batch = state.timestamp.batch.value
    final, work = folder / checkpoint_store.checkpoint_name(batch), checkpoint_store.unfinished_path(folder, batch)
    try:
        with _as_save_failed(final):
            _begin(work, run_id, every_rank=sharded_tensors)
        # The collectives in this call may raise on one rank only. That must not count as a failed save: this rank
        # would continue training while the others wait for it.
        content, tensors = gather_state(state, sharded_tensors=sharded_tensors)
        needed_bytes = sum(leaf.nbytes for leaf in tree_leaves([content, tensors]) if isinstance(leaf, Tensor))
        about = _about(state, sharded_tensors=sharded_tensors) | {'run': run_id}
        with _as_save_failed(final, needed_bytes):
            _write_checkpoint(content, tensors, about, final, work, recipe_text)
    except (Exception, CheckpointException):  # CheckpointException is a BaseException
        # An incomplete checkpoint is of no use, and a full disk needs the space. One rank alone removes it: a slower
        # one could remove the folder of the next try.
        if dist.get_global_rank() == 0:
            shutil.rmtree(work, ignore_errors=True)
        raise
    return final


@contextmanager
def _as_save_failed(final: Path, needed_bytes: int = 0) -> Iterator[None]:
    """Replace an error of the block that a storage fault caused by SaveFailed; all ranks must raise alike in it."""
    try:
        yield
    except (Exception, CheckpointException) as error:  # CheckpointException is a BaseException
        fault = storage_fault(error)
        if fault is None:
            raise
        reason = describe_fault(fault, final.parent, needed_bytes=needed_bytes)
        raise SaveFailed(fault.errno, f'{final}: not saved, {reason}') from error


def _begin(work: Path, run_id: str, *, every_rank: bool) -> None:
    """Create the temporary folder of a save, after a check that its parent is the run's folder; a collective."""
    with raise_on_all_ranks(str(work), logs=False):
        if dist.get_global_rank() == 0 or every_rank:
            check_run_id(work.parent, run_id)
        if dist.get_global_rank() == 0:
            remove(work)
            work.mkdir()


def _write_checkpoint(
    content: Mapping[str, Any],
    tensors: Mapping[str, Tensor],
    about: Mapping[str, Any],
    final: Path,
    work: Path,
    recipe_text: str,
) -> None:
    """Write a checkpoint to the temporary folder `work` and rename it to `final`; a collective."""
    # After each step all ranks continue or all raise: a rank that raised alone would leave the others waiting in the
    # next collective until its timeout.
    rank = dist.get_global_rank()
    records: dict[str, checkpoint_store.FileRecord] = {}
    with raise_on_all_ranks(f'{final}: not saved', logs=False):
        if about['kind'] == 'sharded':
            sharded_state.write_tensors(tensors, work)
            # torch.distributed.checkpoint names files __RANK_NUMBER.distcp. Each rank hashes its own.
            names = [path.name for path in work.glob(f'__{rank}_*')] + ([checkpoint_store.INDEX] if rank == 0 else [])
            records |= checkpoint_store.records_of(work, names)
        if rank == 0:
            records[checkpoint_store.STATE] = _write_state(content, work / checkpoint_store.STATE)
            if recipe_text:
                records[checkpoint_store.RECIPE] = _write_text(recipe_text, work / checkpoint_store.RECIPE)
    all_records: dict[str, checkpoint_store.FileRecord] = {}
    for rank_records in dist.all_gather_object(records):
        all_records |= rank_records
    with raise_on_all_ranks(f'{final}: not saved', logs=False):
        if rank == 0:
            # If the folder is not shared, rank 0 does not see the files of other nodes.
            missing = sorted(name for name in all_records if not (work / name).is_file())
            if missing:
                raise FileNotFoundError(f'{work}: files of other ranks are missing: {", ".join(missing[:3])}')
            check_run_id(work.parent, about['run'])
            checkpoint_store.publish(work, final, all_records, about)


def resume_point(folder: Path, run_id: str = '') -> Path | None:
    """Return a run's newest undamaged checkpoint, found by rank 0 and broadcast; None if the run has no checkpoints.

    Newer checkpoints, which are damaged, are renamed. The other ranks wait however long reading takes.

    Args:
        folder: The run's folder.
        run_id: The run's id, as `open_run_folder` returns it; empty accepts the checkpoints of any run.

    Raises:
        UserError: All of the run's checkpoints are damaged, or the newest is of another run.
        OSError: A checkpoint cannot be read for minutes, which is not damage: nothing is renamed.
    """

    # Only on rank 0: it reads and hashes the whole checkpoint, and two ranks must never resume from different ones.
    def find() -> Path | None:
        found = newest_intact(folder, run_id)
        if found is not None:
            checkpoint_store.set_aside(found)
        return found

    broadcast = [run_on_rank_zero(find, 'autoresume')]
    dist.broadcast_object_list(broadcast, src=0)
    return broadcast[0]


def _write_state(content: Mapping[str, Any], path: Path) -> checkpoint_store.FileRecord:
    """Write the content of state.pt to a file, and return its size and hash."""
    with path.open('wb') as file:
        writer = checkpoint_store.HashingWriter(file)
        torch.save(dict(content), writer)  # type: ignore[arg-type]
        checkpoint_store.flush(file)
    return writer.record()


def _write_text(text: str, path: Path) -> checkpoint_store.FileRecord:
    """Write a text file and return its size and hash."""
    with path.open('wb') as file:
        writer = checkpoint_store.HashingWriter(file)
        writer.write(text.encode())
        checkpoint_store.flush(file)
    return writer.record()


def _about(state: State, *, sharded_tensors: bool) -> dict[str, Any]:
    """Return the fields of a checkpoint's receipt.json other than `files` and `run`: batch, epoch, kind and others."""
    return {
        'batch': state.timestamp.batch.value,
        'epoch': state.timestamp.epoch.value,
        'kind': 'sharded' if sharded_tensors else 'whole',
        'world_size': dist.get_world_size(),
        'saved': datetime.datetime.now(datetime.timezone.utc).isoformat(timespec='seconds'),
    }
