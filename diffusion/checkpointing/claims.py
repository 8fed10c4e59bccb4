"""Claims on checkpoints: a run does not remove a checkpoint while another process reads it.

A claim is a file in the run's folder, `.claim-ba500-TOKEN.json`. It holds its owner and is rewritten every minute. It
counts while its owner's process exists or, on other machines, while it is rewritten. A file `ba500.pinned`, whatever
its content, keeps a checkpoint until the file is removed.
"""

import contextlib
import json
import logging
import os
import re
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from diffusion.checkpointing.checkpoint_store import batch_number
from diffusion.checkpointing.run_folder import find_checkpoint
from diffusion.errors import UserError
from diffusion.runs.run_id import RUN_FILE
from diffusion.runs.run_lock import Owner, parse_owner
from diffusion.storage.own_files import open_own_file
from diffusion.storage.places import LocalPlace

log = logging.getLogger(__name__)

RENEWAL_SECONDS = 60.0
"""Time after which a claim is rewritten."""
LEASE_SECONDS = 600.0
"""A claim of a process on another machine expires if it is not rewritten for this long. That allows for clocks that
differ by minutes on file systems that take times from their clients."""
TRIES = 5
"""Number of searches for a run's newest checkpoint while the run removes checkpoints."""
PAUSE_SECONDS = 0.5
"""Time that a run needs to put back a checkpoint that it was about to remove."""
_CLAIM = re.compile(r'\.claim-ba(\d+)-\w+\.json')
PIN = re.compile(r'ba(\d+)\.pinned')


@contextlib.contextmanager
def claimed_checkpoint(place: str | Path, purpose: str) -> Iterator[Path]:
    """Find a checkpoint as `find_checkpoint` does, and keep its run from removing it inside the block.

    A checkpoint that is not in the folder of a run is not claimed, since nothing removes it.

    Args:
        place: Path of a checkpoint, or of a run's folder for its newest checkpoint.
        purpose: The reason, such as `export`, for people who read the claim.

    Raises:
        UserError: There is no such checkpoint.
    """
    for _ in range(TRIES):
        checkpoint = find_checkpoint(place)
        with holding_claim(checkpoint, purpose):
            if still_exists(checkpoint):
                yield checkpoint
                return
    raise UserError(f'checkpoint: {place} was removed by its run {TRIES} times in a row; name another checkpoint')


def still_exists(checkpoint: Path) -> bool:
    """Return True if a checkpoint that has just been claimed exists; False if its run has removed it."""
    if not checkpoint.exists():
        # A run that sees a claim only after it has renamed the checkpoint puts it back (`retention`).
        time.sleep(PAUSE_SECONDS)
    return checkpoint.exists()


@contextlib.contextmanager
def holding_claim(checkpoint: Path, purpose: str) -> Iterator[None]:
    """Keep a run from removing its checkpoint inside the block; do nothing for one that is not in the folder of a run.

    The checkpoint may have been removed just before, so look whether it exists after the block has begun.
    """
    if batch_number(checkpoint) is None or not (checkpoint.parent / RUN_FILE).is_file():
        yield
        return
    owner = Owner.current(os.environ)
    path = checkpoint.with_name(f'.claim-{checkpoint.name}-{owner.token}.json')
    content = (json.dumps({'owner': asdict(owner), 'purpose': purpose}) + '\n').encode()
    try:
        _write(path, content, create=True)
    except OSError as error:  # another user's run, for example
        log.warning('%s: cannot be claimed (%s); its run may remove it while it is read', checkpoint, error)
        yield
        return
    done = threading.Event()
    thread = threading.Thread(target=_renew, args=(path, content, done), daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        with suppress(OSError):  # the claim expires by itself
            path.unlink(missing_ok=True)


def _renew(path: Path, content: bytes, done: threading.Event) -> None:
    """Rewrite a claim every minute until `done`."""
    while not done.wait(RENEWAL_SECONDS):
        with suppress(OSError):
            _write(path, content, create=False)


def _write(path: Path, content: bytes, *, create: bool) -> None:
    """Write a claim; without `create`, the file must exist, so that a claim that was released does not come back."""
    # Write in place: a temporary file beside it would look like one that an unfinished save has left.
    descriptor = open_own_file(path, os.O_WRONLY | (os.O_CREAT if create else 0))
    try:
        os.pwrite(descriptor, content, 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def claimed_batches(folder: Path) -> set[int]:
    """Return the batches of a run's checkpoints that are claimed or pinned; remove claims that no longer count.

    Raises:
        OSError: The folder cannot be read.
    """
    found = set()
    with os.scandir(folder) as entries:
        # Other users may write to the folder: a link, a pipe or a folder with such a name is not a claim.
        names = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
    for name in names:
        if pinned := PIN.fullmatch(name):
            found.add(int(pinned[1]))
        elif claim := _CLAIM.fullmatch(name):
            if _counts(folder / name):
                found.add(int(claim[1]))
            else:
                with suppress(OSError):  # another user's claim
                    (folder / name).unlink()
    return found


def _counts(claim: Path) -> bool:
    """Return True if the owner of a claim exists, or if that is unknown and the claim was rewritten recently."""
    owner = None
    with suppress(OSError, UserError):
        content = LocalPlace(claim.parent, is_run=True).read_version(claim.name)
        owner = None if content is None else parse_owner(content.content.decode(errors='replace'))
    is_alive = None if owner is None else owner.is_alive()
    if is_alive is not None:
        return is_alive
    # Both times come from the file server's clock, if it sets them, so that the machines' clocks do not matter. The
    # folder's time is that of the last save; an earlier one would only keep a claim for longer.
    with suppress(FileNotFoundError):
        return claim.parent.stat().st_mtime - claim.stat().st_mtime < LEASE_SECONDS
    return False
