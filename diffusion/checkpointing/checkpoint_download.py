"""Download of a checkpoint from an object store for programs that read it: evaluation, export, generation."""

import os
import shutil
import time
from collections.abc import Collection
from pathlib import Path

from diffusion.checkpointing.bucket_checkpoints import download_missing_files, published_batches, read_checked_receipt
from diffusion.checkpointing.checkpoint_store import (
    LATEST,
    RECEIPT,
    DamagedCheckpoint,
    batch_number,
    checkpoint_name,
    list_checkpoints,
    parse_receipt,
)
from diffusion.checkpointing.run_mirror import RunMirror
from diffusion.errors import UserError
from diffusion.storage.locks import hold_path_lock
from diffusion.storage.working_folder import working_folder

TRIES = 5
"""Number of searches for the newest checkpoint while its run removes checkpoints."""
KEPT_SECONDS = 7 * 24 * 3600.0
"""A downloaded checkpoint that is not used for this long is removed when another one of its run is downloaded."""


def download_checkpoint(url: str, folders: Collection[str] = ()) -> Path:
    """Return a local copy of the checkpoint at a URL, verified, with the small files of its run in the folder above.

    A copy from an earlier call is used again. If the run removes its newest checkpoint during the download, the
    checkpoint that is then the newest is downloaded.

    Args:
        url: URL of a checkpoint, or of a run or its `latest` to use the newest checkpoint.
        folders: Folders of the run to download too, such as snapshots.

    Raises:
        UserError: There is no such checkpoint, or it is damaged.
        OSError: The store cannot be read, or the local disk is full.
    """
    for _ in range(TRIES):
        run, batch = _checkpoint_of(url.rstrip('/'))
        try:
            return _download(run, batch, folders)
        except DamagedCheckpoint:
            if batch in published_batches(run):
                raise
    raise UserError(f'checkpoint: {url} was removed by its run {TRIES} times in a row; name another checkpoint')


def _download(run: str, batch: int, folders: Collection[str]) -> Path:
    """Return a local copy of a checkpoint of the run at a URL, verified."""
    name = checkpoint_name(batch)
    # Training removes old checkpoints from its working folder, so downloads have a folder of their own.
    local = working_folder(run, 'downloads')
    checkpoint = local / name
    with hold_path_lock(checkpoint, lambda: None):
        text = read_checked_receipt(f'{run}/{name}')
        checkpoint.mkdir(parents=True, exist_ok=True)
        _remove_unused(local, checkpoint)
        download_missing_files(f'{run}/{name}', checkpoint, parse_receipt(text, f'{run}/{name}')['files'])
        (checkpoint / RECEIPT).write_bytes(text)
    with hold_path_lock(local / 'run', lambda: None):
        RunMirror(local, run, exclude=()).pull(folders)
    return checkpoint


def _checkpoint_of(url: str) -> tuple[str, int]:
    """Return the URL of the run and the batch of the checkpoint at a URL."""
    parent, _, name = url.rpartition('/')
    batch = batch_number(Path(name))
    run = parent if batch is not None or name == LATEST else url
    batches = published_batches(run)
    if batch is None and batches:
        return run, batches[0]
    if batch in batches:
        return run, batch
    found = ', '.join(checkpoint_name(each) for each in batches[:4]) or 'no checkpoint'
    raise UserError(f'checkpoint: {url} is not a checkpoint or a run ({run} contains {found}); check the URL')


def _remove_unused(local: Path, used: Path) -> None:
    """Remove downloaded checkpoints that have not been used for a while, and note the use of this one."""
    os.utime(used)
    for path in list_checkpoints(local):
        if time.time() - path.stat().st_mtime > KEPT_SECONDS:
            shutil.rmtree(path, ignore_errors=True)
