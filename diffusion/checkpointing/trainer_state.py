"""State of a Trainer in a checkpoint: collect it from a Trainer, or load it into one."""

import functools
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from composer.core import State
from composer.loggers import Logger
from composer.utils import collect_env, reproducibility
from torch import Tensor
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)

from diffusion.algorithms.average import Averager, local_shard, reshard, trained_parameters
from diffusion.checkpointing import sharded_state
from diffusion.checkpointing.checkpoint_weights import check_architecture, is_sharded, read_content
from diffusion.checkpointing.rank_agreement import raise_on_all_ranks
from diffusion.checkpointing.sharded_state import Fetch
from diffusion.compatibility.torch_versions import distribute_tied_weights
from diffusion.data.epoch_position import keep_data_position
from diffusion.errors import UserError

# For each state dict, Composer searches all files of its installation for its commit hash. This takes 50 ms, or longer
# on a network file system, while training waits. Cache the hash.
collect_env.get_composer_commit_hash = functools.cache(collect_env.get_composer_commit_hash)

keep_data_position()

_FLAT = StateDictOptions(flatten_optimizer_state_dict=True)
_PACKAGES = ('diffusion', 'composer')
"""Packages whose algorithms only change weights and averages after the backward pass or during evaluation."""


def gather_state(state: State, *, sharded_tensors: bool) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return the content of state.pt, and a dictionary of tensors to save as shards ({} unless `sharded_tensors`)."""
    # Free gathered weights, which FSDP2 may leave in the model after a forward pass without a backward pass
    # (evaluation, image sampling): they are not the parameters that the optimizer holds.
    reshard(state.model)
    random_state = reproducibility.get_rng_state()
    if not sharded_tensors:
        return {'state': _whole_state(state), 'rng': random_state}, {}
    model, optimizer = get_state_dict(state.model, state.optimizers[0], options=_FLAT)
    tensors: dict[str, Any] = {f'model.{name}': tensor for name, tensor in model.items()}
    tensors |= {f'optimizer.{name}': value for name, value in optimizer.items() if isinstance(value, Tensor)}
    settings = {name: value for name, value in optimizer.items() if not isinstance(value, Tensor)}
    averagers = _averagers(state)
    for name, algorithm in averagers.items():
        for label, average in algorithm.averages.items():
            prefix = f'averages.{name}.{label}.'
            tensors |= {prefix + key: shard for key, shard in average.shards(state.model).items()}
    # Turn off `gathers`, so that state_dict() omits the averages: they are among the sharded tensors.
    try:
        for algorithm in averagers.values():
            algorithm.gathers = False
        rest = _rest_of_state(state)
    finally:
        for algorithm in averagers.values():
            algorithm.gathers = True
    kind = type(state.optimizers[0]).__qualname__
    return {'state': rest, 'rng': random_state, 'optimizer_settings': {kind: settings}}, tensors


def _whole_state(state: State) -> dict[str, Any]:
    """Return Composer's state dict with full (unsharded) tensors."""
    if state.fsdp_enabled:
        return state.state_dict()
    # Composer asks PyTorch for the model's tensors and then for the optimizer's. Each time, PyTorch looks up the names
    # of all parameters, which takes 30 ms for Stable Diffusion 2's U-Net. This call looks them up only once.
    model, optimizer = get_state_dict(state.model, state.optimizers[0])
    rest = _rest_of_state(state)
    found = {'model': model, 'optimizers': {type(state.optimizers[0]).__qualname__: optimizer}, **rest}
    # Keep the order of Composer's own state dict.
    return {name: found[name] for name in state.serialized_attributes if name in found} | rest


def _rest_of_state(state: State) -> dict[str, Any]:
    attributes = state.serialized_attributes
    try:
        state.serialized_attributes = [name for name in attributes if name not in ('model', 'optimizers')]
        return state.state_dict()
    finally:
        state.serialized_attributes = attributes


def changed_by_updates(state: State) -> set[int]:
    """Return the addresses of tensors that nothing changes before the optimizer's step in the next batch.

    These are the weights, the optimizer's state and the weight averages. The set is empty after the last batch of an
    epoch, since the epoch's end may update averages. It is also empty if there are algorithms from other packages,
    which may change weights at any time.
    """
    within_epoch = 0 < state.timestamp.batch_in_epoch.value < (state.dataloader_len or 0)
    if not within_epoch or not all(type(each).__module__.partition('.')[0] in _PACKAGES for each in state.algorithms):
        return set()
    tensors: list[Tensor] = list(state.model.parameters())
    for optimizer in state.optimizers:
        tensors += [value for each in optimizer.state.values() for value in each.values() if isinstance(value, Tensor)]
    for averager in _averagers(state).values():
        tensors += [shard for average in averager.averages.values() for shard in average.tensors.values()]
    with torch.no_grad():
        return {local_shard(tensor).data_ptr() for tensor in tensors if tensor.numel()}


def load_checkpoint(state: State, logger: Logger, checkpoint: Path, fetch: Fetch) -> list[dict[str, Any]] | None:
    """Load a checkpoint into a trainer's state, after FSDP but before DDP wraps the model; every rank must call it.

    Returns:
        The states of the random generators, one per rank that saved the checkpoint; None if they were not saved.

    Raises:
        UserError: The checkpoint has another architecture or optimizer, or belongs to a run that this run must not
            resume.
    """
    content: dict[str, Any] = {}
    shapes: dict[str, torch.Size] = {}
    sharded = False
    with raise_on_all_ranks(f'{checkpoint}: not loaded'):
        content, sharded = read_content(checkpoint), is_sharded(checkpoint)
        if sharded:
            shapes = sharded_state.shapes(checkpoint)
    saved = content['state']
    _check_optimizer(state, content, checkpoint)
    tensors: dict[str, Any] = get_model_state_dict(state.model)
    expected = {name: tensor.shape for name, tensor in tensors.items()}
    if sharded:
        prefix = 'model.'
        stored = {name.removeprefix(prefix): shape for name, shape in shapes.items() if name.startswith(prefix)}
        check_architecture(expected, stored, str(checkpoint))
        _load_shards(state, content['optimizer_settings'], checkpoint, fetch)
    else:
        check_architecture(expected, {name: tensor.shape for name, tensor in saved['model'].items()}, str(checkpoint))
    # Restore the run's name, since Composer's load_state_dict replaces it with the checkpoint's.
    run_name = state.run_name
    # Runs on a CPU save the empty state of a disabled gradient scaler, which an enabled scaler would reject.
    if not all(dict(saved.get('scaler', {})).values()):
        del saved['scaler']
    if not sharded:
        distribute_tied_weights(state.model, saved['model'])
    with warnings.catch_warnings():
        # A callback or scheduler added to the recipe has no saved state; RecipeKeeper logs that it was added.
        warnings.filterwarnings('ignore', message='.* is not in the state_dict. Its state will not be restored')
        state.load_state_dict(saved, logger, strict=True)
    state.run_name = run_name
    # Load the averages after load_state_dict, which resets the averagers.
    if sharded:
        _load_averages(state, saved, checkpoint, fetch)
    state.load_path = str(checkpoint)
    return content.get('rng')


def _check_optimizer(state: State, content: Mapping[str, Any], checkpoint: Path) -> None:
    """Raise UserError if a checkpoint was saved with a different optimizer class than the recipe's."""
    stored = content.get('optimizer_settings') or content['state'].get('optimizers') or {}
    kind = type(state.optimizers[0]).__qualname__
    if kind not in stored:
        raise UserError(
            f'{checkpoint}: saved with optimizer {", ".join(stored) or "none"}, but the recipe has {kind}; change the '
            'recipe back to resume, or start a new run from the weights with init_from'
        )


def _load_shards(state: State, settings: Mapping[str, Mapping[str, Any]], checkpoint: Path, fetch: Fetch) -> None:
    model = get_model_state_dict(state.model)  # under FSDP2, these are DTensors with this rank's shards
    # get_optimizer_state_dict initializes the state of a new optimizer, so there are tensors to load into.
    optimizer = get_optimizer_state_dict(state.model, state.optimizers[0], options=_FLAT)
    moments = {name: value for name, value in optimizer.items() if isinstance(value, Tensor)}
    wanted: dict[str, Any] = {f'model.{name}': tensor for name, tensor in model.items()}
    wanted |= {f'optimizer.{name}': tensor for name, tensor in moments.items()}
    sharded_state.read_tensors(wanted, checkpoint, fetch)
    set_model_state_dict(state.model, {name: wanted[f'model.{name}'] for name in model})
    # A setting that the checkpoint lacks, such as initial_lr if the run had no scheduler, keeps its current value.
    restored: Any = optimizer | {name: wanted[f'optimizer.{name}'] for name in moments}
    restored |= settings[type(state.optimizers[0]).__qualname__]
    set_optimizer_state_dict(state.model, state.optimizers[0], restored, options=_FLAT)


def _load_averages(state: State, saved: Mapping[str, Any], checkpoint: Path, fetch: Fetch) -> None:
    algorithms = dict(saved['algorithms'])
    for name, algorithm in _averagers(state).items():
        labels = algorithms.get(name, {}).get('sharded_averages', [])
        weights = trained_parameters(state.model) if labels else {}
        averages = {label: {key: torch.empty_like(t.detach()) for key, t in weights.items()} for label in labels}
        if averages:
            wanted = {
                f'averages.{name}.{label}.{key}': t for label, tensors in averages.items() for key, t in tensors.items()
            }
            sharded_state.read_tensors(wanted, checkpoint, fetch)
            algorithm.restore(averages)


def _averagers(state: State) -> dict[str, Averager]:
    return {type(each).__qualname__: each for each in state.algorithms if isinstance(each, Averager)}
