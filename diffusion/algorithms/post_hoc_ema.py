"""Post-hoc EMA: power-function averages with snapshots, to reconstruct averages of other widths after training."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import torch
from composer.core import Algorithm, Event, State, Time
from composer.loggers import Logger
from composer.utils import create_interval_scheduler, dist
from torch import Tensor, nn

from diffusion.algorithms.average import WeightAverage, averages_state
from diffusion.algorithms.power_function import beta, gamma_of_width
from diffusion.algorithms.snapshots import label_of, write_snapshot
from diffusion.config.keyword_meaning import applied_on_resume, fixed_on_resume
from diffusion.errors import UserError

log = logging.getLogger(__name__)

# Write a snapshot at the end of the batch or epoch, before the checkpoint. A run killed between its last checkpoint and
# a later snapshot would count as finished, and never write the snapshot.
_SNAPSHOT_EVENTS = (Event.BATCH_END, Event.EPOCH_END, Event.FIT_END)
"""Events at which a snapshot may be due. FIT_END is for runs that stop early."""
SNAPSHOTS = applied_on_resume('the snapshots after the resume')


class PostHocEMA(Algorithm):
    """Power-function averages of the trained weights over time, saved as snapshots (Karras et al. 2024, section 3).

    `diffusion export --ema-width 0.13` reconstructs the average of any width at any batch from the snapshots, so that
    the averaging length can be chosen from results after training.

    Averaging starts with the first batch; the share of the first weights in the average tends to 0 as training
    continues. Each width costs one copy of the trained weights (3.5 GB for the 866 M parameters of SD2; under FSDP each
    device stores its shard) and one pass over the weights per batch. A snapshot is one file per width, which
    safetensors reads as an ordinary state dict: `folder/post_hoc_ema/width0.05-ba10000.safetensors`. Gathering a
    snapshot needs memory for one full average on rank 0.

    A resumed run repeats the batches after its checkpoint and overwrites their snapshots with identical ones. If the
    seed, the data or a setting was changed, the snapshots after the checkpoint belong to the old trajectory: a
    reconstruction at an earlier batch ignores them, but one at the end of the run needs them overwritten or removed.

    Args:
        widths: Standard deviations of the averages as fractions of the training so far, sigma_rel; the defaults are the
            paper's.
        every: Interval between snapshots, as a Composer time string; one more is saved at the end of training. The
            number of snapshots determines the accuracy of reconstructed averages, measured as the relative L2 error of
            the weights that they give to the training steps. With 55 snapshots (550,000 batches at the default) it is
            below 1.8% for widths from 0.02 to 0.25; with 25 snapshots, below 4.7% for widths from 0.03 to 0.25. 55
            snapshots of SD2 take 190 GB.
        dtype: Data type of the snapshots. Widths below the smallest saved one are differences of snapshots with large
            coefficients (4 for a width of 0.04 and 35 for 0.02, with 55 snapshots), which amplify the rounding.
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
        """True once the weight averages exist."""
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
        # The last batch may be due at all three events: write its snapshot once.
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
        """Load the weight averages of a checkpoint, a mapping by label.

        Raises:
            UserError: The checkpoint lacks the average of one of the widths.
        """
        missing = sorted(self.widths.keys() - averages.keys())
        if missing:
            raise UserError(
                f'algorithms.post_hoc_ema.widths: the checkpoint has {", ".join(sorted(averages))} but not '
                f'{", ".join(missing)}; averages must start with the first batch, so keep the original widths'
            )
        for label, average in self._averages.items():
            average.restore(averages[label])

    def _update(self, model: nn.Module, *, step: int) -> None:
        """Update all averages with the weights after a training step."""
        for label, average in self._averages.items():
            if average.started:
                average.update(model, beta(step, self.gammas[label]))
            else:
                average.start(model)  # equals an update with beta(1) = 0

    def _write(self, model: nn.Module, batch: int) -> None:
        """Write a snapshot of every average; every rank must call it."""
        if not self.started:
            return
        is_writer = dist.get_global_rank() == 0
        for label, average in self._averages.items():
            tensors = average.whole(model, keep=is_writer)  # collective: every rank must call it
            if is_writer:
                path = write_snapshot(self.folder, tensors, batch=batch, width=self.widths[label], dtype=self.dtype)
                log.info('Wrote %s', path)
