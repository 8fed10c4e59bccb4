"""Agreement between ranks: all ranks raise any rank's error, and all ranks wait for the long work of one rank."""

import errno
import logging
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from composer.utils import dist
from torch.distributed.checkpoint.api import CheckpointException

from diffusion.checkpointing.checkpoint_store import DamagedCheckpoint
from diffusion.errors import DataError, ExternalError, RankFailed, UserError, exit_status
from diffusion.exit_codes import CONFIG_ERROR

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Ranks that wait for another rank's work run a collective at this interval, since a single one would time out."""
Result = TypeVar('Result')
Kind = Literal['other', 'external', 'user', 'damage', 'storage']
SEVERITY: tuple[Kind, ...] = ('other', 'external', 'user', 'damage', 'storage')
"""Kinds of errors, most severe first."""


@dataclass(frozen=True)
class _Failure:
    """Error of a rank as other ranks see it: text instead of the exception, which may not be picklable."""

    kind: Kind
    message: str
    description: str
    errno: int


@contextmanager
def raise_on_all_ranks(where: str, *, logs: bool = True) -> Iterator[None]:
    """Raise on every rank if any rank raises inside the block; a collective, which every rank must enter.

    All ranks raise the most severe kind of error that occurred. From most to least severe: a bug, a failure of another
    program, the user's mistake, damage, a storage fault. A rank with its own error of this kind raises that one. The
    others raise the first such error: a UserError, DamagedCheckpoint or ExternalError with the same message, an OSError
    for a storage fault, or a RankFailed for a bug.

    The block must not contain a collective in which the other ranks would wait for a failed rank.
    """
    error: BaseException | None = None
    try:
        yield
    except (Exception, CheckpointException) as caught:  # CheckpointException is not an Exception
        error = caught
    report = None if error is None else _failure(error)
    try:
        reports = dist.all_gather_object(report)
    except Exception as lost:  # Python shows the block's error, if any, as context
        raise RankFailed(f'{where}: the ranks could not exchange their errors ({lost})') from lost
    failed = [(rank, each) for rank, each in enumerate(reports) if each is not None]
    if not failed:
        return
    # All ranks raise the same kind: a caller that catches a kind and continues must do so on every rank.
    rank, worst = min(failed, key=lambda each: SEVERITY.index(each[1].kind))
    if error is not None:
        assert report is not None
        if logs and report.kind in ('other', 'storage'):  # messages of other kinds are printed where they are caught
            log.error('%s (rank %d: %s)', where, dist.get_global_rank(), error)
        if report.kind != worst.kind:
            raise _as_error(worst, where, rank) from error
        raise error
    raise _as_error(worst, where, rank)


def _failure(error: BaseException) -> _Failure:
    fault = storage_fault(error)
    kind: Kind = 'storage' if fault is not None else 'other'
    if isinstance(error, DamagedCheckpoint):
        kind = 'damage'
    elif isinstance(error, UserError) and exit_status(error) == CONFIG_ERROR:
        kind = 'user'
    elif isinstance(error, ExternalError):
        kind = 'external'
    number = errno.EIO if fault is None or fault.errno is None else fault.errno
    message = str(error) if fault is None else (fault.strerror or str(fault))
    if fault is not None and fault.filename is not None:
        message += f': {fault.filename}'
    return _Failure(kind, message, f'{type(error).__name__}: {error}', number)


def _as_error(failure: _Failure, where: str, rank: int) -> Exception:
    kinds: dict[Kind, type[Exception]] = {'user': UserError, 'damage': DamagedCheckpoint, 'external': ExternalError}
    if failure.kind in kinds:
        return kinds[failure.kind](failure.message)
    if failure.kind == 'storage':
        return OSError(failure.errno, f'{failure.message} (rank {rank})')
    return RankFailed(f'{where} (rank {rank}: {failure.description})')


def gather_on_rank_zero(value: Result) -> list[Result] | None:
    """Return the values of all ranks on rank 0, and None on the other ranks; a collective."""
    if dist.get_world_size() == 1:
        return [value]
    gathered: list[Any] | None = [None] * dist.get_world_size() if dist.get_global_rank() == 0 else None
    torch.distributed.gather_object(value, gathered, dst=0)
    return gathered


def wait_for_all_ranks(done: threading.Event) -> None:
    """Wait until an event is set on every rank; the wait may exceed the timeout of collectives. A collective."""
    while not all(dist.all_gather_object(done.wait(POLL_SECONDS))):
        pass


def run_on_rank_zero(work: Callable[[], Result], where: str, *, logs: bool = True) -> Result | None:
    """Run a function like `run_on_each_rank`, but only on rank 0; return its result there, and None on other ranks."""
    return run_on_each_rank(work if dist.get_global_rank() == 0 else lambda: None, where, logs=logs)


def from_rank_zero(work: Callable[[], Result], where: str, *, logs: bool = True) -> Result:
    """Run a function on rank 0 only, as `run_on_rank_zero` does, and return its result on every rank."""
    results: list[Any] = [run_on_rank_zero(work, where, logs=logs)]
    dist.broadcast_object_list(results, src=0)
    return results[0]


def run_on_each_rank(work: Callable[[], Result], where: str, *, logs: bool = True) -> Result:
    """Run a function on every rank; it may take longer than the timeout of collectives. A collective.

    Args:
        work: The function; it must not contain collectives of the default group.

    Raises:
        Exception: The function's error, on every rank as in `raise_on_all_ranks`.
    """
    done: Future[Result] | None = None
    if dist.get_world_size() > 1:
        # A single collective would time out, so the ranks synchronize every second while their threads work.
        done, ended = _in_thread(work), threading.Event()
        done.add_done_callback(lambda _: ended.set())
        wait_for_all_ranks(ended)
    results: list[Result] = []
    with raise_on_all_ranks(where, logs=logs):
        results.append(work() if done is None else done.result())
    return results[0]


def _in_thread(work: Callable[[], Result]) -> Future[Result]:
    future: Future[Result] = Future()
    device = torch.cuda.current_device() if torch.cuda.is_initialized() else None  # the current device is per thread

    def run() -> None:
        try:
            if device is not None:
                torch.cuda.set_device(device)
            future.set_result(work())
        except BaseException as error:  # future.result() raises the error again
            future.set_exception(error)

    # Unlike the threads of ThreadPoolExecutor, a daemon thread lets the process exit even if the file system hangs.
    threading.Thread(target=run, name='work that may take long', daemon=True).start()
    return future


def storage_fault(error: BaseException) -> OSError | None:
    """Return the OSError behind an error (possibly the error itself), or None if no storage fault caused it."""
    # torch.save and torch.distributed.checkpoint raise their own errors, with the OSError as cause or context. A
    # UserError may also have an OSError as its cause, but was raised as the user's mistake on purpose. A RankFailed
    # reports another rank's error.
    if isinstance(error, UserError | DataError | ExternalError | RankFailed):
        return None
    if isinstance(error, CheckpointException):
        # Every rank has the same failures, so all ranks make the same decision.
        faults = [storage_fault(each) for each, _ in error.failures.values()]
        return faults[0] if faults and None not in faults else None
    if isinstance(error, OSError):
        return error
    cause = error.__cause__ or error.__context__
    return None if cause is None else storage_fault(cause)
