"""A table of all images of all parts in order: those kept, those left out, and the position of each sample.

A row takes about 60 bytes of memory, so 100 million images 6 GB; keys and captions stay on disk.
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
REJECTED = -1
NAMES_SHOWN = 20
"""Names in the report per reason."""
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


@dataclass
class Catalog:
    """Columns over all images; those that are left out have bucket -1."""

    parts: Sequence[Path]
    """Their folders, in order."""
    part: np.ndarray
    """The number of each image's part, int32."""
    bucket: np.ndarray
    """The number of each image's bucket, int16."""
    columns: dict[str, np.ndarray]
    rejected: dict[str, Rejected]
    """Images left out, by reason; without duplicates."""
    first: np.ndarray
    """The row of each part's first image."""

    @classmethod
    def read(cls, parts: Sequence[Path], buckets: Sequence[str]) -> 'Catalog':
        """Gather the rows of parts that are done."""
        codes = {name: code for code, name in enumerate(buckets)} | {'': REJECTED}
        rejected: dict[str, Rejected] = {}
        bucket, columns, counts = [], {name: [] for name in NUMBERS}, []
        for folder in parts:
            rows = read_sample_rows(folder, ['key', 'reason', 'bucket', *NUMBERS])
            counts.append(len(rows))
            encoded = rows['bucket'].combine_chunks().dictionary_encode()
            lookup = np.array([codes[name] for name in encoded.dictionary.to_pylist()], np.int16)
            bucket.append(lookup[encoded.indices.to_numpy()])
            for name, kind in NUMBERS.items():
                columns[name].append(rows[name].to_numpy().astype(kind, copy=False))
            _count(rows, rejected)
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
        """Rows of the images that are kept."""
        return np.flatnonzero(self.bucket != REJECTED)

    def of_bucket(self, code: int) -> np.ndarray:
        """Return the rows of a bucket's kept images."""
        return np.flatnonzero(self.bucket == code)

    def key(self, at: int) -> str:
        """Return the key of an image; reads its part's file."""
        part = int(self.part[at])
        return read_sample_rows(self.parts[part], ['key'])['key'][int(at - self.first[part])].as_py()

    def drop_duplicates(self, mode: str, *, max_distance: int, saved: Path) -> list[tuple[int, int]]:
        """Leave out images that repeat an earlier one; returns the first of them, each with the one that it repeats.

        Args:
            mode: `none`, `exact` or `near`.
            max_distance: Bits by which the perceptual hashes of near ones may differ.
            saved: File that keeps the answer, for it may take long.
        """
        if mode == 'none':
            return []
        kept = self.kept
        repeats = np.load(saved, allow_pickle=False) if saved.exists() else self._repeats(kept, mode, max_distance)
        if not saved.exists():
            with becoming(saved) as unfinished, unfinished.open('xb') as file:
                np.save(file, repeats)
        dropped = np.flatnonzero(repeats >= 0)
        self.bucket[kept[dropped]] = REJECTED
        shown = [(int(kept[at]), int(kept[repeats[at]])) for at in dropped[:NAMES_SHOWN]]
        if len(dropped):
            names = [f'{self.key(at)} (duplicate of {self.key(of)})' for at, of in shown]
            self.rejected[DUPLICATE] = Rejected(len(dropped), names)
        return shown

    def _repeats(self, kept: np.ndarray, mode: str, max_distance: int) -> np.ndarray:
        from diffusion.prepare.image_hashes import duplicates

        meaningful = ~self.columns['is_flat'][kept] if mode == 'near' else np.zeros(len(kept), bool)
        exact, perceptual = self.columns['exact_hash'][kept], self.columns['perceptual_hash'][kept]
        return duplicates(exact, perceptual, meaningful, max_distance=max_distance)


def _count(rows: pa.Table, rejected: dict[str, Rejected]) -> None:
    """Add a part's images that are left out, by reason."""
    reasons = rows['reason'].combine_chunks().dictionary_encode()
    codes = reasons.indices.to_numpy()
    for code, reason in enumerate(reasons.dictionary.to_pylist()):
        if reason:
            found = np.flatnonzero(codes == code)
            so_far = rejected.setdefault(reason, Rejected())
            so_far.count += len(found)
            so_far.names += rows['key'].take(found[: NAMES_SHOWN - len(so_far.names)]).to_pylist()
