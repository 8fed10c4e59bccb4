"""Short runs that save checkpoints: their recipes, and comparisons of what they saved."""

from collections.abc import Callable
from pathlib import Path
from typing import Any, Literal

import torch
from ranks import read_losses
from recipe_files import write_yaml

from diffusion.checkpointing.checkpoint_lookup import find_checkpoint
from diffusion.checkpointing.checkpoint_weights import is_sharded, read_checkpoint, weights_of
from diffusion.checkpointing.checkpointer import Checkpointer
from diffusion.checkpointing.sharded_state import read_all_tensors

EMA = {'ema': {'ema_start': '3ba', 'smoothing': 0.5}}
SHARDED = {'strategy': 'fsdp2', 'checkpoints': 'sharded', 'reshard_after_forward': False}


def recipe_writer(root: Path, tiny_recipe: Callable[..., dict[str, Any]], **common: Any) -> Callable[..., Path]:
    """Return a function that writes a recipe of 8 batches with averaging and a save after every second."""

    def write(name: str, trainer: dict[str, Any] | None = None, **sections: Any) -> Path:
        content = tiny_recipe(root / 'runs', small=True, name=name, **({'algorithms': EMA} | common | sections))
        content['trainer'] |= {'save_interval': '2ba'} | (trainer or {})
        return write_yaml(root / f'{name}.yaml', content)

    return write


def the_checkpointer(trainer: Any) -> Checkpointer:
    return next(each for each in trainer.state.callbacks if isinstance(each, Checkpointer))


def tensors_in(value: Any, name: str = '') -> dict[str, torch.Tensor]:
    """Return all tensors inside dicts, lists and tuples by their path."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list | tuple) else ()
    return {key: found for each, inner in items for key, found in tensors_in(inner, f'{name}.{each}').items()}


def tensors_of(place: Path | str) -> dict[str, torch.Tensor]:
    """Return the weights, averages and optimizer state in a checkpoint, or in the newest one of a run."""
    checkpoint = find_checkpoint(place)
    if is_sharded(checkpoint):
        return read_all_tensors(checkpoint, '')
    state = read_checkpoint(checkpoint)
    return tensors_in({name: state[name] for name in ('model', 'optimizers', 'algorithms')})


def assert_same_tensors(place: Path | str, reference: Path | str) -> None:
    """Assert that two checkpoints, or the newest ones of two runs, have the same tensors, bit for bit."""
    ours, theirs = tensors_of(place), tensors_of(reference)
    assert ours.keys() == theirs.keys() and len(ours) > 20
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


def relative_distance(place: Path | str, reference: Path | str, which: Literal['training', 'ema']) -> float:
    """Return the distance between the weights of the newest checkpoints of two runs, relative to their norm."""
    ours, theirs = (weights_of(find_checkpoint(each), which)[0] for each in (place, reference))
    assert ours.keys() == theirs.keys()
    found, expected = (torch.cat([each[name].flatten() for name in theirs]) for each in (ours, theirs))
    return float((found - expected).norm() / expected.norm())


def assert_same_end(run: Path, reference: Path, place: Path | str | None = None) -> None:
    """Assert that two runs have the same losses and the same newest checkpoint; `place` is the run's URL."""
    assert read_losses(run) == read_losses(reference)
    assert_same_tensors(place or run, reference)
