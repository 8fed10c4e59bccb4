"""Let one job per machine at a time choose its datasets' names in shared memory, the same on all of its ranks."""

import contextlib
import logging
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from composer.utils import dist
from streaming.base.shared import prefix

from diffusion.compatibility.private_names import private_attribute, set_private_attribute
from diffusion.storage import locks

log = logging.getLogger(__name__)

SHM = Path('/dev/shm')
LOCK = Path(tempfile.gettempdir()) / 'diffusion-streaming.lock'
TIMEOUT_SECONDS = 15.0
"""Maximum wait for another job: long enough to open local data, and short enough if the other job hangs."""


@contextlib.contextmanager
def one_job_at_a_time() -> Iterator[None]:
    """Hold a lock of this machine while the block creates a dataset; a collective call.

    If the lock cannot be taken, a warning is logged and the block runs without the lock.
    """
    # Streaming's get_shm_prefix() looks for a free name in shared memory on each rank and claims it only afterwards. If
    # two jobs start on one machine at the same time, one fails with `FileExistsError`. If the names of a killed job
    # vanish during the search, as when ranks restart, the ranks find different ones. Streaming also takes a name if a
    # killed job has left only some of its files in shared memory: the position of a resumed job among them would make
    # the new job skip the beginning of its data. Remove this module when Streaming claims an unused name in one step.
    with contextlib.ExitStack() as stack:
        if dist.get_local_rank() == 0:
            try:
                # Do not remove the lock file afterwards: /tmp is sticky, so another user could not.
                stack.enter_context(locks.hold_lock(LOCK, _wait_until_timeout()))
            except TimeoutError:
                log.warning('%s: held by another job for %d s; continuing without the lock', LOCK, TIMEOUT_SECONDS)
            except OSError as error:
                log.warning('%s: cannot be opened (%s); continuing without the lock', LOCK, error)
        # One rank per machine takes the lock; the others wait here until it holds the lock.
        dist.barrier()
        with _unused_name_on_all_ranks():
            yield


@contextlib.contextmanager
def _unused_name_on_all_ranks() -> Iterator[None]:
    """Let Streaming use, on all ranks of a machine, the largest of the unused numbers that they have found."""
    find, machine = private_attribute(prefix, '_check_and_find_retrying'), os.uname().nodename

    def agreed(*arguments: Any, **settings: Any) -> int:
        error: ValueError | None = None
        number = -1
        try:
            number = _unused(find(*arguments, **settings))
        except ValueError as caught:  # another dataset of this machine uses the local folder
            error = caught
        found = dist.all_gather_object((machine, number))
        if error is not None:
            raise error
        return max(each for place, each in found if place == machine)

    set_private_attribute(prefix, '_check_and_find_retrying', agreed)
    try:
        yield
    finally:
        set_private_attribute(prefix, '_check_and_find_retrying', find)


def _unused(number: int) -> int:
    """Return the first number, from this one on, that is not the prefix of a file in shared memory."""
    used = {path.name[:6] for path in SHM.glob('[0-9]' * 6 + '_*')}
    while f'{number:06}' in used:
        number += 1
    return number


def _wait_until_timeout() -> Callable[[], None]:
    """Return a function that raises TimeoutError once TIMEOUT_SECONDS have passed."""
    deadline = time.monotonic() + TIMEOUT_SECONDS

    def wait() -> None:
        if time.monotonic() > deadline:
            raise TimeoutError

    return wait
