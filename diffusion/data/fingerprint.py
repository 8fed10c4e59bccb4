"""Fingerprint of a run's training data, saved in checkpoints and compared on resume.

Streaming's own state holds only the position in the epoch. If the batch size, a stream or the shuffle block size has
changed, Streaming resumes with different samples and reports nothing.
"""

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from streaming import Stream

from diffusion.data.streams import Bucket, BucketedDataset


def fingerprint(dataset: BucketedDataset, settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return all data settings that determine a run's samples, their order and their content, to compare on resume.

    Values are JSON types. Paths and URLs are left out, since data may move; so are the numbers of devices and workers
    and the prefetching.

    Args:
        dataset: The dataset before its first epoch begins.
        settings: Name of the dataset component and its keyword arguments that change samples, such as `crop`.
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
    # Keywords of a user's dataset class may be of any type: compare those that JSON does not have as strings.
    return json.loads(json.dumps(values, default=str))


def _of_stream(bucket: Bucket, position: int, samples: int) -> dict[str, Any]:
    """Return the part of the data fingerprint that describes one stream."""
    stream = bucket.stream
    return {
        'position': position,  # sample ids, which key all randomness, are numbered across streams
        'shape': str(bucket.shape),
        'choose': int(stream.choose),
        'samples': samples,
        'index_sha256': index_hash(stream),
    }


def index_hash(stream: Stream) -> str:
    """Return the SHA-256 of a stream's index.json, which contains the hashes of its shards if they have any."""
    return hashlib.sha256(Path(stream.local, stream.split or '', 'index.json').read_bytes()).hexdigest()
