"""Interface for image sources: the input is split into parts, and each part yields images with captions.

A part is the unit of input that one job converts, such as a tar file. Implement `Source` to read another format.
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
IMAGE_SUFFIXES = ('jpg', 'jpeg', 'jpe', 'jfif', 'png', 'webp', 'gif', 'bmp', 'tif', 'tiff', 'avif')
CaptionText = Literal['whole', 'lines', 'first']
MEMORY_BYTES = 2**26
"""Maximum size in bytes of a PartList's `where` values to keep in memory; larger ones are kept in a file in TMPDIR."""
_COMMIT = re.compile(r'("hf://datasets/[^"@]*)@[0-9a-f]{40}(?=[/"])')


def captions_in(text: bytes, kind: CaptionText) -> list[str]:
    """Return the captions in a text file; in a JSON list of strings, each string counts like a line.

    `whole` returns the text as one caption (or all strings of a list), `lines` all lines, and `first` the first one.

    Raises:
        UnicodeDecodeError: The text is not UTF-8.
    """
    decoded = str(text, 'utf-8-sig')
    texts = texts_of(decoded)
    if texts == [decoded] and kind != 'whole':
        texts = [line for line in decoded.splitlines() if line.strip()]
    return texts[:1] if kind == 'first' else texts


def texts_of(value: Any) -> list[Any]:
    """Return the captions in a value: items of a list or of a JSON list of strings, otherwise the value itself."""
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
    """Return the columns given in a setting (none, one or several) as a list."""
    return [] if given is None else [given] if isinstance(given, str) else list(given)


def captions_of_columns(values: Mapping[str, Any], columns: Sequence[str]) -> tuple[list[Any], list[str]]:
    """Return the captions in the columns (strings or lists; None for a missing one), and the column of each caption."""
    captions: list[Any] = []
    names: list[str] = []
    for column in columns:
        found = texts_of(values.get(column))
        captions += found
        names += [column] * len(found)
    return captions, names


@dataclass
class NamedCount:
    """Number of inputs rejected for one reason, or skipped for one suffix or reason, with some of their names."""

    count: int = 0
    names: list[str] = field(default_factory=list)
    """Names of the first inputs, at most `NAMES_SHOWN`."""

    @property
    def shown(self) -> str:
        """The first three names as text, such as `a.svg, b.svg, c.svg, ...`."""
        return ', '.join(self.names[:3]) + (', ...' if self.count > 3 else '')


def count_named(counts: dict[str, NamedCount], kind: str, count: int, names: Sequence[str]) -> None:
    total = counts.setdefault(kind, NamedCount())
    total.count += count
    total.names += names[: NAMES_SHOWN - len(total.names)]


def summed_counts(counts: Iterable[Mapping[str, NamedCount]]) -> dict[str, NamedCount]:
    total: dict[str, NamedCount] = {}
    for each in counts:
        for kind, found in each.items():
            count_named(total, kind, found.count, found.names)
    return total


def summed_details(details: Iterable[Mapping[str, Mapping[str, int]]]) -> dict[str, dict[str, int]]:
    total: dict[str, dict[str, int]] = {}
    for each in details:
        for reason, found in each.items():
            count_details(total, reason, found)
    return total


def count_details(details: dict[str, dict[str, int]], reason: str, found: Mapping[str, int]) -> None:
    """Add `found`, counts by explanation, to `details[reason]`, which keeps at most `NAMES_SHOWN` explanations."""
    total = details.setdefault(reason, {})
    for detail, count in found.items():
        if detail in total or len(total) < NAMES_SHOWN:
            total[detail] = total.get(detail, 0) + count


@dataclass(frozen=True)
class PassedOver:
    """Input file that is skipped: of another kind, such as `cat.svg`, of another split, hidden, or a broken link."""

    key: str
    reason: str | None = None
    """Reason for skipping the file, such as `split test`; None if its name is the reason (see `kind`)."""

    @property
    def kind(self) -> str:
        """Category for counting the file: the reason, the lowercase suffix, `hidden`, or `without suffix`."""
        if self.reason is not None:
            return self.reason
        if is_hidden(self.key):
            return 'hidden'
        stem, _, suffix = self.key.rpartition('/')[2].rpartition('.')
        return f'.{suffix.lower()}' if stem and suffix else 'without suffix'


def is_hidden(name: str) -> bool:
    """Return True if any component of a file's path begins with a dot."""
    return name.startswith('.') or '/.' in name


@dataclass(frozen=True)
class Part:
    """Unit of input that one process reads in order, such as a tar file or a range of files."""

    name: str
    """Unique, stable name of letters, digits, dots, dashes and underscores."""
    where: dict[str, Any]
    """Location of the part in a form that its source can read, such as URLs; only JSON values."""
    size: int
    """Size of the part for the progress bar: bytes or, if unknown, number of images."""
    stamp: str
    """Text that changes with the content, such as a file's size and modification time, or an object's ETag."""
    passed_over: Mapping[str, NamedCount] = field(default_factory=dict)
    """Skipped files of the whole input, by `PassedOver.kind`: for the report, not the plan; set in the first part."""
    notes: tuple[str, ...] = ()
    """Notes about the whole input, such as its revision. Only for the report, not in the plan; stored in the first
    part."""
    license: str | None = None
    """License of the whole input: None if the source cannot know it, empty if none is stated. Only for the report, not
    in the plan; stored in the first part."""


@dataclass
class Entry:
    """One input: an undecoded image with captions and metadata, or the reason why the source could not read it."""

    key: str
    """Stable ID within the source, used in the report and the dataset."""
    image: bytes | None = None
    captions: list[Any] = field(default_factory=list)
    """Raw captions; may include None, numbers and NaN."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Other columns by name, such as `aesthetic_score`, as JSON values."""
    problem: str | None = None
    """Reason why the source could not read the input, such as `no_image`; shown in the report. None if it could."""
    caption_columns: list[str] = field(default_factory=list)


class Source(Protocol):
    """Interface for an input of images, such as a folder; must be picklable, since it is sent to other processes."""

    def parts(self) -> Sequence[Part]:
        """Split the input into parts for parallel jobs; the same input always gives the same parts in the same order.

        Raises:
            ValueError: The input is empty, or it cannot be listed.
        """
        ...

    def read(self, part: Part) -> Iterator[Entry | PassedOver]:
        """Yield a part's images in order with captions; each image, caption or row of the input gives one entry.

        Files that are not read, such as other members of a tar file, are yielded as `PassedOver`.

        Raises:
            OSError: The part cannot be read right now; a retry may succeed.
        """
        ...


@runtime_checkable
class DivisibleSource(Source, Protocol):
    """Source that can divide a part into smaller parts, so that several jobs can convert it."""

    def divide(self, part: Part, count: int) -> Sequence[Part]:
        """Split a part into at most `count` parts in order; the result depends only on the arguments."""
        ...


@runtime_checkable
class VersionedSource(Source, Protocol):
    """Source whose input has versions that remain readable, such as commits on the Hugging Face Hub."""

    def pinned_to(self, parts: Iterable[Mapping[str, Any]]) -> Source:
        """Return the source pinned to the version listed by an earlier start of the preparation.

        Args:
            parts: Parts in that start's plan, as JSON objects with the fields of `Part`.
        """
        ...


class PartList(Sequence[Part]):
    """Parts of an input in order. Large `where` values (28 GB for 100 million images) are in a file, not in memory."""

    def __init__(self, parts: Iterable[Part] = ()) -> None:
        self.heads: list[Part] = []
        """The parts in order, with `where` left empty."""
        self._file = tempfile.SpooledTemporaryFile(MEMORY_BYTES)  # noqa: SIM115
        weakref.finalize(self, self._file.close)
        self._starts = array('q')
        self._end = 0
        self._hash = hashlib.sha256(b'{"parts": [')
        for part in parts:
            self.append(part)

    def append(self, part: Part) -> None:
        where = json.dumps(part.where).encode()
        self._file.seek(self._end)
        self._file.write(where)
        self._starts.append(self._end)
        self._end += len(where)
        self._hash.update(b', ' * bool(self.heads) + json.dumps(plan_entry(part), sort_keys=True).encode())
        self.heads.append(replace(part, where={}))

    def report_in_first(self, **values: Any) -> None:
        self.heads[0] = replace(self.heads[0], **values)

    def fingerprint(self, **others: Any) -> str:
        """Return the hexadecimal SHA-256 of a plan with these parts and `others`, written as JSON with sorted keys."""
        whole = self._hash.copy()
        whole.update(b'], ' + json.dumps(others, sort_keys=True).encode()[1:])
        return whole.hexdigest()

    def without_commits(self) -> 'PartList':
        """Return these parts with the commit removed from the URLs of files on the Hub."""
        parts = PartList()
        for part in self:
            where = json.loads(_COMMIT.sub(r'\1', json.dumps(part.where)))
            # Drop the stamp of parts that list image files: it is a hash of `where` with the commit in its URLs, and
            # `where` has a stamp for each image anyway.
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
    """Return a part as stored in a plan: the values that affect the dataset, without those only for the report."""
    return {'name': part.name, 'where': part.where, 'size': part.size, 'stamp': part.stamp}


class Unfit(Exception):
    """Raised to reject an input; the message is the reason in snake case, such as `too_small`."""

    def __init__(self, reason: str, detail: str = '') -> None:
        super().__init__(reason)
        self.detail = detail
        """Explanation for people of why the input is rejected, with the offending values."""


FILTER_REASONS = (
    *('duplicate', 'removed', 'too_small', 'too_elongated', 'too_long', 'too_many_pixels'),
    *('caption_too_short', 'caption_too_long'),
)
"""Reasons of inputs that were filtered out by a limit or the duplicate search in the settings, or by `data remove`.

Reasons for limits of columns, such as `aesthetic_score_below_4.5`, are recognized by `is_filter` in addition. Inputs
rejected for any other reason are unusable: images that cannot be decoded, missing captions, missing values of
filtered columns, rows without an image, and every reason of a source of your own.
"""
_COLUMN_LIMIT = re.compile(r'.+_(below|above)_-?[0-9.]+(e[+-]?[0-9]+)?')


def is_filter(reason: str) -> bool:
    """Return True if the reason means that a setting filtered out the input, False if the input is unusable."""
    return reason in FILTER_REASONS or _COLUMN_LIMIT.fullmatch(reason) is not None
