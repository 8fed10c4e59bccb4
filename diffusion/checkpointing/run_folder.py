"""Finding a run's checkpoints and recipe, and reading weights out of them."""

import os
import pickle
import re
from collections.abc import Mapping
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

from diffusion.checkpointing import sharded_state
from diffusion.checkpointing.checkpoint_store import LATEST, STATE, check_whole, list_checkpoints
from diffusion.errors import UserError

RECIPE = 'recipe.yaml'
"""The resolved recipe, saved beside the checkpoints of its run."""

Weights = Literal['ema', 'training']


def find_checkpoint(place: str | Path) -> Path:
    """The checkpoint that a path means: a folder of ours, or a file of Composer's own.

    Args:
        place: A checkpoint; or a run's folder, which means its latest.

    Raises:
        UserError: There is none; the message names those that there are.
    """
    path = Path(place)
    for choice in (path, path / LATEST):
        if choice.is_file() or (choice / STATE).is_file():
            return choice.parent / choice.readlink() if choice.is_symlink() else choice
    folder = path if path.is_dir() else path.parent
    present = [checkpoint.name for checkpoint in list_checkpoints(folder)] if folder.is_dir() else []
    have = f'{folder} holds {", ".join(present[:4])}' if present else f'{folder} holds no checkpoint'
    raise UserError(f'checkpoint: {place} is not a checkpoint or a run ({have})')


def recipe_beside(checkpoint: Path) -> Path:
    """The resolved recipe of the run that a checkpoint belongs to."""
    folder = checkpoint.resolve().parent
    recipe = next((place / RECIPE for place in (folder, folder.parent) if (place / RECIPE).is_file()), None)
    if recipe is None:
        raise UserError(f'{checkpoint}: no {RECIPE} beside it; copy the one of its run there')
    return recipe


def read_content(path: Path) -> dict[str, Any]:
    """All that a checkpoint's pickle holds, tensors on the CPU, without running anything that is pickled in it.

    Args:
        path: A folder of ours (sharded tensors are not in its pickle), or a file of Composer's own.

    Raises:
        UserError: It is damaged, or holds objects of classes that are not known to be harmless.
    """
    file = path / STATE if path.is_dir() else path
    _check_archive(file)
    try:
        with torch.serialization.safe_globals(_harmless_globals()):
            content = torch.load(file, map_location='cpu', weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        found = re.search(r'Unsupported (?:global: GLOBAL|class) (\S+)', str(error))
        if found is None:
            raise UserError(f'{file}: not a checkpoint (its pickle is damaged)') from error
        raise UserError(
            f'{file}: it holds a pickled {found[1]}, which is not loaded; if it is of a component of yours, admit the '
            'class by torch.serialization.add_safe_globals in a module that the recipe imports'
        ) from error
    except RuntimeError as error:
        if 'PytorchStreamReader' not in str(error):  # what torch's reader of zip archives says of a damaged one
            raise
        reason = str(error).strip().splitlines()[0]
        raise UserError(f'{file}: not readable ({reason}); it may be cut short, use an earlier one') from error
    if not isinstance(content, dict) or not isinstance(content.get('state'), dict):
        raise UserError(f'{file}: it holds no state; is it a checkpoint of Composer?')
    return content


def _check_archive(file: Path) -> None:
    """Check both ends of a file of torch.save, a zip archive; of one that is cut short torch raises anything."""
    with file.open('rb') as opened:
        start, size = opened.read(4), opened.seek(0, os.SEEK_END)
        opened.seek(max(0, size - 22))
        end = opened.read(4)
    if start != b'PK\x03\x04':
        raise UserError(f'{file}: not a checkpoint (torch.save writes a zip archive)')
    if end != b'PK\x05\x06':
        raise UserError(
            f'{file}: not readable (the end of the archive is missing); it is cut short, use an earlier one'
        )


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The `state` of a checkpoint that is checked to be whole, with the model's weights."""
    if path.is_dir():
        check_whole(path)
    state = read_content(path)['state']
    if is_sharded(path):
        state['model'] = sharded_state.read_all_tensors(path, 'model.')
    if 'model' not in state:
        raise UserError(f'{path}: it holds no model; is it a checkpoint of Composer?')
    return state


def is_sharded(path: Path) -> bool:
    """Whether a checkpoint's tensors are in pieces."""
    return (path / sharded_state.INDEX).is_file()


def weights_of(path: Path, which: Weights | None = None) -> tuple[dict[str, Tensor], Weights]:
    """A checkpoint's weights by parameter name, and which they are.

    Args:
        path: The checkpoint.
        which: Averaged weights, training weights, or (None) averaged ones where there are any.

    Raises:
        UserError: It has no averaged weights (says when they would have started), or can't be read.
    """
    state = read_checkpoint(path)
    model = dict(state['model'])
    ema = dict(state.get('algorithms', [])).get('EMA', {})
    has_average = 'averages' in ema or 'sharded_averages' in ema
    if which == 'training' or (which is None and not has_average):
        return model, 'training'
    if not has_average:
        start = ema.get('ema_start')
        why = f'its EMA would have started at {start}' if start else 'its run had no EMA'
        raise UserError(f'{path}: it has no averaged weights, {why}; use --weights training')
    averages = (
        ema['averages']['ema'] if 'averages' in ema else sharded_state.read_all_tensors(path, 'averages.EMA.ema.')
    )
    return model | averages, 'ema'


def check_architecture(own: Mapping[str, torch.Size], stored: Mapping[str, torch.Size], where: str) -> None:
    """Compare names and shapes of a model's tensors with those of a checkpoint.

    Raises:
        UserError: It is of another architecture; the message names the first differences.
    """
    missing, unknown = sorted(set(own) - set(stored)), sorted(set(stored) - set(own))
    other = [name for name in own if name in stored and own[name] != stored[name]]
    if missing or unknown or other:
        details = [f'{len(names)} {what} ({", ".join(names[:2])})' for what, names in _named(missing, unknown) if names]
        details += [f'{name} is {tuple(stored[name])}, here {tuple(own[name])}' for name in other[:2]]
        raise UserError(f'{where}: of another architecture than the recipe: {"; ".join(details)}')


def load_weights(model: nn.Module, weights: dict[str, Tensor], where: str) -> None:
    """Copy weights into a model that has exactly these names and shapes.

    Raises:
        UserError: It is of another architecture.
    """
    check_architecture(_shapes(model.state_dict()), _shapes(weights), where)
    model.load_state_dict(weights)


def _shapes(tensors: Mapping[str, Tensor]) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in tensors.items()}


def _named(missing: list[str], unknown: list[str]) -> list[tuple[str, list[str]]]:
    return [('tensors missing', missing), ('tensors unknown', unknown)]


def _harmless_globals() -> list[Any]:
    """The classes in what Composer saves besides tensors: versions, clocks, numpy's random states."""
    reconstruct = np.zeros(1).__reduce__()[0]  # its module has another name in numpy 1 and 2
    dtypes = [type(np.dtype(name)) for name in ('bool', 'uint32', 'int64', 'float32', 'float64')]
    return [TorchVersion, timedelta, np.ndarray, np.dtype, reconstruct, *dtypes]
