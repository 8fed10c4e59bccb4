"""Timer of the stages of a training step; a process is always in exactly one stage, so fractions sum to 1."""

import functools
import time
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from types import TracebackType
from typing import Any

import torch

DATA_WAIT, COPY, ENCODE, FORWARD, BACKWARD = 'data_wait', 'h2d', 'encode', 'forward', 'backward'
OPTIMIZER, EMA, LOGGING, CHECKPOINT, EVALUATION, OTHER = (
    'optimizer',
    'ema',
    'logging',
    'checkpoint',
    'evaluation',
    'other',
)
STAGES = (DATA_WAIT, COPY, ENCODE, FORWARD, BACKWARD, OPTIMIZER, EMA, LOGGING, CHECKPOINT, EVALUATION, OTHER)
WAITS = (DATA_WAIT, CHECKPOINT, EVALUATION)
"""Stages that are timed by the host's clock even on GPUs, because one of the two waits for the other."""


class Timeline:
    """Current stage of a training step, and the time spent in each stage by the clocks of the host and the GPU.

    Attributes:
        seconds: Host seconds in each stage, up to the last change of stage.
        recorder: Recorder of the same stages on the GPU; None without a GPU.
    """

    def __init__(self, recorder: 'Recorder | None' = None) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.recorder = recorder
        self._stage = OTHER
        self._since = time.perf_counter()

    def switch(self, stage: str) -> str:
        """Count the time from now on towards a stage; return the previous stage."""
        now, previous = time.perf_counter(), self._stage
        self.seconds[previous] += now - self._since
        self._stage, self._since = stage, now
        if self.recorder is not None and self.recorder.on:
            self.recorder.mark(previous)
        return previous

    def stage(self, name: str) -> AbstractContextManager[None]:
        """Return a context manager that times a nested stage; inside an evaluation or checkpoint it does nothing."""
        return _Stage(self, name)

    def timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """Return a function wrapped so that the time of its calls counts towards a nested stage."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with _Stage(self, name):
                return function(*args, **kwargs)

        return run

    def take(self) -> dict[str, float]:
        """Return the host seconds in each stage since the last call, and start again from 0."""
        self.switch(self._stage)  # adds the time of the current stage up to now
        taken, self.seconds = self.seconds, defaultdict(float)
        return dict(taken)


class _Stage:
    """Context manager that counts time towards a nested stage of a timeline."""

    # This is a class, because contextlib's generators cost more, and each batch enters about 50 nested stages.

    def __init__(self, timeline: Timeline, name: str) -> None:
        self.timeline, self.name = timeline, name
        self.outer: str | None = None

    def __enter__(self) -> None:
        # Work of the model and the loggers during an evaluation or a save counts for that evaluation or save.
        outer = self.timeline._stage
        if outer != EVALUATION and outer != CHECKPOINT:
            self.outer = self.timeline.switch(self.name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.outer is not None:
            self.timeline.switch(self.outer)


class Recorder:
    """Timer of stages on a GPU, by CUDA events at the ends of stages; read later so that the host never waits.

    Attributes:
        on: True while it records.
        seconds: GPU seconds in each stage since the last `read`.
    """

    def __init__(self, make_event: Callable[[], Any] | None = None) -> None:
        self.on = False
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._make_event: Callable[[], Any] = make_event or functools.partial(torch.cuda.Event, enable_timing=True)
        self._marks: deque[tuple[Any, str | None]] = deque()
        self._spare: list[Any] = []

    def start(self) -> None:
        """Start recording CUDA events at the ends of stages, to time the stages on the GPU."""
        self.on = True
        self.mark(None)

    def mark(self, ended: str | None) -> None:
        """Record a CUDA event at the end of a stage, or at the start of recording (None)."""
        # Events are reused, since creating one is a call of the CUDA driver.
        event = self._spare.pop() if self._spare else self._make_event()
        event.record()
        self._marks.append((event, ended))

    def stop(self) -> None:
        """Stop timing the stages of a training step, such as forward and backward, on the GPU.

        The CUDA events recorded so far can still be read.
        """
        self.on = False

    def read(self) -> dict[str, float]:
        """Return GPU seconds by stage name, for the work completed since the last call; do not wait for the GPU."""
        marks = self._marks
        # query() tests an event without waiting; synchronize() would stall the host until the GPU catches up. Events
        # complete in order, so stop at the first that is not complete; the next call continues there.
        while len(marks) > 1 and marks[1][0].query():
            first, _ = marks.popleft()
            second, stage = marks[0]
            if stage is not None:  # None: between two recordings
                self.seconds[stage] += first.elapsed_time(second) / 1e3
            self._spare.append(first)
        read, self.seconds = self.seconds, defaultdict(float)
        return dict(read)


def shares_of(host: Mapping[str, float], device: Mapping[str, float] | None) -> dict[str, float]:
    """Return the fraction of time in each stage of a training step; the fractions sum to 1.

    Args:
        host: Host seconds in each stage.
        device: GPU seconds in each stage for some of the batches; None without a GPU.
    """
    # The stages in WAITS are taken from the host's clock, and the remaining time is divided in proportion to the GPU's:
    # by the host's clock, a backward pass takes only as long as launching its kernels.
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
