"""Download of a checkpoint's files from an object store, verified against the receipt, several files at a time."""

import logging
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from composer.utils import dist

from diffusion.checkpointing.checkpoint_store import INDEX, RECIPE, STATE, DamagedCheckpoint, FileRecord, hash_file
from diffusion.errors import UserError
from diffusion.storage import object_store
from diffusion.storage.locks import hold_path_lock
from diffusion.storage.retry import status_of

log = logging.getLogger(__name__)

FILES_AT_ONCE = 8
DOWNLOADS = 2
"""Number of downloads of an object whose content does not match the receipt, before it counts as damaged."""


@dataclass(frozen=True)
class Brought:
    """A file that was made available: its size, and whether it had to be downloaded."""

    bytes: int
    downloaded: bool


def files_of_rank(receipt: Mapping[str, Any]) -> dict[str, FileRecord]:
    """Return the files of a checkpoint that this rank brings to its node, which together are all files that loading
    needs, and verify the whole checkpoint.

    Of a sharded checkpoint, a node needs the shards of its ranks, and of rank 0, which has the tensors that are not
    sharded. If the number of ranks has changed, the shards are only verified here, by one rank each; which of them a
    rank reads is known when the model is built (`sharded_state.read_tensors`).

    Args:
        receipt: Content of the receipt.
    """
    files: dict[str, FileRecord] = receipt['files']
    rank, local_rank, local_ranks = dist.get_global_rank(), dist.get_local_rank(), dist.get_local_world_size()
    largest_first = sorted(files, key=lambda name: (-files[name].bytes, name))
    if receipt.get('kind') != 'sharded':
        names = largest_first[local_rank::local_ranks]
    else:
        common = {STATE, INDEX, RECIPE}
        if receipt.get('world_size') == dist.get_world_size():
            common |= {name for name in files if name.startswith('__0_')}
            names = [name for name in files if name.startswith(f'__{rank}_')]
        else:
            shards = [name for name in largest_first if name not in common]
            names = shards[rank :: dist.get_world_size()]
        names += [name for name in files if name in common and local_rank == 0 and name not in names]
    return {name: files[name] for name in names}


def bring_files(url: str, folder: Path, files: Mapping[str, FileRecord]) -> None:
    """Make files of a checkpoint available in a local folder, verified; files that are intact there are not downloaded.

    Args:
        url: URL of the checkpoint.
        folder: The local folder.
        files: Expected size and hash of the files by name.

    Raises:
        DamagedCheckpoint: An object is missing or damaged.
        UserError: The store refuses access.
        OSError: The store cannot be read, or the local disk is full.
    """
    begin = time.monotonic()
    with ThreadPoolExecutor(FILES_AT_ONCE) as pool:
        try:
            brought = list(pool.map(lambda name: _bring(f'{url}/{name}', folder / name, files[name]), files))
        finally:
            pool.shutdown(cancel_futures=True)
    downloaded = [each.bytes for each in brought if each.downloaded]
    if dist.get_global_rank() == 0 and brought:
        message = '%s: %d of %d files were on the local disk, %d (%.3g GB) downloaded in %.1f s'
        seconds = time.monotonic() - begin
        log.info(
            message, url, len(brought) - len(downloaded), len(brought), len(downloaded), sum(downloaded) / 1e9, seconds
        )


def _bring(url: str, path: Path, expected: FileRecord) -> Brought:
    """Make a file available at a local path; return whether it was downloaded."""
    # The ranks of a node may want the same file.
    with hold_path_lock(path, lambda: None):
        if path.is_file() and path.stat().st_size == expected.bytes and hash_file(path) == expected:
            return Brought(expected.bytes, downloaded=False)
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
                return Brought(expected.bytes, downloaded=True)
        unfinished.unlink(missing_ok=True)
    raise DamagedCheckpoint(f'{url}: the content has changed since it was written (xxh3_128 differs)')
