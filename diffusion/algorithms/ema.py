"""Exponential moving average of the trained weights, with a late start."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from composer.core import Algorithm, Event, State, Time, TimeUnit
from composer.loggers import Logger
from torch import Tensor, nn

from diffusion.algorithms.average import WeightAverage, averages_state
from diffusion.errors import UserError

log = logging.getLogger(__name__)

_EVENTS = (
    Event.INIT,
    Event.AFTER_LOAD,
    Event.FIT_START,
    Event.BATCH_END,
    Event.EPOCH_END,
    Event.EVAL_START,
    Event.EVAL_END,
)


class EMA(Algorithm):
    """Average the trained weights: after each `update_interval`, average = s * average + (1 - s) * weights.

    Differs from Composer's EMA in four ways that matter at scale. Nothing is allocated or saved before `ema_start`.
    The model slot of a checkpoint always holds the training weights, and the average stands beside it, by parameter
    name. Only trained parameters are averaged, buffers are the model's own; evaluation and pictures see the average by
    exchange in place. Under FSDP each device holds the average of its own shard.

    Args:
        ema_start: When averaging begins, a Composer time string: `800000ba`, `10ep`, `0.9dur`.
        smoothing: s above, the share of the average that an update keeps; 0.9999 in the Stable Diffusion recipe.
        half_life: Instead of smoothing, the time in which a weight's share halves, in the unit of update_interval.
        update_interval: Time between updates, in batches (`1ba`) or epochs.
    """

    def __init__(
        self,
        ema_start: str = '0ba',
        *,
        smoothing: float | None = None,
        half_life: str | None = None,
        update_interval: str = '1ba',
    ) -> None:
        self.ema_start = Time.from_timestring(ema_start)
        self.update_interval = Time.from_timestring(update_interval)
        if self.update_interval.unit not in (TimeUnit.BATCH, TimeUnit.EPOCH) or self.update_interval.value < 1:
            raise UserError(f'update_interval: {update_interval!r}; give batches or epochs, such as 1ba')
        if smoothing is not None and half_life is not None:
            raise UserError('ema: smoothing and half_life are two ways to say one thing; give one of them')
        self.smoothing = 0.9999 if smoothing is None else smoothing
        if half_life is not None:
            halving = Time.from_timestring(half_life)
            if halving.unit != self.update_interval.unit or halving.value <= 0:
                raise UserError(f'half_life: {half_life!r}; give it in the unit of update_interval={update_interval}')
            self.smoothing = 2.0 ** -(self.update_interval.value / halving.value)
        if not 0 <= self.smoothing < 1:
            raise UserError(f'smoothing: {self.smoothing} is not in [0, 1)')
        self.average = WeightAverage()
        self.updates = 0
        self.gathers = True
        self._model: nn.Module | None = None
        self._exchanged = False

    @property
    def started(self) -> bool:
        """Whether there is an average."""
        return self.average.started

    @property
    def averages(self) -> Mapping[str, WeightAverage]:
        """What checkpoints keep, by label; none before the start."""
        return {'ema': self.average} if self.started else {}

    def match(self, event: Event, state: State) -> bool:
        return event in _EVENTS

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        self._model = state.model
        if event in (Event.INIT, Event.AFTER_LOAD):
            return
        if event == Event.FIT_START:
            self._warn_if_never(state)
            return
        if event in (Event.EVAL_START, Event.EVAL_END):
            if self.started and self._exchanged == (event == Event.EVAL_END):
                self._exchange()
            return
        if not self.started:
            if self._reached(state):
                self._start(state)
            return
        unit = self.update_interval.unit
        ends = Event.EPOCH_END if unit == TimeUnit.EPOCH else Event.BATCH_END
        if event == ends and state.timestamp.get(unit).value % self.update_interval.value == 0:
            self.update()

    def update(self) -> None:
        """Move the average towards the weights."""
        self.average.update(self._root(), self.smoothing)
        self.updates += 1

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """The model with averaged weights inside, with its own outside; nothing happens before the start."""
        if not self.started or self._exchanged:
            yield
            return
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict()
        if not self.started:
            return state | {'ema_start': self.ema_start.to_timestring()}
        assert not self._exchanged, 'a checkpoint was asked for while the averaged weights were in the model'
        return state | averages_state(self, self._root()) | {'updates': self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = WeightAverage()
        if 'ema' in state.get('averages', {}):
            self.average.restore(state['averages']['ema'])
        self.updates = state.get('updates', 0)

    def restore(self, averages: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Take back what a sharded checkpoint kept, by label."""
        self.average.restore(averages['ema'])

    def _reached(self, state: State) -> bool:
        if self.ema_start.unit == TimeUnit.DURATION:
            elapsed = state.get_elapsed_duration()
            return elapsed is not None and elapsed >= self.ema_start
        return state.timestamp.get(self.ema_start.unit) >= self.ema_start

    def _warn_if_never(self, state: State) -> None:
        end = state.max_duration
        if end is not None and end.unit == self.ema_start.unit and self.ema_start >= end:
            log.warning('EMA starts at %s, after the end of the run at %s: never', self.ema_start, end)

    def _start(self, state: State) -> None:
        self.average.start(self._root())
        log.info('EMA starts at batch %d: %d tensors', state.timestamp.batch.value, len(self.average.tensors))

    def _exchange(self) -> None:
        self.average.exchange(self._root())
        self._exchanged = not self._exchanged

    def _root(self) -> nn.Module:
        assert self._model is not None, 'the algorithm has not met its model yet'
        return self._model


@contextmanager
def averaged_weights(state: State) -> Iterator[bool]:
    """The model with the average of the run's EMA, if it has one that has started; yields whether it has."""
    found = next((algorithm for algorithm in state.algorithms if isinstance(algorithm, EMA)), None)
    if found is None:
        yield False
        return
    with found.averaged():
        yield found.started
