"""Atomic, verified checkpoints on disk.

A run's folder contains ba100/, ba200/, ... and `latest`, a symbolic link to the newest checkpoint. A checkpoint is
written under a temporary name and flushed to disk, together with a receipt that records the size and hash of each file.
Then it is renamed, and finally `latest` is updated. A checkpoint with its final name was therefore complete when it was
written; if it does not match its receipt, it was damaged later.
"""

import errno
import json
import logging
import os
import re
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any, TypeVar

import xxhash

from diffusion.errors import UserError, is_wrong_path
from diffusion.storage.atomic import UNFINISHED, remove, replace_folder, sync_folder

log = logging.getLogger(__name__)

SHORTEST_WORK_SECONDS = 0.01
"""Minimum CPU time between two pauses of a save that pauses to leave the CPU to training."""
STATE = 'state.pt'
"""File with everything except sharded tensors, in Composer's format."""
RECEIPT = 'receipt.json'
LATEST = 'latest'
FORMAT = 1
"""Version of the checkpoint format; checkpoints with other versions are rejected."""
INDEX = '.metadata'
"""Index file of the sharded tensors, in which torch.distributed.checkpoint records the file of each shard."""
RECIPE = 'recipe.yaml'
"""Name of the resolved recipe's file in the run's folder and in each checkpoint."""
RETRY_PAUSES_SECONDS = (1.0, 2.0, 4.0, 8.0, 15.0, 30.0, 60.0, 60.0, 60.0)
"""Pauses before each retry of a failed read, four minutes in total: a file server can take minutes to restart."""
_CHUNK = 8 * 2**20
_PIECE = 2**20
_READS_AHEAD = 4
"""Number of chunks of a file that are read concurrently: a single read would not saturate a network file system."""
Result = TypeVar('Result')


class SaveAbandoned(Exception):
    """Raised in the thread of a save that has been abandoned."""


class WriteProgress:
    """Progress of a save on this rank: counts written bytes, makes the save pause, can stop it at its next write."""

    def __init__(self, total_bytes: int = 0) -> None:
        self.total_bytes = total_bytes
        self.written_bytes = 0
        self.paused_seconds = 0.0
        self._abandoned = threading.Event()
        self._hurries = threading.Event()
        self.pause = 0.0
        """Seconds of pauses between writes per second of the writing thread's CPU time, until `hurry` is called."""
        self._resumed_at: float | None = None

    def hurry(self) -> None:
        """Stop pausing, because training waits for the save; callable from any thread."""
        self._hurries.set()

    def add(self, count: int) -> None:
        """Pause if a pause is due, then count the bytes of the next write; SaveAbandoned if the save is abandoned."""
        if self.pause and not self._hurries.is_set():
            self._wait()
        self.check()
        self.written_bytes += count

    def check(self) -> None:
        if self._abandoned.is_set():
            raise SaveAbandoned

    def abandon(self) -> None:
        """Stop the save at its next write; callable from any thread."""
        self._abandoned.set()
        self.hurry()

    def _wait(self) -> None:
        """Pause in proportion to this thread's CPU time since the last pause, unless that time is too short."""
        # Use CPU time instead of elapsed time: waiting for the disk, and pauses while pickling, do not slow down
        # training.
        if self._resumed_at is None:
            self._resumed_at = time.thread_time()
        worked = time.thread_time() - self._resumed_at
        if worked >= SHORTEST_WORK_SECONDS:
            began = time.monotonic()
            self._hurries.wait(worked * self.pause)
            self._resumed_at = time.thread_time()
            self.paused_seconds += time.monotonic() - began


class DamagedCheckpoint(UserError):
    """Error for a damaged checkpoint: its receipt is missing or not valid, or a file is missing or differs from it."""


@dataclass(frozen=True)
class FileRecord:
    """Size and hash of a checkpoint's file, as recorded in the receipt when it was written."""

    bytes: int
    xxh3_128: str


class HashingWriter:
    """A binary file that computes the hash of the data written to it."""

    # Hash the data while writing it: reading a large checkpoint back would double its I/O.
    def __init__(self, file: IO[bytes], progress: WriteProgress | None = None) -> None:
        self._file = file
        self._progress = progress
        self._hash = xxhash.xxh3_128()
        self._bytes = 0

    def write(self, data: bytes | memoryview) -> int:
        # Small pieces stay in the core's cache between hashing and the copy to the operating system. This takes two
        # passes over memory instead of three, so that the writing thread takes less memory bandwidth from training.
        view = memoryview(data).cast('B')
        for start in range(0, len(view), _PIECE):
            piece = view[start : start + _PIECE]
            if self._progress is not None:
                self._progress.add(len(piece))
            self._hash.update(piece)
            self._file.write(piece)
        self._bytes += len(view)
        return len(view)

    def flush(self) -> None:
        """Do nothing: torch calls this after each tensor, but the caller flushes the file once at the end."""

    def tell(self) -> int:
        return self._bytes

    def record(self) -> FileRecord:
        return FileRecord(self._bytes, self._hash.hexdigest())


def hash_file(path: Path) -> FileRecord:
    digest, size = xxhash.xxh3_128(), 0
    with path.open('rb') as file:
        for chunk in _chunks(file.fileno()):
            digest.update(chunk)
            size += len(chunk)
    return FileRecord(size, digest.hexdigest())


def _chunks(descriptor: int) -> Iterator[memoryview]:
    """Yield a file's content in chunks while threads read ahead; a chunk is valid until the next one is requested."""
    size = os.fstat(descriptor).st_size
    starts = range(0, size, _CHUNK)
    # Reuse buffers: allocating new ones of this size would take longer than hashing.
    buffers = [memoryview(bytearray(min(size, _CHUNK))) for _ in starts[: _READS_AHEAD + 1]]
    if len(starts) < 2:
        yield from (_read_chunk(descriptor, start, buffers[0]) for start in starts)
        return
    with ThreadPoolExecutor(_READS_AHEAD) as readers:
        pending: deque[Future[memoryview]] = deque()
        for number, start in enumerate(starts):
            if number >= len(buffers):
                # Yield the oldest chunk; when the caller asks for the next one, the buffer is free for this read.
                yield pending.popleft().result()
            pending.append(readers.submit(_read_chunk, descriptor, start, buffers[number % len(buffers)]))
        while pending:
            yield pending.popleft().result()


def _read_chunk(descriptor: int, start: int, buffer: memoryview) -> memoryview:
    """Read a chunk of a file into a buffer, from a given position; return the part of the buffer that was filled."""
    filled = 0
    # A read may return fewer bytes than requested; some network file systems do this.
    while count := os.preadv(descriptor, [buffer[filled:]], start + filled):
        filled += count
        if filled == len(buffer):
            break
    return buffer[:filled]


def checkpoint_name(batch: int) -> str:
    return f'ba{batch}'


def batch_number(path: Path) -> int | None:
    """Return the batch number in a checkpoint's name, or None if the name is not a checkpoint's."""
    found = re.fullmatch(r'ba(\d+)', path.name)
    return int(found[1]) if found else None


def unfinished_path(folder: Path, batch: int) -> Path:
    """Return the temporary path, equal on every rank, under which a checkpoint is written before it is renamed."""
    # `new_unfinished` would return a different path on each rank, but under FSDP2 all ranks write into this folder.
    return folder / f'.{checkpoint_name(batch)}.unfinished'


def list_checkpoints(folder: Path) -> list[Path]:
    """Return a run's checkpoints, newest first; [] if the folder does not exist, OSError if it cannot be listed."""
    # Do not use Path.glob, which hides errors: the run would seem to have no checkpoints and start from scratch.
    found: dict[int, Path] = {}
    with suppress(FileNotFoundError, NotADirectoryError), os.scandir(folder) as entries:
        for entry in entries:
            batch = batch_number(Path(entry.name))
            if batch is not None and entry.is_dir():
                found[batch] = folder / entry.name
    return [found[batch] for batch in sorted(found, reverse=True)]


def publish(work: Path, final: Path, files: Mapping[str, FileRecord], about: Mapping[str, Any]) -> None:
    """Write a receipt with `files` and the fields in `about`, rename `work` to `final`, and point `latest` to it."""
    with (work / RECEIPT).open('w', encoding='utf-8') as file:
        file.write(receipt_text(files, about))
        flush(file)
    # Do not create the run's folder: if it is missing, its file system is not mounted, and a new folder would hide
    # that.
    replace_folder(work, final, create_folder=False)
    link_latest(final)


def receipt_text(files: Mapping[str, FileRecord], about: Mapping[str, Any]) -> str:
    """Return the content of a receipt.json; see `publish` for the arguments."""
    records = {name: asdict(record) for name, record in sorted(files.items())}
    return json.dumps({'format': FORMAT, **about, 'files': records}, indent=2)


def link_latest(checkpoint: Path) -> None:
    """Point the symbolic link `latest` in the run's folder to a checkpoint; errors are logged."""
    # Rename a new link over the old one, so that `latest` always exists.
    link = checkpoint.with_name(f'.{LATEST}.unfinished')
    try:
        link.unlink(missing_ok=True)
        link.symlink_to(checkpoint.name)
        os.replace(link, checkpoint.with_name(LATEST))
        sync_folder(checkpoint.parent)
    except OSError as error:  # some file systems have no links, and checkpoints can be found without this one
        log.warning('%s: the link %s could not be set to it (%s)', checkpoint, LATEST, error)


def read_receipt(checkpoint: Path) -> dict[str, Any]:
    """Return the content of a checkpoint's receipt.json, with the expected size and hash of each file.

    Raises:
        DamagedCheckpoint: The receipt is missing, cannot be parsed, lacks a required file, lists a path outside the
            folder, or has a different batch than the folder's name.
        UserError: The receipt's format number is missing or differs from `FORMAT`.
        OSError: The receipt cannot be read, or the checkpoint's folder has vanished.
    """
    try:
        # Read bytes: `parse_receipt` reports non-UTF-8 content as damage.
        text = (checkpoint / RECEIPT).read_bytes()
    except FileNotFoundError as error:
        if not checkpoint.is_dir():
            raise  # the whole folder has vanished: its file system may no longer be mounted, which is not damage
        raise DamagedCheckpoint(f'{checkpoint}: {RECEIPT} is missing') from error
    return parse_receipt(text, str(checkpoint), sharded=(checkpoint / INDEX).exists())


def parse_receipt(text: bytes, checkpoint: str, *, sharded: bool = False) -> dict[str, Any]:
    """Return the content of a receipt.json, with `files` as a dictionary of FileRecord by file name.

    Args:
        checkpoint: Path or URL of the checkpoint; its last part is the checkpoint's name.
        sharded: True if the checkpoint has an index of sharded tensors.

    Raises:
        DamagedCheckpoint: As in `read_receipt`.
        UserError: The receipt's format number is missing or differs from `FORMAT`.
    """
    path = f'{checkpoint}/{RECEIPT}'
    try:
        content = json.loads(text)
        batch, written = content.get('batch'), content.get('format')
        files = {name: FileRecord(**record) for name, record in content['files'].items()}
    except (KeyError, TypeError, AttributeError, ValueError, RecursionError) as error:
        raise DamagedCheckpoint(f'{path}: not a valid receipt ({error})') from error
    if written != FORMAT:
        found = 'has no format number' if written is None else f'has format {written}'
        raise UserError(
            f'{path}: {found}, but this version of diffusion reads format {FORMAT}; resume with the version that wrote '
            'it, or start over under another name'
        )
    outside = [name for name in files if name in ('', '.', '..') or '/' in name or '\0' in name]
    if outside:
        raise DamagedCheckpoint(f'{path}: lists {outside[0]!r}, which is not the name of a file in its folder')
    sharded = sharded or content.get('kind') == 'sharded'
    missing = [name for name in (STATE, *([INDEX] if sharded else [])) if name not in files]
    if missing:
        raise DamagedCheckpoint(f'{path}: does not list {missing[0]}, which every checkpoint of its kind has')
    name = checkpoint.rpartition('/')[2]
    number = batch_number(Path(name))
    if number is not None and batch != number:
        raise DamagedCheckpoint(f'{path}: belongs to batch {batch}, but the folder is named {name}; rename it')
    return content | {'files': files}


def all_damaged(place: str, damages: Sequence[str]) -> UserError:
    """Return the error to raise if all checkpoints of a run are damaged."""
    # Never start from scratch: the run would overwrite checkpoints that may be repairable.
    return UserError(
        f'{place}: all {len(damages)} checkpoints are damaged: {"; ".join(damages[:3])}; '
        'restore one from a backup, or change the name of the run to start over'
    )


def read_with_retries(read: Callable[[], Result]) -> Result:
    """Return the result of `read`; after an I/O error, call it again, with the pauses in RETRY_PAUSES_SECONDS.

    Errors that a retry cannot fix, such as denied access, are raised at once; a path that does not exist is retried.
    """
    # On a network file system ESTALE, EIO and ETIMEDOUT are often transient, and falling back to an older checkpoint
    # would cost a large run hours.
    for pause in RETRY_PAUSES_SECONDS:
        try:
            return read()
        except OSError as error:
            # Retry even if the path does not exist (ENOENT): its file system may be mounted again.
            if is_wrong_path(error) and error.errno != errno.ENOENT:
                raise
            log.warning('%s; retrying in %g s', error, pause)
            time.sleep(pause)
    return read()


def set_aside(newest: Path) -> None:
    """Rename all checkpoints newer than `newest`, which must be damaged, and point `latest` to `newest`."""
    # Update the link first, so that it does not dangle if the process is killed after the renames. Checkpoints are
    # renamed because the run will write new ones under their names, and kept because they may be repairable.
    link = newest.with_name(LATEST)
    if not link.is_symlink() or os.readlink(link) != newest.name:
        link_latest(newest)
    for path in list_checkpoints(newest.parent):
        if (batch_number(path) or 0) > (batch_number(newest) or 0):
            aside = path.with_name(f'{path.name}.damaged')
            remove(aside)
            os.replace(path, aside)
            log.warning('%s: damaged, renamed to %s', path, aside.name)


def remove_unfinished_saves(folder: Path) -> None:
    """Remove incomplete checkpoints left behind by a process killed while writing, replacing or removing them."""
    for pattern in ('.ba*.unfinished*', f'ba*{UNFINISHED}*'):
        for path in [*folder.glob(pattern)]:
            remove(path)


def remove_others(checkpoint: Path) -> None:
    for path in list_checkpoints(checkpoint.parent):
        if path.name != checkpoint.name:
            remove(path)


def flush(file: IO[Any]) -> None:
    """Flush an open file to the operating system, and from there to disk."""
    file.flush()
    os.fsync(file.fileno())
