"""Threads that send requests to object stores in parallel, a bounded number per process."""

import os
import queue
import threading
from collections.abc import Callable, Iterable
from concurrent.futures import FIRST_EXCEPTION, Future, wait
from dataclasses import replace

from diffusion.storage.retry import RetryPolicy

THREADS = 8
"""Threads per process; all calls of `run_all` share them, so that eight ranks of a node have 64 connections at most."""
POLL_SECONDS = 0.02
Task = Callable[[RetryPolicy], None]


class Stopped(Exception):
    """Error that ends a task because another task of the same call failed; it is not retried."""


def run_all(tasks: Iterable[Task], retry: RetryPolicy) -> None:
    """Call all tasks in threads; on the first error cancel and end the others, and raise it.

    No task runs after the return. A task must not call this function.

    Args:
        tasks: Functions of the retry policy that they must use; its `wait` ends a task when another one has failed.
        retry: The caller's policy; its `wait` is called in the caller's thread.
    """
    stopped = threading.Event()

    def check() -> None:
        if stopped.is_set():
            raise Stopped('another request failed')

    policy, pool = replace(retry, wait=check), _process_pool()
    pending = {pool.submit(task, policy) for task in tasks}
    try:
        while pending:
            done, pending = wait(pending, POLL_SECONDS, FIRST_EXCEPTION)
            for future in done:
                future.result()
            retry.wait()
    except BaseException:
        stopped.set()
        # A request that has been sent ends at the latest when the client's timeout has passed.
        wait({future for future in pending if not future.cancel()})
        raise


class _Pool:
    """Threads that run submitted tasks, the oldest first."""

    # A ThreadPoolExecutor would not do: its threads are not daemons, and at exit it still works off its whole queue.

    def __init__(self) -> None:
        self.tasks: queue.SimpleQueue[tuple[Future[None], Task, RetryPolicy]] = queue.SimpleQueue()
        for number in range(THREADS):
            threading.Thread(target=self._work, name=f'object-store-{number}', daemon=True).start()

    def submit(self, task: Task, policy: RetryPolicy) -> Future[None]:
        """Run a task in the next thread that is free."""
        future: Future[None] = Future()
        self.tasks.put((future, task, policy))
        return future

    def _work(self) -> None:
        while True:
            future, task, policy = self.tasks.get()
            if not future.set_running_or_notify_cancel():
                continue
            try:
                task(policy)
            except BaseException as error:
                future.set_exception(error)
            else:
                future.set_result(None)
            del future, task, policy  # do not keep them alive while the thread waits


def _process_pool() -> _Pool:
    """Return the pool of this process."""
    global _pool
    with _lock:
        if _pool is None:
            _pool = _Pool()
        return _pool


def _forget_pool() -> None:
    """Forget the pool and the lock of the parent process after a fork."""
    # The parent's threads do not exist here, and the lock stays locked if one of them held it.
    global _lock, _pool
    _lock, _pool = threading.Lock(), None


_lock = threading.Lock()
_pool: _Pool | None = None
os.register_at_fork(after_in_child=_forget_pool)
