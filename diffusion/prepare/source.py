"""What a preparation reads: a source cut into parts, each of which yields pictures with captions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

PICTURES = ('jpg', 'jpeg', 'png', 'webp', 'gif', 'bmp', 'tif', 'tiff', 'avif')
"""Suffixes of files that are pictures."""


@dataclass(frozen=True)
class Part:
    """A piece of the input that one process reads from beginning to end, such as a tar or a run of files."""

    name: str
    """Unique and stable; of letters, digits, dots, dashes and underscores."""
    where: dict[str, Any]
    """What the source needs to read it, in JSON's types."""
    size: int
    """Bytes, or pictures where bytes are not known; what progress counts."""
    stamp: str
    """Changes when the part's content does: size and time of a file, or the tag an object store gives it."""


@dataclass
class Entry:
    """A picture as it was found, or why there is none."""

    key: str
    """Stable id within the source, which the report and the dataset name it by."""
    image: bytes | None = None
    """The file as it was found: still encoded, nothing checked."""
    captions: list[Any] = field(default_factory=list)
    """As they were found: None, numbers and NaN included."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Other columns by name, such as `aesthetic_score`, in JSON's types."""
    problem: str | None = None
    """Why the source could not read it, as a reason for the report, such as `no_image`."""


class Source(Protocol):
    """Where pictures come from; it travels to other processes, so it is plain data."""

    def parts(self) -> Sequence[Part]:
        """The parts in their order, the same whenever the input is the same.

        Raises:
            ValueError: There is nothing to read, or it cannot be listed.
        """
        ...

    def read(self, part: Part) -> Iterator[Entry]:
        """The entries of a part in their order; every picture, caption or row that is there gives one.

        Raises:
            OSError: The part cannot be read now; trying again may help.
        """
        ...
