"""Run the jobs of `diffusion prepare` in processes on this machine or on several machines.

The process pool survives the death of a worker: it retries the job, and if the job fails again, reports the job and its
image. By contrast, if a worker is killed, `multiprocessing.Pool` hangs and `ProcessPoolExecutor` fails all pending
work, without reporting which job the worker was running.

Several machines need the input at the same location, and a shared work folder (NFS, Lustre) unless they convert shares
with `PrepareSettings.parts` in an object store. For engines other than Ray, call `prepare(settings, run=function)`; in
Spark `lambda jobs: spark.sparkContext.parallelize(list(jobs)).map(run_job).toLocalIterator()`.
"""

import multiprocessing
import os
import pickle
import signal
import threading
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from multiprocessing import forkserver
from multiprocessing.connection import Connection, wait
from typing import Any, Protocol

from diffusion.errors import DataError, UserError
from diffusion.storage.host_memory import keep_freed_memory

Note = Callable[[str], None]
"""Callback that records a job's current item, such as an image's key, for the error message if the process dies."""

PRELOAD = ['diffusion.prepare.convert_part', 'diffusion.prepare.output_folders', 'pandas']
"""Modules that the fork server imports once for all workers; pandas (0.5 s), since pyarrow's first array needs it."""
DEATHS = 3
"""The preparation fails when a job's process has died this many times."""
NOTE_BYTES = 1024


class WorkerJob(Protocol):
    """Interface for work in another process; must be picklable and, since it may run more than once, idempotent."""

    @property
    def name(self) -> str:
        """Name of the job in messages, such as `part 3 (00003.tar)`."""
        ...

    def __call__(self, note: Note) -> Any:
        """Run the job and return its result; `note` records the current item, to be reported if the process dies."""
        ...


Run = Callable[[Iterable[WorkerJob]], Iterator[Any]]


def run_jobs(jobs: Iterable[WorkerJob], *, workers: int) -> Iterator[Any]:
    """Run jobs in at most `workers` processes and yield their results as they finish.

    If a job raises an exception, or its process has died `DEATHS` times (DataError), the other jobs are stopped.
    """
    # If a job's process dies, the job runs again in parallel with others. After the second death, it runs alone, since
    # the other jobs may have used up the memory.
    pending, retries, last_tries = iter(jobs), deque[WorkerJob](), deque[WorkerJob]()
    deaths: Counter[str] = Counter()
    idle: list[_Worker] = []
    busy: list[_Worker] = []
    try:
        while True:
            while len(busy) < workers and (job := retries.popleft() if retries else next(pending, None)) is not None:
                busy.append(idle.pop() if idle else _Worker())
                busy[-1].send(job)
            if not busy and last_tries:
                busy.append(idle.pop() if idle else _Worker())
                busy[-1].send(last_tries.popleft())
            if not busy:
                return
            pipes = wait([worker.pipe for worker in busy])
            for worker in [worker for worker in busy if worker.pipe in pipes]:
                busy.remove(worker)
                try:
                    result = worker.receive()
                except EOFError:
                    deaths[worker.job.name] += 1
                    if deaths[worker.job.name] == DEATHS:
                        raise DataError(_death_message(worker)) from None
                    (retries if deaths[worker.job.name] == 1 else last_tries).append(worker.job)
                    worker.stop()
                else:
                    idle.append(worker)
                    yield result
    finally:
        for worker in idle + busy:
            worker.stop()


class _Worker:
    job: WorkerJob

    def __init__(self) -> None:
        # Workers started by a fork server share its imports (10 ms per start instead of 400 ms). A plain fork would
        # copy the caller's locks and open files but not its threads, which is unsafe in a process that has imported
        # torch.
        context = multiprocessing.get_context('forkserver')
        context.set_forkserver_preload(PRELOAD)
        _start_forkserver()
        # The note is in shared memory, so the parent can read it even after the worker was killed.
        self._note = context.RawArray('c', NOTE_BYTES)
        self.pipe, child_pipe = context.Pipe()
        self._process = context.Process(target=_serve, args=(child_pipe, self._note, dict(os.environ)), daemon=True)
        self._process.start()
        # Close the child's end in the parent. Otherwise, `recv` would block forever after the child's death instead of
        # raising EOFError.
        child_pipe.close()

    @property
    def note(self) -> str:
        """Item on which the job is working, such as an image's key; available even after the process died."""
        return self._note.value.decode('utf-8', 'replace')

    def send(self, job: WorkerJob) -> None:
        self.job = job
        self._note.value = b''
        # Ignore that the process died between two jobs: `receive` will raise EOFError, and the job is retried.
        with suppress(ConnectionError):
            self.pipe.send(job)

    def receive(self) -> Any:
        """Return the result of the job, or raise its exception; raise EOFError if the process died."""
        try:
            result, job_error, worker_traceback = self.pipe.recv()
        except OSError as error:
            # The pipe raises OSError instead of EOFError if the process died while sending or before reading its job.
            raise EOFError from error
        if job_error is not None:
            raise job_error from _WorkerTraceback(worker_traceback)
        return result

    def stop(self) -> int | None:
        """Kill the process if it is still alive; return its exit code."""
        self._process.kill()
        self._process.join()
        self.pipe.close()
        return self._process.exitcode


class _WorkerTraceback(Exception):
    """Traceback text of an exception raised in a worker; attached to the exception as its cause."""

    def __str__(self) -> str:
        return f'\n{self.args[0]}'


def _death_message(worker: _Worker) -> str:
    note, code = worker.note, worker.stop() or 0
    if not note and code > 0:
        # The process died while importing the caller's script, which must not start another preparation on import.
        return (
            f'{worker.job.name}: its process ended with status {code} before it began, with the traceback above; a '
            "script that prepares data must do so below `if __name__ == '__main__':`"
        )
    cause = f'killed by {signal.Signals(-code).name}' if code < 0 else f'exited with status {code}'
    position = f' at {note}' if note else ''
    return (
        f'{worker.job.name}: its process died {DEATHS} times{position}, {cause} with no other job running; '
        'add memory or remove that image, then run the same command again; finished work is kept'
    )


def _start_forkserver() -> None:
    """Start the fork server for worker processes with SIGINT ignored: it and the workers inherit this setting."""
    # The terminal sends Ctrl-C to the whole process group. A worker that is still importing, before `_serve` ignores
    # SIGINT, would die with its own traceback.
    if threading.current_thread() is not threading.main_thread():
        return  # SIGINT cannot be ignored here: only the main thread can set signal handlers
    handler = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        forkserver.ensure_running()
    finally:
        signal.signal(signal.SIGINT, handler)


def _serve(pipe: Connection, shared: Any, environment: dict[str, str]) -> None:
    """Run jobs received through a pipe until it closes; main function of a worker."""
    keep_freed_memory()
    os.environ.update(environment)  # variables that the caller set after the fork server started
    threading.Thread(target=_exit_with_parent, daemon=True).start()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # on Ctrl-C, the parent kills its workers

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


def _exit_with_parent() -> None:
    """Wait for the parent process to end, then exit this process."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    # If the parent is killed with SIGKILL, a daemon process keeps running, and would still write while the next start
    # resumes the same part. `sys.exit` would end only this thread.
    parent.join()
    os._exit(1)


def run_on_ray(jobs: Iterable[WorkerJob], *, workers: int | None = None) -> Iterator[Any]:
    """Run jobs in at most `workers` tasks of a Ray cluster (default: one per core); yield results as they finish."""
    # Without a cluster, Ray starts a local one, which would send usage statistics to Anyscale.
    os.environ.setdefault('RAY_USAGE_STATS_ENABLED', '0')
    try:
        import ray.data
    except ImportError as error:
        raise UserError(
            f"--engine ray: Ray is not installed ({error}); pip install 'diffusion-recipes[ray]'"
        ) from error
    items = [{'job': pickle.dumps(job)} for job in jobs]
    if not items:
        return
    # Use one block per job: Ray schedules blocks, so the jobs in a larger block would run one after another.
    data = ray.data.from_items(items, override_num_blocks=len(items))
    for row in data.map(_run_pickled, concurrency=workers).iter_rows():
        result, error = pickle.loads(row['outcome'])
        if error is not None:
            raise error
        yield result


def run_job(job: WorkerJob) -> Any:
    """Run a job of `diffusion prepare` in this process and return its result; this is the function to map in Spark."""
    return job(lambda text: None)


def _run_pickled(item: dict[str, Any]) -> dict[str, bytes]:
    """Run a pickled job as a Ray task; return its pickled (result, error)."""
    # Return errors, because Ray wraps raised exceptions in its own, so callers could not catch UserError or DataError.
    keep_freed_memory()
    job: WorkerJob = pickle.loads(item['job'])
    try:
        return {'outcome': pickle.dumps((run_job(job), None))}
    except Exception as error:
        return {'outcome': pickle.dumps((None, error))}
