"""Sort any number of listed files by name with little memory: sorted runs are written to disk and merged."""

import heapq
import marshal
import tempfile
import weakref
from collections.abc import Iterable, Iterator
from itertools import islice, starmap
from operator import attrgetter
from typing import IO, NamedTuple

IN_MEMORY = 300_000
"""Maximum number of files to sort in memory, which takes 120 MB."""
BLOCK = 2000
"""Files that are written and read at a time."""


class File(NamedTuple):
    """A file in a local folder or an object store."""

    url: str
    """Path, or URL such as s3://bucket/key; the argument of `local_copy`."""
    size: int
    """Size in bytes."""
    stamp: str
    """Text that changes with the content: size and modification time of a local file, or the ETag of an object."""
    name: str
    """Path relative to the listed location, with forward slashes."""


by_name = attrgetter('name')


class SortedFiles(Iterable[File]):
    """Files in the order of their names, which may be iterated several times; many are in a file in TMPDIR.

    Args:
        files: The files in any order.
    """

    def __init__(self, files: Iterable[File]) -> None:
        rest = iter(files)
        runs: list[_Run] = []
        while len(chunk := sorted(islice(rest, IN_MEMORY), key=by_name)) == IN_MEMORY:
            runs.append(_Run(chunk))
        self._files: Iterable[File] = _Run(heapq.merge(*runs, chunk, key=by_name)) if runs else chunk

    def __iter__(self) -> Iterator[File]:
        return iter(self._files)


class _Run:
    """Sorted files in a temporary file, in blocks that are preceded by their size."""

    def __init__(self, files: Iterable[File]) -> None:
        self._file: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        rest = map(tuple, files)
        while block := list(islice(rest, BLOCK)):
            data = marshal.dumps(block)
            self._file.write(len(data).to_bytes(8, 'little') + data)

    def __iter__(self) -> Iterator[File]:
        place = 0
        while True:
            self._file.seek(place)
            size = int.from_bytes(self._file.read(8), 'little')
            if not size:
                return
            block = marshal.loads(self._file.read(size))
            place += 8 + size
            yield from starmap(File, block)
