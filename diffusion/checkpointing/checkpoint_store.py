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
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import xxhash

from diffusion.errors import UserError
from diffusion.storage.atomic import UNFINISHED, remove, replace_folder, sync_folder

log = logging.getLogger(__name__)

STATE = 'state.pt'
"""Everything but sharded tensors, in Composer's own form."""
RECEIPT = 'receipt.json'
LATEST = 'latest'
VERSION = 1
RETRY_PAUSES_SECONDS = (0.5, 1.0, 2.0, 4.0)
"""Pauses before each further try of a read that failed."""
_CHUNK = 16 * 2**20
Result = TypeVar('Result')


class DamagedCheckpoint(UserError):
    """A checkpoint whose files are not those of its receipt: one is missing, or its size or hash differs."""


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
    """A run's checkpoints, newest first.

    Raises:
        OSError: The folder exists and cannot be listed. (Path.glob would hide that, and the run would start anew.)
    """
    found: dict[int, Path] = {}
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            batch = batch_of(Path(entry.name))
            if batch is not None and entry.is_dir():
                found[batch] = folder / entry.name
    return [found[batch] for batch in sorted(found, reverse=True)]


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
    link_latest(final)


def link_latest(checkpoint: Path) -> None:
    """Point the run's `latest` at a checkpoint."""
    link = checkpoint.with_name(f'.{LATEST}.unfinished')
    link.unlink(missing_ok=True)
    link.symlink_to(checkpoint.name)
    os.replace(link, checkpoint.with_name(LATEST))
    sync_folder(checkpoint.parent)


def receipt_of(checkpoint: Path) -> dict[str, Any]:
    """Read a checkpoint's receipt.

    Raises:
        DamagedCheckpoint: There is none, or it says nothing that can be understood.
    """
    path = checkpoint / RECEIPT
    try:
        content = json.loads(path.read_text(encoding='utf-8'))
        if content['version'] != VERSION:
            raise DamagedCheckpoint(f'{checkpoint}: its receipt is of version {content["version"]}, this is {VERSION}')
        return content | {'files': {name: FileRecord(**record) for name, record in content['files'].items()}}
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f'{checkpoint}: it has no {RECEIPT}') from error
    except (KeyError, TypeError, AttributeError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise DamagedCheckpoint(f'{path}: not a receipt ({error})') from error


def check_whole(checkpoint: Path) -> None:
    """Compare a checkpoint with its receipt, file by file; reads all of it.

    Raises:
        DamagedCheckpoint: Says which file and how.
        OSError: A file cannot be read, after several tries. That is no damage: the file may be sound.
    """
    receipt = read_patiently(lambda: receipt_of(checkpoint))
    for name, expected in receipt['files'].items():
        read_patiently(lambda path=checkpoint / name, expected=expected: _check_file(path, expected))


def _check_file(path: Path, expected: FileRecord) -> None:
    try:
        size = path.stat().st_size
        if size != expected.bytes:
            raise DamagedCheckpoint(f'{path}: {size} bytes, {expected.bytes} were written')
        if record_of(path) != expected:
            raise DamagedCheckpoint(f'{path}: its content is not what was written (xxh3_128 differs)')
    except FileNotFoundError as error:
        raise DamagedCheckpoint(f'{path}: not readable ({error.strerror})') from error


def read_patiently(read: Callable[[], Result]) -> Result:
    """Call `read`, several times over some seconds while it raises OSError.

    ESTALE, EIO and ETIMEDOUT of a network file system often pass, and a large run's newest checkpoint is worth waiting.
    """
    for pause in RETRY_PAUSES_SECONDS:
        try:
            return read()
        except OSError as error:
            log.warning('%s; trying again in %g s', error, pause)
            time.sleep(pause)
    return read()


def newest_whole(folder: Path) -> Path | None:
    """A run's newest checkpoint that is whole, or None for a run that has saved none.

    Raises:
        UserError: There are checkpoints, and all are damaged.
        OSError: A checkpoint cannot be read, after several tries.
    """
    damages = []
    for checkpoint in read_patiently(lambda: list_checkpoints(folder)):
        try:
            check_whole(checkpoint)
        except DamagedCheckpoint as error:
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


def set_aside(newest: Path) -> None:
    """Rename the checkpoints newer than the one a run goes on from, which are damaged; `latest` then points at it."""
    link = newest.with_name(LATEST)
    if not link.is_symlink() or os.readlink(link) != newest.name:
        link_latest(newest)
    for path in list_checkpoints(newest.parent):
        if (batch_of(path) or 0) > (batch_of(newest) or 0):
            aside = path.with_name(f'{path.name}.damaged')
            remove(aside)
            os.replace(path, aside)
            log.warning('%s: set aside as %s', path, aside.name)


def remove_unfinished_saves(folder: Path) -> None:
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
