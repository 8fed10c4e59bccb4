"""Checkpoints on disk: there whole or not at all, and checked before they are trusted.

A run's folder holds ba100/, ba200/, ... and `latest`, a link to the newest. A checkpoint is written under a temporary
name and flushed to disk, with a receipt that has the size and hash of each of its files; then it is renamed, and only
then does `latest` move. So a checkpoint with its own name was whole once, and one that disagrees with its receipt was
damaged since.
"""

import json
import logging
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import xxhash

from diffusion.errors import UserError
from diffusion.storage.atomic import UNFINISHED, remove, replace_folder, sync_folder

log = logging.getLogger(__name__)

STATE = 'state.pt'
"""Everything but sharded tensors, in Composer's own form."""
RECEIPT = 'receipt.json'
LATEST = 'latest'
VERSION = 1
_CHUNK = 16 * 2**20


@dataclass(frozen=True)
class FileRecord:
    """What a file should be."""

    bytes: int
    xxh3_128: str


class HashingWriter:
    """A binary file that hashes what is written to it, on the way."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = xxhash.xxh3_128()
        self._bytes = 0

    def write(self, data: bytes) -> int:
        self._hash.update(data)
        self._bytes += len(data)
        return self._file.write(data)

    def flush(self) -> None:
        self._file.flush()

    def record(self) -> FileRecord:
        """Of all that was written."""
        return FileRecord(self._bytes, self._hash.hexdigest())


def record_of(path: Path) -> FileRecord:
    """Size and hash of a file as it is on disk."""
    digest, size = xxhash.xxh3_128(), 0
    with path.open('rb') as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
            size += len(chunk)
    return FileRecord(size, digest.hexdigest())


def name_of(batch: int) -> str:
    """The name of the checkpoint after so many batches."""
    return f'ba{batch}'


def batch_of(path: Path) -> int | None:
    """The batch in a checkpoint's name, or None for another name."""
    found = re.fullmatch(r'ba(\d+)', path.name)
    return int(found[1]) if found else None


def unfinished(folder: Path, batch: int) -> Path:
    """Where a checkpoint is written before it has its name."""
    return folder / f'.{name_of(batch)}.unfinished'


def list_checkpoints(folder: Path) -> list[Path]:
    """A run's checkpoints, newest first."""
    found = [path for path in folder.glob('ba*') if path.is_dir() and batch_of(path) is not None]
    return sorted(found, key=lambda path: batch_of(path) or 0, reverse=True)


def publish(work: Path, final: Path, files: Mapping[str, FileRecord], about: Mapping[str, Any]) -> None:
    """Give a written checkpoint its receipt and its name, and move `latest` to it.

    Args:
        work: The temporary folder; its files are flushed already.
        final: The name; what is there is replaced.
        files: What each file should be.
        about: What else the receipt says.
    """
    content = {'version': VERSION, **about, 'files': {name: asdict(record) for name, record in sorted(files.items())}}
    receipt = work / RECEIPT
    with receipt.open('w', encoding='utf-8') as file:
        json.dump(content, file, indent=2)
        flush(file)
    replace_folder(work, final)
    link = final.parent / f'.{LATEST}.unfinished'
    link.unlink(missing_ok=True)
    link.symlink_to(final.name)
    os.replace(link, final.parent / LATEST)
    sync_folder(final.parent)


def receipt_of(checkpoint: Path) -> dict[str, Any]:
    """What a checkpoint's receipt says.

    Raises:
        UserError: There is none, or it can't be read.
    """
    try:
        content = json.loads((checkpoint / RECEIPT).read_text(encoding='utf-8'))
        if content['version'] != VERSION:
            raise UserError(f'{checkpoint}: its receipt is of version {content["version"]}, this is {VERSION}')
        return content | {'files': {name: FileRecord(**record) for name, record in content['files'].items()}}
    except FileNotFoundError as error:
        raise UserError(f'{checkpoint}: it has no {RECEIPT}') from error
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise UserError(f'{checkpoint / RECEIPT}: not a receipt ({error})') from error


def check_whole(checkpoint: Path) -> None:
    """Compare a checkpoint with its receipt, file by file; reads all of it.

    Raises:
        UserError: It is damaged; says which file and how.
    """
    for name, expected in receipt_of(checkpoint)['files'].items():
        path = checkpoint / name
        try:
            size = path.stat().st_size
            if size != expected.bytes:
                raise UserError(f'{path}: {size} bytes, {expected.bytes} were written')
            if record_of(path) != expected:
                raise UserError(f'{path}: its content is not what was written (xxh3_128 differs)')
        except OSError as error:
            raise UserError(f'{path}: not readable ({error.strerror})') from error


def newest_whole(folder: Path) -> Path | None:
    """A run's newest checkpoint that is whole, or None for a run that has saved none.

    Raises:
        UserError: There are checkpoints, and all are damaged.
    """
    damages = []
    for checkpoint in list_checkpoints(folder):
        try:
            check_whole(checkpoint)
        except ValueError as error:
            damages.append(str(error))
            log.warning('damaged checkpoint, looking for an earlier one: %s', error)
            continue
        return checkpoint
    if damages:
        raise UserError(
            f'{folder}: none of its {len(damages)} checkpoints is whole: {"; ".join(damages[:3])}; '
            'restore one from a copy, or give the run another name to start anew'
        )
    return None


def set_aside(folder: Path, newest: Path | None) -> None:
    """Rename checkpoints newer than the one a run goes on from, which are damaged, so that nothing counts them."""
    for path in list_checkpoints(folder):
        if newest is None or (batch_of(path) or 0) > (batch_of(newest) or 0):
            aside = path.with_name(f'{path.name}.damaged')
            remove(aside)
            os.replace(path, aside)
            log.warning('%s: set aside as %s', path, aside.name)


def remove_unfinished(folder: Path) -> None:
    """Remove what a killed process left half-written or half-removed."""
    for pattern in ('.ba*.unfinished*', f'ba*{UNFINISHED}*', '.ba*.removed'):
        for path in [*folder.glob(pattern)]:
            remove(path)


def prune(folder: Path, keep: int) -> list[Path]:
    """Remove all but the newest checkpoints; returns the removed."""
    old = list_checkpoints(folder)[max(1, keep) :]
    for path in old:
        remove(path)
    return old


def flush(file: IO[Any]) -> None:
    """Flush a file to the disk itself."""
    file.flush()
    os.fsync(file.fileno())


def records_of(folder: Path, names: Iterable[str]) -> dict[str, FileRecord]:
    """Records of some files of a folder."""
    return {name: record_of(folder / name) for name in names}
