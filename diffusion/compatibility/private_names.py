"""All private names of torch, Composer, Streaming and TorchMetrics that this package uses, and the versions checked.

A private name may vanish or change with any release of its package, so each is listed here with its reason:

- `IMPORTED` are classes, functions and modules. Import them from this module, which imports the package on first use:
  `from diffusion.compatibility.private_names import TorchDispatchMode`.
- `ATTRIBUTES` are private attributes of objects of those packages. Read and set them with `private_attribute` and
  `set_private_attribute`.
- `INHERITED` are private attributes that this package's subclasses use or override through `self`.

A name that is missing in the installed version raises a `UserError` that says which versions have it. A test fails if
an unlisted private name is used.
"""

import importlib
import importlib.metadata
from dataclasses import dataclass
from typing import Any

from diffusion.errors import UserError

CHECKED_VERSIONS = {
    'torch': ('2.7.0', '2.14.1'),
    'mosaicml': ('0.32.1',),
    'mosaicml-streaming': ('0.13.0',),
    'torchmetrics': ('1.7.4', '1.9.0'),
}
"""Versions of each distribution that the tests were run with."""


@dataclass(frozen=True)
class PrivateName:
    """A private name of another package.

    Args:
        distribution: Name of the package in the package index, a key of `CHECKED_VERSIONS`.
        where: Module that contains the name; if the name is an attribute, followed by its class:
            `torch.utils.data.dataloader:_SomeClass`.
        name: The name itself, dotted for a member of a private module.
        reason: What the name is used for, and why no public name works.
    """

    distribution: str
    where: str
    name: str
    reason: str

    def load(self) -> Any:
        """Import the module and return the object with this name; UserError if the installed version lacks it."""
        module, _, owner = self.where.partition(':')
        try:
            found = importlib.import_module(module)
            for part in filter(None, (*owner.split('.'), *self.name.split('.'))):
                found = getattr(found, part)
        except (ModuleNotFoundError, AttributeError) as error:
            # Let an ordinary ImportError through if the package is not installed or lacks a dependency.
            inside = '.' in str(error.name) and f'{module}.'.startswith(f'{error.name}.')
            if isinstance(error, ModuleNotFoundError) and not inside:
                raise
            raise self.missing() from error
        return found

    def missing(self) -> UserError:
        try:
            version = importlib.metadata.version(self.distribution)
        except importlib.metadata.PackageNotFoundError:
            version = '(not installed)'
        place = self.where.replace(':', '.')
        return UserError(
            f'{self.distribution} {version}: it has no {place}.{self.name}, which this package needs ({self.reason}); '
            f'checked with {self.distribution} {" and ".join(CHECKED_VERSIONS[self.distribution])}. '
            'To fix: install the tested versions with `make install`, see docs/install.md'
        )


def _table(*rows: tuple[str, str, str, str]) -> tuple[PrivateName, ...]:
    return tuple(PrivateName(*row) for row in rows)


_C10D = 'torch.distributed.distributed_c10d'
_LOADER = 'torch.utils.data.dataloader'
_STREAMING = 'streaming.base.dataset'

IMPORTED = {
    each.name.rpartition('.')[2]: each
    for each in _table(
        ('torch', 'torch.utils._python_dispatch', 'TorchDispatchMode', 'sees every operation; no public module has it'),
        ('torch', 'torch.utils._pytree', 'tree_leaves', 'walks nested tensors; no public module has it'),
        ('torch', 'torch.utils._pytree', 'tree_map', 'walks nested tensors; no public module has it'),
        ('torch', 'torch.utils._pytree', 'tree_flatten', 'walks nested tensors; no public module has it'),
        ('torch', 'torch.utils._pytree', 'tree_unflatten', 'walks nested tensors; no public module has it'),
        ('torch', 'torch._subclasses.fake_tensor', 'FakeTensorMode', 'counts memory without allocating any'),
        ('torch', 'torch._dynamo', 'config', 'limits of recompilation, documented without a public module'),
        ('torch', 'torch', '_foreach_lerp', 'updates many tensors by one kernel, as the optimizers of torch do'),
        ('torch', 'torch', '_foreach_lerp_', 'updates many tensors by one kernel, as the optimizers of torch do'),
        ('torch', 'torch', '_foreach_mul_', 'updates many tensors by one kernel, as the optimizers of torch do'),
        ('torch', 'torch', '_foreach_add_', 'updates many tensors by one kernel, as the optimizers of torch do'),
        ('torch', 'torch', '_fused_adamw_', 'AdamW in one kernel, without collecting its tensors in each step'),
        ('torch', 'torch._dynamo.utils', 'counters', 'numbers of graphs that were compiled, and found in a cache'),
        ('torch', 'torch', '_foreach_norm', 'norms of many tensors by one kernel, as clip_grad_norm_ does'),
        ('torch', _C10D, '_world', 'lists the process groups of a device mesh'),
        ('torch', _C10D, '_set_pg_timeout', 'timeout of a group, for torch without set_timeout'),
        ('torch', 'torch.distributed.checkpoint.utils', '_DistWrapper', 'plans a sharded checkpoint as save() does'),
        ('torch', 'torch.distributed.checkpoint.filesystem', '_metadata_fn', 'file name of the index of a checkpoint'),
        ('torch', 'torch.utils.data._utils', 'signal_handling', 'keeps SIGCHLD from raising in a forward pass'),
        ('torch', _LOADER, '_MultiProcessingDataLoaderIter', 'iterator whose workers are watched and ended'),
        ('mosaicml-streaming', _STREAMING, '_Iterator', 'class of objects that hold the position in an epoch'),
        ('mosaicml-streaming', _STREAMING, '_ShardState', 'states of shards in shared memory'),
        ('torchmetrics', 'torchmetrics.functional.image.lpips', '_LPIPS', 'LPIPS of single images, with gradients'),
    )
}

ATTRIBUTES = {
    (each.where.rpartition('.')[2].rpartition(':')[2], each.name): each
    for each in _table(
        ('torch', f'{_LOADER}:_MultiProcessingDataLoaderIter', '_shutdown_workers', 'ends workers after a failure'),
        ('torch', f'{_LOADER}:_MultiProcessingDataLoaderIter', '_workers', 'exit statuses of the workers'),
        ('torch', f'{_LOADER}:_MultiProcessingDataLoaderIter', '_workers_done_event', 'ends workers; may block'),
        ('torch', f'{_LOADER}:_MultiProcessingDataLoaderIter', '_worker_pids_set', 'marks workers as watched by us'),
        ('torch', 'torch.utils.data._utils.signal_handling', '_remove_worker_pids', 'see signal_handling'),
        ('torch', 'torch:ops.aten', '_scaled_dot_product_flash_attention_for_cpu', 'attention with FLOPs on a CPU'),
        ('torch', 'torch:UntypedStorage', '_cdata', 'identifies the storage of a fake tensor, which has no address'),
        ('torch', 'torch:UntypedStorage', '_new_shared', 'shared memory for a batch, as default_collate allocates it'),
        ('mosaicml', 'composer.core.engine:Engine', '_run_loggers', 'calls loggers only at events that they handle'),
        ('mosaicml', 'composer.core.engine:Engine', '_run_nonlogger_callbacks', 'the same for other callbacks'),
        ('mosaicml', 'composer.core.engine:Engine', '_run_algorithms', 'the part of an event that is kept'),
        ('mosaicml', 'composer.callbacks:CheckpointSaver', '_save_checkpoint', 'saves at once; only Trainer has more'),
        ('mosaicml', 'composer.core:State', '_dataset_of', 'the dataset of a loader, however it is wrapped'),
        ('mosaicml', 'composer.core:State', '_dataset_state_dict', 'saves a wrong epoch at the end of an epoch'),
        ('mosaicml', 'composer:Trainer', '_iter_dataloader', 'starts an epoch, before which its position is set'),
        ('mosaicml', 'composer:Trainer', '_spin_dataloaders_to_cur_epoch', 'would skip batches a second time'),
        ('torch', 'torch:Tensor', '_version', 'detects changes of tensors that are being copied'),
        ('mosaicml-streaming', 'streaming:StreamingDataset', '_resume', 'position of a loaded checkpoint'),
        ('mosaicml-streaming', 'streaming:Stream', '_proportion', 'tells if the proportion was set or computed'),
        ('mosaicml-streaming', 'streaming:Stream', '_choose', 'tells if the number of samples was set or computed'),
        ('mosaicml-streaming', 'streaming.base.shared.prefix', '_check_and_find_retrying', 'lets ranks agree on names'),
    )
}
"""Private attributes, by (name of the class or module, name of the attribute)."""

INHERITED = {
    each.name: each
    for each in _table(
        ('torch', 'torch.optim:AdamW', '_init_group', 'initializes the state of our AdamW exactly as torch does'),
        ('torch', 'torch.nn:Module', '_apply', 'LatentDiffusion moves its frozen parts'),
        ('diffusers', 'diffusers:DiffusionPipeline', '_execution_device', 'i1 with offloaded weights'),
        ('torch', 'torch.utils.data:DataLoader', '_iterator', 'BucketedLoader forgets workers that it has ended'),
        ('mosaicml-streaming', 'streaming:StreamingDataset', '_each_sample_id', 'detects an epoch that ends early'),
        ('mosaicml-streaming', 'streaming:StreamingDataset', '_get_work', 'order of samples in evaluation'),
        ('mosaicml-streaming', 'streaming:StreamingDataset', '_set_shuffle_block_size', 'order of samples'),
        ('mosaicml-streaming', 'streaming:StreamingDataset', '_event', 'stops the threads of an epoch'),
        ('mosaicml-streaming', 'streaming:StreamingDataset', '_shard_states', 'claims of shards'),
        ('mosaicml-streaming', 'streaming:StreamingDataset', '_cache_filelock', 'lock of the claims'),
        ('mosaicml-streaming', 'streaming:StreamingDataset', '_cache_filelock_path', 'lock of the claims'),
        ('mosaicml-streaming', 'streaming:StreamingDataset', '_shm_prefix_int', 'name of more shared memory'),
        ('mosaicml-streaming', 'streaming:StreamingDataset', '_parallel_rank_world', 'number of nodes and ranks'),
        ('mosaicml-streaming', 'streaming:StreamingDataset', '_parallel_worker_world', 'number of nodes and ranks'),
        ('mosaicml-streaming', 'streaming:StreamingDataset', '_unique_rank_world', 'one process per machine'),
    )
}
"""Attributes that subclasses use through `self`; those set by a constructor exist only on instances."""


def private_attribute(owner: Any, name: str) -> Any:
    """Return a listed private attribute of an object, class or module; UserError if the installed version lacks it."""
    entry = _entry(owner, name)
    try:
        return getattr(owner, name)
    except AttributeError as error:
        raise entry.missing() from error


def set_private_attribute(owner: Any, name: str, value: Any) -> None:
    """Set a listed private attribute of an object or module; UserError if the installed version does not have it."""
    if not hasattr(owner, name):
        raise _entry(owner, name).missing()
    setattr(owner, name, value)


def _entry(owner: Any, name: str) -> PrivateName:
    """Return the listed `PrivateName` of an attribute; of several with this name, prefer one of the owner's classes."""
    kinds = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
    places = {kind.__name__ for kind in kinds} | {str(getattr(owner, '__name__', '')).rpartition('.')[2]}
    rows = [entry for (place, listed), entry in ATTRIBUTES.items() if listed == name]
    assert rows, f'{name} is not listed in {__name__}'
    return next((row for row in rows if {row.where.rpartition(':')[2].rpartition('.')[2]} & places), rows[0])


def __getattr__(name: str) -> Any:
    if name not in IMPORTED:
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    # Store it as a global, so that the next use is an ordinary lookup.
    return globals().setdefault(name, IMPORTED[name].load())
