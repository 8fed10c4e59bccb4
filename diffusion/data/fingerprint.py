"""What decides the data of a run, as plain values that are compared when it goes on.

Streaming's own state says where an epoch stood, not which data it went over: with another batch size, another stream or
another block size, resuming gives other samples and no message.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streaming import Stream

from diffusion.data.streams import Bucket, BucketedDataset


def fingerprint(dataset: BucketedDataset, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Everything that decides which samples come when and what is made of them, in JSON's types.

    Folders and object stores are no part of it, since data may move; nor are devices, workers and reading ahead.

    Args:
        dataset: As it was made, before an epoch begins.
        settings: Kind of the dataset and its keywords that change samples, such as `crop`.
    """
    order = ('batching_method', 'shuffle', 'shuffle_algo', 'shuffle_seed', 'shuffle_block_size')
    sampling = ('num_canonical_nodes', 'partition_algo', 'sampling_method', 'sampling_granularity')
    values = {
        'global_batch': dataset.global_batch,
        **{name: getattr(dataset, name) for name in (*order, *sampling)},
        'dataset': dict(settings),
        'streams': {
            bucket.name: _of_stream(bucket, position, samples)
            for position, (bucket, samples) in enumerate(
                zip(dataset.buckets, dataset.samples_per_stream.tolist(), strict=True)
            )
        },
    }
    # str: whatever a dataset of somebody else takes.
    return json.loads(json.dumps(values, default=str))


def _of_stream(bucket: Bucket, position: int, samples: int) -> dict[str, Any]:
    stream = bucket.stream
    return {
        'position': position,  # ids of samples count on from stream to stream
        'shape': str(bucket.shape),
        'choose': int(stream.choose),
        'samples': samples,
        'index_sha256': index_hash(stream),
    }


def index_hash(stream: Stream) -> str:
    """SHA-256 of a stream's index, which holds the hash of every shard where they have hashes."""
    return hashlib.sha256(Path(stream.local, stream.split or '', 'index.json').read_bytes()).hexdigest()
