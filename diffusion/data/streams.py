"""Dataset over several named streams of MDS shards, one image shape per stream."""

import hashlib
import json
import logging
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from streaming import Stream

from diffusion.compatibility.private_names import private_attribute
from diffusion.config.device_checks import (
    batching_problem,
    canonical_nodes_problem,
    choose_problem,
    default_canonical_nodes,
    nodes_problem,
    sampling_granularity,
)
from diffusion.config.image_shapes import Shape, apportion
from diffusion.data.bad_samples import MAX_ATTEMPTS, BadSample, replacement
from diffusion.data.caption_choice import (
    CAPTION_COLUMNS,
    CaptionChoice,
    caption_chances,
    captions_of,
    check_caption_weights,
    choose_caption_index,
)
from diffusion.data.caption_columns import CaptionColumns
from diffusion.data.epoch_order import EvaluationOrder, OccurrenceSpanner, evaluation_order, numbered_ids
from diffusion.data.epoch_position import keep_data_position
from diffusion.data.transforms import ImageBlock
from diffusion.data.verified_dataset import VerifiedDataset
from diffusion.errors import UserError
from diffusion.models import batch_keys
from diffusion.models.randomness import Purpose, epoch_word, keyed_uniforms
from diffusion.storage.caption_tables import ORIGINAL

log = logging.getLogger(__name__)

keep_data_position()


MAX_SHARE_ERROR = 0.01
"""Log a warning if rounding to whole batches changes a stream's share of an epoch by more than 1% of that share."""


@dataclass(frozen=True)
class Bucket:
    """A stream, its name, and the shape to which its images are cropped and resized."""

    name: str
    stream: Stream
    shape: Shape


class BucketedDataset(VerifiedDataset):
    """Base class of datasets over several streams, each with its own image shape; subclasses implement `item`.

    Samples carry their id, epoch, and occurrence within the epoch, which seed all random draws. Methods take a numbered
    id (`diffusion.data.epoch_order`) as `index`; for the first copy of a sample in an epoch, it equals the sample id.

    Args:
        batch_size: Samples per device per batch.
        columns: Columns that every sample must have; each tuple lists alternatives, of which one is enough.
        seed: Seed of crops, flips and caption choice, in [0, 2**32).
        elastic: True (training) serves whole global batches that are the same on any number of devices; samples that do
            not fill a batch wait for another epoch. False (evaluation) serves every sample once per epoch, always in
            the same order (`diffusion.data.epoch_order`).
        substitute: Replace samples that cannot be decoded with others from the same shard
            (`diffusion.data.bad_samples`).
        caption_weights: Probability weight of each caption column, whether stored in the shards or written by
            `diffusion caption`. None means that all captions in the shards are equally likely, and that columns of
            `diffusion caption` are not used.
    """

    copies = 'each with its own crop, caption, timestep and noise'
    """Part of log messages: the difference between the copies of a sample within an epoch."""

    def __init__(
        self,
        buckets: Sequence[Bucket],
        *,
        batch_size: int,
        columns: Sequence[tuple[str, ...]],
        seed: int,
        elastic: bool = False,
        substitute: bool = False,
        caption_choice: CaptionChoice = 'random',
        caption_weights: Mapping[str, float] | None = None,
        **streaming: Any,
    ) -> None:
        check_caption_weights(caption_weights, caption_choice)
        self.image_block = ImageBlock(batch_size)
        self.seed = seed
        self.elastic = elastic
        self.substitute = substitute
        self.caption_choice: CaptionChoice = caption_choice
        self.caption_weights = caption_weights
        # Read the private `_proportion`, which is None unless the recipe set it: Streaming's constructor derives a
        # `proportion` for every stream.
        given = [bucket.stream for bucket in buckets if private_attribute(bucket.stream, '_proportion') is not None]
        self.is_proportional = bool(given) or streaming.get('epoch_size') is not None
        super().__init__({bucket.name: bucket.stream for bucket in buckets}, batch_size=batch_size, **streaming)
        self.buckets = [replace(bucket, stream=stream) for bucket, stream in zip(buckets, self.streams, strict=True)]
        self.spanner = OccurrenceSpanner(self.spanner)
        self._check_columns(columns)
        # Without weights, do not read captions written by `diffusion caption`: new ones would silently change a run.
        self.caption_columns = self.open_caption_columns(caption_weights or ())
        self._check_caption_columns()
        if elastic:
            self._round_to_whole_batches()
        else:
            assert isinstance(self.batch_size, int)
            self.length = sum(-(-int(stream.choose) // self.global_batch) for stream in self.streams) * self.batch_size

    @property
    def global_batch(self) -> int:
        """Number of samples per global batch, summed over all devices."""
        assert isinstance(self.batch_size, int)
        # Streaming's private view of the ranks, fixed when the dataset was created.
        return self.batch_size * self._parallel_rank_world.num_ranks

    def __getitem__(self, at: int) -> dict[str, Any]:  # type: ignore[override]
        return self.read(at)[1]

    def read(self, at: int) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return a stored sample, and by batch key the tensors, id, epoch and occurrence that a batch contains of it.

        With `substitute`, a sample that cannot be decoded is replaced by another, served under the id of the original.
        Before a sample is replaced or rejected, its shard is hashed again and, if damaged, downloaded again.

        Raises:
            BadSample: The sample and, with `substitute`, `MAX_ATTEMPTS` replacements cannot be decoded.
            DataError: The shard cannot be read, or it is damaged and has no remote; such samples are never replaced.
        """
        errors: list[str] = []
        index = int(at)
        while True:
            try:
                sample = self.get_item(index)
                item = self.item(sample, index)
                break
            except BadSample as error:
                # Do not replace a damaged shard's samples one by one: download the shard again, or report it in an
                # error.
                if self.check_again(int(self.spanner[index][0])):
                    continue
                errors.append(str(error))
                if not self.substitute:
                    raise
                if len(errors) > MAX_ATTEMPTS:
                    raise BadSample(
                        f'{errors[0]}; {MAX_ATTEMPTS} other samples of its shard cannot be decoded either'
                    ) from error
            index = self._replacement(int(at), len(errors))
        # Set this key in every sample: collation takes the keys from the first sample of a batch.
        if self.substitute:
            item[batch_keys.REPLACED] = self._replacement_note(int(at), index, errors) if errors else ''
        return sample, item | self.identity(at)

    def item(self, sample: dict[str, Any], index: int) -> dict[str, Any]:
        """Return a stored sample's tensors by batch key, without id and epoch, or raise BadSample; abstract."""
        raise NotImplementedError

    def choose_caption(self, sample: dict[str, Any], index: int) -> tuple[int, str]:
        """Return index and text of the caption chosen for a sample in this epoch; raise BadSample if it has none."""
        draw = self.draws(index, Purpose.CAPTION_CHOICE)[0]
        try:
            sample = self.with_table_captions(sample, index)
            captions = captions_of(sample, '')
            chances = [] if self.caption_weights is None else caption_chances(sample, self.caption_weights)
        except BadSample as error:
            raise BadSample(f'{self.where(index)}: {str(error).removeprefix(": ")}') from error
        chosen = choose_caption_index(captions, self.caption_choice, draw, chances)
        return chosen, captions[chosen]

    def with_table_captions(self, sample: dict[str, Any], index: int) -> dict[str, Any]:
        """Return a sample with captions of `diffusion caption` added to its shard's, and the column of each caption."""
        shard, row = self.spanner[index]
        columns = self.caption_columns[int(self.stream_per_shard[shard])]
        if not columns.listed:
            return sample
        added = columns.captions(self.shards[shard].raw_data.basename, int(row))
        captions = captions_of(sample, '')
        stored = sample.get(CAPTION_COLUMNS) or [ORIGINAL] * len(captions)
        return sample | {
            'captions': [*captions, *(text for _, text in added)],
            CAPTION_COLUMNS: [*stored, *(name for name, _ in added)],
        }

    def open_caption_columns(self, names: Collection[str]) -> list[CaptionColumns]:
        """Return each stream's caption columns with these names that `diffusion caption` has written."""
        found = []
        for stream, shards in self.shards_of_streams():
            mds_shards: list[Any] = shards
            found.append(CaptionColumns.open(stream, names, [vars(shard.raw_data) for shard in mds_shards]))
        return found

    def _check_caption_columns(self) -> None:
        weights = self.caption_weights
        if weights is None or any(CAPTION_COLUMNS in self.columns_of(bucket) for bucket in self.buckets):
            return
        listed = {name for columns in self.caption_columns for name in columns.listed}
        unknown = sorted(set(weights) - listed - {ORIGINAL})
        if listed and unknown:
            raise UserError(
                f'dataset.caption_weights: no stream has captions {", ".join(unknown)}; diffusion caption has written '
                f'{", ".join(sorted(listed))}, and {ORIGINAL} means those in the shards'
            )
        if not listed:
            raise UserError(
                'dataset.caption_weights: no stream records the columns of its captions; prepare the data with '
                f'{" ".join(f"--caption-column {name}" for name in weights)}, write such columns with diffusion '
                'caption (for latents, store them by precompute.caption_columns), or remove the setting'
            )

    def columns_of(self, bucket: Bucket) -> set[str]:
        """Return the columns that any shard of a bucket has; shards added later may lack some of them."""
        _, shards = list(self.shards_of_streams())[self.buckets.index(bucket)]
        return set().union(*(shard.column_names for shard in shards))  # type: ignore[attr-defined]

    def bucket_of(self, index: int) -> Bucket:
        shard, _ = self.spanner[index]
        return self.buckets[int(self.stream_per_shard[shard])]

    def where(self, index: int) -> str:
        shard, row = self.spanner[index]
        reader = self.shards[shard]
        sample = index % self.num_samples
        return f'streams.{self.bucket_of(index).name}: sample {sample} (row {row} of {reader.raw_data.basename})'

    def current_epoch(self) -> int:
        """Return the number of the current epoch, counted from 0."""
        # Streaming increments `next_epoch` when an iteration starts; before the first iteration, it is 0.
        return max(self.next_epoch - 1, 0)

    def draws(self, index: int, purpose: Purpose) -> tuple[float, float, float, float]:
        """Return four uniform random numbers in [0, 1) that depend on seed, purpose, sample, epoch and occurrence."""
        occurrence, sample = divmod(int(index), self.num_samples)
        return keyed_uniforms(self.seed, purpose, sample, epoch_word(self.current_epoch(), occurrence))

    def identity(self, index: int) -> dict[str, int]:
        """Return a sample's id, epoch and occurrence by batch key; they seed its random draws on the device."""
        occurrence, sample = divmod(int(index), self.num_samples)
        return {batch_keys.SAMPLE_ID: sample, batch_keys.EPOCH: self.current_epoch(), batch_keys.OCCURRENCE: occurrence}

    def _replacement(self, index: int, attempt: int) -> int:
        """Return the numbered id of the replacement for an undecodable sample at this attempt (1, 2, ...)."""
        # A sample from the same shard is already on the local disk and has the same shape, so the batch stays uniform.
        shard, _ = self.spanner[index]
        first = int(self.sample_offset_per_shard[shard])
        samples = int(self.samples_per_shard[shard])
        occurrence, sample = divmod(index, self.num_samples)
        served = first + replacement(self.seed, sample, self.current_epoch(), attempt, samples=samples)
        return served + occurrence * self.num_samples

    def _replacement_note(self, index: int, served: int, errors: Sequence[str]) -> str:
        shard, row = self.spanner[index]
        raw = self.shards[shard].file_pairs[0][0].basename
        key = self.get_item(index).get('key')
        name = self.bucket_of(index).name
        ids = {'sample_id': index % self.num_samples, 'served': served % self.num_samples}
        line = ids | {'stream': name, 'shard': raw, 'row': int(row), 'key': key}
        return json.dumps(line | {'epoch': self.current_epoch(), 'error': errors[0]}, default=str)

    def load_state_dict(self, obj: dict[str, Any]) -> None:
        """Set the position from a checkpoint; for training, clip it to the epoch and round down to a global batch."""
        if self.elastic:
            # Streaming would take `num_canonical_nodes` and `shuffle_seed` from the checkpoint for the rest of the run.
            # Keep the dataset's own values: SameRun has compared them with the checkpoint's, and if the data may
            # change, the recipe's values apply. After a change of batch size or data, Streaming would also accept a
            # position inside a batch or beyond the end of the epoch.
            position = min(obj['sample_in_epoch'], self.epoch_size) // self.global_batch * self.global_batch
            order = {'num_canonical_nodes': self.num_canonical_nodes, 'shuffle_seed': self.shuffle_seed}
            obj = obj | order | {'sample_in_epoch': position}
        super().load_state_dict(obj)

    def _round_to_whole_batches(self) -> None:
        """Round the samples per epoch of each stream to whole global batches; `config.device_checks` explains why."""
        # Streaming computes `choose` and `proportion` of each stream, and `epoch_size` and `length` of the dataset, in
        # its constructor, but reads them only when an epoch begins or the length is requested. So they can be replaced
        # here. Every rank computes the same numbers from the same indexes.
        if self.num_canonical_nodes is None:
            self.num_canonical_nodes = default_canonical_nodes(self.global_batch)
        self._check_order(self.num_canonical_nodes)
        requested = [float(stream.proportion) for stream in self.streams]
        batches = self._batches_of_streams(requested)
        self.epoch_size = sum(batches) * self.global_batch
        samples_of = zip(self.buckets, self.samples_per_stream.tolist(), batches, requested, strict=True)
        for bucket, samples, count, share in samples_of:
            bucket.stream.choose = count * self.global_batch
            bucket.stream.repeat = bucket.stream.choose / samples
            bucket.stream.proportion = bucket.stream.choose / self.epoch_size
            self._log_epoch(bucket, samples, share)
        self.length = self.epoch_size // self._parallel_rank_world.num_ranks
        granularity = sampling_granularity(int(self.samples_per_stream.max()))
        self.sampling_granularity = max(self.sampling_granularity, granularity)
        # This private method of Streaming sets the default block size, which depends only on num_canonical_nodes. Call
        # it now rather than at the first epoch, so that the fingerprint contains the value.
        self._set_shuffle_block_size(self._parallel_rank_world)
        assert all(stream.choose % self.global_batch == 0 for stream in self.streams)
        assert self.length * self._parallel_rank_world.num_ranks == self.epoch_size

    @cached_property
    def evaluation_order(self) -> EvaluationOrder:
        """Order of an epoch that serves every sample once, for a dataset with `elastic=False`."""
        assert not self.elastic and isinstance(self.batch_size, int)
        # Always use the samples of epoch 0: a stream with `choose` draws different samples in each epoch.
        samples = [self.resample_streams(0, index)[1] for index in range(len(self.streams))]
        return evaluation_order(samples, ranks=self._parallel_rank_world.num_ranks, batch_size=self.batch_size)

    def resample_streams(self, epoch: int, stream_id: int | None = None) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the sizes of the shuffle units and the sample ids (in training, numbered ids) of an epoch.

        Streaming calls this and shuffles the ids. `stream_id` selects one stream; None means all.
        """
        units, samples = super().resample_streams(epoch, stream_id)
        return units, numbered_ids(samples, self.num_samples) if self.elastic else samples

    def _get_work(self, epoch: int, sample_in_epoch: int) -> NDArray[np.int64]:
        """Return the ids of the samples that this worker loads, in order; Streaming calls this when an epoch begins."""
        if self.elastic:
            return super()._get_work(epoch, sample_in_epoch)
        world = self._parallel_worker_world
        rank = world.node * world.ranks_per_node + world.rank_of_node
        return self.evaluation_order.for_workers(world.workers_per_rank)[rank, world.worker_of_rank]

    def _batches_of_streams(self, proportions: Sequence[float]) -> list[int]:
        """Return each stream's number of batches per epoch, at least 1.

        If `epoch_size` or a proportion is set, it follows from `proportions`; else it is `choose` in whole batches.
        """
        if not self.is_proportional:
            return [max(1, int(stream.choose) // self.global_batch) for stream in self.streams]
        total = max(len(self.streams), self.epoch_size // self.global_batch)
        return [max(1, count) for count in apportion(total, proportions)]

    def _check_order(self, canonical_nodes: int) -> None:
        """Raise UserError if a setting makes the order of samples depend on the number of devices."""
        problems = {
            'num_canonical_nodes': canonical_nodes_problem(canonical_nodes, self.global_batch)
            or nodes_problem(canonical_nodes, self._parallel_rank_world.num_nodes),
            'batching_method': batching_problem(self.batching_method, [str(bucket.shape) for bucket in self.buckets]),
        }
        for bucket in self.buckets:
            given = private_attribute(bucket.stream, '_choose')
            problem = None if given is None else choose_problem(given, self.global_batch)
            problems[f'streams.{bucket.name}.choose'] = problem
        for where, problem in problems.items():
            if problem is not None:
                raise UserError(f'{where}: {problem}')

    def _log_epoch(self, bucket: Bucket, samples: int, share: float) -> None:
        """Log a stream's samples per epoch; warn if rounding changes `share`, or if they cannot fill a batch."""
        if not self._unique_rank_world.is_leader:
            return
        taken = bucket.stream.choose
        log.info(
            'streams.%s: %d samples (%d batches) per epoch; drops %d of %d samples per epoch',
            *(bucket.name, taken, taken // self.global_batch, max(0, samples - taken), samples),
        )
        if self.is_proportional and abs(bucket.stream.proportion / share - 1) > MAX_SHARE_ERROR:
            log.warning(
                'streams.%s: %.4f of an epoch requested, %.4f in whole batches; raise loader.epoch_size to come closer',
                *(bucket.name, share, bucket.stream.proportion),
            )
        if samples < self.global_batch:
            log.warning(
                'streams.%s: its %d samples do not fill a global batch of %d; a batch will hold copies of a sample, %s',
                *(bucket.name, samples, self.global_batch, self.copies),
            )
        elif taken > samples:
            log.info('streams.%s: %.3g copies of each sample per epoch, %s', bucket.name, taken / samples, self.copies)

    def _check_columns(self, columns: Sequence[tuple[str, ...]]) -> None:
        for bucket, (_, shards) in zip(self.buckets, self.shards_of_streams(), strict=True):
            present = shards[0].column_names  # type: ignore[attr-defined]
            for choice in columns:
                if not set(choice) & set(present):
                    raise UserError(
                        f'streams.{bucket.name}: its samples have the columns {", ".join(present)}, '
                        f'but {" or ".join(choice)} is required; check remote and local'
                    )


def fingerprint(dataset: BucketedDataset, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return all data settings that determine which samples a run sees, in which order; compared on resume.

    Streaming's own state holds only the position in the epoch. If the batch size, a stream or the shuffle block size
    has changed, Streaming resumes with different samples and reports nothing.

    Values are JSON types. Paths and URLs are not included, since data may move; nor are the numbers of devices and
    workers, and prefetching. Call this before the first epoch. `settings` has the dataset component's name, and its
    arguments that affect samples, such as `crop`.
    """
    order = ('batching_method', 'shuffle', 'shuffle_algo', 'shuffle_seed', 'shuffle_block_size')
    sampling = ('num_canonical_nodes', 'partition_algo', 'sampling_method', 'sampling_granularity')
    values = {
        'global_batch': dataset.global_batch,
        **{name: getattr(dataset, name) for name in (*order, *sampling)},
        'dataset': dict(settings),
        'streams': {
            bucket.name: {
                'position': position,  # affects the sample ids, which seed all random draws
                'shape': str(bucket.shape),
                'choose': int(bucket.stream.choose),
                'samples': samples,
                'index_sha256': index_hash(bucket.stream),
                **({'captions': columns.fingerprint()} if columns.listed else {}),
            }
            for position, (bucket, samples, columns) in enumerate(
                zip(dataset.buckets, dataset.samples_per_stream.tolist(), dataset.caption_columns, strict=True)
            )
        },
    }
    # Arguments of a user's dataset class may have any type; types unknown to JSON are compared as strings.
    return json.loads(json.dumps(values, default=str))


def index_hash(stream: Stream) -> str:
    """Return the SHA-256 of a stream's index.json, which contains the shards' hashes if they have any."""
    return hashlib.sha256(Path(stream.local, stream.split or '', 'index.json').read_bytes()).hexdigest()
