"""Post-hoc EMA: power-function averages with snapshots, from which averages of other widths can be reconstructed."""

import json
import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import numpy as np
import torch
from composer.core import Algorithm, Event, State, Time
from composer.loggers import Logger
from composer.utils import create_interval_scheduler, dist
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from diffusion.algorithms.average import WeightAverage, averages_state
from diffusion.algorithms.power_function import SNAPSHOT_FOLDER, WIDEST, Profile, beta, gamma_of_width, mixture
from diffusion.config.declarations import applied_on_resume, fixed_on_resume
from diffusion.errors import UserError
from diffusion.storage.atomic import atomic_file

log = logging.getLogger(__name__)

# Write a snapshot at the end of the batch or epoch, before the checkpoint. Otherwise a run killed after its last
# checkpoint but before a later snapshot would count as finished and never write that snapshot.
_SNAPSHOT_EVENTS = (Event.BATCH_END, Event.EPOCH_END, Event.FIT_END)
"""Events at which a snapshot may be due. FIT_END is for runs that stop early."""
SNAPSHOTS = applied_on_resume('the snapshots after the resume')
LARGE_ERROR = 0.05
"""A reconstruction whose relative profile error (`ReconstructedAverage.profile_error`) is larger logs a warning."""
_KEY = 'post_hoc_ema'
_VERSION = 1
_NEGLIGIBLE = 1e-8
"""A snapshot with a smaller absolute coefficient is not read, since it would not change float32 weights."""


class PostHocEMA(Algorithm):
    """Power-function averages of the trained weights over time, saved as snapshots (Karras et al. 2024, section 3).

    `diffusion export --ema-width 0.13` reconstructs the average of any width at any batch from the snapshots, so the
    averaging length can be chosen after training.

    Averaging starts with the first batch; the contribution of the initial weights tends to 0 as training continues.
    Each width costs one copy of the trained weights (3.5 GB for the 866 M parameters of SD2; under FSDP each device
    stores its shard) and one pass over the weights per batch. Each snapshot is a safetensors file per width with an
    ordinary state dict: `folder/post_hoc_ema/width0.05-ba10000.safetensors`. Gathering a snapshot needs memory for one
    full average on rank 0.

    A resumed run repeats the batches after its checkpoint and overwrites their snapshots with identical files. If the
    seed, the data or a setting was changed, snapshots after the checkpoint belong to the old trajectory. Reconstruction
    at an earlier batch ignores them; reconstruction at the end of the run requires that they are overwritten or
    removed.

    Args:
        widths: Standard deviations of the averages as fractions of the training so far, sigma_rel; the defaults are the
            paper's.
        every: Interval between snapshots, as a Composer time string; one more is saved at the end of training. More
            snapshots make reconstructed averages more accurate. The relative L2 error of the averaging profile is below
            1.8% for widths from 0.02 to 0.25 with 55 snapshots (550,000 batches at the default), and below 4.7% for
            widths from 0.03 to 0.25 with 25 snapshots. 55 snapshots of SD2 take 190 GB.
        dtype: Data type of the snapshots. Widths below the smallest saved width are reconstructed as differences of
            snapshots with large coefficients (4 for width 0.04 and 35 for width 0.02, with 55 snapshots), which amplify
            rounding errors.
        folder: The run's folder.
    """

    on_resume = fixed_on_resume('its averages start with the first batch')

    def __init__(
        self,
        *,
        widths: Sequence[float] = (0.05, 0.10),
        every: Annotated[str, SNAPSHOTS] = '10000ba',
        dtype: Annotated[Literal['float16', 'bfloat16', 'float32'], SNAPSHOTS] = 'float16',
        folder: Annotated[str, SNAPSHOTS] = 'runs',
    ) -> None:
        self.widths = {label_of(width): width for width in widths}
        if not widths or len(self.widths) < len(widths):
            raise UserError(f'algorithms.post_hoc_ema.widths: {list(widths)}; use at least one width, without repeats')
        self.gammas = {label: gamma_of_width(width) for label, width in self.widths.items()}
        if Time.from_timestring(every).value <= 0:
            raise UserError(f'algorithms.post_hoc_ema.every: {every!r}; use a positive interval such as 10000ba')
        self.is_due = create_interval_scheduler(every, checkpoint_events=False, final_events=set(_SNAPSHOT_EVENTS))
        self.dtype = {'float16': torch.float16, 'bfloat16': torch.bfloat16, 'float32': torch.float32}[dtype]
        self.folder = Path(folder)
        self.gathers = True
        self._averages = {label: WeightAverage() for label in self.widths}
        self._model: nn.Module | None = None
        self._last_snapshot = -1

    @property
    def started(self) -> bool:
        return all(average.started for average in self._averages.values())

    @property
    def averages(self) -> Mapping[str, WeightAverage]:
        """Weight averages to save in checkpoints, by label such as `width0.05`; empty before the first batch."""
        return self._averages if self.started else {}

    def match(self, event: Event, state: State) -> bool:
        return event in (Event.INIT, Event.AFTER_LOAD, Event.FIT_START, *_SNAPSHOT_EVENTS)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        self._model = state.model
        batch = state.timestamp.batch.value
        if event == Event.FIT_START and batch > 0 and not self.started:
            raise UserError(
                f'algorithms.post_hoc_ema: the checkpoint of batch {batch} has no averages, which must start with the '
                'first batch; remove post_hoc_ema, or start a new run from these weights with init_from'
            )
        if event == Event.BATCH_END:
            self._update(state.model, step=batch)
        # A snapshot of the last batch may be due at all three events; write it only once.
        if event in _SNAPSHOT_EVENTS and batch != self._last_snapshot and self.is_due(state, event):
            self._last_snapshot = batch
            self._write(state.model, batch)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if not self.started:
            return state
        assert self._model is not None, 'the algorithm has no model before Event.INIT'
        return state | averages_state(self, self._model)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._averages = {label: WeightAverage() for label in self.widths}
        if state.get('averages'):
            self.restore(state['averages'])

    def restore(self, averages: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load the weight averages of a checkpoint, given by label; raise UserError if one of the widths is missing."""
        missing = sorted(self.widths.keys() - averages.keys())
        if missing:
            raise UserError(
                f'algorithms.post_hoc_ema.widths: the checkpoint has {", ".join(sorted(averages))} but not '
                f'{", ".join(missing)}; averages must start with the first batch, so keep the original widths'
            )
        for label, average in self._averages.items():
            average.restore(averages[label])

    def _update(self, model: nn.Module, *, step: int) -> None:
        for label, average in self._averages.items():
            if average.started:
                average.update(model, beta(step, self.gammas[label]))
            else:
                average.start(model)  # `start` copies the weights, as an update with beta(1) = 0 would

    def _write(self, model: nn.Module, batch: int) -> None:
        """Write a snapshot of every average, on rank 0; a collective, so every rank must call it."""
        if not self.started:
            return
        is_writer = dist.get_global_rank() == 0
        for label, average in self._averages.items():
            tensors = average.whole(model, keep=is_writer)  # `whole` is a collective, so all ranks call it
            if is_writer:
                path = write_snapshot(self.folder, tensors, batch=batch, width=self.widths[label], dtype=self.dtype)
                log.info('Wrote %s', path)


@dataclass(frozen=True)
class Snapshot:
    """File with one weight average of a run at one batch."""

    path: Path
    batch: int
    width: float
    gamma: float

    @property
    def profile(self) -> Profile:
        return Profile(self.batch, self.gamma)


@dataclass(frozen=True)
class ReconstructedAverage:
    """Average of a run's weights, reconstructed from snapshots.

    Attributes:
        tensors: Averaged weights by parameter name, float32.
        batch: Last batch included in the average.
        profile_error: Relative error |p - sum x_i p_i| / |p| between the requested profile p and the mixture of the
            snapshots' profiles p_i.
    """

    tensors: dict[str, Tensor]
    width: float
    batch: int
    profile_error: float

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: tensor.shape for name, tensor in self.tensors.items()}


def write_snapshot(run: Path, tensors: Mapping[str, Tensor], *, batch: int, width: float, dtype: torch.dtype) -> Path:
    """Write a weight average, as full tensors, to a snapshot file atomically, and return the file's path."""
    path = run / SNAPSHOT_FOLDER / f'{label_of(width)}-ba{batch}.safetensors'
    header = {'version': _VERSION, 'batch': batch, 'width': width, 'gamma': gamma_of_width(width)}
    # safetensors rejects non-contiguous tensors, such as tensors in channels_last.
    stored = {name: tensor.to('cpu', dtype).contiguous() for name, tensor in tensors.items()}
    # Use a single metadata key: safetensors writes several keys in varying order, and a resumed run must write
    # identical files.
    with atomic_file(path) as unfinished:
        save_file(stored, unfinished, metadata={_KEY: json.dumps(header)})
    return path


def label_of(width: float) -> str:
    """Return the label of the average with this width in checkpoints and file names, such as `width0.05`."""
    return f'width{width:g}'


def find_snapshots(run: Path) -> list[Snapshot]:
    """Return a run's snapshots, sorted by batch and width; reads only file headers. UserError if the run has none."""
    found = [_header(path) for path in sorted((run / SNAPSHOT_FOLDER).glob('width*-ba*.safetensors'))]
    if not found:
        raise UserError(
            f'{run / SNAPSHOT_FOLDER}: no snapshots; to save them in training, set `algorithms: {{post_hoc_ema: }}`'
        )
    return sorted(found, key=lambda snapshot: (snapshot.batch, snapshot.width))


def reconstruct_average(run: Path, width: float, *, at: int | None = None) -> ReconstructedAverage:
    """Reconstruct the power-function average of any width at any batch of a run from its snapshots.

    Files are read one at a time; peak memory is the model in float32 plus one tensor.

    Args:
        width: Standard deviation of the average's coefficients over the training steps, as a fraction of the training
            so far, in (0, 0.2887]; 0.2887 weights all steps equally.
        at: Last batch to average over; None uses the batch of the last snapshot. At a batch between two snapshots, the
            coefficients have a relative L2 error of about 20%.
    """
    gamma = gamma_of_width(width)
    snapshots = find_snapshots(run)
    last = snapshots[-1].batch
    batch = last if at is None else at
    if not 1 <= batch <= last:
        raise UserError(
            f'{run / SNAPSHOT_FOLDER}: batch {batch} is not between 1 and {last}, the batch of the last snapshot'
        )
    # Ignore snapshots after the first one at or after this batch. They contain little information about the average at
    # this batch and may come from an abandoned trajectory: a run that resumed from an earlier checkpoint with another
    # learning rate may not have overwritten them yet.
    until = min(snapshot.batch for snapshot in snapshots if snapshot.batch >= batch)
    used = [snapshot for snapshot in snapshots if snapshot.batch <= until]
    shares, error = mixture([snapshot.profile for snapshot in used], Profile(batch, gamma))
    if error > LARGE_ERROR:
        advice = _advice(used, batch)
        log.warning('width %g at batch %d: relative profile error %.0f%%; %s', width, batch, 100 * error, advice)
    return ReconstructedAverage(_mixed(used, shares.tolist()), width, batch, error)


def _advice(snapshots: Sequence[Snapshot], batch: int) -> str:
    """Return advice for an inaccurate reconstruction: batches or widths that the snapshots can reconstruct well."""
    batches = sorted({snapshot.batch for snapshot in snapshots})
    if batch < batches[-1]:
        # Advise the nearest batches, not widths: a profile drops from its maximum to 0 at its own batch, and a mixture
        # of profiles that end at other batches cannot have this edge.
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
    with _open_snapshot(path) as file:
        header = json.loads((file.metadata() or {}).get(_KEY, '{}'))
    if header.get('version') != _VERSION:
        raise UserError(
            f'{path}: not a snapshot of version {_VERSION} (its header is {header or "empty"}); move it elsewhere'
        )
    return Snapshot(path, header['batch'], header['width'], header['gamma'])


@contextmanager
def _open_snapshot(path: Path) -> Iterator[Any]:
    try:
        with safe_open(path, framework='pt') as file:
            yield file
    except SafetensorError as error:
        raise UserError(f'{path}: not readable ({error}); remove this file to use the other snapshots') from error
