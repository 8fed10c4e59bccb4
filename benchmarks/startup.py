"""What it takes to begin an epoch, and to go on in the middle of one, by the size of the data.

    python benchmarks/startup.py [millions of samples ...]     # 1 10 100 by default; the last takes 5 GB and minutes

The data is an index.json without shards, which are not read before a sample is: 4,000 samples in each, about 256 MB.
Each line is a process of its own that makes the dataset of one device with a global batch of 2048, as training does,
asks for the first batch's ids, and, made anew, for those from the middle of the epoch on. What is timed is the order
of samples; to fetch and decode them comes on top. `/dev/shm` is the most that the process has mapped of it at once,
memory the most that it had at all, without what its imports take.
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
"""Of the lines with an `epoch_size`: 10 million samples."""


def main(millions: list[float]) -> None:
    """Run and print."""
    print(
        f'{heading()}, streaming {version("mosaicml-streaming")}; batches of {GLOBAL_BATCH}, '
        f'{SHARD_SAMPLES} samples a shard'
    )
    print(
        '\n| samples | epoch_size | index, MB | dataset made, s | first batch, s | resumed, s | memory, GB '
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
    """The index of so many samples; its bytes."""
    shards = []
    for number, begin in enumerate(range(0, samples, SHARD_SAMPLES)):
        raw = {'basename': f'shard.{number:05}.mds', 'bytes': 2**28, 'hashes': {'sha1': f'{number:040x}'}}
        columns = {'column_names': ['captions', 'image'], 'column_encodings': ['json', 'bytes']}
        form = {'version': 2, 'format': 'mds', 'compression': None, 'hashes': ['sha1'], 'size_limit': 2**28}
        count = {'samples': min(SHARD_SAMPLES, samples - begin), 'raw_data': raw, 'zip_data': None}
        shards.append(form | columns | {'column_sizes': [None, None]} | count)
    path = folder / 'index.json'
    path.write_text(json.dumps({'version': 2, 'shards': shards}))
    return path.stat().st_size


def measured(folder: str, epoch_size: int | None) -> list[str]:
    """The figures of a line, from a process of its own."""
    command = [sys.executable, __file__, 'measure', folder, str(epoch_size or 0)]
    process = subprocess.run(command, capture_output=True, text=True, check=False)
    if process.returncode:
        return [f'failed ({process.returncode}): {process.stderr.strip().splitlines()[-1:]}']
    return json.loads(process.stdout.splitlines()[-1])


def measure(folder: str, epoch_size: int) -> list[str]:
    """Make the dataset, begin an epoch, and go on in the middle of it."""
    from streaming import Stream

    from diffusion.config.image_shapes import square
    from diffusion.data.streams import Bucket, BucketedDataset

    def made() -> BucketedDataset:
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
        make_seconds, dataset = timed(made)
        first_seconds, ids = timed(lambda dataset=dataset: work_of(dataset))
        assert len(ids) == dataset.epoch_size
        middle = dataset.epoch_size // 2 // GLOBAL_BATCH * GLOBAL_BATCH
        state = dataset.state_dict(middle, from_beginning=True)
        del dataset, ids
        remade = made()
        remade.load_state_dict(state)
        resume_seconds, rest = timed(lambda: work_of(remade))
        assert len(rest) == remade.epoch_size - middle
    seconds = [f'{each:.1f}' for each in (make_seconds, first_seconds, resume_seconds)]
    return [*seconds, f'{memory_gb() - loaded:.1f}', f'{shared.most / 1e6:.1f}']


def work_of(dataset: Any) -> Any:
    """Ids of an epoch, from where the dataset stands on; what Streaming does when an iteration begins."""
    dataset._unique_worker_world = dataset._unique_rank_world.detect_workers()
    dataset._parallel_worker_world = dataset._parallel_rank_world.detect_workers()
    return dataset._get_work(*dataset._resume_incr_epoch())


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds of a call, and what it returns."""
    begin = time.perf_counter()
    result = call()
    return time.perf_counter() - begin, result


def memory_gb() -> float:
    """The most that this process has had at once."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


class SharedMemory:
    """The most that this process has mapped of /dev/shm at once, meanwhile."""

    def __enter__(self) -> 'SharedMemory':
        self.most, self._done = 0, False
        sys.addaudithook(self._note)
        return self

    def __exit__(self, *_: object) -> None:
        self._done = True  # a hook stays for good

    def _note(self, event: str, arguments: tuple[Any, ...]) -> None:
        if event != 'mmap.__new__' or self._done or arguments[0] < 0:
            return
        if os.readlink(f'/proc/self/fd/{arguments[0]}').startswith('/dev/shm/'):
            self.most = max(self.most, mapped() + arguments[1])


def mapped() -> int:
    """Bytes of /dev/shm that this process has mapped."""
    lines = [line.split() for line in Path('/proc/self/maps').read_text().splitlines() if '/dev/shm/' in line]
    return sum(int(end, 16) - int(begin, 16) for begin, end in (words[0].split('-') for words in lines))


if __name__ == '__main__':
    if sys.argv[1:2] == ['measure']:
        print(json.dumps(measure(sys.argv[2], int(sys.argv[3]))))
    else:
        main([float(word) for word in sys.argv[1:]] or [1, 10, 100])
