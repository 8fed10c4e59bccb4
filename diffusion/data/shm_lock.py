"""One job at a time on a machine may register its datasets in shared memory."""

import contextlib
import logging
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from composer.utils import dist

from diffusion.storage import locks

log = logging.getLogger(__name__)

LOCK = Path(tempfile.gettempdir()) / 'diffusion-streaming.lock'
PATIENCE_SECONDS = 15.0
"""Longest wait for another job: enough for local data, and a job that hangs must not hold up the others."""


@contextlib.contextmanager
def one_job_at_a_time() -> Iterator[None]:
    """Hold the machine's lock while a dataset is made.

    Streaming looks for a free name in shared memory and takes it later, each rank for itself: of two jobs that start
    on one machine at the same moment, one dies of `FileExistsError`, or its ranks disagree on the name.
    """
    with contextlib.ExitStack() as stack:
        if dist.get_local_rank() == 0:
            try:
                # The file stays: one of another user in /tmp cannot be removed.
                stack.enter_context(locks.held(LOCK, _patience()))
            except TimeoutError:
                log.warning('%s: held by another job for %d s; going on without it', LOCK, PATIENCE_SECONDS)
            except OSError as error:
                log.warning('%s: cannot be opened (%s); going on without a lock among jobs', LOCK, error)
        dist.barrier()
        yield


def _patience() -> Callable[[], None]:
    deadline = time.monotonic() + PATIENCE_SECONDS

    def wait() -> None:
        if time.monotonic() > deadline:
            raise TimeoutError

    return wait
