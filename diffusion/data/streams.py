"""Named streams of MDS shards and the dataset over several of them."""

import json
import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from streaming import Stream

from diffusion.config import sample_order
from diffusion.config.image_shapes import Shape, apportion
from diffusion.data.bad_samples import MAX_ATTEMPTS, BadSample, replacement
from diffusion.data.caption_choice import captions_of
from diffusion.data.image_block import ImageBlock
from diffusion.data.verified_dataset import VerifiedDataset
from diffusion.errors import UserError
from diffusion.models import batch_keys
from diffusion.models.randomness import Purpose, keyed_uniforms

log = logging.getLogger(__name__)


MAX_SHARE_ERROR = 0.01
"""Relative error of a stream's share of an epoch above which a warning is logged."""


@dataclass(frozen=True)
class Bucket:
    """A stream with its name and the shape at which the model sees its images."""

    name: str
    stream: Stream
    shape: Shape


class BucketedDataset(VerifiedDataset):
    """Samples of several streams, each with its own shape, and the keys that randomness depends on.

    Args:
        buckets: The streams.
        batch_size: Samples per device and batch.
        columns: Columns that every sample must have; one of each tuple is enough.
        seed: Seed of crops, flips and caption choice, in [0, 2**32).
        elastic: Serve whole global batches of the same samples on any number of devices, for training; samples that do
            not fill a batch wait for another epoch. Otherwise an epoch serves every sample, for evaluation.
        substitute: Serve another sample of the same shard in place of one that cannot be decoded; see
            `diffusion.data.bad_samples`.
        streaming: Keywords of VerifiedDataset and StreamingDataset.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        *,
        batch_size: int,
        columns: Sequence[tuple[str, ...]],
        seed: int,
        elastic: bool = False,
        substitute: bool = False,
        **streaming: Any,
    ) -> None:
        self.image_block = ImageBlock(batch_size)
        self.seed = seed
        self.elastic = elastic
        self.substitute = substitute
        # Read before Streaming gives every stream a proportion.
        given = [bucket.stream for bucket in buckets if bucket.stream._proportion is not None]
        self.by_shares = bool(given) or streaming.get('epoch_size') is not None
        super().__init__({bucket.name: bucket.stream for bucket in buckets}, batch_size=batch_size, **streaming)
        self.buckets = [replace(bucket, stream=stream) for bucket, stream in zip(buckets, self.streams, strict=True)]
        self._check_columns(columns)
        if elastic:
            self._take_whole_batches()

    @property
    def global_batch(self) -> int:
        """Number of samples of a batch over all devices."""
        assert isinstance(self.batch_size, int)
        return self.batch_size * self._parallel_rank_world.num_ranks

    def __getitem__(self, at: int) -> dict[str, Any]:  # type: ignore[override]
        """Return a sample, or its replacement if it cannot be decoded, under the sample's own id."""
        errors: list[str] = []
        index = int(at)
        while True:
            try:
                item = self.item(index)
                break
            except BadSample as error:
                errors.append(str(error))
                if not self.substitute:
                    raise
                if len(errors) > MAX_ATTEMPTS:
                    raise BadSample(f'{errors[0]}; so are {MAX_ATTEMPTS} others of its shard') from error
            index = self._replacement(int(at), len(errors))
        if self.substitute:
            item[batch_keys.REPLACED] = self._note(int(at), index, errors) if errors else ''
        return item | self.identity(at)

    def item(self, at: int) -> dict[str, Any]:
        """Return the tensors of a sample without its identity; subclasses implement this.

        Raises:
            BadSample: The sample was read and cannot be decoded.
        """
        raise NotImplementedError

    def captions(self, sample: dict[str, Any], at: int) -> list[str]:
        """Return the captions of a sample.

        Raises:
            BadSample: It has no captions.
        """
        try:
            return captions_of(sample, '')
        except BadSample as error:
            raise BadSample(f'{self.where(at)}{error}') from error

    def bucket_of(self, index: int) -> Bucket:
        """Return the stream that a sample belongs to."""
        shard, _ = self.spanner[index]
        return self.buckets[int(self.stream_per_shard[shard])]

    def where(self, index: int) -> str:
        """Return a sample's address for error messages."""
        shard, row = self.spanner[index]
        reader = self.shards[shard]
        return f'streams.{self.bucket_of(index).name}: sample {index} (row {row} of {reader.raw_data.basename})'

    def current_epoch(self) -> int:
        """Return the epoch being served; Streaming increments `next_epoch` when an iteration starts."""
        return max(self.next_epoch - 1, 0)

    def draws(self, index: int, purpose: Purpose) -> tuple[float, float, float, float]:
        """Return four uniform numbers in [0, 1) keyed by seed, purpose, sample and epoch."""
        return keyed_uniforms(self.seed, purpose, index, self.current_epoch())

    def identity(self, index: int) -> dict[str, int]:
        """Return the id and the epoch of a sample, which key its randomness on the device."""
        return {batch_keys.SAMPLE_ID: int(index), batch_keys.EPOCH: self.current_epoch()}

    def _replacement(self, at: int, attempt: int) -> int:
        shard, _ = self.spanner[at]
        first = int(self.sample_offset_per_shard[shard])
        samples = int(self.samples_per_shard[shard])
        return first + replacement(self.seed, at, self.current_epoch(), attempt, samples=samples)

    def _note(self, at: int, served: int, errors: Sequence[str]) -> str:
        shard, row = self.spanner[at]
        raw = self.shards[shard].file_pairs[0][0].basename
        key = self.get_item(at).get('key')
        name = self.bucket_of(at).name
        line = {'sample_id': at, 'served': served, 'stream': name, 'shard': raw, 'row': int(row), 'key': key}
        return json.dumps(line | {'epoch': self.current_epoch(), 'error': errors[0]}, default=str)

    def load_state_dict(self, obj: dict[str, Any]) -> None:
        """Resume in the middle of an epoch.

        Streaming also takes `num_canonical_nodes` and `shuffle_seed` from the state and keeps them for the rest of the
        run. Here the dataset's own values stay: SameRun has compared them, and if data may change, the recipe decides.
        The position is rounded down to a multiple of the current global batch, or to the end of the epoch.
        """
        if self.elastic:
            position = min(obj['sample_in_epoch'], self.epoch_size) // self.global_batch * self.global_batch
            own = {'num_canonical_nodes': self.num_canonical_nodes, 'shuffle_seed': self.shuffle_seed}
            obj = obj | own | {'sample_in_epoch': position}
        super().load_state_dict(obj)

    def _take_whole_batches(self) -> None:
        """Round the samples that an epoch takes of each stream to whole global batches.

        See `diffusion.config.sample_order`.
        """
        # Streaming reads `choose` and `proportion` of a stream, `epoch_size` and `length` when an epoch begins or the
        # length is asked for, never before, so they can be replaced here. Every rank computes the same numbers.
        if self.num_canonical_nodes is None:
            self.num_canonical_nodes = sample_order.default_canonical_nodes(self.global_batch)
        self._check_order(self.num_canonical_nodes)
        asked = [float(stream.proportion) for stream in self.streams]
        batches = self._batches_of_streams(asked)
        self.epoch_size = sum(batches) * self.global_batch
        samples_of = zip(self.buckets, self.samples_per_stream.tolist(), batches, asked, strict=True)
        for bucket, samples, count, share in samples_of:
            bucket.stream.choose = count * self.global_batch
            bucket.stream.repeat = bucket.stream.choose / samples
            bucket.stream.proportion = bucket.stream.choose / self.epoch_size
            self._log_epoch(bucket, samples, share)
        self.length = self.epoch_size // self._parallel_rank_world.num_ranks
        granularity = sample_order.sampling_granularity(int(self.samples_per_stream.max()))
        self.sampling_granularity = max(self.sampling_granularity, granularity)
        # The default depends on num_canonical_nodes alone, which is known now.
        self._set_shuffle_block_size(self._parallel_rank_world)
        assert all(stream.choose % self.global_batch == 0 for stream in self.streams)
        assert self.length * self._parallel_rank_world.num_ranks == self.epoch_size

    def _batches_of_streams(self, proportions: Sequence[float]) -> list[int]:
        """Return the batches that an epoch takes of each stream; proportions are off by less than one batch."""
        if not self.by_shares:
            return [
                sample_order.whole_batches(int(stream.choose), self.global_batch) // self.global_batch
                for stream in self.streams
            ]
        total = max(len(self.streams), self.epoch_size // self.global_batch)
        return [max(1, count) for count in apportion(total, proportions)]

    def _check_order(self, canonical_nodes: int) -> None:
        problems = {
            'num_canonical_nodes': sample_order.canonical_nodes_problem(canonical_nodes, self.global_batch)
            or sample_order.nodes_problem(canonical_nodes, self._parallel_rank_world.num_nodes),
            'batching_method': sample_order.batching_problem(
                self.batching_method, [str(bucket.shape) for bucket in self.buckets]
            ),
        }
        for bucket in self.buckets:
            given = bucket.stream._choose
            problem = None if given is None else sample_order.choose_problem(given, self.global_batch)
            problems[f'streams.{bucket.name}.choose'] = problem
        for where, problem in problems.items():
            if problem is not None:
                raise UserError(f'{where}: {problem}')

    def _log_epoch(self, bucket: Bucket, samples: int, share: float) -> None:
        if not self._unique_rank_world.is_leader:
            return
        taken = bucket.stream.choose
        log.info(
            'streams.%s: an epoch takes %d samples, %d batches, and leaves %d of its %d for another epoch',
            *(bucket.name, taken, taken // self.global_batch, max(0, samples - taken), samples),
        )
        if self.by_shares and abs(bucket.stream.proportion / share - 1) > MAX_SHARE_ERROR:
            log.warning(
                'streams.%s: %.4f of an epoch was asked for, in whole batches it is %.4f; a larger loader.epoch_size '
                'comes nearer',
                *(bucket.name, share, bucket.stream.proportion),
            )
        if samples < self.global_batch:
            log.warning(
                'streams.%s: its %d samples do not fill a global batch of %d; a batch holds samples more than once',
                *(bucket.name, samples, self.global_batch),
            )

    def _check_columns(self, columns: Sequence[tuple[str, ...]]) -> None:
        for index, bucket in enumerate(self.buckets):
            shards = [s for s, stream in zip(self.shards, self.stream_per_shard, strict=True) if stream == index]
            if not shards:
                raise UserError(f'streams.{bucket.name}: it has no samples; prepare it again or remove the stream')
            present = shards[0].column_names  # type: ignore[attr-defined]
            for choice in columns:
                if not set(choice) & set(present):
                    raise UserError(
                        f'streams.{bucket.name}: its samples have {", ".join(present)}, '
                        f'but {" or ".join(choice)} is needed; does the recipe name the right dataset?'
                    )
