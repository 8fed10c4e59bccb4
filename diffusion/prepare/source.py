"""Interface of a source of images: the input is split into parts, and each part yields images with captions.

A part is the unit of input that one job converts, such as a tar. Implement `Source` to read another format.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

IMAGE_SUFFIXES = ('jpg', 'jpeg', 'png', 'webp', 'gif', 'bmp', 'tif', 'tiff', 'avif')
"""File suffixes of images, in lower case and without a dot."""


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


class Source(Protocol):
    """Interface of an input of images, such as a folder; must be picklable, since it is sent to other processes."""

    def parts(self) -> Sequence[Part]:
        """Split the input into parts, which jobs convert in parallel; the same input gives the same parts in order.

        Raises:
            ValueError: There is nothing to read, or the input cannot be listed.
        """
        ...

    def read(self, part: Part) -> Iterator[Entry]:
        """Yield the images of a part in order with captions; each image, caption or row of the input gives one entry.

        Raises:
            OSError: The part cannot be read at the moment; a retry may succeed.
        """
        ...
