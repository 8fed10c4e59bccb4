"""Saving and loading of checkpoints that can be resumed on any number of devices with any parallelism strategy."""

import contextlib
import logging
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

from composer.callbacks import CheckpointSaver
from composer.core import Event, State, Time
from composer.loggers import Logger
from composer.utils import dist, reproducibility

from diffusion.callbacks.preemption import is_last_batch
from diffusion.checkpointing.checkpoint_writer import save_checkpoint
from diffusion.checkpointing.rank_agreement import raise_on_all_ranks
from diffusion.checkpointing.run_storage import RunStorage, run_storage
from diffusion.checkpointing.save_interval import timed_interval
from diffusion.checkpointing.storage_faults import SaveFailed, way_out
from diffusion.checkpointing.trainer_state import load_checkpoint
from diffusion.config.checkpointing import KeepConfig
from diffusion.launch import run_lock
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
        storage: The run's folder, on a file system that all nodes share, or its URL in an object store, or an open
            `RunStorage`.
        save_interval: A Composer time string, a time such as `10m`, or `auto`, which chooses the time from the
            duration of saves and the failures of the run. The end of training is always saved.
        keep: Checkpoints to keep (`retention`); None keeps all.
        sharded: If True, each rank writes its shards of model, optimizer and weight averages, which requires FSDP2;
            otherwise rank 0 writes them unsharded. Both formats can be read by any number of ranks with any strategy.
        resume: Checkpoint to resume from; None starts a new run. With `auto`, the run's newest undamaged checkpoint is
            found when training is set up, and rank 0 holds the run's lock until the Trainer is closed, so that no other
            job saves to the same place.
        recipe_text: The resolved recipe, saved in each checkpoint as recipe.yaml; empty for a run without a recipe.
        on_failed_save: Called on rank 0 with the message of each failed save.
    """

    # A subclass of Composer's CheckpointSaver, since the Trainer looks for one by type and asks it when to save. Its
    # saving is replaced: Composer 0.32.1 writes to the final name, without a flush, so that a process killed during a
    # save leaves a truncated file.

    def __init__(
        self,
        storage: str | Path | RunStorage,
        *,
        save_interval: str | int | Time = '1ep',
        keep: KeepConfig | None = None,
        sharded: bool = False,
        resume: Path | Literal['auto'] | None = None,
        recipe_text: str = '',
        on_failed_save: Callable[[str], None] = _ignore,
    ) -> None:
        self.storage = run_storage(storage) if isinstance(storage, str | Path) else storage
        self._timed = timed_interval(save_interval, self.storage.place)
        super().__init__(
            folder=str(self.storage.folder),
            filename='{batch}',
            remote_file_name=None,
            latest_filename=None,
            latest_remote_file_name=None,
            save_interval=self._timed or save_interval,
            overwrite=True,
        )
        self.tmp_dir_for_symlink.cleanup()  # used for uploads only, which this class does not do
        self.keep = keep
        self.sharded = sharded
        self.resume = None if resume == 'auto' else resume
        self._opens = resume == 'auto'
        self._lock = contextlib.ExitStack()
        self.recipe_text = recipe_text
        self.on_failed_save = on_failed_save
        self.failed_saves = 0
        """Number of saves of this process that failed."""
        self._failed_in_a_row = 0
        self._random_state: list[dict[str, Any]] | None = None

    def init(self, state: State, logger: Logger) -> None:
        if self._opens:
            with raise_on_all_ranks(self.storage.place):
                if dist.get_global_rank() == 0:
                    self._lock.enter_context(run_lock.hold_run_lock(self.storage.place))
        if not self.storage.run_id:
            self.storage.open()
        if self._opens:
            self.resume = self.storage.resume_point()
        self.storage.remove_unfinished()

    def close(self, state: State, logger: Logger) -> None:
        self._lock.close()

    def before_load(self, state: State, logger: Logger) -> None:
        if self.resume is None:
            return
        self._random_state = load_checkpoint(state, logger, self.resume, self.storage.fetch)
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
            saved = self._write(state)
        except SaveFailed as error:
            # The ranks may have met different faults, but only together can they make room and try again.
            full = any(dist.all_gather_object(error.errno in DISK_FULL_ERRORS))
            if not full or not self._make_room(state):
                raise
            saved = self._write(state)
        if self._timed is not None:
            self._timed.saved(time.monotonic() - began)
        # After the save: `save_now` saves a batch again unless this is its number.
        self.last_checkpoint_batch = state.timestamp.batch
        self.saved_checkpoints.append(saved)
        self._failed_in_a_row = 0
        if dist.get_global_rank() == 0 and self.keep is not None:
            try:
                self.storage.prune(self.keep)
            except OSError as error:  # the next save tries again
                log.warning('%s: old checkpoints are not removed (%s)', self.storage.place, error)

    def _write(self, state: State) -> str:
        return save_checkpoint(state, self.storage, sharded_tensors=self.sharded, recipe_text=self.recipe_text)

    def _make_room(self, state: State) -> bool:
        """Remove what the run would not keep after a save; return True if there was anything, on any rank."""
        removed = False
        try:
            removed = self.storage.make_room(self.keep, state.timestamp.batch.value)
        except OSError as error:
            log.warning('%s: old checkpoints are not removed (%s)', self.storage.place, error)
        return any(dist.all_gather_object(removed))

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
