"""Interface of a source of images: the input is split into parts, and each part yields images with captions.

A part is the unit of input that one job converts, such as a tar. Implement `Source` to read another format.
"""

import hashlib
import json
import re
import tempfile
import weakref
from array import array
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Protocol, overload, runtime_checkable

NAMES_SHOWN = 20
"""Maximum number of names that a `NamedCount` keeps."""
IMAGE_SUFFIXES = ('jpg', 'jpeg', 'jpe', 'jfif', 'png', 'webp', 'gif', 'bmp', 'tif', 'tiff', 'avif')
"""File suffixes of images, in lower case and without a dot."""
CaptionText = Literal['whole', 'lines', 'first']
"""Content of the text file of an image; see `SourceSettings.caption_text`."""
MEMORY_BYTES = 2**26
"""Maximum size of a list of parts to keep in memory; a larger one is kept in TMPDIR."""
_COMMIT = re.compile(r'("hf://datasets/[^"@]*)@[0-9a-f]{40}(?=[/"])')


def captions_in(text: bytes, kind: CaptionText) -> list[str]:
    """Return the captions in a text file; if it is a JSON list, each of its strings is a caption, whatever `kind` is.

    Raises:
        UnicodeDecodeError: The text is not UTF-8.
    """
    decoded = str(text, 'utf-8-sig')
    texts = texts_of(decoded)
    if texts == [decoded] and kind != 'whole':
        texts = [line for line in decoded.splitlines() if line.strip()]
    return texts[:1] if kind == 'first' else texts


def texts_of(value: Any) -> list[Any]:
    """Return the captions in a value: the items of a list, or of a JSON list of texts in a text, else the value."""
    if isinstance(value, list):
        return value
    if isinstance(value, str) and value.lstrip()[:1] == '[':
        try:
            found = json.loads(value)
        except (ValueError, RecursionError):
            return [value]
        if isinstance(found, list) and found and all(isinstance(text, str) for text in found):
            return found
    return [value]


def column_list(given: str | Sequence[str] | None) -> list[str]:
    """Return the columns that a setting names: none, one or several."""
    return [] if given is None else [given] if isinstance(given, str) else list(given)


def captions_of_columns(values: Mapping[str, Any], columns: Sequence[str]) -> tuple[list[Any], list[str]]:
    """Return the captions in some columns of an image, each a text or a list of texts, and the column of each."""
    captions: list[Any] = []
    names: list[str] = []
    for column in columns:
        found = texts_of(values.get(column))
        captions += found
        names += [column] * len(found)
    return captions, names


@dataclass
class NamedCount:
    """Number of inputs that were rejected for one reason, or skipped for one suffix, and some of their names."""

    count: int = 0
    names: list[str] = field(default_factory=list)
    """Names of the first ones, at most `NAMES_SHOWN`."""

    @property
    def shown(self) -> str:
        """The first three names as text, such as `a.svg, b.svg, c.svg, ...`."""
        return ', '.join(self.names[:3]) + (', ...' if self.count > 3 else '')


def count_named(counts: dict[str, NamedCount], kind: str, count: int, names: Sequence[str]) -> None:
    """Add inputs of a kind to counts by kind, given their number and the names of the first ones."""
    total = counts.setdefault(kind, NamedCount())
    total.count += count
    total.names += names[: NAMES_SHOWN - len(total.names)]


def summed_counts(counts: Iterable[Mapping[str, NamedCount]]) -> dict[str, NamedCount]:
    """Return the sums of counts by kind, with the names of the first ones."""
    total: dict[str, NamedCount] = {}
    for each in counts:
        for kind, found in each.items():
            count_named(total, kind, found.count, found.names)
    return total


def summed_details(details: Iterable[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    """Return the sums of explanations by reason."""
    total: dict[str, dict[str, int]] = {}
    for each in details:
        for reason, found in each.items():
            count_details(total, reason, found)
    return total


def count_details(details: dict[str, dict[str, int]], reason: str, found: Mapping[str, int]) -> None:
    """Add explanations of one reason with their counts; at most `NAMES_SHOWN` different ones are kept."""
    total = details.setdefault(reason, {})
    for detail, count in found.items():
        if detail in total or len(total) < NAMES_SHOWN:
            total[detail] = total.get(detail, 0) + count


@dataclass(frozen=True)
class PassedOver:
    """File of the input that is neither an image nor belongs to one, such as `cat.svg`."""

    key: str
    """Its name, for the report."""
    reason: str | None = None
    """Reason to skip it other than its suffix, such as `split test`."""

    @property
    def kind(self) -> str:
        """Kind in the counts: its reason, or its suffix in lower case such as `.svg`, `hidden`, `without suffix`."""
        if self.reason is not None:
            return self.reason
        if is_hidden(self.key):
            return 'hidden'
        stem, _, suffix = self.key.rpartition('/')[2].rpartition('.')
        return f'.{suffix.lower()}' if stem and suffix else 'without suffix'


def is_hidden(name: str) -> bool:
    """Return True if a file, or a folder of its path, begins with a dot."""
    return name.startswith('.') or '/.' in name


@dataclass(frozen=True)
class Part:
    """Unit of input that one process reads in order, such as a tar or a range of files."""

    name: str
    """Unique, stable name of letters, digits, dots, dashes and underscores."""
    where: dict[str, Any]
    """JSON values that the source needs to read the part."""
    size: int
    """Size in bytes, or the number of images if bytes are unknown; unit of the progress bar."""
    stamp: str
    """Text that changes when the content changes: size and modification time of a file, or the ETag of an object."""
    passed_over: Mapping[str, NamedCount] = field(default_factory=dict)
    """Files that were listed and are in no part, by kind, for the report; no part of the plan. The first part has
    them."""
    notes: tuple[str, ...] = ()
    """Messages about the whole input for the report, such as its revision; no part of the plan. The first part has
    them."""
    license: str | None = None
    """License of the whole input for the report; no part of the plan. None if the source cannot know it, empty if the
    input states none. The first part has it."""


@dataclass
class Entry:
    """One input: an undecoded image with its captions and metadata, or the reason why the source could not read it."""

    key: str
    """Stable ID within the source, used in the report and the dataset."""
    image: bytes | None = None
    """Encoded image file, not validated."""
    captions: list[Any] = field(default_factory=list)
    """Raw captions, which may include None, numbers and NaN."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Other columns by name, such as `aesthetic_score`, as JSON values."""
    problem: str | None = None
    """Reason why the source could not read it, such as `no_image`; shown in the report."""
    caption_columns: list[str] = field(default_factory=list)
    """The column of each caption; empty if all are from one."""


class Source(Protocol):
    """Interface of an input of images, such as a folder; must be picklable, since it is sent to other processes."""

    def parts(self) -> Sequence[Part]:
        """Split the input into parts, which jobs convert in parallel; the same input gives the same parts in order.

        Raises:
            ValueError: There is nothing to read, or the input cannot be listed.
        """
        ...

    def read(self, part: Part) -> Iterator[Entry | PassedOver]:
        """Yield the images of a part in order with captions; each image, caption or row of the input gives one entry.

        Files in the part that it does not read, such as other members of a tar, are yielded as `PassedOver`.

        Raises:
            OSError: The part cannot be read at the moment; a retry may succeed.
        """
        ...


@runtime_checkable
class DivisibleSource(Source, Protocol):
    """Source that can divide a part into smaller ones, so that several jobs convert it."""

    def divide(self, part: Part, count: int) -> Sequence[Part]:
        """Return at most `count` parts with the images of a part in order; the same for the same part and count."""
        ...


@runtime_checkable
class VersionedSource(Source, Protocol):
    """Source of an input with versions that stay readable, such as the commits of a branch on the Hugging Face Hub."""

    def pinned_to(self, parts: Iterable[Mapping[str, Any]]) -> Source:
        """Return the source at the version that an earlier start of the preparation listed.

        Args:
            parts: Parts of the plan of that start, as JSON objects with the fields of `Part`.
        """
        ...


class PartList(Sequence[Part]):
    """Parts of an input in order. Their `where`, which take 28 GB for 100 million images, are not kept in memory."""

    def __init__(self, parts: Iterable[Part] = ()) -> None:
        self.heads: list[Part] = []
        """The parts without `where`, which is empty."""
        self._file = tempfile.SpooledTemporaryFile(MEMORY_BYTES)  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        self._starts = array('q')
        self._end = 0
        self._hash = hashlib.sha256(b'{"parts": [')
        for part in parts:
            self.append(part)

    def append(self, part: Part) -> None:
        """Add a part at the end."""
        where = json.dumps(part.where).encode()
        self._file.seek(self._end)
        self._file.write(where)
        self._starts.append(self._end)
        self._end += len(where)
        self._hash.update(b', ' * bool(self.heads) + json.dumps(plan_entry(part), sort_keys=True).encode())
        self.heads.append(replace(part, where={}))

    def report_in_first(self, **values: Any) -> None:
        """Set fields of the first part that are for the report only, such as `passed_over`."""
        self.heads[0] = replace(self.heads[0], **values)

    def fingerprint(self, **others: Any) -> str:
        """Return the SHA-256, in hexadecimal, of the JSON of a plan with these parts and other values, keys sorted."""
        whole = self._hash.copy()
        whole.update(b'], ' + json.dumps(others, sort_keys=True).encode()[1:])
        return whole.hexdigest()

    def without_commits(self) -> 'PartList':
        """Return these parts with addresses of files on the Hub that name no commit."""
        parts = PartList()
        for part in self:
            where = json.loads(_COMMIT.sub(r'\1', json.dumps(part.where)))
            # The stamp of images is a hash of `where`, addresses included, which has the stamp of each image.
            parts.append(replace(part, where=where, stamp='' if 'pictures' in where else part.stamp))
        return parts

    def __len__(self) -> int:
        return len(self.heads)

    @overload
    def __getitem__(self, index: int) -> Part: ...

    @overload
    def __getitem__(self, index: slice) -> list[Part]: ...

    def __getitem__(self, index: int | slice) -> Part | list[Part]:
        if isinstance(index, slice):
            return [self[number] for number in range(*index.indices(len(self)))]
        number = range(len(self))[index]
        start, end = self._starts[number], self._starts[number + 1] if number + 1 < len(self) else self._end
        self._file.seek(start)
        return replace(self.heads[number], where=json.loads(self._file.read(end - start)))

    def __iter__(self) -> Iterator[Part]:
        return (self[number] for number in range(len(self)))


def plan_entry(part: Part) -> dict[str, Any]:
    """Return the entry of a part in a plan: the values that the dataset depends on, without those for the report."""
    return {'name': part.name, 'where': part.where, 'size': part.size, 'stamp': part.stamp}


class Unfit(Exception):
    """Raised to reject an input; the message is the reason in snake case, such as `too_small`."""

    def __init__(self, reason: str, detail: str = '') -> None:
        super().__init__(reason)
        self.detail = detail
        """Explanation of the reason with the values found."""
