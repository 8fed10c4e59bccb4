"""Reading a tar from beginning to end, to the byte at which it is damaged.

The standard library's TarFile takes a file cut off between two members, or broken by a bad header, for a whole one, and
can run for years on a header with a wrong size; so only its parser of headers is used here.
"""

import gzip
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

BLOCK = tarfile.BLOCKSIZE
MAX_CONTENT = 512 * 2**20
"""Bytes of a file that are read; of a larger one there is no content."""
MAX_NAME = 2**20
CHUNK = 2**20
GZIP = b'\x1f\x8b'

BEFORE_A_MEMBER = frozenset(
    {
        *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
        *(tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.XGLTYPE),
    }
)
"""Types of headers that describe the member after them."""
WITHOUT_CONTENT = frozenset(
    {
        *(tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE),
        *(tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE),
    }
)
"""Types whose size, if their header has one, is that of something else."""


class DamagedTar(Exception):
    """The message is `cut_off`, `unreadable` (from its first byte) or `damaged`."""

    def __init__(self, how: str, byte: int, name: str | None) -> None:
        super().__init__(how)
        self.byte = byte
        """The offset of the member that cannot be read; in a compressed tar, the offset after unpacking."""
        self.name = name
        """That member's name, where its header is whole."""


class Member(NamedTuple):
    """A member of a tar: a file, or a link, folder or device."""

    name: str
    is_file: bool
    content: bytes | None
    """None for what is no file or larger than `MAX_CONTENT`."""


def members(path: Path) -> Iterator[Member]:
    """Yield the members of a tar, compressed by gzip or not, in their order.

    Raises:
        Damaged: After the members before the damage.
        OSError: The disk fails.
    """
    with path.open('rb') as file:
        packed = file.read(2) == GZIP
        file.seek(0)
        tar = _Tar(gzip.GzipFile(fileobj=file) if packed else file)
        try:
            yield from tar.members()
        except EOFError as error:  # gzip's
            raise tar.damaged('cut_off') from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise tar.damaged('damaged') from error


class _Tar:
    """A tar and the position of reading."""

    def __init__(self, file: IO[bytes] | gzip.GzipFile) -> None:
        self.file = file
        self._read = 0
        self._begin = 0
        self._name: str | None = None

    def damaged(self, how: str) -> DamagedTar:
        return DamagedTar(how, self._begin, self._name)

    def members(self) -> Iterator[Member]:
        """Yield the members; names and sizes too long for a header stand in members of their own before it."""
        name, size, ended = None, None, False
        while True:
            if name is None and size is None:
                self._begin = self._read
            self._name = None
            block = self._take(BLOCK, may_end=ended)
            if block is None:
                return
            if not any(block):  # the mark of the end; another tar may follow where two were joined
                ended = True
                continue
            ended = False
            header = self._header(block)
            if header.type in BEFORE_A_MEMBER:
                content = self._content(header.size, limit=MAX_NAME)
                if content is None:
                    raise self.damaged('damaged')
                if header.type == tarfile.GNUTYPE_LONGNAME:
                    name = content.partition(b'\0')[0].decode('utf-8', 'surrogateescape')
                elif header.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE):
                    name, size = self._extended(content)
                continue
            self._name = header.name if name is None else name
            is_file = header.isreg()
            stored = 0 if header.type in WITHOUT_CONTENT else header.size if size is None else size
            content = self._content(stored, limit=MAX_CONTENT if is_file else 0)
            yield Member(self._name, is_file, content if is_file else None)
            name = size = None

    def _header(self, block: bytes) -> tarfile.TarInfo:
        try:
            header = tarfile.TarInfo.frombuf(block, 'utf-8', 'surrogateescape')
        except (tarfile.HeaderError, ValueError) as error:
            raise self.damaged('damaged' if self._read > BLOCK else 'unreadable') from error
        if header.size < 0 or header.type == tarfile.GNUTYPE_SPARSE:
            raise self.damaged('damaged')
        return header

    def _extended(self, content: bytes) -> tuple[str | None, int | None]:
        """Return the name and size that a pax header sets; its records are lines such as `24 path=a/long/name.jpg`."""
        name, size = None, None
        try:
            while content:
                length = int(content.partition(b' ')[0])
                record, content = content[:length], content[length:]
                key, _, value = record.partition(b' ')[2].removesuffix(b'\n').partition(b'=')
                if length < 5:
                    raise ValueError(f'a record of {length} bytes')
                if key == b'path':
                    name = value.decode('utf-8', 'surrogateescape')
                elif key == b'size':
                    size = int(value)
        except ValueError as error:
            raise self.damaged('damaged') from error
        if size is not None and size < 0:
            raise self.damaged('damaged')
        return name, size

    def _content(self, size: int, *, limit: int) -> bytes | None:
        """Read a member's content and its padding; returns None for content over the limit."""
        padding = -size % BLOCK
        if 0 < size <= limit:
            content = self._take(size)
            self._take(padding)
            return content
        left = size + padding
        while left:
            left -= len(self._take(min(left, CHUNK)) or b'')
        return b'' if size <= limit else None

    def _take(self, size: int, *, may_end: bool = False) -> bytes | None:
        """Read so many bytes; returns None at the end of the file, if it may end here."""
        taken = self.file.read(size)
        self._read += len(taken)
        if not taken and size and may_end:
            return None
        if len(taken) < size:
            raise self.damaged('cut_off')
        return taken
