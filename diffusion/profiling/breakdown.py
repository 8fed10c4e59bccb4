"""Breakdown of step time: a timer for the stages of a step, and the callback that logs each stage's fraction.

A process is always in exactly one stage, so the fractions sum to 1.
"""

import functools
import logging
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any

import torch
from composer.callbacks import CheckpointSaver
from composer.callbacks.speed_monitor import get_gpu_flops_available
from composer.core import Callback, Event, State
from composer.loggers import Logger, LoggerDestination
from composer.utils import dist

from diffusion.algorithms.average import Averager, unwrapped
from diffusion.callbacks.image_grid import ImageGrid
from diffusion.callbacks.reduce_once import number_of_microbatches
from diffusion.errors import UserError
from diffusion.models import stage_hooks

DATA_WAIT, COPY, ENCODE, FORWARD, BACKWARD = 'data_wait', 'h2d', 'encode', 'forward', 'backward'
OPTIMIZER, EMA, LOGGING = 'optimizer', 'ema', 'logging'
CHECKPOINT, EVALUATION, OTHER = 'checkpoint', 'evaluation', 'other'
STAGES = (DATA_WAIT, COPY, ENCODE, FORWARD, BACKWARD, OPTIMIZER, EMA, LOGGING, CHECKPOINT, EVALUATION, OTHER)
WAITS = (DATA_WAIT, CHECKPOINT, EVALUATION)
"""Stages in which the host and the GPU wait for each other or for data; timed with the host's clock."""


class Timeline:
    """Current stage of a training step, and the time spent in each stage as measured on the host and the GPU.

    Attributes:
        seconds: Host seconds in each stage, up to the last stage change.
        recorder: Recorder of the same stages on the GPU; None without a GPU.
    """

    def __init__(self, recorder: 'Recorder | None' = None) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.recorder = recorder
        self._stage = OTHER
        self._since = time.perf_counter()

    def switch(self, stage: str) -> str:
        """Count time towards a stage from now on; return the previous stage."""
        now, previous = time.perf_counter(), self._stage
        self.seconds[previous] += now - self._since
        self._stage, self._since = stage, now
        if self.recorder is not None and self.recorder.on:
            self.recorder.mark(previous)
        return previous

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager that counts time towards a stage; without effect in evaluations and checkpoints."""
        return _Stage(self, name)

    def timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with _Stage(self, name):
                return function(*args, **kwargs)

        return run

    def take(self) -> dict[str, float]:
        """Return the host seconds in each stage since the last call, and reset them to 0."""
        self.switch(self._stage)  # adds the current stage's time up to now
        taken, self.seconds = self.seconds, defaultdict(float)
        return dict(taken)


class _Stage:
    """Context manager that counts time towards a nested stage of a timeline."""

    # This is a class because contextlib's generators cost more, and each batch enters about 50 nested stages.

    def __init__(self, timeline: Timeline, name: str) -> None:
        self.timeline, self.name = timeline, name
        self.outer: str | None = None

    def __enter__(self) -> None:
        # During an evaluation or a save, the work of the model and loggers counts towards that evaluation or save.
        outer = self.timeline._stage
        if outer != EVALUATION and outer != CHECKPOINT:
            self.outer = self.timeline.switch(self.name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.outer is not None:
            self.timeline.switch(self.outer)


class Recorder:
    """Timer of stages on a GPU: record a CUDA event at the end of each stage, and read events once they are complete.

    Attributes:
        on: True while recording.
        seconds: GPU seconds in each stage since the last `read`.
    """

    def __init__(self, make_event: Callable[[], Any] | None = None) -> None:
        self.on = False
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._make_event: Callable[[], Any] = make_event or functools.partial(torch.cuda.Event, enable_timing=True)
        self._marks: deque[tuple[Any, str | None]] = deque()
        self._spare: list[Any] = []

    def start(self) -> None:
        self.on = True
        self.mark(None)

    def mark(self, ended: str | None) -> None:
        """Record a CUDA event at the end of a stage, or at the start of recording (None)."""
        # Reuse events, since creating one is a CUDA driver call.
        event = self._spare.pop() if self._spare else self._make_event()
        event.record()
        self._marks.append((event, ended))

    def stop(self) -> None:
        self.on = False

    def read(self) -> dict[str, float]:
        """Return GPU seconds by stage for work completed since the last call, without waiting for the GPU."""
        marks = self._marks
        # query() tests an event without waiting; synchronize() would stall the host until the GPU catches up. Events
        # complete in order, so stop at the first incomplete one; the next call continues there.
        while len(marks) > 1 and marks[1][0].query():
            first, _ = marks.popleft()
            second, stage = marks[0]
            if stage is not None:  # None marks the gap between two recordings
                self.seconds[stage] += first.elapsed_time(second) / 1e3
            self._spare.append(first)
        read, self.seconds = self.seconds, defaultdict(float)
        return dict(read)


def shares_of(host: Mapping[str, float], device: Mapping[str, float] | None) -> dict[str, float]:
    """Return the fraction of time in each stage of a training step; they sum to 1 (all are 0 if no time was measured).

    Args:
        host: Host seconds in each stage.
        device: GPU seconds in each stage for some of the batches; None without a GPU.
    """
    # Take the stages in WAITS from the host's clock, and divide the remaining time among the other stages in proportion
    # to their GPU times. Their host times would mislead: a backward pass takes only as long as launching its kernels.
    total = sum(host.values())
    if not total:
        return dict.fromkeys(STAGES, 0.0)
    shares = {stage: host.get(stage, 0.0) / total for stage in STAGES}
    computed = {stage: (device or {}).get(stage, 0.0) for stage in STAGES if stage not in WAITS}
    known = sum(computed.values())
    if not known:
        return shares
    rest = 1 - sum(shares[stage] for stage in WAITS)
    return shares | {stage: rest * seconds / known for stage, seconds in computed.items()}


log = logging.getLogger(__name__)

NAMES = {'data_wait': 'data wait', 'h2d': 'copies to the device', 'ema': 'EMA'}
"""Stage names in the log line, where they differ from those in the metrics."""


@dataclass(frozen=True)
class BreakdownReport:
    """Throughput over a window of training batches, and the fraction of time in each stage of a step.

    Attributes:
        samples: Number of samples processed by all devices.
        step_seconds: Seconds per step on rank 0, excluding evaluations.
        slowest_step_seconds: Seconds per step on the slowest rank.
        flops: FLOPs in the window on all devices; None if the model does not count them.
        peak_flops_per_second: Peak FLOP/s of one device; None if unknown.
        peak_gib: Peak allocated memory in GiB, maximum over the devices; None without a GPU.
        shares: Fraction of time in each stage; they sum to 1.
    """

    batches: int
    samples: int
    devices: int
    step_seconds: float
    slowest_step_seconds: float
    flops: float | None
    peak_flops_per_second: float | None
    peak_gib: float | None
    shares: Mapping[str, float]

    @property
    def samples_per_second(self) -> float:
        return self.samples / (self.batches * self.step_seconds)

    @property
    def flops_per_second_and_device(self) -> float | None:
        """FLOP/s that the model achieves per device; None if the model does not count its FLOPs."""
        return None if self.flops is None else self.flops / (self.batches * self.step_seconds * self.devices)

    @property
    def mfu(self) -> float | None:
        """Model FLOPs utilization, in [0, 1]; None if unknown."""
        rate, peak = self.flops_per_second_and_device, self.peak_flops_per_second
        return rate / peak if rate is not None and peak else None

    def metrics(self) -> dict[str, float]:
        """Return the metrics to log, by name; throughput metrics are named as in Composer's SpeedMonitor."""
        found: dict[str, float | None] = {
            'throughput/samples_per_sec': self.samples_per_second,
            'throughput/batches_per_sec': 1 / self.step_seconds,
            'throughput/device/samples_per_sec': self.samples_per_second / self.devices,
            'throughput/device/flops_per_sec': self.flops_per_second_and_device,
            'throughput/device/mfu': self.mfu,
            'throughput/step_seconds': self.step_seconds,
            'throughput/slowest_rank_step_seconds': self.slowest_step_seconds,
            'memory/peak_gib': self.peak_gib,
        }
        found |= {f'time_share/{stage}': share for stage, share in self.shares.items()}
        return {name: value for name, value in found.items() if value is not None}

    def line(self) -> str:
        rate, per_device = self.samples_per_second, self.samples_per_second / self.devices
        parts = [f'{_figures(rate)} images/s' + (f' ({_figures(per_device)} per device)' if self.devices > 1 else '')]
        if self.mfu is not None:
            parts.append(f'MFU {100 * self.mfu:.1f}%')
        step = f'{_figures(1e3 * self.step_seconds)} ms/step'
        if self.slowest_step_seconds > 1.02 * self.step_seconds:
            step += f' (slowest rank {_figures(1e3 * self.slowest_step_seconds)})'
        parts.append(step)
        if self.peak_gib is not None:
            parts.append(f'peak {self.peak_gib:.1f} GiB')
        largest = sorted(self.shares.items(), key=lambda item: -item[1])
        shown = [f'{NAMES.get(stage, stage)} {100 * share:.0f}%' for stage, share in largest if share >= 0.01]
        return f'{", ".join(parts)}; {", ".join(shown)}'


class Breakdown(Callback):
    """Log images per second, MFU and the fraction of step time in each stage, as metrics and as a log line.

    Stages: `data_wait` (waiting for the loader, or for other ranks' loaders), `h2d` (copies of microbatches to the
    device), `encode` (frozen encoders), `forward`, `backward`, `optimizer` (including clipping), `ema`, `logging`
    (callbacks and loggers), `checkpoint`, `evaluation` (including image grids) and `other`.

    `data_wait`, `checkpoint` and `evaluation` are timed with the host's clock in every batch. On GPUs, the other stages
    are timed with CUDA events in the last `sampled` batches of a window. Events are only read after the GPU has passed
    them, so that the host never waits. GPU idle time counts towards the stage that the host is in.

    Args:
        window: Number of batches per report.
        skip: Number of initial batches that are not measured; the first batch starts the loader and compiles.
        sampled: Number of batches per window that are timed with CUDA events.
        peak_tflops: Peak TFLOP/s of a device in the run's precision (default: from Composer's table).
    """

    def __init__(self, *, window: int = 50, skip: int = 1, sampled: int = 10, peak_tflops: float | None = None) -> None:
        for name, batches in {'window': window, 'skip': skip, 'sampled': sampled}.items():
            if batches < 1:
                raise UserError(f'callbacks.breakdown.{name}: {batches} batches; use at least 1')
        self.window = window
        self.skip = skip
        self.sampled = min(window, sampled)
        self.peak_flops = None if peak_tflops is None else 1e12 * peak_tflops
        self.report: BreakdownReport | None = None
        """Report on the last window; None before its end. A run shorter than a window gets its report at the end."""
        self.timeline = Timeline()
        self._microbatches_left = 0
        self._to_skip = skip
        self._batches = 0
        self._samples = 0
        self._flops = 0.0
        self._undo: list[Callable[[], object]] = []

    def fit_start(self, state: State, logger: Logger) -> None:
        # A second call of Trainer.fit must not wrap methods that are already wrapped.
        self._detach()
        on_gpu = state.device.name == 'gpu'
        if self.peak_flops is None:
            self.peak_flops = float(get_gpu_flops_available(state) or 0)
        self.timeline = Timeline(Recorder() if on_gpu else None)
        self._to_skip, self._batches = self.skip, 0
        for algorithm in state.algorithms:
            if isinstance(algorithm, Averager):
                self._time_method(algorithm, 'apply', EMA)
        for callback in state.callbacks:
            if callback is not self:
                for name in hooks_of(callback):
                    self._time_method(callback, name, stage_of(callback))
        # Composer has no event right after the optimizer step. Without this hook, what Composer does between the step
        # and BATCH_END, such as learning rate schedules, would count as `optimizer`.
        for optimizer in state.optimizers:
            self._undo.append(optimizer.register_step_post_hook(lambda *_: self._end_stage(state, logger)).remove)
        # The model reports its encoder stage through a global listener; while there is none, this costs one function
        # call.
        stage_hooks.set_listener(self.timeline)
        self._undo.append(lambda: stage_hooks.set_listener(None))

    def before_dataloader(self, state: State, logger: Logger) -> None:
        self.timeline.switch(DATA_WAIT)

    epoch_start = before_dataloader  # the first batch also waits for the start of the workers

    def _end_stage(self, state: State, logger: Logger) -> None:
        self.timeline.switch(OTHER)

    after_dataloader = epoch_end = eval_after_all = _end_stage

    def before_train_batch(self, state: State, logger: Logger) -> None:
        # Count microbatches: Composer copies each one to the device right before its forward pass.
        self._microbatches_left = number_of_microbatches(state)
        self.timeline.switch(COPY)

    def before_forward(self, state: State, logger: Logger) -> None:
        self.timeline.switch(FORWARD)

    def before_backward(self, state: State, logger: Logger) -> None:
        self.timeline.switch(BACKWARD)

    def after_backward(self, state: State, logger: Logger) -> None:
        self._microbatches_left -= 1
        self.timeline.switch(COPY if self._microbatches_left else OPTIMIZER)

    def eval_before_all(self, state: State, logger: Logger) -> None:
        self.timeline.switch(EVALUATION)

    def batch_end(self, state: State, logger: Logger) -> None:
        if self._to_skip:
            self._to_skip -= 1
            if not self._to_skip:
                self._begin(state)
            return
        self._batches += 1
        if (count := getattr(unwrapped(state.model), 'flops_per_batch', None)) is not None:
            self._flops += count(state.batch)
        recorder = self.timeline.recorder
        if recorder is not None and self._batches == self.window - self.sampled:
            recorder.start()
        if self._batches == self.window:
            self._report(state, logger)

    def fit_end(self, state: State, logger: Logger) -> None:
        if self.report is None and self._batches:
            self._report(state, logger)  # a run shorter than one window has no report yet
        self._detach()

    def close(self, state: State, logger: Logger) -> None:
        # Restore the methods here too: `fit_end` is not called if training ends with an exception.
        self._detach()

    def _begin(self, state: State) -> None:
        """Start a window of batches: reset the counters, and start GPU timing if every batch is sampled."""
        self._batches, self._flops = 0, 0.0
        self._samples = state.timestamp.sample.value
        self.timeline.take()
        if (recorder := self.timeline.recorder) is not None:
            recorder.stop()
            if self.sampled == self.window:
                recorder.start()

    def _report(self, state: State, logger: Logger) -> None:
        """Log the report of a window and start the next window; a collective that all ranks call in the same batch."""
        host = self.timeline.take()
        recorder = self.timeline.recorder
        shares = shares_of(host, None if recorder is None else recorder.read())
        seconds = sum(host.values()) - host.get(EVALUATION, 0.0)
        step_seconds, flops, peak_bytes = seconds / self._batches, self._flops, 0.0
        if recorder is not None:
            peak_bytes = float(torch.cuda.max_memory_allocated())
        ranks = _of_all_ranks([step_seconds, flops, peak_bytes], state)
        self.report = BreakdownReport(
            batches=self._batches,
            samples=state.timestamp.sample.value - self._samples,
            devices=len(ranks),
            step_seconds=ranks[0][0],
            slowest_step_seconds=max(rank[0] for rank in ranks),
            flops=sum(rank[1] for rank in ranks) or None,
            peak_flops_per_second=self.peak_flops or None,
            peak_gib=max(rank[2] for rank in ranks) / 2**30 if recorder is not None else None,
            shares=shares,
        )
        self._begin(state)
        logger.log_metrics(self.report.metrics())
        if dist.get_global_rank() == 0:
            log.info('batch %d: %s', state.timestamp.batch.value, self.report.line())

    def _time_method(self, owner: Any, name: str, stage: str) -> None:
        # Within an event, Composer calls callbacks and algorithms one after another and offers no hook around each of
        # them, so their methods are wrapped. The wrapper in the instance's __dict__ only shadows the class's method for
        # this instance, and deleting it restores the method.
        setattr(owner, name, self.timeline.timed(getattr(owner, name), stage))
        self._undo.append(lambda: owner.__dict__.pop(name, None))

    def _detach(self) -> None:
        while self._undo:
            self._undo.pop()()


def hooks_of(callback: Callback) -> list[str]:
    """Return the names of the methods to time for a callback: those called in training that its class overrides."""
    callback_class = type(callback)
    # INIT and FIT_START have already happened when the methods are wrapped.
    names = ['run_event', *(event.value for event in Event if event not in (Event.INIT, Event.FIT_START))]
    if isinstance(callback, LoggerDestination):
        names += ['log_metrics', 'log_hyperparameters', 'log_traces', 'log_images']
    base: type = LoggerDestination if isinstance(callback, LoggerDestination) else Callback
    # Only wrap overridden methods: inherited ones are empty, and each wrapper costs time in every batch.
    overridden = [name for name in names if getattr(callback_class, name, None) is not getattr(base, name, None)]
    # All events of a callback go through run_event; if it is overridden, timing it includes the event methods.
    if 'run_event' in overridden:
        return ['run_event', *(name for name in overridden if name.startswith('log_'))]
    return overridden


def stage_of(callback: Callback) -> str:
    if isinstance(callback, CheckpointSaver):
        return CHECKPOINT
    return EVALUATION if isinstance(callback, ImageGrid) else LOGGING


def _of_all_ranks(figures: Sequence[float], state: State) -> list[list[float]]:
    """Gather numbers from all ranks in one collective; return one list of numbers per rank."""
    if dist.get_world_size() == 1:
        return [list(figures)]
    # Use float64, because FLOP counts and byte counts have more digits than float32.
    local = state.device.tensor_to_device(torch.tensor(figures, dtype=torch.float64))
    return torch.stack(list(dist.all_gather(local))).tolist()


def _figures(value: float) -> str:
    """Format a number with three significant digits, or as an integer if it is 100 or more."""
    return f'{value:.0f}' if value >= 100 else f'{value:.3g}'
