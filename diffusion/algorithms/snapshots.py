"""Snapshots of averaged weights, and the average of any width put together from them."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from diffusion.algorithms.power_function import WIDEST, Profile, gamma_of_width, mixture
from diffusion.errors import UserError
from diffusion.storage.atomic import becoming

log = logging.getLogger(__name__)

FOLDER = 'post_hoc_ema'
"""Of a run's snapshots, in the run's folder."""
LARGE_ERROR = 0.05
"""Of a profile, relative; from here on it is told."""

_KEY = 'post_hoc_ema'
_VERSION = 1
_NEGLIGIBLE = 1e-8
"""A share of a snapshot that float32 weights do not notice."""


@dataclass(frozen=True)
class Snapshot:
    """A file that holds one average of a run."""

    path: Path
    batch: int
    width: float
    gamma: float

    @property
    def profile(self) -> Profile:
        """What it averages."""
        return Profile(self.batch, self.gamma)


@dataclass(frozen=True)
class ReconstructedAverage:
    """An average that was put together from snapshots.

    Attributes:
        tensors: float32, by parameter name.
        width: As asked for.
        batch: Of the run, at which it is the average.
        profile_error: |p - sum x_i p_i| / |p|, of the profile p asked for and of what the snapshots make of it.
    """

    tensors: dict[str, Tensor]
    width: float
    batch: int
    profile_error: float

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """By parameter name."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}


def write_snapshot(run: Path, tensors: Mapping[str, Tensor], *, batch: int, width: float, dtype: torch.dtype) -> Path:
    """Write an average of whole tensors; the file appears whole or not at all."""
    path = run / FOLDER / f'{label_of(width)}-ba{batch}.safetensors'
    about = {'version': _VERSION, 'batch': batch, 'width': width, 'gamma': gamma_of_width(width)}
    # Safetensors refuses the strides of channels_last.
    stored = {name: tensor.to('cpu', dtype).contiguous() for name, tensor in tensors.items()}
    # One key: safetensors writes several in another order each time, and a file that is written again should be equal.
    with becoming(path) as unfinished:
        save_file(stored, unfinished, metadata={_KEY: json.dumps(about)})
    return path


def label_of(width: float) -> str:
    """What the average of a width is called in checkpoints and file names."""
    return f'width{width:g}'


def find_snapshots(run: Path) -> list[Snapshot]:
    """The snapshots of a run, by batch and width; reads their headers alone.

    Raises:
        UserError: There is none, or a file is damaged.
    """
    found = [_header(path) for path in sorted((run / FOLDER).glob('width*-ba*.safetensors'))]
    if not found:
        raise UserError(f'{run / FOLDER}: no snapshots; `algorithms: {{post_hoc_ema: }}` takes them while a run trains')
    return sorted(found, key=lambda snapshot: (snapshot.batch, snapshot.width))


def reconstruct_average(run: Path, width: float, *, at: int | None = None) -> ReconstructedAverage:
    """The power-function average of any width at any batch of a run, from its snapshots.

    Reads the files one after another: memory is the model in float32, and one tensor.

    Args:
        run: The run's folder.
        width: Standard deviation of the profile as a share of the training so far, above 0 and up to 0.2887.
        at: Batch after which it is the average, by default that of the last snapshot. Between two snapshots the
            profile is off by some 20 %.

    Raises:
        UserError: There are no snapshots, they end before `at`, the width is none, or a file is damaged.
    """
    gamma = gamma_of_width(width)
    snapshots = find_snapshots(run)
    last = snapshots[-1].batch
    batch = last if at is None else at
    if not 1 <= batch <= last:
        raise UserError(f'{run / FOLDER}: batch {batch} is not between 1 and {last}, where the last snapshot is')
    # Later ones know little of this batch, and may be of another run: of a trajectory that was left for an earlier
    # checkpoint with another learning rate, and that was not overwritten yet.
    until = min(snapshot.batch for snapshot in snapshots if snapshot.batch >= batch)
    used = [snapshot for snapshot in snapshots if snapshot.batch <= until]
    shares, error = mixture([snapshot.profile for snapshot in used], Profile(batch, gamma))
    if error > LARGE_ERROR:
        advice = _advice(used, batch)
        log.warning('width %g at batch %d: the profile is off by %.0f %%; %s', width, batch, 100 * error, advice)
    return ReconstructedAverage(_mixed(used, shares.tolist()), width, batch, error)


def _advice(snapshots: Sequence[Snapshot], batch: int) -> str:
    """Which widths the snapshots can give."""
    batches = sorted({snapshot.batch for snapshot in snapshots})
    if batch < batches[-1]:
        # A profile stops at its batch, from its highest value to 0; a mixture of others has no such edge.
        return f'snapshots are at {", ".join(f"batch {each}" for each in batches[-2:])}, not at this one'
    kept = [snapshot.profile for snapshot in snapshots]
    candidates = np.geomspace(0.005, WIDEST, 100)
    good = [width for width in candidates if mixture(kept, Profile(batch, gamma_of_width(width)))[1] <= LARGE_ERROR]
    if not good:
        return f'{len(kept)} snapshots are too few for any width'
    bar = f'{100 * LARGE_ERROR:.0f} %'
    return f'{len(kept)} snapshots give widths from {min(good):.3f} to {max(good):.3f} within {bar}'


def _mixed(snapshots: Sequence[Snapshot], shares: Sequence[float]) -> dict[str, Tensor]:
    total: dict[str, Tensor] = {}
    for snapshot, share in zip(snapshots, shares, strict=True):
        if abs(share) < _NEGLIGIBLE:
            continue
        with _opened(snapshot.path) as file:
            names = list(file.keys())
            if total and set(names) != set(total):
                raise UserError(f'{snapshot.path}: it averages other tensors than the snapshots before it; remove it')
            for name in names:
                tensor = file.get_tensor(name).float()
                total[name] = tensor.mul_(share) if name not in total else total[name].add_(tensor, alpha=share)
    return total


def _header(path: Path) -> Snapshot:
    with _opened(path) as file:
        about = json.loads((file.metadata() or {}).get(_KEY, '{}'))
    if about.get('version') != _VERSION:
        raise UserError(f'{path}: no snapshot of version {_VERSION}: it says {about or "nothing"}; move it elsewhere')
    return Snapshot(path, about['batch'], about['width'], about['gamma'])


@contextmanager
def _opened(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework='pt') as file:
            yield file
    except SafetensorError as error:
        raise UserError(f'{path}: not readable ({error}); cut short? Remove it: the others may do') from error
