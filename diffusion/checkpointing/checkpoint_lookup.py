"""Lookup of a run's checkpoints by path or URL, and claims that keep the run from removing them while they are read.

A claim is a file in the run's folder, `.claim-ba500-TOKEN.json`. It names its owner and is rewritten every minute. A
claim is valid while its owner's process exists or, on other machines, while it keeps being rewritten. A file
`ba500.pinned`, with any content, keeps a checkpoint until the file is removed.

This module does not import torch, so that a wrong path is reported within a second.
"""

import contextlib
import json
import logging
import os
import re
import shutil
import threading
import time
from collections.abc import Collection, Iterator
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from diffusion.checkpointing.bucket_checkpoints import download_missing_files, published_batches, read_checked_receipt
from diffusion.checkpointing.checkpoint_store import (
    LATEST,
    RECEIPT,
    RECIPE,
    STATE,
    DamagedCheckpoint,
    batch_number,
    checkpoint_name,
    list_checkpoints,
    parse_receipt,
)
from diffusion.checkpointing.run_mirror import RunMirror
from diffusion.errors import UserError
from diffusion.runs.run_id import RUN_FILE
from diffusion.runs.run_lock import Owner, parse_owner
from diffusion.storage.local_files import open_own_file, working_folder
from diffusion.storage.locks import hold_path_lock
from diffusion.storage.places import LocalPlace, is_url

log = logging.getLogger(__name__)

KEPT_SECONDS = 7 * 24 * 3600.0
"""A downloaded checkpoint unused for this long is removed when another checkpoint of the same run is downloaded."""
RENEWAL_SECONDS = 60.0
"""Interval at which a claim is rewritten."""
LEASE_SECONDS = 600.0
"""A claim from another machine expires if it is not rewritten for this long. The margin allows for clocks that differ
by minutes, on file systems that take times from their clients."""
TRIES = 5
"""Number of attempts to find a run's newest checkpoint while the run removes checkpoints."""
PAUSE_SECONDS = 0.5
"""Wait before a vanished checkpoint with a claim counts as removed: its run may have seen the claim and restore it."""
_CLAIM = re.compile(r'\.claim-ba(\d+)-\w+\.json')
PIN = re.compile(r'ba(\d+)\.pinned')


def find_checkpoint(place: str | Path) -> Path:
    """Return the path of the checkpoint at `place`: a checkpoint folder, or a file of Composer's own saver.

    Args:
        place: Path or URL of a checkpoint. For a run or its `latest`, the newest checkpoint is used, from which the run
            would resume. A checkpoint in an object store is downloaded.

    Raises:
        UserError: The checkpoint does not exist; the message lists the existing ones.
    """
    if is_url(place):
        return download_checkpoint(str(place))
    path = Path(place)
    if (found := local_checkpoint(path)) is not None:
        return found
    folder = path if path.is_dir() else path.parent
    present = [checkpoint.name for checkpoint in list_checkpoints(folder)] if folder.is_dir() else []
    missing = 'it does not exist' if not path.exists() else f'{folder} contains no checkpoint'
    what = f'{folder} contains {", ".join(present[:4])}' if present else missing
    raise UserError(f'checkpoint: {place} is not a checkpoint or a run ({what}); check the path')


def local_checkpoint(path: Path) -> Path | None:
    """Return the checkpoint at a local path, as `find_checkpoint` does, or None if there is none."""
    run = path.parent if path.name == LATEST and path.is_symlink() else path
    if run.is_dir() and batch_number(run) is None and (newest := list_checkpoints(run)[:1]):
        link = run / LATEST
        # If a save is killed between two steps, or if a run is copied, the link may dangle or name an older checkpoint.
        if link.is_symlink() and os.readlink(link) != newest[0].name:
            log.warning('%s points to %s; using the newest checkpoint instead, %s', link, os.readlink(link), newest[0])
        return newest[0]
    for choice in (path, path / LATEST):
        if choice.is_file() or (choice / STATE).is_file():
            return choice.parent / choice.readlink() if choice.is_symlink() else choice
    return None


def run_of_checkpoint(checkpoint: Path) -> Path:
    """Return the folder of the run that a checkpoint belongs to: its parent or grandparent, whichever has a recipe.

    The grandparent is for files that Composer's own saver wrote into a subfolder. If neither has one, it is the parent.
    """
    folder = checkpoint.resolve().parent
    return next((parent for parent in (folder, folder.parent) if (parent / RECIPE).is_file()), folder)


def recipe_of_checkpoint(checkpoint: Path) -> Path:
    """Return the path of the resolved recipe that a checkpoint was trained with, from the checkpoint or from its run.

    Raises:
        UserError: Neither the checkpoint nor its parent or grandparent folder has a recipe.
    """
    for recipe in (checkpoint / RECIPE, run_of_checkpoint(checkpoint) / RECIPE):
        if recipe.is_file():
            return recipe
    folder = checkpoint.resolve().parent
    raise UserError(f'{checkpoint}: there is no {RECIPE} next to it; copy the {RECIPE} of its run to {folder}')


def download_checkpoint(url: str, folders: Collection[str] = ()) -> Path:
    """Return a verified local copy of the checkpoint at a URL, with its run's small files in the parent folder.

    A copy from an earlier call is reused. If the run removes its newest checkpoint during the download, the download is
    repeated with the checkpoint that is newest then.

    Args:
        folders: Additional folders of the run to download, such as snapshots.

    Raises:
        UserError: The checkpoint does not exist, or it is damaged.
        OSError: The store cannot be read, or the local disk is full.
    """
    for _ in range(TRIES):
        run, batch = _checkpoint_of(url.rstrip('/'))
        try:
            return _download(run, batch, folders)
        except DamagedCheckpoint:
            if batch in published_batches(run):
                raise
    raise _removed(url)


def _removed(place: str | Path) -> UserError:
    return UserError(f'checkpoint: {place} was removed by its run {TRIES} times in a row; name another checkpoint')


def _download(run: str, batch: int, folders: Collection[str]) -> Path:
    """Return a verified local copy of a checkpoint of the run at a URL."""
    name = checkpoint_name(batch)
    # Downloads have their own folder, since training removes old checkpoints from its working folder.
    local = working_folder(run, 'downloads')
    checkpoint = local / name
    with hold_path_lock(checkpoint, lambda: None):
        text = read_checked_receipt(f'{run}/{name}')
        checkpoint.mkdir(parents=True, exist_ok=True)
        os.utime(checkpoint)  # marks it as used now
        for path in list_checkpoints(local):
            if time.time() - path.stat().st_mtime > KEPT_SECONDS:
                shutil.rmtree(path, ignore_errors=True)
        download_missing_files(f'{run}/{name}', checkpoint, parse_receipt(text, f'{run}/{name}')['files'])
        (checkpoint / RECEIPT).write_bytes(text)
    with hold_path_lock(local / 'run', lambda: None):
        RunMirror(local, run, exclude=()).pull(folders)
    return checkpoint


def _checkpoint_of(url: str) -> tuple[str, int]:
    """Return a run's URL and the batch of the checkpoint at `url`; the newest one if `url` is the run or `latest`."""
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


@contextlib.contextmanager
def claimed_checkpoint(place: str | Path, purpose: str) -> Iterator[Path]:
    """Find a checkpoint as `find_checkpoint` does, and keep its run from removing it during the `with` block.

    A checkpoint outside a run's folder is not claimed, since nothing removes it.

    Args:
        purpose: Reason for the claim, such as `export`, for people who read the claim.

    Raises:
        UserError: The checkpoint does not exist.
    """
    for _ in range(TRIES):
        checkpoint = find_checkpoint(place)
        with holding_claim(checkpoint, purpose):
            if still_exists(checkpoint):
                yield checkpoint
                return
    raise _removed(place)


def still_exists(checkpoint: Path) -> bool:
    """Return True if a checkpoint that was just claimed still exists, or False if its run has removed it."""
    if not checkpoint.exists():
        # Wait: a run that sees the claim only after renaming the checkpoint renames it back (`retention`).
        time.sleep(PAUSE_SECONDS)
    return checkpoint.exists()


@contextlib.contextmanager
def holding_claim(checkpoint: Path, purpose: str) -> Iterator[None]:
    """Keep a run from removing its checkpoint during the `with` block; no-op for a checkpoint outside a run's folder.

    The checkpoint may have been removed just before, so check inside the block that it exists. If the claim cannot be
    written, a warning is logged.
    """
    if batch_number(checkpoint) is None or not (checkpoint.parent / RUN_FILE).is_file():
        yield
        return
    owner = Owner.current(os.environ)
    path = checkpoint.with_name(f'.claim-{checkpoint.name}-{owner.token}.json')
    content = (json.dumps({'owner': asdict(owner), 'purpose': purpose}) + '\n').encode()
    try:
        _write(path, content, create=True)
    except OSError as error:  # for example, the run belongs to another user
        log.warning('%s: cannot be claimed (%s); its run may remove it while it is read', checkpoint, error)
        yield
        return
    done = threading.Event()
    threading.Thread(target=_renew, args=(path, content, done), daemon=True).start()
    try:
        yield
    finally:
        done.set()
        with suppress(OSError):  # if the claim cannot be removed, it expires
            path.unlink(missing_ok=True)


def _renew(path: Path, content: bytes, done: threading.Event) -> None:
    """Rewrite a claim every minute until `done` is set."""
    while not done.wait(RENEWAL_SECONDS):
        with suppress(OSError):
            _write(path, content, create=False)


def _write(path: Path, content: bytes, *, create: bool) -> None:
    """Write a claim. Unless `create` is True the file must exist, so that a released claim is not restored."""
    # Write in place: a temporary file next to it would look like a leftover of an unfinished save.
    descriptor = open_own_file(path, os.O_WRONLY | (os.O_CREAT if create else 0))
    try:
        os.pwrite(descriptor, content, 0)
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def claimed_batches(folder: Path) -> set[int]:
    """Return the batches of a run's checkpoints that are claimed or pinned, and remove abandoned claims.

    Raises:
        OSError: The folder cannot be read.
    """
    found = set()
    with os.scandir(folder) as entries:
        # Other users may write to the folder: a link, pipe or folder with such a name is not a claim.
        names = [entry.name for entry in entries if entry.is_file(follow_symlinks=False)]
    for name in names:
        if pinned := PIN.fullmatch(name):
            found.add(int(pinned[1]))
        elif claim := _CLAIM.fullmatch(name):
            if _counts(folder / name):
                found.add(int(claim[1]))
            else:
                with suppress(OSError):  # a claim of another user cannot be removed
                    (folder / name).unlink()
    return found


def _counts(claim: Path) -> bool:
    """Return True if a claim's owner exists, or if that is unknown and the claim was rewritten recently."""
    owner = None
    with suppress(OSError, UserError):
        content = LocalPlace(claim.parent, is_run=True).read_version(claim.name)
        owner = None if content is None else parse_owner(content.content.decode(errors='replace'))
    is_alive = None if owner is None else owner.is_alive()
    if is_alive is not None:
        return is_alive
    # Compare the claim's time with the folder's: a file server sets both, so the machines' clocks do not matter. The
    # folder's time is that of the last save; if it was long ago, the claim is only kept longer.
    with suppress(FileNotFoundError):
        return claim.parent.stat().st_mtime - claim.stat().st_mtime < LEASE_SECONDS
    return False
