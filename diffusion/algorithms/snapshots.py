"""Snapshots of averaged weights, and reconstruction of the average of any width from them."""

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

from diffusion.algorithms.power_function import SNAPSHOT_FOLDER, WIDEST, Profile, gamma_of_width, mixture
from diffusion.errors import UserError
from diffusion.storage.atomic import atomic_file

log = logging.getLogger(__name__)

LARGE_ERROR = 0.05
"""Relative profile error above which a reconstruction logs a warning."""

_KEY = 'post_hoc_ema'
_VERSION = 1
_NEGLIGIBLE = 1e-8
"""Coefficient below which a snapshot does not change float32 weights."""


@dataclass(frozen=True)
class Snapshot:
    """File with one average of a run's weights at one batch."""

    path: Path
    batch: int
    width: float
    gamma: float

    @property
    def profile(self) -> Profile:
        """Profile of this saved average: the weight of each training step in it."""
        return Profile(self.batch, self.gamma)


@dataclass(frozen=True)
class ReconstructedAverage:
    """Average of a run's weights that was reconstructed from snapshots.

    Attributes:
        tensors: Averaged weights by parameter name, float32.
        width: Requested width.
        batch: Last batch of the run in the average.
        profile_error: Relative error |p - sum x_i p_i| / |p| between the requested profile p and the mixture of the
            snapshots' profiles p_i.
    """

    tensors: dict[str, Tensor]
    width: float
    batch: int
    profile_error: float

    @property
    def shapes(self) -> dict[str, torch.Size]:
        """Shapes of the tensors by parameter name."""
        return {name: tensor.shape for name, tensor in self.tensors.items()}


def write_snapshot(run: Path, tensors: Mapping[str, Tensor], *, batch: int, width: float, dtype: torch.dtype) -> Path:
    """Write a weight average, as full tensors, to a snapshot file atomically, and return the file's path."""
    path = run / SNAPSHOT_FOLDER / f'{label_of(width)}-ba{batch}.safetensors'
    header = {'version': _VERSION, 'batch': batch, 'width': width, 'gamma': gamma_of_width(width)}
    # safetensors rejects tensors that are not contiguous, such as those in channels_last.
    stored = {name: tensor.to('cpu', dtype).contiguous() for name, tensor in tensors.items()}
    # Use one metadata key: safetensors writes several in varying order, and a resumed run must write equal files.
    with atomic_file(path) as unfinished:
        save_file(stored, unfinished, metadata={_KEY: json.dumps(header)})
    return path


def label_of(width: float) -> str:
    """Return the label of a width's average in checkpoints and file names, such as `width0.05`."""
    return f'width{width:g}'


def find_snapshots(run: Path) -> list[Snapshot]:
    """Return the snapshots of a run's weight averages, sorted by batch and width; only file headers are read.

    Raises:
        UserError: There are no snapshots, or a file is damaged.
    """
    found = [_header(path) for path in sorted((run / SNAPSHOT_FOLDER).glob('width*-ba*.safetensors'))]
    if not found:
        raise UserError(
            f'{run / SNAPSHOT_FOLDER}: no snapshots; `algorithms: {{post_hoc_ema: }}` takes them during training'
        )
    return sorted(found, key=lambda snapshot: (snapshot.batch, snapshot.width))


def reconstruct_average(run: Path, width: float, *, at: int | None = None) -> ReconstructedAverage:
    """Reconstruct the power-function average of any width at any batch of a run from its snapshots.

    Files are read one at a time; peak memory is the model in float32 plus one tensor.

    Args:
        width: Standard deviation of the average's coefficients over the training steps, as a fraction of the training
            so far, in (0, 0.2887]; 0.2887 is the plain mean of all steps.
        at: Last batch to average over; the batch of the last snapshot by default. The coefficients have a relative L2
            error of about 20% at a batch between two snapshots.

    Raises:
        UserError: There are no snapshots, `at` is after the last one, the width is out of range, or a file is damaged.
    """
    gamma = gamma_of_width(width)
    snapshots = find_snapshots(run)
    last = snapshots[-1].batch
    batch = last if at is None else at
    if not 1 <= batch <= last:
        raise UserError(
            f'{run / SNAPSHOT_FOLDER}: batch {batch} is not between 1 and {last}, the batch of the last snapshot'
        )
    # Ignore snapshots beyond the first one from this batch on. They have little information about it, and may be from
    # an abandoned trajectory: a run that resumed from an earlier checkpoint with another learning rate and has not
    # overwritten them yet.
    until = min(snapshot.batch for snapshot in snapshots if snapshot.batch >= batch)
    used = [snapshot for snapshot in snapshots if snapshot.batch <= until]
    shares, error = mixture([snapshot.profile for snapshot in used], Profile(batch, gamma))
    if error > LARGE_ERROR:
        advice = _advice(used, batch)
        log.warning('width %g at batch %d: relative profile error %.0f%%; %s', width, batch, 100 * error, advice)
    return ReconstructedAverage(_mixed(used, shares.tolist()), width, batch, error)


def _advice(snapshots: Sequence[Snapshot], batch: int) -> str:
    """Return advice for an inaccurate reconstruction: the batches or widths that the snapshots can reconstruct."""
    batches = sorted({snapshot.batch for snapshot in snapshots})
    if batch < batches[-1]:
        # A profile drops from its maximum to 0 at its own batch; no mixture of other batches' profiles has that edge.
        return f'the nearest snapshots are at {" and ".join(f"batch {each}" for each in batches[-2:])}'
    profiles = [snapshot.profile for snapshot in snapshots]
    candidates = np.geomspace(0.005, WIDEST, 100)
    good = [width for width in candidates if mixture(profiles, Profile(batch, gamma_of_width(width)))[1] <= LARGE_ERROR]
    if not good:
        return f'{len(profiles)} snapshots are too few for any width'
    tolerance = f'{100 * LARGE_ERROR:.0f}%'
    return f'{len(profiles)} snapshots reconstruct widths from {min(good):.3f} to {max(good):.3f} within {tolerance}'


def _mixed(snapshots: Sequence[Snapshot], shares: Sequence[float]) -> dict[str, Tensor]:
    """Return the weighted sum of the snapshots' tensors, float32, by parameter name."""
    total: dict[str, Tensor] = {}
    for snapshot, share in zip(snapshots, shares, strict=True):
        if abs(share) < _NEGLIGIBLE:
            continue
        with _open_snapshot(snapshot.path) as file:
            names = list(file.keys())
            if total and set(names) != set(total):
                raise UserError(f'{snapshot.path}: has other tensors than the snapshots before it; remove this file')
            for name in names:
                tensor = file.get_tensor(name).float()
                total[name] = tensor.mul_(share) if name not in total else total[name].add_(tensor, alpha=share)
    return total


def _header(path: Path) -> Snapshot:
    """Read the batch and width of a snapshot from the header of its file."""
    with _open_snapshot(path) as file:
        header = json.loads((file.metadata() or {}).get(_KEY, '{}'))
    if header.get('version') != _VERSION:
        raise UserError(
            f'{path}: not a snapshot of version {_VERSION} (its header is {header or "empty"}); move it elsewhere'
        )
    return Snapshot(path, header['batch'], header['width'], header['gamma'])


@contextmanager
def _open_snapshot(path: Path) -> Iterator[Any]:
    """Open a snapshot file for reading inside of the context; raise UserError if the file is damaged."""
    try:
        with safe_open(path, framework='pt') as file:
            yield file
    except SafetensorError as error:
        raise UserError(f'{path}: not readable ({error}); remove this file to use the other snapshots') from error
