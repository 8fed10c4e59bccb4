"""Saving and loading of checkpoints that can be resumed on any number of devices with any parallelism strategy."""

import datetime
import errno
import logging
import shutil
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from composer.callbacks import CheckpointSaver
from composer.core import State, Time
from composer.loggers import Logger
from composer.utils import dist, reproducibility
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.utils._pytree import tree_leaves

from diffusion.algorithms.average import Averager, empty_average, reshard
from diffusion.checkpointing import checkpoint_store, sharded_state
from diffusion.checkpointing.checkpoint_weights import check_architecture, is_sharded, read_content
from diffusion.errors import UserError
from diffusion.storage.atomic import remove

log = logging.getLogger(__name__)

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_SHARDED_ATTRIBUTES = ('model', 'optimizers')
"""Attributes of Composer's state whose tensors are stored by `sharded_state` instead of in state.pt."""


class Checkpointer(CheckpointSaver):
    """Callback that saves checkpoints atomically (`checkpoint_store`) and resumes from one.

    If one rank cannot write, all ranks raise. Composer uses this callback instead of creating its own CheckpointSaver.

    Args:
        folder: The run's folder, on a file system that all nodes share.
        save_interval: A Composer time string; the end of training is always saved.
        num_checkpoints_to_keep: Number of newest checkpoints to keep; -1 keeps all.
        sharded: If True, each rank writes its shards of model, optimizer and weight averages, which requires FSDP2;
            otherwise rank 0 writes them unsharded. Both formats can be read by any number of ranks with any strategy.
        resume: Checkpoint to resume from; None starts a new run.
    """

    # A subclass of Composer's CheckpointSaver, since the Trainer looks for one by type and asks it when to save. Its
    # saving is replaced: Composer 0.32.1 writes to the final name, without a flush, so that a process killed during a
    # save leaves a truncated file.

    def __init__(
        self,
        folder: str | Path,
        *,
        save_interval: str | int | Time = '1ep',
        num_checkpoints_to_keep: int = -1,
        sharded: bool = False,
        resume: Path | None = None,
    ) -> None:
        super().__init__(
            folder=str(folder),
            filename='{batch}',
            remote_file_name=None,
            latest_filename=None,
            latest_remote_file_name=None,
            save_interval=save_interval,
            overwrite=True,
            num_checkpoints_to_keep=num_checkpoints_to_keep,
        )
        self.tmp_dir_for_symlink.cleanup()  # used for uploads only, which this class does not do
        self.run_folder = Path(folder)
        self.sharded = sharded
        self.resume = resume
        self._random_state: list[dict[str, Any]] | None = None

    def init(self, state: State, logger: Logger) -> None:
        with raise_on_all_ranks(str(self.run_folder)):
            if dist.get_global_rank() == 0:
                self.run_folder.mkdir(parents=True, exist_ok=True)
                checkpoint_store.remove_unfinished_saves(self.run_folder)
        if self.sharded:
            check_shared(self.run_folder, 'runs_dir')

    def before_load(self, state: State, logger: Logger) -> None:
        if self.resume is None:
            return
        self._random_state = load_checkpoint(state, logger, self.resume)
        self.last_checkpoint_batch = state.timestamp.batch
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

    def _save_checkpoint(self, state: State, logger: Logger) -> None:
        self.last_checkpoint_batch = state.timestamp.batch
        final = save_checkpoint(state, self.run_folder, sharded_tensors=self.sharded)
        self.saved_checkpoints.append(str(final))
        if dist.get_global_rank() == 0 and self.num_checkpoints_to_keep > 0:
            checkpoint_store.prune(self.run_folder, self.num_checkpoints_to_keep)


def save_checkpoint(state: State, folder: Path, *, sharded_tensors: bool = False) -> Path:
    """Save a checkpoint of a trainer's state and return its path; a collective, which every rank must call.

    Raises:
        Exception: A rank could not write. Every rank raises, no checkpoint appears under the final name, and the files
            written so far are removed.
    """
    batch = state.timestamp.batch.value
    final, work = folder / checkpoint_store.checkpoint_name(batch), checkpoint_store.unfinished_path(folder, batch)
    try:
        _save(state, final, work, sharded_tensors=sharded_tensors)
    except (Exception, CheckpointException):  # CheckpointException is a BaseException
        # An incomplete checkpoint is of no use, and a full disk needs the space. Every rank removes the folder: if by
        # mistake it is not shared, each node has its own; if it is shared, concurrent removals ignore each other's
        # errors.
        shutil.rmtree(work, ignore_errors=True)
        raise
    return final


def _save(state: State, final: Path, work: Path, *, sharded_tensors: bool) -> None:
    """Write a checkpoint to the temporary folder `work` and rename it to `final`; a collective."""
    # After each step all ranks continue or all raise: a rank that raised alone would leave the others waiting in the
    # next collective until its timeout.
    rank = dist.get_global_rank()
    with raise_on_all_ranks(f'{final}: not saved'):
        if rank == 0:
            remove(work)
            work.mkdir(parents=True)
    content, tensors = _gather(state, sharded_tensors=sharded_tensors)
    records: dict[str, checkpoint_store.FileRecord] = {}
    with raise_on_all_ranks(f'{final}: not saved'), _explain_full_disk(final, content, tensors):
        if sharded_tensors:
            sharded_state.write_tensors(tensors, work)
            # torch.distributed.checkpoint names files __RANK_NUMBER.distcp. Each rank hashes its own.
            names = [path.name for path in work.glob(f'__{rank}_*')] + ([sharded_state.INDEX] if rank == 0 else [])
            records |= checkpoint_store.records_of(work, names)
        if rank == 0:
            records[checkpoint_store.STATE] = _write_state(content, work / checkpoint_store.STATE)
    all_records: dict[str, checkpoint_store.FileRecord] = {}
    for rank_records in dist.all_gather_object(records):
        all_records |= rank_records
    with raise_on_all_ranks(f'{final}: not saved'), _explain_full_disk(final, content, tensors):
        if rank == 0:
            # If the folder is not shared, rank 0 does not see the files of other nodes.
            missing = sorted(name for name in all_records if not (work / name).is_file())
            if missing:
                raise FileNotFoundError(f'{work}: files of other ranks are missing: {", ".join(missing[:3])}')
            checkpoint_store.publish(work, final, all_records, _about(state, sharded_tensors=sharded_tensors))


def load_checkpoint(state: State, logger: Logger, checkpoint: Path) -> list[dict[str, Any]] | None:
    """Load a checkpoint into a trainer's state, before DDP wraps the model and after FSDP does; every rank calls this.

    Returns:
        The states of torch's random generators, one per rank of the run that saved them; None if there are none.

    Raises:
        UserError: The checkpoint has another architecture or optimizer, or belongs to a run that this one must not
            resume.
    """
    content = read_content(checkpoint)
    saved = content['state']
    _check_optimizer(state, content, checkpoint)
    expected = {name: tensor.shape for name, tensor in _model_tensors(state).items()}
    if is_sharded(checkpoint):
        prefix = 'model.'
        stored = {
            name.removeprefix(prefix): shape
            for name, shape in sharded_state.shapes(checkpoint).items()
            if name.startswith(prefix)
        }
        check_architecture(expected, stored, str(checkpoint))
        _load_shards(state, content['optimizer_settings'], checkpoint)
    else:
        check_architecture(expected, {name: tensor.shape for name, tensor in saved['model'].items()}, str(checkpoint))
    # Composer's load_state_dict replaces the run's name by the checkpoint's.
    run_name = state.run_name
    state.load_state_dict(saved, logger, strict=True)
    state.run_name = run_name
    # After load_state_dict, which resets the averagers.
    if is_sharded(checkpoint):
        _load_averages(state, saved, checkpoint)
    state.load_path = str(checkpoint)
    return content.get('rng')


def resume_point(folder: Path) -> Path | None:
    """Return a run's newest undamaged checkpoint, found by rank 0 and broadcast; None if the run has no checkpoints.

    Newer checkpoints, which are damaged, are renamed.

    Raises:
        UserError: All of the run's checkpoints are damaged.
        OSError: A checkpoint cannot be read, which is not damage: nothing is renamed. (RuntimeError on other ranks.)
    """
    # Only on rank 0: it reads and hashes the whole checkpoint, and two ranks must never resume from different ones.
    found: Path | None = None
    with raise_on_all_ranks('autoresume'):
        if dist.get_global_rank() == 0:
            found = checkpoint_store.newest_intact(folder)
            if found is not None:
                checkpoint_store.set_aside(found)
    broadcast = [found]
    dist.broadcast_object_list(broadcast, src=0)
    if broadcast[0] is not None:
        check_shared(folder, 'runs_dir')  # every rank reads it
    return broadcast[0]


@contextmanager
def raise_on_all_ranks(where: str) -> Iterator[None]:
    """Raise on every rank if any rank raises inside the block; a collective, which every rank must enter.

    A rank that failed raises its own error; the others raise a RuntimeError with the first failed rank and its error.
    A UserError is raised as a UserError on all ranks.

    The block must not contain a collective that a failing rank would leave the others waiting in. `where` is the start
    of the error messages.
    """
    error: BaseException | None = None
    try:
        yield
    except (Exception, CheckpointException) as caught:  # CheckpointException is a BaseException
        error = caught
    # Text instead of the exception itself, which may not be picklable.
    report = None if error is None else (isinstance(error, UserError), f'{type(error).__name__}: {error}', str(error))
    failed = [(rank, each) for rank, each in enumerate(dist.all_gather_object(report)) if each is not None]
    if error is not None:
        if not isinstance(error, UserError):
            log.error('%s (rank %d: %s)', where, dist.get_global_rank(), error)
        raise error
    if failed:
        rank, (is_user_error, description, message) = failed[0]
        raise UserError(message) if is_user_error else RuntimeError(f'{where} (rank {rank}: {description})')


def check_shared(folder: Path, where: str) -> None:
    """Check before training that a folder is shared by all ranks; a collective, which every rank must call.

    Args:
        folder: The folder; rank 0 creates it if it does not exist.
        where: Recipe key that sets the folder, for messages.

    Raises:
        UserError: A rank does not see a file that rank 0 wrote.
    """
    if dist.get_world_size() == 1:
        return
    # A new name each time: a network file system may cache that a name was absent.
    name = [f'.shared-{uuid.uuid4().hex}']
    dist.broadcast_object_list(name, src=0)
    probe = folder / name[0]
    try:
        with raise_on_all_ranks(str(folder)):
            if dist.get_global_rank() == 0:
                folder.mkdir(parents=True, exist_ok=True)
                probe.touch()
        with raise_on_all_ranks(str(folder)):
            if not probe.exists():
                raise UserError(
                    f'{where}: {folder} is not the same folder on rank 0 and rank {dist.get_global_rank()}; '
                    'use a folder on a file system that all nodes share'
                )
    finally:
        if dist.get_global_rank() == 0:
            probe.unlink(missing_ok=True)


@contextmanager
def _explain_full_disk(final: Path, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Replace any error of the block that a full disk caused by an OSError with the size of the checkpoint."""
    # torch.save and torch.distributed.checkpoint raise their own errors, which do not mention the disk; the OSError is
    # one of their causes.
    try:
        yield
    except (Exception, CheckpointException) as error:
        if not _is_full_disk(error):
            raise
        needed = sum(leaf.nbytes for leaf in tree_leaves([content, tensors]) if isinstance(leaf, Tensor)) / 2**30
        what = f'{final}: not saved, no space left on {final.parent}, {needed:.2f} GiB needed'
        raise OSError(errno.ENOSPC, f'{what}; free some space and start the same command again') from error


def _is_full_disk(error: BaseException) -> bool:
    """Return True if an error or one of its causes is a full disk or an exceeded quota, on this or another rank."""
    if isinstance(error, CheckpointException):
        return any(_is_full_disk(each) for each, _ in error.failures.values())
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    cause = error.__cause__ or error.__context__
    return cause is not None and _is_full_disk(cause)


def _gather(state: State, *, sharded_tensors: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return what to save: the content of state.pt, and by name the tensors of which each rank writes its shards."""
    # After a forward pass without a backward pass (evaluation, image sampling) FSDP2 may leave gathered weights in the
    # model, which are not the parameters that the optimizer holds.
    reshard(state.model)
    random_state = reproducibility.get_rng_state()
    if not sharded_tensors:
        return {'state': state.state_dict(), 'rng': random_state}, {}
    optimizer = get_optimizer_state_dict(state.model, state.optimizers[0], options=_FLAT)
    tensors = {f'model.{name}': tensor for name, tensor in _model_tensors(state).items()}
    tensors |= {f'optimizer.{name}': value for name, value in optimizer.items() if isinstance(value, Tensor)}
    settings = {name: value for name, value in optimizer.items() if not isinstance(value, Tensor)}
    averagers = _averagers(state)
    for name, algorithm in averagers.items():
        for label, average in algorithm.averages.items():
            shards = average.shards(state.model)
            tensors |= {f'averages.{name}.{label}.{key}': shard for key, shard in shards.items()}
    # state_dict() must leave out the tensors that are stored sharded: model and optimizer through Composer's list of
    # attributes, the averages through the averagers' switch. It has no argument for that, so both are changed here.
    attributes = state.serialized_attributes
    try:
        for algorithm in averagers.values():
            algorithm.gathers = False
        state.serialized_attributes = [name for name in attributes if name not in _SHARDED_ATTRIBUTES]
        rest = state.state_dict()
    finally:
        state.serialized_attributes = attributes
        for algorithm in averagers.values():
            algorithm.gathers = True
    kind = type(state.optimizers[0]).__qualname__
    return {'state': rest, 'rng': random_state, 'optimizer_settings': {kind: settings}}, tensors


def _write_state(content: Mapping[str, Any], path: Path) -> checkpoint_store.FileRecord:
    """Write the content of state.pt to a file, and return its size and hash."""
    with path.open('wb') as file:
        writer = checkpoint_store.HashingWriter(file)
        torch.save(dict(content), writer)  # type: ignore[arg-type]
        checkpoint_store.flush(file)
    return writer.record()


def _about(state: State, *, sharded_tensors: bool) -> dict[str, Any]:
    """Return the fields of a checkpoint's receipt.json other than `files`: batch, epoch, kind, ranks and time."""
    return {
        'batch': state.timestamp.batch.value,
        'epoch': state.timestamp.epoch.value,
        'kind': 'sharded' if sharded_tensors else 'whole',
        'world_size': dist.get_world_size(),
        'saved': datetime.datetime.now(datetime.timezone.utc).isoformat(timespec='seconds'),
    }


def _check_optimizer(state: State, content: Mapping[str, Any], checkpoint: Path) -> None:
    """Raise UserError if a checkpoint was saved with another optimizer class than the recipe's."""
    stored = content.get('optimizer_settings') or content['state'].get('optimizers') or {}
    kind = type(state.optimizers[0]).__qualname__
    if kind not in stored:
        raise UserError(
            f'{checkpoint}: saved with optimizer {", ".join(stored) or "none"}, but the recipe has {kind}; change the '
            'recipe back to resume, or start a new run from the weights with init_from'
        )


def _load_shards(state: State, settings: Mapping[str, Mapping[str, Any]], checkpoint: Path) -> None:
    """Load the model and the optimizer from a sharded checkpoint."""
    model = _model_tensors(state)
    # get_optimizer_state_dict initializes the state of a new optimizer, so the tensors to read into exist.
    optimizer = get_optimizer_state_dict(state.model, state.optimizers[0], options=_FLAT)
    moments = {name: value for name, value in optimizer.items() if isinstance(value, Tensor)}
    wanted = {f'model.{name}': tensor for name, tensor in model.items()}
    wanted |= {f'optimizer.{name}': tensor for name, tensor in moments.items()}
    sharded_state.read_tensors(wanted, checkpoint)
    set_model_state_dict(state.model, {name: wanted[f'model.{name}'] for name in model})
    restored = {name: wanted[f'optimizer.{name}'] for name in moments}
    restored |= settings[type(state.optimizers[0]).__qualname__]
    set_optimizer_state_dict(state.model, state.optimizers[0], restored, options=_FLAT)


def _load_averages(state: State, saved: Mapping[str, Any], checkpoint: Path) -> None:
    """Load the weight averages of all averagers from a sharded checkpoint."""
    labels_of = {
        name: algorithm_state['sharded_averages']
        for name, algorithm_state in dict(saved['algorithms']).items()
        if 'sharded_averages' in algorithm_state
    }
    for name, algorithm in _averagers(state).items():
        averages = {label: empty_average(state.model) for label in labels_of.get(name, [])}
        if averages:
            wanted = {
                f'averages.{name}.{label}.{key}': t for label, tensors in averages.items() for key, t in tensors.items()
            }
            sharded_state.read_tensors(wanted, checkpoint)
            algorithm.restore(averages)


def _model_tensors(state: State) -> dict[str, Any]:
    """Return the model's tensors by name; under FSDP2 they are DTensors with this rank's shards."""
    return get_model_state_dict(state.model)


def _averagers(state: State) -> dict[str, Averager]:
    """Return the algorithms that average weights, by class name, which is their key in Composer's state."""
    return {type(each).__qualname__: each for each in state.algorithms if isinstance(each, Averager)}
