"""Signals that ask a process to stop: SIGTERM, SIGUSR1, SIGHUP (the terminal was closed) and SIGINT (Ctrl-C)."""

import contextlib
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any

from diffusion.exit_codes import PREEMPTED

STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP, signal.SIGINT)
REPEAT_SECONDS = 0.5
"""Minimum time between two SIGINT signals that count as two Ctrl-C. A single Ctrl-C can arrive twice: from the
terminal, which signals the whole process group, and from a launcher that forwards it."""
_START_SECONDS = 20.0
"""Time after which a process that receives a stop signal during startup is forced to end. It is long because an orderly
end may wait for the delivery of messages (`notify.CLOSE_SECONDS`) and for the run's storage."""


class StoppedEarly(KeyboardInterrupt):
    """Raised on a stop signal before training has begun. `except Exception` does not catch it."""

    def __init__(self, number: int) -> None:
        self.by_user = number == signal.SIGINT
        cause = 'Ctrl-C' if self.by_user else signal.Signals(number).name
        super().__init__(f'stopped before the first batch on {cause}; nothing is lost')


def handled_signals() -> tuple[signal.Signals, ...]:
    """Return the stop signals that this process must handle, excluding those that its parent made it ignore."""
    # nohup makes a process ignore SIGHUP; a shell script makes its background commands ignore SIGINT.
    optional = (signal.SIGHUP, signal.SIGINT)
    return tuple(each for each in STOP_SIGNALS if each not in optional or signal.getsignal(each) != signal.SIG_IGN)


def describe_loss(batch: int, saved: int) -> str:
    """Describe which batches are lost if a run ends after `batch` batches and last saved ba`saved` (0: nothing)."""
    if not batch and not saved:
        return 'nothing is lost'
    newest = f'the newest checkpoint is ba{saved}' if saved else 'there is no checkpoint'
    first = saved + 1
    lost = (
        'no batch is' if batch < first else f'batch {batch} is' if batch == first else f'batches {first} to {batch} are'
    )
    return f'{lost} lost; {newest}'


class RepeatedInterrupt:
    """Detector of a second Ctrl-C. Call `is_repeated` once for each signal that counts as a Ctrl-C."""

    def __init__(self) -> None:
        self._first: float | None = None

    def is_repeated(self) -> bool:
        """Record a stop signal; return True if the first one came at least REPEAT_SECONDS ago."""
        now = time.monotonic()
        if self._first is None:
            self._first = now
        return now - self._first >= REPEAT_SECONDS


class SignalThread:
    """Thread that calls a function for every signal, even while the main thread is blocked outside Python.

    Python runs signal handlers in the main thread between two bytecode instructions. If that thread is blocked in a
    collective or a kernel, handlers do not run, and Ctrl-C has no effect. The signals must have a Python handler.
    """

    def __init__(self, on_signal: Callable[[int], None]) -> None:
        self._on_signal = on_signal
        self._previous = -1
        self._write: int | None = None

    def start(self) -> None:
        """Start the thread; call this in the main thread."""
        read, self._write = os.pipe()
        os.set_blocking(self._write, False)
        self._previous = signal.set_wakeup_fd(self._write, warn_on_full_buffer=False)
        threading.Thread(target=self._run, args=(read,), name='signals', daemon=True).start()
        _pipes.add(self._write)

    def stop(self) -> None:
        """End the thread; call this in the main thread."""
        if self._write is None:
            return
        current = signal.set_wakeup_fd(self._previous)
        if current not in (self._write, -1):
            signal.set_wakeup_fd(current)  # keep a descriptor that another library has set
            return
        write, self._write = self._write, None
        _pipes.discard(write)
        os.close(write)

    def _run(self, read: int) -> None:
        while numbers := os.read(read, 64):
            for number in numbers:
                self._on_signal(number)
        os.close(read)


_pipes: set[int] = set()
"""Pipe descriptors to which this process's signals are written."""


def _leave_pipes() -> None:
    # A forked process, such as a loader worker, must not write its signals to the pipe: they would look like ours.
    if _pipes:
        _pipes.clear()
        signal.set_wakeup_fd(-1)


os.register_at_fork(after_in_child=_leave_pipes)


@contextlib.contextmanager
def stopping_early() -> Iterator[None]:
    """Context manager that raises StoppedEarly on a stop signal, until a callback takes over the signals."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    process, previous = os.getpid(), {}
    received: list[int] = []
    timers: list[threading.Timer] = []

    def stop(number: int, frame: FrameType | None) -> None:
        # A forked process, such as a data loader worker, inherits this handler and must ignore the signal.
        if os.getpid() == process:
            raise StoppedEarly(number)

    def end_if_blocked(number: int) -> None:
        # End the process from a timer: no handler runs while the main thread waits for other nodes in C++.
        if number in previous and signal.getsignal(number) in (stop, composer_handler()) and not timers:
            received.append(number)
            timers.append(threading.Timer(_START_SECONDS, _end, (number,)))
            timers[0].daemon = True
            timers[0].start()

    previous |= {number: signal.signal(number, stop) for number in handled_signals()}
    thread = SignalThread(end_if_blocked)
    thread.start()
    try:
        yield
    except StoppedEarly:
        raise
    except BaseException as error:
        # Libraries may replace StoppedEarly by an exception of their own, and Composer's handler raises SystemExit.
        number = received[0] if received else signal_of_exit(error)
        if number is None:
            raise
        raise StoppedEarly(number) from error
    finally:
        for timer in timers:
            timer.cancel()
        thread.stop()
        for number, handler in previous.items():
            if signal.getsignal(number) == stop:
                signal.signal(number, handler)


def composer_handler() -> Any:
    """Return the signal handler that Composer installs on import, or None if Composer is not imported."""
    # The handler raises SystemExit with the status 128 + signal.
    return getattr(sys.modules.get('composer.core.engine'), 'sigterm_handler', None)


def signal_of_exit(error: BaseException) -> int | None:
    """Return the signal for which Composer's handler raised this SystemExit, or None."""
    code = error.code if isinstance(error, SystemExit) else None
    return code - 128 if isinstance(code, int) and code - 128 in STOP_SIGNALS else None


def _end(number: int) -> None:
    print(StoppedEarly(number), file=sys.stderr, flush=True)
    os._exit(PREEMPTED)
