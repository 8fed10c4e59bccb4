"""Jobs over processes: the job of a process that dies is tried again, and named when that does not help.

Python's own pools either hang when a worker is killed or give all work up, and neither says which job it had.
"""

import multiprocessing
import os
import signal
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from diffusion.errors import DataError

Note = Callable[[str], None]
"""Takes the current item of a job, such as an image's key, for the message when its process dies."""

PRELOAD = ['diffusion.prepare.convert_part', 'diffusion.prepare.pack_shards', 'pandas']
"""Modules that every worker needs; pyarrow imports pandas, half a second of it, when it makes its first array."""
DEATHS = 3
"""Deaths of a job's process before giving up: it runs beside others, then alone, since memory may have run out."""
NOTE_BYTES = 1024


class WorkerJob(Protocol):
    """Work that another process does; it can be pickled, and doing it twice is as good as once."""

    @property
    def name(self) -> str:
        """The job's name in messages."""
        ...

    def __call__(self, note: Note) -> Any:
        """Run the job."""
        ...


def run_jobs(jobs: Iterable[WorkerJob], *, workers: int) -> Iterator[Any]:
    """Run the jobs in at most `workers` processes; yields their results as they come.

    Raises:
        DataError: A job's process died again and again.
        Exception: What a job raised; the other jobs are stopped.
    """
    todo, again, alone = iter(jobs), deque[WorkerJob](), deque[WorkerJob]()
    deaths: Counter[str] = Counter()
    idle: list[_Worker] = []
    busy: list[_Worker] = []
    try:
        while True:
            while len(busy) < workers and (job := again.popleft() if again else next(todo, None)) is not None:
                busy.append(idle.pop() if idle else _Worker())
                busy[-1].give(job)
            if not busy and alone:
                busy.append(idle.pop() if idle else _Worker())
                busy[-1].give(alone.popleft())
            if not busy:
                return
            for worker in _ready(busy):
                busy.remove(worker)
                try:
                    result = worker.take()
                except EOFError:
                    deaths[worker.job.name] += 1
                    if deaths[worker.job.name] == DEATHS:
                        raise DataError(_obituary(worker)) from None
                    (again if deaths[worker.job.name] == 1 else alone).append(worker.job)
                    worker.stop()
                else:
                    idle.append(worker)
                    yield result
    finally:
        for worker in idle + busy:
            worker.stop()


class _Worker:
    """A process that does one job after the other."""

    job: WorkerJob

    def __init__(self) -> None:
        # A forkserver's children share the imports (10 ms each instead of 400) and none of the caller's threads, locks
        # and open files, as they would after a plain fork of a process with torch in it.
        context = multiprocessing.get_context('forkserver')
        context.set_forkserver_preload(PRELOAD)
        _start_forkserver()
        self._note = context.RawArray('c', NOTE_BYTES)
        self.pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, self._note, dict(os.environ)), daemon=True)
        self._process.start()
        theirs.close()

    @property
    def note(self) -> str:
        """The current item of its job; readable also after the death of the process."""
        return self._note.value.decode('utf-8', 'replace')

    def give(self, job: WorkerJob) -> None:
        self.job = job
        self._note.value = b''
        # That a process died between two jobs is noticed when its result is waited for.
        with suppress(ConnectionError):
            self.pipe.send(job)

    def take(self) -> Any:
        """Return the result of its job. Raises EOFError when the process died."""
        try:
            result, error, trace = self.pipe.recv()
        except OSError as broken:
            raise EOFError from broken
        if error is not None:
            raise error from _InWorker(trace)
        return result

    def stop(self) -> int | None:
        """End the process if it still lives; returns its exit code."""
        self._process.kill()
        self._process.join()
        self.pipe.close()
        return self._process.exitcode


class _InWorker(Exception):
    """The traceback of an error in another process."""

    def __str__(self) -> str:
        return f'\n{self.args[0]}'


def _ready(busy: list[_Worker]) -> list[_Worker]:
    """Wait until a worker is done or dead; returns all that are."""
    pipes = wait([worker.pipe for worker in busy])
    return [worker for worker in busy if worker.pipe in pipes]


def _obituary(worker: _Worker) -> str:
    note, code = worker.note, worker.stop() or 0
    how = f'killed by {signal.Signals(-code).name}' if code < 0 else f'ended with status {code}'
    at = f' at {note}' if note else ''
    return (
        f'{worker.job.name}: its process died {DEATHS} times{at}, the last time alone and {how}; '
        'give the machine more memory or take that image out, then start again: what is done is kept'
    )


def _start_forkserver() -> None:
    """Start the forkserver with Ctrl-C ignored, which its children inherit.

    Ctrl-C reaches all processes; a child that is still importing would otherwise die with a traceback of its own.
    """
    if threading.current_thread() is not threading.main_thread():
        return  # only the main thread may set a signal's handler, and only it gets Ctrl-C
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, handler)


def _serve(pipe: Connection, shared: Any, environment: dict[str, str]) -> None:
    """Run jobs from a pipe: the main function of a worker."""
    os.environ.update(environment)  # the forkserver may have started before a variable was set
    threading.Thread(target=_end_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the parent ends the others

    def note(text: str) -> None:
        shared.value = text.encode('utf-8', 'replace')[: NOTE_BYTES - 1]

    while True:
        try:
            job = pipe.recv()
        except EOFError:
            return
        try:
            outcome = job(note), None, ''
        except Exception as error:
            outcome = None, error, traceback.format_exc()
        pipe.send(outcome)


def _end_with_parent() -> None:
    """End this process with its parent; else it would work on beside those of the next start."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)
