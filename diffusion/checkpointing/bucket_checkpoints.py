"""Checkpoints in an object store: list, verify, download and delete them. Imports neither torch nor Composer."""

import logging
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from diffusion.checkpointing.checkpoint_store import (
    RECEIPT,
    DamagedCheckpoint,
    FileRecord,
    batch_number,
    checkpoint_name,
    hash_file,
    parse_receipt,
)
from diffusion.errors import UserError
from diffusion.storage import object_store
from diffusion.storage.locks import hold_path_lock
from diffusion.storage.places import StorePlace
from diffusion.storage.retry import status_of

log = logging.getLogger(__name__)

DAMAGED_RECEIPT = 'receipt.damaged.json'
"""Name to which a damaged checkpoint's receipt is renamed; other objects stay until that batch is saved again."""
FILES_AT_ONCE = 8
REQUESTS_AT_ONCE = 16
DOWNLOADS = 2
"""Number of times an object is downloaded before a mismatch with the receipt counts as damage."""


def published_batches(url: str) -> list[int]:
    """Return the batch numbers of the complete checkpoints (those with a receipt) of the run at a URL, newest first."""
    return sorted((batch for batch, names in object_names(url).items() if RECEIPT in names), reverse=True)


def object_names(url: str) -> dict[int, set[str]]:
    """Return the object names of each checkpoint of a run, complete or not, by batch."""
    # List each checkpoint separately and in parallel: a listing of all objects would be fetched one page of 1000 at a
    # time.
    batches = [batch_number(Path(key)) for key in object_store.list_folder(url)[0]]
    found = [batch for batch in batches if batch is not None]
    with ThreadPoolExecutor(REQUESTS_AT_ONCE) as pool:
        names = pool.map(lambda batch: set(StorePlace(f'{url}/{checkpoint_name(batch)}').sizes()), found)
        return dict(zip(found, names, strict=True))


def read_checked_receipt(url: str, run_id: str = '') -> bytes:
    """Check that a store has all objects of a checkpoint with the right sizes, and return the checkpoint's receipt.

    Raises:
        DamagedCheckpoint: The receipt is damaged, or an object is missing or has another size.
        UserError: The checkpoint belongs to another run than `run_id` (not checked if either id is unknown).
    """
    text = StorePlace(url).read(RECEIPT)
    if text is None:
        raise DamagedCheckpoint(f'{url}: {RECEIPT} is missing')
    receipt = parse_receipt(text, url)
    if run_id and receipt.get('run') and receipt['run'] != run_id:
        raise UserError(
            f'{url}: it belongs to another run (id {receipt["run"]}, this run has {run_id}); move it away, or start a '
            f'new run from its weights with init_from: {url}'
        )
    sizes = StorePlace(url).sizes()
    for name, record in receipt['files'].items():
        if sizes.get(name) != record.bytes:
            found = f'{sizes[name]} bytes, expected {record.bytes}' if name in sizes else 'the object does not exist'
            raise DamagedCheckpoint(f'{url}/{name}: {found}')
    return text


def delete_checkpoint(url: str) -> None:
    """Delete a checkpoint in a store: its receipt first, so that a partial checkpoint never looks complete."""
    place = StorePlace(url)
    names = place.sizes().keys()
    place.delete(names & {RECEIPT})
    place.delete(names - {RECEIPT})


def download_missing_files(url: str, folder: Path, files: Mapping[str, FileRecord]) -> None:
    """Download a checkpoint's files into a local folder and verify them; intact local files are kept.

    Raises:
        DamagedCheckpoint: An object is missing or damaged.
        UserError: The store refuses access.
        OSError: The store cannot be read, or the local disk is full.
    """
    begin = time.monotonic()
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        try:
            found = list(pool.map(lambda name: _download_missing(f'{url}/{name}', folder / name, files[name]), files))
        finally:
            pool.shutdown(cancel_futures=True)
    downloaded = [size for size in found if size is not None]
    # Only rank 0 shows this: other ranks only log warnings and errors.
    log.info(
        '%s: %d files from the local disk, %d (%.3g GB) downloaded in %.1f s',
        *(url, len(found) - len(downloaded), len(downloaded), sum(downloaded) / 1e9, time.monotonic() - begin),
    )


def _download_missing(url: str, path: Path, expected: FileRecord) -> int | None:
    """Ensure that a local file is present and intact; return the number of downloaded bytes, None if it was intact."""
    # Lock the path, since several ranks of a node may want the same file.
    with hold_path_lock(path, lambda: None):
        if path.is_file() and path.stat().st_size == expected.bytes and hash_file(path) == expected:
            return None
        unfinished = path.with_name(f'.{path.name}.unfinished')
        for _ in range(DOWNLOADS):
            try:
                object_store.download(url, unfinished, size=expected.bytes)
            except UserError as error:
                if status_of(error) == 404:
                    raise DamagedCheckpoint(f'{url}: the object does not exist') from error
                raise
            if hash_file(unfinished) == expected:
                os.replace(unfinished, path)
                return expected.bytes
        unfinished.unlink(missing_ok=True)
    raise DamagedCheckpoint(f'{url}: the content has changed since it was written (xxh3_128 differs)')
