"""Finding a run's checkpoints and recipe, and reading weights out of them."""

import pickle
import re
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor, nn
from torch.torch_version import TorchVersion

RECIPE = 'recipe.yaml'
"""The resolved recipe, saved beside the checkpoints of its run."""
LATEST = 'latest-rank0.pt'

Weights = Literal['ema', 'training']


def find_checkpoint(place: str | Path) -> Path:
    """The checkpoint file that a path means.

    Args:
        place: A file; a run's folder, which means its latest checkpoint; or such a folder and `latest`, or the name of
            one of its checkpoints without its ending (`runs/phase1/ba50000`).
    """
    path = Path(place)
    choices = [path, path / LATEST, path.with_name(f'{path.name}-rank0.pt'), path.with_name(f'{path.name}.pt')]
    for choice in choices:
        if choice.is_file():
            return choice
    folder = path if path.is_dir() else path.parent
    present = sorted(file.name for file in folder.glob('*.pt')) if folder.is_dir() else []
    have = f'{folder} holds {", ".join(present[-4:])}' if present else f'{folder} holds no checkpoint'
    raise ValueError(f'checkpoint: {place} is not a checkpoint or a run ({have})')


def recipe_beside(checkpoint: Path) -> Path:
    """The resolved recipe of the run that a checkpoint belongs to."""
    recipe = checkpoint.resolve().parent / RECIPE
    if not recipe.is_file():
        raise ValueError(f'{checkpoint}: no {RECIPE} beside it; copy the one of its run there')
    return recipe


def read_checkpoint(path: Path) -> dict[str, Any]:
    """The `state` of a Composer checkpoint, tensors on the CPU, without running anything that is pickled in it."""
    try:
        with torch.serialization.safe_globals(_harmless_globals()):
            content = torch.load(path, map_location='cpu', weights_only=True, mmap=True)
    except pickle.UnpicklingError as error:
        found = re.search(r'Unsupported global: GLOBAL (\S+)', str(error))
        what = f'it holds a pickled {found[1]}, which is not loaded' if found else 'its pickle is damaged'
        raise ValueError(f'{path}: not a checkpoint of this library ({what})') from error
    except (RuntimeError, EOFError, KeyError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ValueError(f'{path}: not readable ({reason}); it may be cut short, use an earlier one') from error
    if not isinstance(content, dict) or 'model' not in content.get('state', {}):
        raise ValueError(f'{path}: it holds no model; is it a checkpoint of Composer?')
    return content['state']


def weights_of(path: Path, which: Weights | None = None) -> tuple[dict[str, Tensor], Weights]:
    """A checkpoint's weights by parameter name, and which they are.

    Args:
        path: The checkpoint.
        which: Averaged weights, training weights, or (None) averaged ones where there are any.
    """
    state = read_checkpoint(path)
    model = dict(state['model'])
    average = dict(state.get('algorithms', [])).get('EMA', {})
    if which == 'training' or (which is None and 'averages' not in average):
        return model, 'training'
    if 'averages' not in average:
        start = average.get('ema_start')
        why = f'its EMA would have started at {start}' if start else 'its run had no EMA'
        raise ValueError(f'{path}: it has no averaged weights, {why}; use --weights training')
    return model | average['averages'], 'ema'


def load_weights(model: nn.Module, weights: dict[str, Tensor], where: str) -> None:
    """Copy weights into a model that has exactly these names and shapes.

    Raises:
        ValueError: It is of another architecture; the message names the first differences.
    """
    own = model.state_dict()
    missing, unknown = sorted(set(own) - set(weights)), sorted(set(weights) - set(own))
    other = [name for name in own if name in weights and own[name].shape != weights[name].shape]
    if missing or unknown or other:
        details = [f'{len(names)} {what} ({", ".join(names[:2])})' for what, names in _named(missing, unknown) if names]
        details += [f'{name} is {tuple(weights[name].shape)}, here {tuple(own[name].shape)}' for name in other[:2]]
        raise ValueError(f'{where}: of another architecture than the recipe: {"; ".join(details)}')
    model.load_state_dict(weights)


def _named(missing: list[str], unknown: list[str]) -> list[tuple[str, list[str]]]:
    return [('tensors missing', missing), ('tensors unknown', unknown)]


def _harmless_globals() -> list[Any]:
    """The classes in what Composer saves besides tensors: versions, clocks, numpy's random states."""
    reconstruct = np.zeros(1).__reduce__()[0]  # its module has another name in numpy 1 and 2
    dtypes = [type(np.dtype(name)) for name in ('bool', 'uint32', 'int64', 'float32', 'float64')]
    return [TorchVersion, timedelta, np.ndarray, np.dtype, reconstruct, *dtypes]
