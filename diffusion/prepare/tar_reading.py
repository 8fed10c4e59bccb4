"""Sequential tar reader that detects damage and reports its byte offset."""

# Use only tarfile's header parser. tarfile.TarFile reports no error if a file is truncated between two members or has a
# bad header after the first one, and loops practically forever if a header has a huge, wrong size.

import gzip
import tarfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import IO, NamedTuple

BLOCK = tarfile.BLOCKSIZE
MAX_CONTENT = 512 * 2**20
"""Maximum size in bytes of a member to read; the `content` of larger members is None."""
MAX_NAME = 2**20
"""Maximum size in bytes of a header that describes the next member; a larger one counts as damage."""
CHUNK = 2**20
GZIP = b'\x1f\x8b'

DESCRIBES_NEXT_MEMBER = frozenset(
    {
        *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
        *(tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.XGLTYPE),
    }
)
WITHOUT_CONTENT = frozenset(
    {*(tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE), *(tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE)}
)
"""Member types without content, although their header may state a size, such as that of a link's target."""


class DamagedTar(Exception):
    """Raised for a damaged tar file; the message is `cut_off`, `unreadable` (from the first byte) or `damaged`."""

    def __init__(self, reason: str, byte: int, name: str | None) -> None:
        super().__init__(reason)
        self.byte = byte
        """Offset of the member that cannot be read; for a compressed tar file, the offset in the uncompressed data."""
        self.name = name
        """Name of that member; None if its header is damaged."""


class Member(NamedTuple):
    """Member of a tar: a file, link, folder or device."""

    name: str
    is_file: bool
    content: bytes | None
    """Content; None if the member is not a file or is larger than `MAX_CONTENT`."""


def members(path: Path) -> Iterator[Member]:
    """Yield the members (files, links and folders) of a tar file in order; the file may be gzip-compressed.

    If the file is damaged, yield the members before the damage, then raise DamagedTar.
    """
    with path.open('rb') as file:
        is_gzip = file.read(2) == GZIP
        file.seek(0)
        tar = _Tar(gzip.GzipFile(fileobj=file) if is_gzip else file)
        try:
            yield from tar.members()
        except EOFError as error:  # gzip raises EOFError if the file is truncated
            raise tar.damaged('cut_off') from error
        except (gzip.BadGzipFile, zlib.error) as error:
            raise tar.damaged('damaged') from error


class _Tar:
    """Reads the members of an open tar file sequentially, and determines the byte offset of damage."""

    def __init__(self, file: IO[bytes] | gzip.GzipFile) -> None:
        self.file = file
        self._position = 0
        self._member_start = 0
        self._member_name: str | None = None

    def damaged(self, reason: str) -> DamagedTar:
        return DamagedTar(reason, self._member_start, self._member_name)

    def members(self) -> Iterator[Member]:
        # If a name or size does not fit into a member's header, an extra member before it contains the value; `name`
        # and `size` keep the value until the described member is read.
        name, size, ended = None, None, False
        while True:
            if name is None and size is None:
                self._member_start = self._position
            self._member_name = None
            block = self._read_exactly(BLOCK, may_end=ended)
            if block is None:
                return
            if not any(block):  # marks the end of an archive; another archive may be appended
                ended = True
                continue
            ended = False
            header = self._header(block)
            if header.type in DESCRIBES_NEXT_MEMBER:
                content = self._content(header.size, limit=MAX_NAME)
                if content is None:
                    raise self.damaged('damaged')
                if header.type == tarfile.GNUTYPE_LONGNAME:
                    name = content.partition(b'\0')[0].decode('utf-8', 'surrogateescape')
                elif header.type in (tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE):
                    name, size = self._extended(content)
                continue
            self._member_name = header.name if name is None else name
            is_file = header.isreg()
            stored = 0 if header.type in WITHOUT_CONTENT else header.size if size is None else size
            content = self._content(stored, limit=MAX_CONTENT if is_file else 0)
            yield Member(self._member_name, is_file, content if is_file else None)
            name = size = None

    def _header(self, block: bytes) -> tarfile.TarInfo:
        try:
            header = tarfile.TarInfo.frombuf(block, 'utf-8', 'surrogateescape')
        except (tarfile.HeaderError, ValueError) as error:
            raise self.damaged('damaged' if self._position > BLOCK else 'unreadable') from error
        # Sparse files, whose content has a different layout, are not supported.
        if header.size < 0 or header.type == tarfile.GNUTYPE_SPARSE:
            raise self.damaged('damaged')
        return header

    def _extended(self, content: bytes) -> tuple[str | None, int | None]:
        """Return name and size (None: not stated) from a pax header, with lines such as `24 path=a/long/name.jpg`."""
        name, size = None, None
        try:
            while content:
                length = int(content.partition(b' ')[0])
                record, content = content[:length], content[length:]
                key, _, value = record.partition(b' ')[2].removesuffix(b'\n').partition(b'=')
                if length < 5:
                    raise ValueError(f'pax record of {length} bytes')
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
        """Read past a tar member and its padding; return its content, or None if it is larger than `limit` bytes."""
        padding = -size % BLOCK
        if 0 < size <= limit:
            content = self._read_exactly(size)
            self._read_exactly(padding)
            return content
        # Skip by reading: seeking is slow in gzip streams, and seeking past the end of a truncated file raises no
        # error.
        remaining = size + padding
        while remaining:
            remaining -= len(self._read_exactly(min(remaining, CHUNK)) or b'')
        return b'' if size <= limit else None

    def _read_exactly(self, size: int, *, may_end: bool = False) -> bytes | None:
        """Read exactly `size` bytes; with `may_end`, return None at the end of the file."""
        data = self.file.read(size)
        self._position += len(data)
        if not data and size and may_end:
            return None
        if len(data) < size:
            raise self.damaged('cut_off')
        return data
