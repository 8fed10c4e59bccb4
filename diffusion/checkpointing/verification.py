"""Verification of checkpoints against their receipts, and the choice of the checkpoint to resume from."""

import logging
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from diffusion.checkpointing import checkpoint_store
from diffusion.checkpointing.checkpoint_store import DamagedCheckpoint, FileRecord, read_receipt, read_with_retries
from diffusion.checkpointing.sharded_state import data_files
from diffusion.errors import UserError
from diffusion.runs.run_id import check_run_id

log = logging.getLogger(__name__)

FILES_AT_ONCE = 8
"""Number of files of a checkpoint that are read at the same time."""


def verify_checkpoint(checkpoint: Path) -> None:
    """Check every file of a checkpoint against its receipt; reads all data, several files at a time.

    Raises:
        DamagedCheckpoint: A file is damaged; the message has its path and the difference.
        OSError: A file cannot be read after several tries, which does not mean that it is damaged.
    """
    receipt = read_with_retries(lambda: read_receipt(checkpoint))

    def check(name: str) -> None:
        read_with_retries(lambda: _check_file(checkpoint / name, receipt['files'][name]))

    # xxhash and reads release the interpreter's lock. The first failure ends the check: files that no thread has begun
    # are not read.
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        try:
            for _ in pool.map(check, receipt['files']):
                pass
        finally:
            pool.shutdown(cancel_futures=True)
    if checkpoint_store.INDEX in receipt['files']:
        missing = sorted(read_with_retries(lambda: data_files(checkpoint)) - receipt['files'].keys())
        if missing:
            raise DamagedCheckpoint(
                f'{checkpoint / checkpoint_store.RECEIPT}: does not list {missing[0]}, which its index names'
            )


def _check_file(path: Path, expected: FileRecord) -> None:
    """Raise DamagedCheckpoint if a file is missing, or has another size or hash than expected."""
    try:
        # Ask the open file for its size: a network file system asks its server at an open, but stat() may be cached.
        with path.open('rb') as file:
            size = os.fstat(file.fileno()).st_size
        if size != expected.bytes:
            raise DamagedCheckpoint(f'{path}: {size} bytes, expected {expected.bytes}')
        if checkpoint_store.hash_file(path) != expected:
            raise DamagedCheckpoint(f'{path}: the content has changed since it was written (xxh3_128 differs)')
    except FileNotFoundError as error:
        if not path.parent.is_dir():
            raise  # the whole folder has vanished, which is a fault of the file system
        raise DamagedCheckpoint(f'{path}: the file does not exist') from error


def newest_intact(folder: Path, run_id: str = '') -> Path | None:
    """Return a run's newest undamaged checkpoint, or None if it has no checkpoints.

    Args:
        run_id: The run's id; empty accepts the checkpoints of any run.

    Raises:
        UserError: All of the run's checkpoints are damaged, or the newest is a checkpoint of another run.
        OSError: A checkpoint cannot be read after several tries, or `folder` is no longer the run's folder.
    """
    damages = []
    for checkpoint in read_with_retries(lambda: checkpoint_store.list_checkpoints(folder)):
        # Only damage is skipped. An OSError ends the run with status 1: after a transient error of the file system, a
        # restart resumes from this checkpoint instead of repeating hours of work from an older one.
        try:
            found = read_with_retries(lambda checkpoint=checkpoint: read_receipt(checkpoint)).get('run')
            if run_id and found and found != run_id:
                raise UserError(
                    f'{checkpoint}: it is of another run (id {found}, this run has {run_id}); move it out of the '
                    f'folder, or start a new run from its weights with init_from: {checkpoint}'
                )
            verify_checkpoint(checkpoint)
        except DamagedCheckpoint as error:
            damages.append(str(error))
            log.warning('damaged checkpoint, trying an earlier one: %s', error)
            continue
        return checkpoint
    # Never start from scratch here: the run would overwrite checkpoints that may be repairable.
    if damages:
        if run_id:
            check_run_id(folder, run_id)  # raises if the file system has vanished, which is not damage
        raise UserError(
            f'{folder}: all {len(damages)} checkpoints are damaged: {"; ".join(damages[:3])}; '
            'restore one from a backup, or change the name of the run to start over'
        )
    return None
