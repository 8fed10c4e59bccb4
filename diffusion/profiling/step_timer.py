"""Which stage of training a process is in, and how long it was in each: always in exactly one, so shares add up."""

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
"""Stages in which a GPU waits for the host, or which end when it has finished: the host's clock says how long."""


class Timeline:
    """The stages of a process by the host's clock and, while `recorder` records, by the GPU's.

    Attributes:
        seconds: In each stage, up to the last change.
        recorder: Events on a GPU, None without one.
    """

    def __init__(self, recorder: 'Recorder | None' = None) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.recorder = recorder
        self._stage = OTHER
        self._since = time.perf_counter()

    def switch(self, stage: str) -> str:
        """Go over to a stage; returns the one before."""
        now, before = time.perf_counter(), self._stage
        self.seconds[before] += now - self._since
        self._stage, self._since = stage, now
        if self.recorder is not None and self.recorder.on:
            self.recorder.mark(before)
        return before

    def stage(self, name: str) -> AbstractContextManager[None]:
        """A stage inside of another; in an evaluation or a checkpoint there are none."""
        return _Stage(self, name)

    def timed(self, function: Callable[..., Any], name: str) -> Callable[..., Any]:
        """A function whose work is a stage inside of another."""

        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> Any:
            with _Stage(self, name):
                return function(*args, **kwargs)

        return run

    def take(self) -> dict[str, float]:
        """The seconds since the last call."""
        self.switch(self._stage)
        taken, self.seconds = self.seconds, defaultdict(float)
        return dict(taken)


class _Stage:
    """Not a generator: this is entered some fifty times a batch."""

    def __init__(self, timeline: Timeline, name: str) -> None:
        self.timeline, self.name = timeline, name
        self.before: str | None = None

    def __enter__(self) -> None:
        inside = self.timeline._stage
        if inside != EVALUATION and inside != CHECKPOINT:
            self.before = self.timeline.switch(self.name)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self.before is not None:
            self.timeline.switch(self.before)


class Recorder:
    """Times of the ends of stages on a GPU, read when it has come to them; the host never waits.

    Attributes:
        on: Whether it records.
        seconds: In each stage, as far as they have been read.
    """

    def __init__(self, make_event: Callable[[], Any] | None = None) -> None:
        self.on = False
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._make_event: Callable[[], Any] = make_event or functools.partial(torch.cuda.Event, enable_timing=True)
        self._marks: deque[tuple[Any, str | None]] = deque()
        self._spare: list[Any] = []

    def start(self) -> None:
        """Record from now on."""
        self.on = True
        self.mark(None)

    def mark(self, ended: str | None) -> None:
        """Note that a stage has ended for what is queued from here on."""
        event = self._spare.pop() if self._spare else self._make_event()
        event.record()
        self._marks.append((event, ended))

    def stop(self) -> None:
        """Record no more."""
        self.on = False

    def read(self) -> dict[str, float]:
        """The seconds in each stage of what the GPU has finished and nobody has read."""
        marks = self._marks
        while len(marks) > 1 and marks[1][0].query():
            first, _ = marks.popleft()
            second, stage = marks[0]
            if stage is not None:
                self.seconds[stage] += first.elapsed_time(second) / 1e3
            self._spare.append(first)
        read, self.seconds = self.seconds, defaultdict(float)
        return dict(read)


def shares_of(host: Mapping[str, float], device: Mapping[str, float] | None) -> dict[str, float]:
    """Each stage's share of the host's time; they sum to 1.

    Args:
        host: Seconds in each stage by the host's clock.
        device: The same on the GPU, of some of the batches; None where there is none. What the host did not wait for is
            shared out as it says: to a GPU's host, a backward pass takes as long as it takes to queue it.
    """
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
