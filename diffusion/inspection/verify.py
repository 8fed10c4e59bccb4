"""`diffusion data verify`: read shards in full, in several processes, and name everything that is wrong."""

import multiprocessing
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from diffusion.config.load import Recipe
from diffusion.errors import UserError
from diffusion.inspection.shard_checks import (
    Defect,
    ShardResult,
    check_shard,
    read_index,
    source_of,
    stream_manifest,
)
from diffusion.inspection.stream_selection import select, with_shapes
from diffusion.models import batch_keys
from diffusion.storage.download import RemoteFolder

DEFECTS_FOUND = 3
"""Exit status where something is wrong with the data."""


@dataclass
class VerifyReport:
    """What reading a stream gave.

    Attributes:
        shards: Of them, those that were read.
        of: Shards of the stream.
        seconds: From the first shard to the last, with all processes.
    """

    shards: int = 0
    total_shards: int = 0
    samples: int = 0
    bytes: int = 0
    seconds: float = 0.0
    defects: list[Defect] = field(default_factory=list)
    problem: str | None = None
    """What is wrong with the stream as a whole."""

    def add(self, reading: ShardResult) -> None:
        self.samples += reading.samples
        self.bytes += reading.bytes
        self.defects += reading.defects

    @property
    def is_sound(self) -> bool:
        return self.problem is None and all(defect.harmless for defect in self.defects)

    def lines(self, name: str) -> Iterator[str]:
        """A summary, and a line a defect."""
        rate = self.bytes / 1e6 / self.seconds if self.seconds else 0.0
        yield (
            f'{name}: {"ok" if self.is_sound else "DAMAGED"}; {self.shards} of {self.total_shards} shards, '
            f'{self.samples} samples, {self.bytes / 1e6:.1f} MB, {self.seconds:.1f} s ({rate:.0f} MB/s)'
        )
        if self.problem is not None:
            yield f'  {self.problem}'
        for defect in sorted(self.defects):
            yield f'  {"warning: " if defect.harmless else ""}{defect}'


def verify(recipe: Recipe, names: Sequence[str] = (), *, sample: float = 1.0, seed: int = 0, jobs: int = 1) -> int:
    """Read the shards of a recipe's streams and print what was found.

    Args:
        recipe: Of training, evaluation and precomputing; its model is not made.
        names: Streams; none for all.
        sample: Share of each stream's shards, at least one.
        seed: Of which shards these are.
        jobs: Processes.

    Returns:
        The exit status: 0, or 3 where something is wrong.
    """
    sound = True
    with _pool(jobs) as pool:
        for section, streams in select(recipe, names).items():
            for name, stream in with_shapes(section, streams).items():
                report = verify_stream(source_of(stream), sample=sample, seed=seed, pool=pool)
                sound &= report.is_sound
                for line in report.lines(f'{section}.{name}'):
                    print(line, flush=True)
    return 0 if sound else DEFECTS_FOUND


def verify_stream(source: RemoteFolder, *, sample: float = 1.0, seed: int = 0, pool: Executor) -> VerifyReport:
    """Read the shards of one folder."""
    report = VerifyReport()
    try:
        entries = read_index(source)
        manifest = (
            stream_manifest(source) if entries and batch_keys.LATENT_MOMENTS in entries[0]['column_names'] else None
        )
    except UserError as error:
        report.problem = str(error)
        return report
    report.total_shards = len(entries)
    chosen = random.Random(seed).sample(entries, min(len(entries), max(1, round(sample * len(entries)))))
    begin = time.monotonic()
    for reading in _results(pool, [(source, entry, manifest) for entry in chosen]):
        report.shards += 1
        report.add(reading)
    report.seconds = time.monotonic() - begin
    if not entries:
        report.problem = 'it has no shards'
    return report


def _results(pool: Executor, tasks: Sequence[tuple[Any, ...]]) -> Iterator[ShardResult]:
    futures: list[Future[ShardResult]] = [pool.submit(check_shard, *task) for task in tasks]
    try:
        for future in tqdm(as_completed(futures), total=len(futures), unit=' shards', leave=False, disable=None):
            yield future.result()
    except BrokenProcessPool as error:
        raise RuntimeError(
            '--jobs: a process died, of a decoder or for want of memory; --jobs 1 shows where'
        ) from error
    finally:
        for future in futures:
            future.cancel()


def _pool(jobs: int) -> Executor:
    if jobs == 1:
        return _InlineExecutor()
    # Its children share the imports, and have none of this process's threads and locks.
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(['diffusion.inspection.shard_checks'])
    return ProcessPoolExecutor(jobs, mp_context=context)


class _InlineExecutor(Executor):
    """Runs what it is given at once, in this process."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future
