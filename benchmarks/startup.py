"""Benchmark of the time and memory to start an epoch, and to resume in the middle of one, by number of samples.

    python benchmarks/startup.py [millions of samples ...]     # default 1 10 100; the last takes 5 GB and minutes

The data is an index.json without shards, which are read only when a sample is: 4,000 samples per shard, about 256 MB.
Each row is measured in a separate process, which creates the dataset of one device with a global batch of 2048 as
training does, computes the sample order of an epoch, creates the dataset again, and computes the order from the middle
of the epoch. Only the order of samples is timed, not downloading and decoding them. `/dev/shm` is the peak of shared
memory that the process has mapped; memory is the peak of resident memory without that of its imports.
"""

import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path
from typing import Any

from machine import heading

GLOBAL_BATCH, SHARD_SAMPLES = 2048, 4000
EPOCH_BATCHES = 4883
"""Batches per epoch in the rows with an `epoch_size`: 10 million samples."""


def main(millions: list[float]) -> None:
    """Run the benchmark and print its table."""
    print(
        f'{heading()}, streaming {version("mosaicml-streaming")}; batches of {GLOBAL_BATCH}, '
        f'{SHARD_SAMPLES} samples per shard'
    )
    print(
        '\n| samples | epoch_size | index, MB | create dataset, s | start epoch, s | resume, s | memory, GB '
        '| /dev/shm, MB |'
    )
    print('|---|---|---|---|---|---|---|---|')
    for count in millions:
        samples = int(count * 1e6)
        with tempfile.TemporaryDirectory() as folder:
            size = write_index(Path(folder), samples)
            epochs = [None, *([EPOCH_BATCHES * GLOBAL_BATCH] if samples > 2 * EPOCH_BATCHES * GLOBAL_BATCH else [])]
            for epoch_size in reversed(epochs):
                print(f'| {count:g} M | {"all" if epoch_size is None else f"{epoch_size / 1e6:.0f} M"} ', end='')
                print(f'| {size / 1e6:.1f} | {" | ".join(measured(folder, epoch_size))} |', flush=True)


def write_index(folder: Path, samples: int) -> int:
    """Write the index of this many samples, and return its size in bytes."""
    shards = []
    for number, begin in enumerate(range(0, samples, SHARD_SAMPLES)):
        raw = {'basename': f'shard.{number:05}.mds', 'bytes': 2**28, 'hashes': {'sha1': f'{number:040x}'}}
        columns = {'column_names': ['captions', 'image'], 'column_encodings': ['json', 'bytes']}
        common = {'version': 2, 'format': 'mds', 'compression': None, 'hashes': ['sha1'], 'size_limit': 2**28}
        count = {'samples': min(SHARD_SAMPLES, samples - begin), 'raw_data': raw, 'zip_data': None}
        shards.append(common | columns | {'column_sizes': [None, None]} | count)
    path = folder / 'index.json'
    path.write_text(json.dumps({'version': 2, 'shards': shards}))
    return path.stat().st_size


def measured(folder: str, epoch_size: int | None) -> list[str]:
    """Return the figures of a row, measured in a separate process."""
    # A separate process, because the peak of resident memory is that of the whole life of a process.
    command = [sys.executable, __file__, 'measure', folder, str(epoch_size or 0)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        return [f'failed ({process.returncode}): {process.stderr.strip().splitlines()[-1:]}']
    return json.loads(process.stdout.splitlines()[-1])


def measure(folder: str, epoch_size: int) -> list[str]:
    """Return the figures of a row: start an epoch (of all samples if `epoch_size` is 0), and resume in its middle."""
    from streaming import Stream

    from diffusion.config.image_shapes import square
    from diffusion.data.streams import Bucket, BucketedDataset

    def make_dataset() -> BucketedDataset:
        bucket = Bucket('photos', Stream(local=folder), square(256))
        return BucketedDataset(
            [bucket],
            batch_size=GLOBAL_BATCH,
            columns=[('image',)],
            seed=17,
            elastic=True,
            shuffle=True,
            batching_method='random',
            epoch_size=epoch_size or None,
        )

    loaded = memory_gb()
    with SharedMemory() as shared:
        make_seconds, dataset = timed(make_dataset)
        first_seconds, ids = timed(lambda dataset=dataset: sample_order(dataset))
        assert len(ids) == dataset.epoch_size
        middle = dataset.epoch_size // 2 // GLOBAL_BATCH * GLOBAL_BATCH
        state = dataset.state_dict(middle, from_beginning=True)
        del dataset, ids
        resumed = make_dataset()
        resumed.load_state_dict(state)
        resume_seconds, rest = timed(lambda: sample_order(resumed))
        assert len(rest) == resumed.epoch_size - middle
    seconds = [f'{each:.1f}' for each in (make_seconds, first_seconds, resume_seconds)]
    return [*seconds, f'{memory_gb() - loaded:.1f}', f'{shared.peak / 1e6:.1f}']


def sample_order(dataset: Any) -> Any:
    """Return the sample IDs of an epoch from the dataset's current position."""
    # The steps of StreamingDataset.__iter__ before its first sample; there is no public way to run them alone.
    dataset._unique_worker_world = dataset._unique_rank_world.detect_workers()
    dataset._parallel_worker_world = dataset._parallel_rank_world.detect_workers()
    return dataset._get_work(*dataset._resume_incr_epoch())


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Return the seconds of a call and its result."""
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def memory_gb() -> float:
    """Return the peak of this process's resident memory in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


class SharedMemory:
    """Context manager that measures the peak of shared memory in /dev/shm that this process has mapped."""

    def __enter__(self) -> 'SharedMemory':
        self.peak, self._done = 0, False
        # An audit hook sees every mmap before it happens, also those that exist only for a moment.
        sys.addaudithook(self._on_audit)
        return self

    def __exit__(self, *_: object) -> None:
        self._done = True  # an audit hook cannot be removed

    def _on_audit(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != 'mmap.__new__' or self._done or arguments[0] < 0:
            return
        if os.readlink(f'/proc/self/fd/{arguments[0]}').startswith('/dev/shm/'):
            self.peak = max(self.peak, mapped_bytes() + arguments[1])


def mapped_bytes() -> int:
    """Return the bytes of /dev/shm that this process has mapped."""
    lines = [line.split() for line in Path('/proc/self/maps').read_text().splitlines() if '/dev/shm/' in line]
    return sum(int(end, 16) - int(begin, 16) for begin, end in (words[0].split('-') for words in lines))


if __name__ == '__main__':
    if sys.argv[1:2] == ['measure']:
        print(json.dumps(measure(sys.argv[2], int(sys.argv[3]))))
    else:
        main([float(word) for word in sys.argv[1:]] or [1, 10, 100])
