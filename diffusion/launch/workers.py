"""Start, signal and end a node's worker processes, and derive the attempt's outcome from their exit statuses."""

import atexit
import contextlib
import ctypes
import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any, NoReturn, TextIO, cast

from diffusion.exit_codes import BAD_HARDWARE, CONFIG_ERROR, FAILED, PREEMPTED
from diffusion.launch.rank_discovery import NCCL_PIPE, NodePosition, rank_environment
from diffusion.runs import heartbeats

TICK_SECONDS = 0.1
STACK_SECONDS = 3.0
"""Maximum time to wait for the ranks' stacks; less than MARGIN_SECONDS. A rank that is not stopped writes them in
milliseconds."""
KILL_SECONDS = 60.0
"""Time after which a killed process that still exists counts as stuck in a device or disk operation."""
PR_SET_PDEATHSIG = 1

_GONE = (errno.EIO, errno.EPIPE, errno.ENXIO)
"""Errors of writing to a closed terminal, or to a pipe without a reader."""
StartRank = Callable[[int, Sequence[str], Mapping[str, str], IO[bytes] | None], subprocess.Popen[bytes]]
"""Function with the same arguments as `start_rank`."""


@dataclass(frozen=True)
class Outcome:
    status: int
    cause: str
    """Cause of the attempt's end: a key of `attempts.CAUSES`."""
    detail: str = ''


@dataclass(frozen=True)
class Workers:
    """Worker processes of a node, one per GPU, each in a process group with its children."""

    position: NodePosition
    command: Sequence[str]
    environ: Mapping[str, str]
    folder: Path
    start: StartRank | None = None
    processes: list[subprocess.Popen[bytes]] = field(default_factory=list)

    def __post_init__(self) -> None:
        # Do not use Composer's launcher: it leaves its workers behind when it receives SIGTERM, its exit status does
        # not reflect theirs, and importing it takes half a minute. The workers get the environment that it would set.
        for local_rank, environ in enumerate(self.environs()):
            # Show the output of one rank, which is enough to follow a run, but the errors (stderr) of all ranks.
            output = None if local_rank == 0 else (self.folder / f'output-{local_rank}.txt').open('wb')
            process = (self.start or start_rank)(local_rank, self.command, environ, output)
            self.processes.append(process)
            if output is not None:
                output.close()

    def environs(self) -> list[dict[str, str]]:
        ranks = range(self.position.processes)
        return [rank_environment(self.position, local_rank, self.environ) for local_rank in ranks]

    def codes(self) -> list[int | None]:
        """Return the exit status of each worker process: negative if a signal killed it, None if it still runs."""
        return [process.poll() for process in self.processes]

    def ended(self) -> bool:
        return None not in self.codes()

    def outcome(self, *, stop_requested: bool, late: bool = False) -> Outcome:
        """Combine the exit statuses of all workers into one outcome; `late` means that they did not end in time."""
        codes = {rank: process.poll() for rank, process in self.by_rank().items()}
        # A user error or bad hardware on one rank is the cause of all other failures.
        for status, cause in ((CONFIG_ERROR, 'mistake'), (BAD_HARDWARE, 'hardware')):
            if status in codes.values():
                return Outcome(status, cause)
        killed = [f'rank {rank} by {signal.Signals(-code).name}' for rank, code in codes.items() if code and code < 0]
        failed = [f'rank {rank} with {code}' for rank, code in codes.items() if code and code > 0 and code != PREEMPTED]
        if stop_requested and not failed:
            detail = 'did not save in time' if late or killed else ''
            done = set(codes.values()) == {0}
            return Outcome(0, 'done') if done else Outcome(PREEMPTED, 'preempted', detail)
        if killed:  # for example by the OOM killer; the other ranks' errors are then misleading
            return Outcome(FAILED, 'killed', ', '.join(killed))
        if failed:
            return Outcome(FAILED, 'crash', ', '.join(failed))
        return Outcome(PREEMPTED, 'preempted') if PREEMPTED in codes.values() else Outcome(0, 'done')

    def signal(self, number: int) -> None:
        for process in self.processes:
            if process.poll() is None:
                process.send_signal(number)

    def by_rank(self) -> dict[int, subprocess.Popen[bytes]]:
        first = self.position.rank * self.position.processes
        return {first + local: process for local, process in enumerate(self.processes)}

    def write_stacks(self) -> dict[int, str]:
        """Make responsive workers write their threads' stacks; return them by rank, after STACK_SECONDS at most."""
        before = heartbeats.read_stacks(self.folder)
        self.signal(heartbeats.STACK_DUMP_SIGNAL)
        until, found = time.monotonic() + STACK_SECONDS, before
        while time.monotonic() < until:
            time.sleep(TICK_SECONDS)
            found, previous = heartbeats.read_stacks(self.folder), found
            running = [rank for rank, process in self.by_rank().items() if process.poll() is None]
            missing = any(found.get(rank) == before.get(rank) for rank in running)
            # Files that have not grown since the last check are complete.
            if not missing and found == previous:
                break
        return {rank: text for rank, text in found.items() if text != before.get(rank)}

    def request_nccl_dumps(self) -> list[int]:
        """Make NCCL's flight recorder write its file in each worker process that uses NCCL; return their ranks."""
        asked = []
        for rank, process in self.by_rank().items():
            if process.poll() is not None:
                continue
            # Request the file: NCCL would write it only when a collective times out, which is later than our watchdog.
            with contextlib.suppress(OSError):  # no pipe: the rank does not use NCCL, or has no process group yet
                pipe = os.open(self.folder / NCCL_PIPE.format(rank=rank), os.O_WRONLY | os.O_NONBLOCK)
                os.write(pipe, b'1')
                os.close(pipe)
                asked.append(rank)
        return asked

    def kill(self) -> list[int]:
        """Kill all worker processes and their children; return the ids of workers still alive after KILL_SECONDS."""
        for process in self.processes:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        stuck, until = [], time.monotonic() + KILL_SECONDS
        for process in self.processes:
            try:
                process.wait(max(0.0, until - time.monotonic()))
            except subprocess.TimeoutExpired:
                stuck.append(process.pid)
        return stuck

    def reap_orphans(self, others: Collection[int] = ()) -> None:
        """Reap orphaned processes, as PID 1 in a container must; `others` are ids of children that are not orphans."""
        if os.getpid() != 1:
            return
        # Orphans stay zombies until waitpid(), and the container would run out of process ids. Only Popen.poll() may
        # reap a worker, to get its status, so use WNOWAIT to look at an ended child without reaping it. waitid()
        # returns an ended worker until poll() has reaped it, so orphans after that worker wait for the next call.
        worker_pids = {process.pid for process in self.processes} | {*others}
        with contextlib.suppress(ChildProcessError):
            while (ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)) is not None:
                if ended.si_pid in worker_pids:
                    return
                os.waitpid(ended.si_pid, 0)


def start_rank(
    local_rank: int, command: Sequence[str], environ: Mapping[str, str], output: IO[bytes] | None
) -> subprocess.Popen[bytes]:
    # A new session makes each rank the leader of a process group, so that kill() can end it together with its data
    # loader workers, and Ctrl-C reaches only this process, which forwards it once.
    return subprocess.Popen(
        [sys.executable, *command], env=environ, stdout=output, start_new_session=True, preexec_fn=die_with_parent
    )


def process_problem(pid: int) -> str:
    """Describe a process that does not respond to a signal, by its state in the kernel."""
    # The state is the first field after the program's name in parentheses (man 5 proc).
    try:
        state = Path(f'/proc/{pid}/stat').read_text(encoding='utf-8', errors='replace').rpartition(')')[2].split()[0]
    except (OSError, IndexError):
        state = ''
    known = {'T': 'is stopped (SIGSTOP)', 't': 'is stopped by a debugger', 'D': 'is stuck in a system call'}
    return known.get(state, 'does not respond')


def die_with_parent() -> None:
    """Make the kernel kill this process when its parent dies. Does nothing on systems other than Linux."""
    if sys.platform == 'linux':
        # A parent killed by SIGKILL runs no handlers, and orphaned ranks would keep the GPUs and the port.
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)


class _DiscardingStream:
    """Wrapper of a stream that discards text once the stream can no longer be written."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def write(self, text: str) -> int:
        with self._discarding():
            self._stream.write(text)
        return len(text)

    def writelines(self, lines: Any) -> None:
        self.write(''.join(lines))

    def flush(self) -> None:
        with self._discarding():
            self._stream.flush()

    @contextlib.contextmanager
    def _discarding(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if error.errno not in _GONE:
                raise
            # Redirect the file descriptor, not only the stream: at exit, the interpreter flushes the buffer and would
            # change the exit status to 120 if that failed. Libraries also write to the descriptor.
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, self._stream.fileno())
            os.close(null)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)


@contextlib.contextmanager
def discarding_lost_output() -> Iterator[None]:
    """Context manager that discards output that can no longer be written instead of raising OSError."""
    # A run whose terminal is closed receives SIGHUP and must still save, but each message would raise an error.
    before = sys.stdout, sys.stderr
    guarded = tuple(cast(TextIO, _DiscardingStream(stream)) for stream in before)
    sys.stdout, sys.stderr = guarded
    try:
        yield
    finally:
        for stream in guarded:
            stream.flush()
        # Keep any wrapper that other code has put around the streams in the meantime.
        sys.stdout = before[0] if sys.stdout is guarded[0] else sys.stdout
        sys.stderr = before[1] if sys.stderr is guarded[1] else sys.stderr


def end_process(status: int) -> NoReturn:
    """Wait for threads, run exit handlers, and end this process with an exit status.

    A normal exit may abort the process: it finalizes the interpreter, which ends daemon threads when they return from
    PyTorch code. A run that ended with a clear error would then seem to have been killed by SIGABRT.
    """
    # These are the first steps of a normal exit: wait for non-daemon threads, and call the exit handlers.
    with suppress(Exception):
        threading._shutdown()  # type: ignore[attr-defined]
    # If training ends in the middle of an epoch, loader workers wait for their next batch. A torch exit handler waits 5
    # s for each of them if memory is pinned; a multiprocessing exit handler sends SIGTERM and waits without a limit.
    # The workers ignore SIGTERM, which schedulers send to whole jobs, so a complete run would never end.
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()
    atexit._run_exitfuncs()
    for stream in filter(None, (sys.stdout, sys.stderr)):  # a stream is None if its descriptor was closed at the start
        with suppress(OSError, ValueError):  # the reader is gone
            stream.flush()
    os._exit(status)
