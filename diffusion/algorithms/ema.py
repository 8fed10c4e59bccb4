"""Exponential moving average (EMA) of the trained weights, with an optional late start."""

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any

from composer.core import Algorithm, Event, State, Time, TimeUnit
from composer.loggers import Logger
from torch import Tensor, nn

from diffusion.algorithms.average import WeightAverage, averages_state
from diffusion.config.checks import duration_problem
from diffusion.config.declarations import applied_on_resume, constrained, fixed_once_averaging
from diffusion.errors import UserError

log = logging.getLogger(__name__)

_EVALUATION = (Event.EVAL_START, Event.EVAL_END)
_EVENTS = (Event.INIT, Event.AFTER_LOAD, Event.FIT_START, Event.BATCH_END, Event.EPOCH_END, *_EVALUATION)
DECAY = applied_on_resume('the average continues with the new decay')


class EMA(Algorithm):
    """Moving average of the trained weights: after each `update_interval`, average = s * average + (1 - s) * weights.

    Differs from Composer's EMA in four ways that matter at scale:

    * Nothing is allocated or saved before `ema_start`.
    * A checkpoint's `model` entry always holds the training weights; the average is stored separately, by parameter
      name.
    * Only trained parameters are averaged, not buffers. For evaluation and image logging, the average is swapped with
      the weights in place.
    * Under FSDP each device stores the average of its own shard.

    Args:
        ema_start: Time at which averaging starts, as a Composer time string: `800000ba`, `10ep`, `0.9dur`.
        smoothing: s above, the fraction of the average that an update keeps; 0.9999 in the Stable Diffusion recipe.
        half_life: Alternative to smoothing: time in which the contribution of old weights halves, in the unit of
            update_interval.
        update_interval: Time between updates, in batches (`1ba`) or epochs.
    """

    on_resume = fixed_once_averaging(
        'averaging cannot start in the past, and removing the algorithm would drop the averages'
    )

    # Composer 0.32.1's EMA allocates its copy at INIT, regardless of `ema_start`, and swaps the roles of model and
    # average in checkpoints. It raises AttributeError under FSDP1. Under FSDP2 it silently corrupts weights if a run
    # resumes after the start (first losses 0.326 and 0.582 instead of 0.258 and 0.521).

    @constrained
    def __init__(
        self,
        ema_start: str = '0ba',
        *,
        smoothing: Annotated[float | None, DECAY] = None,
        half_life: Annotated[str | None, DECAY] = None,
        update_interval: Annotated[str, DECAY] = '1ba',
    ) -> None:
        durations = {'ema_start': ema_start, 'half_life': half_life, 'update_interval': update_interval}
        for name, duration in durations.items():
            if (problem := duration_problem(duration)) is not None:
                raise UserError(f'{name}: {problem}')
        self.ema_start = Time.from_timestring(ema_start)
        self.update_interval = Time.from_timestring(update_interval)
        if self.update_interval.unit not in (TimeUnit.BATCH, TimeUnit.EPOCH) or self.update_interval.value < 1:
            raise UserError(f'update_interval: {update_interval!r}; use batches or epochs, such as 1ba')
        if smoothing is not None and half_life is not None:
            raise UserError('ema: smoothing and half_life set the same quantity; set only one of them')
        self.smoothing = 0.9999 if smoothing is None else smoothing
        if half_life is not None:
            half_life_time = Time.from_timestring(half_life)
            if half_life_time.unit != self.update_interval.unit or half_life_time.value <= 0:
                raise UserError(f'half_life: {half_life!r}; use the unit of update_interval={update_interval}')
            self.smoothing = 2.0 ** -(self.update_interval.value / half_life_time.value)
        if not 0 <= self.smoothing < 1:
            raise UserError(f'smoothing: {self.smoothing} is not in [0, 1); use a value such as 0.9999')
        self.average = WeightAverage()
        self.updates = 0
        self.gathers = True
        self._model: nn.Module | None = None
        self._exchanged = False
        self._saved_start: str | None = None

    @property
    def started(self) -> bool:
        """True once averaging of the weights has started."""
        return self.average.started

    @property
    def averages(self) -> Mapping[str, WeightAverage]:
        """Weight averages to save in checkpoints, by label; empty before `ema_start`."""
        return {'ema': self.average} if self.started else {}

    def match(self, event: Event, state: State) -> bool:
        return event in _EVENTS

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        # Update `_model` at every event: Composer wraps the model for FSDP between INIT and AFTER_LOAD, and for
        # DDP after AFTER_LOAD.
        self._model = state.model
        if event == Event.AFTER_LOAD:
            self._check_start(state)
        elif event == Event.FIT_START:
            self._warn_if_never(state)
        elif event in _EVALUATION:
            if self.started and self._exchanged == (event == Event.EVAL_END):
                self._exchange()
        elif event != Event.INIT and self.started:
            unit = self.update_interval.unit
            ends = Event.EPOCH_END if unit == TimeUnit.EPOCH else Event.BATCH_END
            if event == ends and state.timestamp.get(unit).value % self.update_interval.value == 0:
                self.update()
        elif event != Event.INIT and self._start_reached(state):
            self._start(state)

    def update(self) -> None:
        """Update the average with the model's current weights."""
        self.average.update(self._root(), self.smoothing)
        self.updates += 1

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Swap the averaged weights into the model inside the context; no-op before `ema_start` or in a nested call."""
        if not self.started or self._exchanged:
            yield
            return
        self._exchange()
        try:
            yield
        finally:
            self._exchange()

    def state_dict(self) -> dict[str, Any]:
        state = super().state_dict() | {'ema_start': self.ema_start.to_timestring()}
        if not self.started:
            return state
        assert not self._exchanged, 'checkpoint requested while the model holds the averaged weights'
        return state | averages_state(self, self._root()) | {'updates': self.updates}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.average = WeightAverage()
        self._saved_start = state.get('ema_start')
        if 'ema' in state.get('averages', {}):
            self.average.restore(state['averages']['ema'])
        self.updates = state.get('updates', 0)

    def restore(self, averages: Mapping[str, Mapping[str, Tensor]]) -> None:
        """Load weight averages, given by label, that were read from a sharded checkpoint."""
        self.average.restore(averages['ema'])

    def _start_reached(self, state: State) -> bool:
        if self.ema_start.unit == TimeUnit.DURATION:
            elapsed = state.get_elapsed_duration()
            return elapsed is not None and elapsed >= self.ema_start
        return state.timestamp.get(self.ema_start.unit) >= self.ema_start

    def _check_start(self, state: State) -> None:
        """Raise UserError on resume unless averaging started at `ema_start`, or will start at it later."""
        batch, start = state.timestamp.batch.value, self.ema_start.to_timestring()
        if not batch:
            return
        if self.started:
            if self._saved_start not in (None, start):
                raise UserError(
                    f'algorithms.ema.ema_start: {start}, but averaging has started at {self._saved_start}; set it back '
                    'to resume, or start a new run from the weights with init_from'
                )
            if not self._start_reached(state):
                raise UserError(
                    f'algorithms.ema.ema_start: {start}, but averaging has started before batch {batch}, where the run '
                    'resumes; set it back to resume, or start a new run from the weights with init_from'
                )
        elif self._start_reached(state):
            raise UserError(
                f'algorithms.ema.ema_start: {start} has passed; the run resumes at batch {batch} without averages: use '
                f'a later time, such as {batch + 1}ba'
            )

    def _warn_if_never(self, state: State) -> None:
        """Log a warning if training ends before `ema_start`; skipped if the two times have different units."""
        end = state.max_duration
        if self.started:
            return
        if end is not None and end.unit == self.ema_start.unit and self.ema_start >= end:
            log.warning('EMA never starts: ema_start=%s is not before the end of the run at %s', self.ema_start, end)

    def _start(self, state: State) -> None:
        self.average.start(self._root())
        log.info(
            'EMA starts at batch %d and averages %d tensors', state.timestamp.batch.value, len(self.average.tensors)
        )

    def _exchange(self) -> None:
        self.average.exchange(self._root())
        self._exchanged = not self._exchanged

    def _root(self) -> nn.Module:
        """Return the model as of the last event, including its FSDP or DDP wrapper."""
        assert self._model is not None, 'the algorithm has no model before Event.INIT'
        return self._model


@contextmanager
def averaged_weights(state: State) -> Iterator[bool]:
    """Swap the weights averaged by EMA into the model in the context; yield False without EMA or before it starts."""
    ema = next((algorithm for algorithm in state.algorithms if isinstance(algorithm, EMA)), None)
    if ema is None:
        yield False
        return
    with ema.averaged():
        yield ema.started
