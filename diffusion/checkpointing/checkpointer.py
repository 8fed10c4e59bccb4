"""Saving and resuming: whole checkpoints, for any number of devices under any strategy."""

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

from diffusion.algorithms.average import Averager, blank, reshard
from diffusion.checkpointing import checkpoint_store, sharded_state
from diffusion.checkpointing.run_folder import check_architecture, is_sharded, read_content
from diffusion.errors import UserError
from diffusion.storage.atomic import remove

log = logging.getLogger(__name__)

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_SHARDED_ATTRIBUTES = ('model', 'optimizers')


class Checkpointer(CheckpointSaver):
    """Save checkpoints that are whole or absent, and go on from one.

    Composer's CheckpointSaver writes to the final name, so that a process killed meanwhile leaves half a file. This one
    writes, flushes, hashes and renames (see `checkpoint_store`), and stops all ranks where one cannot write.
    Where it is among a Trainer's callbacks, Composer uses it instead of its own.

    Args:
        folder: Of the run; on a file system that all nodes share.
        save_interval: A Composer time string; the end of training is always saved.
        num_checkpoints_to_keep: The newest that stay; -1 keeps all.
        sharded: Each rank writes its own pieces of model, optimizer and averages, which FSDP2 can; otherwise rank 0
            writes them whole. Either kind is read by any number of ranks under any strategy.
        resume: The checkpoint to go on from.
    """

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
        self.tmp_dir_for_symlink.cleanup()  # for uploads, of which there are none
        self.run_folder = Path(folder)
        self.sharded = sharded
        self.resume = resume
        self._random_state: list[dict[str, Any]] | None = None

    def init(self, state: State, logger: Logger) -> None:
        with all_or_none(str(self.run_folder)):
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
        # Ours is keyed; this is for layers that draw from torch's generator, as dropout does. After the loader has
        # started, which draws too; an epoch's first batch is left to Composer's seed.
        if self._random_state is not None:
            states, self._random_state = self._random_state, None
            if len(states) == dist.get_world_size() and state.timestamp.batch_in_epoch.value:
                reproducibility.load_rng_state(states)

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
    """Write a checkpoint of a trainer's state; every rank calls this.

    Raises:
        Exception: A rank could not write. Every rank raises, nothing has the checkpoint's name, and what was written is
            removed.
    """
    batch = state.timestamp.batch.value
    final, work = folder / checkpoint_store.name_of(batch), checkpoint_store.unfinished(folder, batch)
    try:
        _save(state, final, work, sharded_tensors=sharded_tensors)
    except (Exception, CheckpointException):
        # A full disk needs the room, and nobody goes on with a part. Nodes that do not share the folder have each their
        # own; those that do may remove it together.
        shutil.rmtree(work, ignore_errors=True)
        raise
    return final


def _save(state: State, final: Path, work: Path, *, sharded_tensors: bool) -> None:
    rank = dist.get_global_rank()
    with all_or_none(f'{final}: not saved'):
        if rank == 0:
            remove(work)
            work.mkdir(parents=True)
    content, tensors = _gather(state, sharded_tensors=sharded_tensors)
    records: dict[str, checkpoint_store.FileRecord] = {}
    with all_or_none(f'{final}: not saved'), _full_disk_in_words(final, content, tensors):
        if sharded_tensors:
            sharded_state.write_tensors(tensors, work)
            own = [path.name for path in work.glob(f'__{rank}_*')] + ([sharded_state.INDEX] if rank == 0 else [])
            records |= checkpoint_store.records_of(work, own)
        if rank == 0:
            records[checkpoint_store.STATE] = _write_state(content, work / checkpoint_store.STATE)
    everybodys: dict[str, checkpoint_store.FileRecord] = {}
    for theirs in dist.all_gather_object(records):
        everybodys |= theirs
    with all_or_none(f'{final}: not saved'), _full_disk_in_words(final, content, tensors):
        if rank == 0:
            absent = sorted(name for name in everybodys if not (work / name).is_file())
            if absent:
                raise FileNotFoundError(f'{work} lacks {", ".join(absent[:3])}, which other ranks wrote')
            checkpoint_store.publish(work, final, everybodys, _about(state, sharded_tensors=sharded_tensors))


def load_checkpoint(state: State, logger: Logger, checkpoint: Path) -> list[dict[str, Any]] | None:
    """Read a checkpoint into a trainer's state, before DDP wraps the model and after FSDP does; every rank calls this.

    Returns:
        The states of torch's generators, one a rank that saved.

    Raises:
        UserError: It is of another architecture or optimizer, or of a run that this one may not go on from.
    """
    content = read_content(checkpoint)
    saved = content['state']
    _check_optimizer(state, content, checkpoint)
    own = {name: tensor.shape for name, tensor in _model_tensors(state).items()}
    if is_sharded(checkpoint):
        prefix = 'model.'
        stored = {
            name.removeprefix(prefix): shape
            for name, shape in sharded_state.shapes(checkpoint).items()
            if name.startswith(prefix)
        }
        check_architecture(own, stored, str(checkpoint))
        _load_shards(state, content['optimizer_settings'], checkpoint)
    else:
        check_architecture(own, {name: tensor.shape for name, tensor in saved['model'].items()}, str(checkpoint))
    run_name = state.run_name
    state.load_state_dict(saved, logger, strict=True)
    state.run_name = run_name
    if is_sharded(checkpoint):
        _load_averages(state, saved, checkpoint)
    state.load_path = str(checkpoint)
    return content.get('rng')


def resume_point(folder: Path) -> Path | None:
    """A run's newest whole checkpoint, found by rank 0 and told to all; None for a run that has saved none.

    Newer ones, which are damaged, are set aside.

    Raises:
        UserError: There are checkpoints, and all are damaged.
        OSError: A checkpoint cannot be read, which is no damage: nothing is set aside. (RuntimeError on other ranks.)
    """
    found: Path | None = None
    with all_or_none('autoresume'):
        if dist.get_global_rank() == 0:
            found = checkpoint_store.newest_whole(folder)
            if found is not None:
                checkpoint_store.set_aside(found)
    told = [found]
    dist.broadcast_object_list(told, src=0)
    if told[0] is not None:
        check_shared(folder, 'runs_dir')  # every rank reads it
    return told[0]


@contextmanager
def all_or_none(where: str) -> Iterator[None]:
    """Raise on every rank when a rank raises inside, so that none waits for one that has given up.

    A rank that failed raises its own error; the others raise a RuntimeError that names the first such rank and its
    error. A UserError is raised as a UserError on all of them.

    The block must not end some ranks inside a collective that others wait in.
    """
    error: BaseException | None = None
    try:
        yield
    except (Exception, CheckpointException) as caught:  # the second is no Exception
        error = caught
    told = None if error is None else (isinstance(error, UserError), f'{type(error).__name__}: {error}', str(error))
    failed = [(rank, each) for rank, each in enumerate(dist.all_gather_object(told)) if each is not None]
    if error is not None:
        if not isinstance(error, UserError):
            log.error('%s (rank %d: %s)', where, dist.get_global_rank(), error)
        raise error
    if failed:
        rank, (users, what, message) = failed[0]
        raise UserError(message) if users else RuntimeError(f'{where} (rank {rank}: {what})')


def check_shared(folder: Path, where: str) -> None:
    """Check that all ranks see the same folder, before the work begins; every rank calls this.

    Args:
        folder: A folder; rank 0 makes it where it does not exist.
        where: The key of the recipe that names it.

    Raises:
        UserError: A rank does not see what rank 0 writes.
    """
    if dist.get_world_size() == 1:
        return
    # A name that no node has asked for before, which no cache of a network file system can know as absent.
    name = [f'.shared-{uuid.uuid4().hex}']
    dist.broadcast_object_list(name, src=0)
    probe = folder / name[0]
    try:
        with all_or_none(str(folder)):
            if dist.get_global_rank() == 0:
                folder.mkdir(parents=True, exist_ok=True)
                probe.touch()
        with all_or_none(str(folder)):
            if not probe.exists():
                raise UserError(
                    f'{where}: {folder} is not the same folder on rank 0 and rank {dist.get_global_rank()}; '
                    'give one on a file system that all nodes share'
                )
    finally:
        if dist.get_global_rank() == 0:
            probe.unlink(missing_ok=True)


@contextmanager
def _full_disk_in_words(final: Path, content: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Say how much room a checkpoint needs where there was none.

    torch.save and torch.distributed.checkpoint raise errors of their own, which do not mention the disk; the OSError is
    behind them.
    """
    try:
        yield
    except (Exception, CheckpointException) as error:
        if not _is_full_disk(error):
            raise
        needed = sum(leaf.nbytes for leaf in tree_leaves([content, tensors]) if isinstance(leaf, Tensor)) / 2**30
        what = f'{final}: not saved, no space left on {final.parent}, {needed:.2f} GiB needed'
        raise OSError(errno.ENOSPC, f'{what}; make room and start the same command again') from error


def _is_full_disk(error: BaseException) -> bool:
    if isinstance(error, CheckpointException):
        return any(_is_full_disk(each) for each, _ in error.failures.values())
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return True
    behind = error.__cause__ or error.__context__
    return behind is not None and _is_full_disk(behind)


def _gather(state: State, *, sharded_tensors: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """What state.pt holds, and the tensors that are stored in pieces."""
    # A forward pass without a backward one, of an evaluation or a picture, leaves gathered weights in the model, which
    # are not those that the optimizer knows.
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
    with path.open('wb') as file:
        writer = checkpoint_store.HashingWriter(file)
        torch.save(dict(content), writer)  # type: ignore[arg-type]
        checkpoint_store.flush(file)
    return writer.record()


def _about(state: State, *, sharded_tensors: bool) -> dict[str, Any]:
    return {
        'batch': state.timestamp.batch.value,
        'epoch': state.timestamp.epoch.value,
        'kind': 'sharded' if sharded_tensors else 'whole',
        'world_size': dist.get_world_size(),
        'saved': datetime.datetime.now(datetime.timezone.utc).isoformat(timespec='seconds'),
    }


def _check_optimizer(state: State, content: Mapping[str, Any], checkpoint: Path) -> None:
    stored = content.get('optimizer_settings') or content['state'].get('optimizers') or {}
    kind = type(state.optimizers[0]).__qualname__
    if kind not in stored:
        raise UserError(
            f'{checkpoint}: of a run with {", ".join(stored) or "no optimizer"}, this one has {kind}; go on with the '
            'optimizer of before, or start a new run from the weights: init_from'
        )


def _load_shards(state: State, settings: Mapping[str, Mapping[str, Any]], checkpoint: Path) -> None:
    model = _model_tensors(state)
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
    labels_of = {
        name: kept['sharded_averages'] for name, kept in dict(saved['algorithms']).items() if 'sharded_averages' in kept
    }
    for name, algorithm in _averagers(state).items():
        averages = {label: blank(state.model) for label in labels_of.get(name, [])}
        if averages:
            wanted = {
                f'averages.{name}.{label}.{key}': t for label, room in averages.items() for key, t in room.items()
            }
            sharded_state.read_tensors(wanted, checkpoint)
            algorithm.restore(averages)


def _model_tensors(state: State) -> dict[str, Any]:
    """The model's tensors as they are on this rank."""
    return get_model_state_dict(state.model)


def _averagers(state: State) -> dict[str, Averager]:
    return {type(each).__qualname__: each for each in state.algorithms if isinstance(each, Averager)}
