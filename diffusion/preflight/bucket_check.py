"""Checks of the object store that is the home of a run: conditional writes, one store for all nodes, upload speed."""

import os
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import uuid4

import torch.distributed as dist

from diffusion.errors import UserError
from diffusion.exit_codes import CONFIG_ERROR, FAILED
from diffusion.launch import environment
from diffusion.launch.findings import Finding
from diffusion.storage import object_store
from diffusion.storage.retry import PreconditionFailed, RetryPolicy

RETRY = RetryPolicy(tries=3, timeout_seconds=60.0)
CHUNK_BYTES = 2**24
GROWTH = 4
"""Factor from the size of one measured upload to that of the next."""


def check_bucket(url: str) -> Iterator[Finding]:
    """Check that this node can write, read and delete objects below the URL of a run, and that conditions hold."""
    marker, content = _marker(url), uuid4().hex.encode()
    try:
        object_store.write(marker, content, if_absent=True, retry=RETRY)
        same, tag = object_store.read(marker, retry=RETRY) == content, object_store.head(marker, retry=RETRY).tag
        refusals = {'If-None-Match': _refuses(marker, if_absent=True), 'If-Match': _refuses(marker, if_tag=f'{tag}0')}
        ignored = [name for name, refused in refusals.items() if not refused]
        # If the store ignored a condition, the object has another tag than `tag`.
        accepts = ignored or not _refuses(marker, if_tag=tag)
        object_store.delete(marker, retry=RETRY)
    except (OSError, UserError) as error:
        yield Finding('bucket', False, str(error), FAILED)
        return
    if ignored or not accepts:
        what = f'ignores {" and ".join(ignored)}' if ignored else 'refuses If-Match with the etag that it returns'
        detail = (
            f'{url}: the store {what}, so the lock of a run does not work, and two jobs could train it; update the '
            'store, or set runs_dir to another one'
        )
        yield Finding('bucket', False, detail, CONFIG_ERROR)
        return
    if same:
        yield Finding('bucket', True, f'{url}: conditional writes, reading and deleting work')
    else:
        yield Finding('bucket', False, f'{url}: an object reads back other data than was written', FAILED)


def check_same_store(url: str) -> list[Finding]:
    """Let every node read an object of the first one; all ranks return the same findings; a collective."""
    marker = [_marker(url)]
    problem: str | None = None
    if dist.get_rank() == 0:
        try:
            object_store.write(marker[0], b'preflight', retry=RETRY)
        except (OSError, UserError) as error:
            problem, marker = str(error), ['']
    dist.broadcast_object_list(marker, src=0)
    if os.environ['LOCAL_RANK'] == '0' and dist.get_rank() and marker[0]:
        try:
            object_store.read(marker[0], retry=RETRY)
        except (OSError, UserError) as error:
            problem = f'an object that the first node has written cannot be read ({error}); set the same '
            problem += 'S3_ENDPOINT_URL and credentials on all nodes'
    problems: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(problems, (environment.machine_name(os.environ), problem))
    if dist.get_rank() == 0 and marker[0]:
        with suppress(OSError, UserError):
            object_store.delete(marker[0], retry=RETRY)
    failed = [Finding('same store', False, what, FAILED, host) for host, what in problems if what]
    return failed or [Finding('same store', True, f'{url}: all nodes reach the same objects')]


def _refuses(marker: str, *, if_absent: bool = False, if_tag: str | None = None) -> bool:
    """Return True if the store refuses to write an object, because a condition does not hold."""
    try:
        object_store.write(marker, uuid4().hex.encode(), if_absent=if_absent, if_tag=if_tag, retry=RETRY)
    except PreconditionFailed:
        return True
    return False


def measure_upload_speed(url: str, folder: Path, seconds: float, most_bytes: int) -> float:
    """Return the bytes/s at which this process uploads a file, which is deleted again, below a URL.

    The size grows until an upload takes half of the time: a large file is uploaded in parts in parallel, as a
    checkpoint is.

    Args:
        folder: Local folder for the file.
        seconds: Approximate time to measure.
        most_bytes: Upper bound of the file's size.

    Raises:
        OSError: The file or the object cannot be written.
        UserError: The store refuses the request.
    """
    marker, path = _marker(url), folder / f'.preflight-{uuid4().hex[:8]}'
    size, written, speed = CHUNK_BYTES, 0, 0.0
    try:
        while True:
            with path.open('ab') as file:
                while written < size:
                    written += file.write(os.urandom(CHUNK_BYTES))
            begin = time.monotonic()
            object_store.write(marker, path, retry=RETRY)
            elapsed = time.monotonic() - begin
            speed = size / max(elapsed, 1e-6)
            if elapsed > seconds / 2 or size * GROWTH > most_bytes:
                return speed
            size *= GROWTH
    finally:
        path.unlink(missing_ok=True)
        with suppress(OSError, UserError):
            object_store.delete(marker, retry=RETRY)


def _marker(url: str) -> str:
    """Return the URL of a new object; the name is unique, since all nodes check at the same time."""
    return f'{url}/.preflight-{environment.machine_name(os.environ)}-{uuid4().hex[:8]}'
