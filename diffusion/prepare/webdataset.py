"""Source for tar files of images and captions in webdataset format, as written by img2dataset.

The reader of tar files detects damage and reports its byte offset.
"""

import gzip
import tarfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, NamedTuple

from diffusion.prepare.caption_files import read_sidecars
from diffusion.prepare.dataset_splits import refuse_mixed_splits
from diffusion.prepare.file_listing import (
    as_utf8,
    is_pattern,
    list_files,
    local_copy,
    single_file_part,
    with_passed_over,
)
from diffusion.prepare.source import IMAGE_SUFFIXES, CaptionText, Entry, Part, PassedOver, column_list

# Use only tarfile's header parser. tarfile.TarFile reports no error if a file is truncated between two members or has a
# bad header after the first one, and loops practically forever if a header has a huge, wrong size.
BLOCK = tarfile.BLOCKSIZE
MAX_CONTENT = 512 * 2**20
"""Maximum size in bytes of a member to read; the `content` of larger members is None."""
MAX_NAME = 2**20
"""Maximum size in bytes of a header that describes the next member; a larger one counts as damage."""
CHUNK = 2**20
GZIP = b'\x1f\x8b'

DESCRIBES_NEXT_MEMBER = (
    *(tarfile.GNUTYPE_LONGNAME, tarfile.GNUTYPE_LONGLINK),
    *(tarfile.XHDTYPE, tarfile.SOLARIS_XHDTYPE, tarfile.XGLTYPE),
)
WITHOUT_CONTENT = (
    *(tarfile.LNKTYPE, tarfile.SYMTYPE, tarfile.DIRTYPE),
    *(tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.BLKTYPE),
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


SUFFIXES = ('.tar', '.tar.gz', '.tgz')


@dataclass(frozen=True)
class WebDatasetSource:
    """Tar files in a folder, a single tar file, or a pattern with braces; each tar file is one part.

    A sample is a group of adjacent members with the same stem: image `000000012.jpg`, caption `000000012.txt` and
    metadata `000000012.json`. Its key joins the stems of tar file and members: `00000/000000012`. Captions are
    taken from `captions` in the .json member, otherwise from the .txt member, otherwise from `caption` in the .json
    member; other JSON keys become metadata.

    A stem ends at the first dot, as in webdataset. But the stem of a name with more dots, such as `photo.v2.jpg`, is
    `photo.v2`; beside an image `photo.jpg`, this is a separate sample only if it has its own caption or metadata.

    Other files are skipped, such as `00000.parquet` and `00000_stats.json`, which img2dataset writes beside tar files.
    """

    location: str
    caption_text: CaptionText = 'whole'
    caption_column: str | Sequence[str] | None = None
    """Caption keys in .json members, and `txt` for .txt members; None means those listed in the class docstring."""
    image_suffixes: tuple[str, ...] = IMAGE_SUFFIXES
    caption_suffix: str = 'txt'

    def parts(self) -> list[Part]:
        """Return one part (unit of input that one job converts) per tar file."""
        files, others = list_files(self.location, SUFFIXES)
        if not is_pattern(self.location):
            refuse_mixed_splits(self.location, [file.name for file in files], 'webdataset')
        return with_passed_over([single_file_part(file, SUFFIXES[0]) for file in files], others)

    def read(self, part: Part) -> Iterator[Entry | PassedOver]:
        """Yield samples in tar order; if the file is damaged, yield those before the damage and an entry about it."""
        with local_copy(part.where['url'], size=part.where['size']) as path:
            yield from self.read_tar(path, part.where['stem'])

    def read_tar(self, path: Path, stem: str) -> Iterator[Entry | PassedOver]:
        """Yield a local tar file's samples, with keys that begin with this stem; see `read`."""
        # Reject a sample whose key has appeared before. If both samples have an image, it is a duplicate key.
        # Otherwise, a sample's members were not adjacent, so image and caption were read as two samples.
        had_image: dict[str, bool] = {}
        try:
            for sample in _samples(path, self.image_suffixes, (self.caption_suffix, 'json')):
                if isinstance(sample, Member):
                    yield PassedOver(f'{stem}/{as_utf8(sample.name)}')
                    continue
                has_image = sample.image is not None
                if sample.key not in had_image:
                    yield self._entry(sample, stem)
                else:
                    both = has_image and had_image[sample.key]
                    yield Entry(_key(sample, stem), problem='duplicate_key' if both else 'sample_scattered')
                had_image[sample.key] = has_image or had_image.get(sample.key, False)
        except DamagedTar as damage:
            yield Entry(f'{stem} at byte {damage.byte}', problem=f'part_{damage}')

    def _entry(self, sample: '_Sample', stem: str) -> Entry:
        entry = Entry(_key(sample, stem))
        if sample.image is None or not sample.image.is_file:
            entry.problem = 'no_image'
        elif sample.image.content is None:
            entry.problem = 'file_too_large'
        else:
            entry.image = sample.image.content
        names = (self.caption_suffix, 'json')
        text, columns = (sample.members[name].content or b'' if name in sample.members else None for name in names)
        read_sidecars(entry, text, columns, rule=self.caption_text, caption_columns=column_list(self.caption_column))
        return entry


@dataclass(frozen=True)
class _Sample:
    """One image with caption and metadata: adjacent members of a tar file with the same stem."""

    key: str
    image_suffixes: Sequence[str]
    members: dict[str, Member] = field(default_factory=dict)

    @property
    def image(self) -> Member | None:
        return next((self.members[suffix] for suffix in self.image_suffixes if suffix in self.members), None)


def _samples(path: Path, image_suffixes: Sequence[str], beside: Sequence[str]) -> Iterator[_Sample | Member]:
    """Group adjacent tar members with the same stem into samples; yield other files one by one.

    A repeated suffix starts a new sample. `beside` are the suffixes of captions and metadata.
    """
    known = {*image_suffixes, *beside}
    group = _Group('', image_suffixes)
    try:
        for member in members(path):
            key, suffix = _split(member.name)
            if _split_suffix(suffix)[1] not in known:
                if member.is_file:
                    yield member
                continue
            if key != group.key or group.has(suffix):
                yield from group.samples()
                group = _Group(key, image_suffixes)
            group.add(suffix, member)
    except DamagedTar as damage:
        # If the damaged member belongs to another sample, the last sample is complete. Otherwise, or if the damaged
        # member's name is unknown, the last sample may lack members.
        if damage.name is not None and _split(damage.name)[0] != group.key:
            yield from group.samples()
        raise
    yield from group.samples()


class _Group:
    """Adjacent tar members whose names, including folders, are equal up to the first dot."""

    def __init__(self, key: str, image_suffixes: Sequence[str]) -> None:
        self.key = key
        self._image_suffixes = image_suffixes
        self._samples: dict[str, _Sample] = {}
        """Samples by the part of their stem after the first dot: `v2` for `photo.v2.jpg`, empty for `photo.jpg`."""

    def has(self, suffix: str) -> bool:
        """Return True if there is a member with this suffix; it may contain dots, such as `v2.jpg`."""
        middle, last = _split_suffix(suffix)
        return middle in self._samples and last in self._samples[middle].members

    def add(self, suffix: str, member: Member) -> None:
        middle, last = _split_suffix(suffix)
        key = f'{self.key}.{middle}' if middle else self.key
        sample = self._samples.setdefault(middle, _Sample(key, self._image_suffixes))
        sample.members[last] = member

    def samples(self) -> Iterator[_Sample | Member]:
        """Yield samples, and members that are not samples, such as a mask `photo.mask.png` beside `photo.jpg`."""
        plain = self._samples.get('')
        has_image = plain is not None and plain.image is not None
        for middle, sample in self._samples.items():
            if middle and has_image and (sample.image is None or len(sample.members) == 1):
                yield from sample.members.values()
            else:
                yield sample


def _split(name: str) -> tuple[str, str]:
    """Split a member's path into (key, suffix) at the first dot of the file name, as in webdataset."""
    folder, slash, last = name.removeprefix('./').rpartition('/')
    stem, _, suffix = last.partition('.')
    return folder + slash + stem, suffix if stem else ''


def _split_suffix(suffix: str) -> tuple[str, str]:
    """Split a suffix such as `v2.jpg` at its last dot; the part after it is returned in lower case."""
    middle, _, last = suffix.rpartition('.')
    return middle, last.lower()


def _key(sample: _Sample, stem: str) -> str:
    return f'{stem}/{as_utf8(sample.key)}'
