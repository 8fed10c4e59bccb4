"""The interface of sources: a source is cut into parts, each of which yields images with captions."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

IMAGE_SUFFIXES = ('jpg', 'jpeg', 'png', 'webp', 'gif', 'bmp', 'tif', 'tiff', 'avif')
"""Suffixes of files that are images."""


@dataclass(frozen=True)
class Part:
    """A piece of the input that one process reads from beginning to end, such as a tar or a run of files."""

    name: str
    """Unique and stable; of letters, digits, dots, dashes and underscores."""
    where: dict[str, Any]
    """Values that the source needs to read it, in JSON's types."""
    size: int
    """Bytes, or images where bytes are not known; the progress bar counts them."""
    stamp: str
    """A text that changes when the part's content does: size and time of a file, or the tag of an object."""


@dataclass
class Entry:
    """An image as it was found, or a reason why there is none."""

    key: str
    """Stable id within the source, which the report and the dataset name it by."""
    image: bytes | None = None
    """The file as it was found: still encoded, nothing checked."""
    captions: list[Any] = field(default_factory=list)
    """Captions as they were found: None, numbers and NaN included."""
    metadata: dict[str, Any] = field(default_factory=dict)
    """Other columns by name, such as `aesthetic_score`, in JSON's types."""
    problem: str | None = None
    """The reason why the source could not read it, for the report, such as `no_image`."""


class Source(Protocol):
    """A source of images; it is sent to other processes, so it is plain data."""

    def parts(self) -> Sequence[Part]:
        """Return the parts in their order, the same whenever the input is the same.

        Raises:
            ValueError: There is nothing to read, or it cannot be listed.
        """
        ...

    def read(self, part: Part) -> Iterator[Entry]:
        """Yield the entries of a part in their order; every image, caption or row that is there gives one.

        Raises:
            OSError: The part cannot be read now; trying again may help.
        """
        ...
