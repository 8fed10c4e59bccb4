"""List of the parts of an input, most of which is in a temporary file: that of 100 million images has 28 GB."""

import hashlib
import json
import re
import tempfile
import weakref
from array import array
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any, overload

from diffusion.prepare.source import Part

MEMORY_BYTES = 2**26
"""Size up to which the list is kept in memory instead of in TMPDIR."""


_COMMIT = re.compile(r'("hf://datasets/[^"@]*)@[0-9a-f]{40}(?=[/"])')


class PartList(Sequence[Part]):
    """Parts of an input in order. Memory holds all of a part but its `where`.

    Args:
        parts: The first parts.
    """

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
    """Return what a plan has of a part: the values that the dataset depends on, without those for the report."""
    return {'name': part.name, 'where': part.where, 'size': part.size, 'stamp': part.stamp}
