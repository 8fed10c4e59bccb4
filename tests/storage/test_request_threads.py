"""Threads for requests: their number, the first error, a caller that is told to stop, and forked processes."""

import os
import threading
import time

import pytest

from diffusion.errors import DataError
from diffusion.storage.retry import DamagedDownload, RetryPolicy
from diffusion.storage.transfers import THREADS, Stopped, run_all

DEFAULT = RetryPolicy()


def test_all_calls_share_a_bounded_number_of_threads() -> None:
    lock, running, most, finished = threading.Lock(), 0, 0, 0

    def task(_: RetryPolicy) -> None:
        nonlocal running, most, finished
        with lock:
            running += 1
            most = max(most, running)
        time.sleep(0.01)
        with lock:
            running, finished = running - 1, finished + 1

    callers = [threading.Thread(target=run_all, args=([task] * 20, DEFAULT)) for _ in range(3)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert (most, finished) == (THREADS, 60)


def test_first_error_ends_the_other_tasks() -> None:
    ended, others = [], threading.Event()

    def pausing(policy: RetryPolicy) -> None:
        try:
            policy.run(fail_download, 's3://bucket/a')
        except Stopped:
            ended.append(1)
            raise

    def fail_download() -> None:
        others.set()
        raise DamagedDownload('cut')

    def failing(_: RetryPolicy) -> None:
        others.wait()
        raise ValueError('bug')

    start = time.monotonic()
    with pytest.raises(ValueError, match='bug'):
        run_all([pausing, failing, *[pausing] * 50], DEFAULT)
    assert time.monotonic() - start < 1  # the pause of a retry is 1 s or longer
    assert 0 < len(ended) <= THREADS  # the thread of the failed task may have begun another one
    count = len(ended)
    time.sleep(0.05)
    assert len(ended) == count  # the rest was cancelled


def test_caller_is_told_to_stop() -> None:
    def wait() -> None:
        raise DataError('another rank failed')

    with pytest.raises(DataError, match='another rank'):
        run_all([lambda policy: policy.run(fail_forever, 's3://bucket/a')], RetryPolicy(tries=10**6, wait=wait))


def fail_forever() -> None:
    raise DamagedDownload('cut')


def test_forked_process_starts_its_own_threads() -> None:
    run_all([lambda policy: None], DEFAULT)
    process = os.fork()
    if not process:
        status = 1
        try:
            called: list[int] = []
            run_all([lambda policy: called.append(os.getpid())] * 3, DEFAULT)
            status = 0 if called == [os.getpid()] * 3 else 2
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(process, 0)[1]) == 0
