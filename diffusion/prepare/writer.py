"""Writing a prepared dataset: hashed MDS shards by bucket, in a folder that appears only when it is whole."""

import os
import shutil
import socket
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

from streaming import MDSWriter

from diffusion.errors import UserError
from diffusion.prepare.bucket_choice import sizes_problem
from diffusion.prepare.output_folders import check_new

COLUMNS = {'image': 'bytes', 'captions': 'json', 'width': 'int', 'height': 'int', 'key': 'str'}
SHARD_BYTES = 64 * 2**20


@dataclass(frozen=True)
class Picture:
    """A sample: an encoded picture, its captions, its size in pixels and a stable id of where it comes from."""

    image: bytes
    captions: list[str]
    width: int
    height: int
    key: str


class BucketWriter:
    """Shards in `folder`/<size>px, a folder for each size that gets a picture.

    A context manager, which writes the last shards and the indexes when its block ends well. MDSWriter's own writes
    index.json even when the block fails, so that a part looks whole.
    """

    def __init__(self, folder: Path, *, shard_bytes: int = SHARD_BYTES) -> None:
        self.folder = folder
        self.shard_bytes = shard_bytes
        self.counts: dict[int, int] = {}
        self._writers: dict[int, MDSWriter] = {}

    def write(self, size: int, picture: Picture) -> None:
        """Add a picture to the bucket of a size in pixels."""
        if size not in self._writers:
            out = str(self.folder / f'{size}px')
            self._writers[size] = MDSWriter(out=out, columns=COLUMNS, hashes=['xxh64'], size_limit=self.shard_bytes)
        self._writers[size].write(asdict(picture))
        self.counts[size] = self.counts.get(size, 0) + 1

    @property
    def buckets(self) -> dict[str, int]:
        """Pictures by folder name, the smallest size first."""
        return {f'{size}px': self.counts[size] for size in sorted(self.counts)}

    def __enter__(self) -> 'BucketWriter':
        return self

    def __exit__(self, failure: type[BaseException] | None, *_: object) -> None:
        for writer in self._writers.values():
            writer.finish() if failure is None else writer.cancel_future_jobs()


@contextmanager
def new_dataset(out: Path, *, overwrite: bool = False) -> Iterator[Path]:
    """A folder to write into, which becomes `out` when the block ends well and is removed when it does not.

    It lies beside `out` as `<out>.part-<host>-<pid>`. A killed process leaves it behind; the next start on the same
    host removes it.

    Raises:
        UserError: `out` is there already, or cannot be renamed into.
    """
    out = out.resolve()
    _clean_up_after_the_dead(out)
    check_new(out, overwrite=overwrite)
    part = out.with_name(f'{out.name}.part-{socket.gethostname()}-{os.getpid()}')
    part.mkdir(parents=True)
    try:
        yield part
        _flush_to_disk(part)
        check_new(out, overwrite=overwrite)  # another process may have written it meanwhile
        _put_in_place(part, out)
    finally:
        shutil.rmtree(part, ignore_errors=True)


def check_sizes(sizes: Sequence[int]) -> list[int]:
    """The sizes in pixels, ascending."""
    problem = sizes_problem(sizes)
    if problem is not None:
        raise UserError(f'--sizes: {problem}')
    return sorted(sizes)


def _put_in_place(part: Path, out: Path) -> None:
    """Rename `part` to `out`; what is there, if allowed, steps aside first and comes back when that fails."""
    if not out.exists():
        os.rename(part, out)
        return
    old = part.with_name(f'{part.name}-replaced')
    os.rename(out, old)
    try:
        os.rename(part, out)
    except BaseException:
        os.rename(old, out)
        raise
    shutil.rmtree(old)


def _flush_to_disk(folder: Path) -> None:
    # Without this a full disk can go unnoticed on a network mount, and a power cut can leave empty files.
    for path in folder.rglob('*'):
        if path.is_file():
            with path.open('rb+') as file:
                os.fsync(file.fileno())


def _clean_up_after_the_dead(out: Path) -> None:
    """Remove what dead processes of this host left beside `out`; an `out` that one had moved aside comes back."""
    prefix = f'{out.name}.part-{socket.gethostname()}-'
    left = [path for path in out.parent.glob('*') if path.name.startswith(prefix)]
    for path in left:
        pid, _, aside = path.name.removeprefix(prefix).partition('-')
        if not pid.isdecimal() or _is_alive(int(pid)):
            continue
        if aside and not out.exists():
            os.rename(path, out)
        else:
            shutil.rmtree(path)


def _is_alive(pid: int) -> bool:
    """Whether another process has this id; our own id on a folder that we did not make yet is a reused one."""
    if pid == os.getpid():
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
