"""Named streams of MDS shards and the dataset over several of them."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from streaming import Stream, StreamingDataset

from diffusion.data import keys
from diffusion.models.noise import Purpose, keyed_uniforms


@dataclass(frozen=True)
class Bucket:
    """A stream with its name and the resolution its pictures are seen at, in pixels."""

    name: str
    stream: Stream
    resolution: int


class BucketedDataset(StreamingDataset):
    """Samples of several streams, each with its own resolution, and the keys that randomness depends on.

    Args:
        buckets: The streams.
        batch_size: Samples a device and batch.
        columns: What every sample must have; of a tuple, one.
        seed: Of what is random about a sample, in [0, 2**32).
        streaming: Keywords of StreamingDataset.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        *,
        batch_size: int,
        columns: Sequence[tuple[str, ...]],
        seed: int,
        **streaming: Any,
    ) -> None:
        self.buckets = list(buckets)
        self.seed = seed
        where = ', '.join(f'streams.{bucket.name}' for bucket in self.buckets)
        try:
            super().__init__(streams=[bucket.stream for bucket in self.buckets], batch_size=batch_size, **streaming)
        except FileNotFoundError as error:
            raise ValueError(f'{where}: {error}; is it a folder of MDS shards with an index.json?') from error
        except (ValueError, RuntimeError) as error:
            raise ValueError(f'{where}: {error}') from error
        self._check_columns(columns)

    def bucket_of(self, index: int) -> Bucket:
        """The stream that a sample belongs to."""
        shard, _ = self.spanner[index]
        return self.buckets[int(self.stream_per_shard[shard])]

    def where(self, index: int) -> str:
        """A sample's address for error messages."""
        shard, row = self.spanner[index]
        reader = self.shards[shard]
        return f'streams.{self.bucket_of(index).name}: sample {index} (row {row} of {reader.raw_data.basename})'

    def current_epoch(self) -> int:
        """The epoch being served; Streaming counts it up when an iteration starts."""
        return max(self.next_epoch - 1, 0)

    def draws(self, index: int, purpose: Purpose) -> tuple[float, float, float, float]:
        """Four numbers in [0, 1) that belong to this sample in this epoch."""
        return keyed_uniforms(self.seed, purpose, index, self.current_epoch())

    def identity(self, index: int) -> dict[str, int]:
        """What randomness on the device depends on: which sample, in which epoch."""
        return {keys.SAMPLE_ID: int(index), keys.EPOCH: self.current_epoch()}

    def _check_columns(self, columns: Sequence[tuple[str, ...]]) -> None:
        for index, bucket in enumerate(self.buckets):
            shards = [s for s, stream in zip(self.shards, self.stream_per_shard, strict=True) if stream == index]
            if not shards:
                raise ValueError(f'streams.{bucket.name}: it has no samples; prepare it again or remove the stream')
            present = shards[0].column_names  # type: ignore[attr-defined]
            for choice in columns:
                if not set(choice) & set(present):
                    raise ValueError(
                        f'streams.{bucket.name}: its samples have {", ".join(present)}, '
                        f'but {" or ".join(choice)} is needed; does the recipe name the right dataset?'
                    )
