"""Power-function averages with snapshots, of which any width can be made after training."""

import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import torch
from composer.core import Algorithm, Event, State, Time
from composer.loggers import Logger
from composer.utils import create_interval_scheduler, dist
from torch import Tensor, nn

from diffusion.algorithms.average import WeightAverage, averages_state
from diffusion.algorithms.power_function import beta, gamma_of_width
from diffusion.algorithms.snapshots import label_of, write_snapshot
from diffusion.errors import UserError

log = logging.getLogger(__name__)

_ENDS = (Event.BATCH_END, Event.EPOCH_END, Event.FIT_END)
"""When a snapshot may be due: the first two come before the checkpoint, the last is for a run that was stopped."""


class PostHocEMA(Algorithm):
    """Average the trained weights with power functions of time, and keep snapshots (Karras et al. 2024, section 3).

    `diffusion export --ema-width 0.13` makes the average of any width out of the snapshots, at any batch: how long to
    average is chosen by looking at results, not before training.

    The averages start with the first batch, whose share of them goes to 0 as the run goes on. A width costs a copy of
    the trained weights (3.5 GB for the 866 M parameters of SD2; under FSDP each device holds its shard) and a pass
    over them a batch. A snapshot is a file a width, which safetensors reads as an ordinary state dict:
    `folder/post_hoc_ema/width0.05-ba10000.safetensors`. Gathering it takes room for one whole average in the memory
    of rank 0.

    A run that resumes does the batches after its checkpoint again and writes the same snapshots again; those already
    there are of the same trajectory. They are not where the seed, the data or a setting was changed: a reconstruction
    at an earlier batch leaves them out, one at the end of the run needs them overwritten or removed.

    Args:
        widths: Standard deviations of the averages as shares of the training so far, sigma_rel; two, the paper's.
        every: Interval of the snapshots, a Composer time string; the end of training counts too. What matters is how
            many there are: with 55, as of 550 000 batches, widths from 0.02 to 0.25 are off by less than 1.8 % of
            their profile, with 25 those from 0.03 to 0.25 by less than 4.7 %. They fill 190 GB for SD2.
        dtype: Of the snapshots. Widths below the smallest kept one add and subtract many times the weights (4 times
            for 0.04, 35 times for 0.02, with 55 snapshots) and their rounding with them.
        folder: Of the run.
    """

    def __init__(
        self,
        *,
        widths: Sequence[float] = (0.05, 0.10),
        every: str = '10000ba',
        dtype: Literal['float16', 'bfloat16', 'float32'] = 'float16',
        folder: str = 'runs',
    ) -> None:
        self.widths = {label_of(width): width for width in widths}
        if not widths or len(self.widths) < len(widths):
            raise UserError(f'algorithms.post_hoc_ema.widths: {list(widths)}; give at least one, and none twice')
        self.gammas = {label: gamma_of_width(width) for label, width in self.widths.items()}
        if Time.from_timestring(every).value <= 0:
            raise UserError(f'algorithms.post_hoc_ema.every: {every!r}; give an interval such as 10000ba')
        self.is_due = create_interval_scheduler(every, checkpoint_events=False, final_events=set(_ENDS))
        self.dtype = {'float16': torch.float16, 'bfloat16': torch.bfloat16, 'float32': torch.float32}[dtype]
        self.folder = Path(folder)
        self.gathers = True
        self._averages = {label: WeightAverage() for label in self.widths}
        self._model: nn.Module | None = None
        self._last_snapshot = -1

    @property
    def started(self) -> bool:
        """Whether there are averages."""
        return all(average.started for average in self._averages.values())

    @property
    def averages(self) -> Mapping[str, WeightAverage]:
        """What checkpoints keep, by label; none before the first batch."""
        return self._averages if self.started else {}

    def match(self, event: Event, state: State) -> bool:
        return event in (Event.INIT, Event.AFTER_LOAD, Event.FIT_START, *_ENDS)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        self._model = state.model
        batch = state.timestamp.batch.value
        if event == Event.FIT_START and batch > 0 and not self.started:
            raise UserError(
                f'algorithms.post_hoc_ema: the checkpoint of batch {batch} has none of its averages, which begin with '
                'the first batch; remove it, or start another run from these weights with init_from'
            )
        if event == Event.BATCH_END:
            self._update(state.model, step=batch)
        if event in _ENDS and batch != self._last_snapshot and self.is_due(state, event):
            self._last_snapshot = batch
            self._write(state.model, batch)

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if not self.started:
            return state
        assert self._model is not None, 'the algorithm has not met its model yet'
        return state | averages_state(self, self._model)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._averages = {label: WeightAverage() for label in self.widths}
        if state.get('averages'):
            self.restore(state['averages'])

    def restore(self, averages: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take back what a checkpoint kept, by label.

        Raises:
            UserError: It kept other widths.
        """
        missing = sorted(self.widths.keys() - averages.keys())
        if missing:
            raise UserError(
                f'algorithms.post_hoc_ema.widths: the checkpoint has {", ".join(sorted(averages))} and no '
                f'{", ".join(missing)}; averages begin with the first batch, keep the widths as they were'
            )
        for label, average in self._averages.items():
            average.restore(averages[label])

    def _update(self, model: nn.Module, *, step: int) -> None:
        for label, average in self._averages.items():
            if average.started:
                average.update(model, beta(step, self.gammas[label]))
            else:
                average.start(model)  # beta(1) = 0

    def _write(self, model: nn.Module, batch: int) -> None:
        if not self.started:
            return
        writes = dist.get_global_rank() == 0
        for label, average in self._averages.items():
            tensors = average.whole(model, keep=writes)  # every rank takes part
            if writes:
                path = write_snapshot(self.folder, tensors, batch=batch, width=self.widths[label], dtype=self.dtype)
                log.info('%s: written', path)
