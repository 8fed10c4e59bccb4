"""Table in memory of all inputs of a preparation, in order: bucket or rejection, measurements, position of the sample.

It combines the tables of all parts; a part is the unit of input that one job converts, such as a tar. A row takes
about 60 bytes of memory, so 100 million images take 6 GB; keys and captions stay on disk.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa

from diffusion.prepare.counts_report import Rejected
from diffusion.prepare.sample_table import read_sample_rows
from diffusion.storage.atomic import becoming

DUPLICATE = 'duplicate'
"""Rejection reason of duplicates."""
REJECTED = -1
"""Bucket number of rejected inputs."""
NAMES_SHOWN = 20
"""Maximum number of names per reason in the report."""
NUMBERS = {
    'shard': np.uint32,
    'offset': np.uint32,
    'size': np.uint32,
    'width': np.uint32,
    'height': np.uint32,
    'caption_length': np.uint32,
    'exact_hash': np.uint64,
    'perceptual_hash': np.uint64,
    'is_flat': np.bool_,
}
"""Numeric columns of the table, with their types."""


@dataclass
class Catalog:
    """Table with one row per input, stored as one array per column; rejected inputs have bucket -1."""

    parts: Sequence[Path]
    """Folders of the parts, in order."""
    part: np.ndarray
    """Part number of each input, int32."""
    bucket: np.ndarray
    """Bucket number of each input, int16."""
    columns: dict[str, np.ndarray]
    """The columns in `NUMBERS`."""
    rejected: dict[str, Rejected]
    """Rejected inputs by reason; includes duplicates after `drop_duplicates`."""
    first_row: np.ndarray
    """Row of the first input of each part, int64, and the number of rows at the end."""

    @classmethod
    def read(cls, parts: Sequence[Path], buckets: Sequence[str]) -> 'Catalog':
        """Read the tables that were written for each part of the input, and combine them.

        Args:
            parts: Output folders of the converted parts, in order.
            buckets: Names of the buckets; their index is the bucket number.
        """
        codes = {name: code for code, name in enumerate(buckets)} | {'': REJECTED}
        rejected: dict[str, Rejected] = {}
        bucket, columns, counts = [], {name: [] for name in NUMBERS}, []
        for folder in parts:
            rows = read_sample_rows(folder, ['key', 'reason', 'bucket', *NUMBERS])
            counts.append(len(rows))
            # Map the few distinct names to numbers, and not each of up to 100 million strings in Python.
            encoded = rows['bucket'].combine_chunks().dictionary_encode()
            lookup = np.array([codes[name] for name in encoded.dictionary.to_pylist()], np.int16)
            bucket.append(lookup[encoded.indices.to_numpy()])
            for name, kind in NUMBERS.items():
                columns[name].append(rows[name].to_numpy().astype(kind, copy=False))
            _count_rejected(rows, rejected)
        return cls(
            parts,
            np.repeat(np.arange(len(parts), dtype=np.int32), counts),
            np.concatenate(bucket),
            {name: np.concatenate(pieces) for name, pieces in columns.items()},
            rejected,
            np.concatenate([[0], np.cumsum(counts)]).astype(np.int64),
        )

    def __len__(self) -> int:
        return len(self.part)

    @property
    def kept(self) -> np.ndarray:
        """Row numbers of the images that are not rejected."""
        return np.flatnonzero(self.bucket != REJECTED)

    def rows_of_bucket(self, code: int) -> np.ndarray:
        """Return the row numbers of the kept images of a bucket, given by its number."""
        return np.flatnonzero(self.bucket == code)

    def key(self, row: int) -> str:
        """Return the key (ID within the source, such as a path) of the input in a row; read from disk."""
        part = int(self.part[row])
        return read_sample_rows(self.parts[part], ['key'])['key'][int(row - self.first_row[part])].as_py()

    def drop_duplicates(self, mode: str, *, max_distance: int, saved: Path) -> list[tuple[int, int]]:
        """Mark images that are duplicates of an earlier one as rejected.

        Args:
            mode: `none`, `exact` or `near`.
            max_distance: Maximum number of bits in which the perceptual hashes of near-duplicates may differ.
            saved: File that caches the result of the search for a resumed preparation, since the search may be slow.

        Returns:
            (duplicate, original) row numbers of the first `NAMES_SHOWN` duplicates, for the report.
        """
        if mode == 'none':
            return []
        kept = self.kept
        repeats = np.load(saved, allow_pickle=False) if saved.exists() else self._search(kept, mode, max_distance)
        if not saved.exists():
            with becoming(saved) as unfinished, unfinished.open('xb') as file:
                np.save(file, repeats)
        dropped = np.flatnonzero(repeats >= 0)
        self.bucket[kept[dropped]] = REJECTED
        shown = [(int(kept[index]), int(kept[repeats[index]])) for index in dropped[:NAMES_SHOWN]]
        if len(dropped):
            names = [f'{self.key(row)} (duplicate of {self.key(original)})' for row, original in shown]
            self.rejected[DUPLICATE] = Rejected(len(dropped), names)
        return shown

    def _search(self, kept: np.ndarray, mode: str, max_distance: int) -> np.ndarray:
        """Search the kept images for duplicates; return the result of `image_hashes.duplicates`."""
        from diffusion.prepare.image_hashes import duplicates

        # Noise determines the perceptual hashes of flat images, which would make unrelated ones near-duplicates.
        meaningful = ~self.columns['is_flat'][kept] if mode == 'near' else np.zeros(len(kept), bool)
        exact, perceptual = self.columns['exact_hash'][kept], self.columns['perceptual_hash'][kept]
        return duplicates(exact, perceptual, meaningful, max_distance=max_distance)


def _count_rejected(rows: pa.Table, rejected: dict[str, Rejected]) -> None:
    """Add the inputs that a part's table lists as rejected to `rejected`: per reason, their number and first keys."""
    reasons = rows['reason'].combine_chunks().dictionary_encode()
    codes = reasons.indices.to_numpy()
    for code, reason in enumerate(reasons.dictionary.to_pylist()):
        if reason:
            found = np.flatnonzero(codes == code)
            entry = rejected.setdefault(reason, Rejected())
            entry.count += len(found)
            entry.names += rows['key'].take(found[: NAMES_SHOWN - len(entry.names)]).to_pylist()
