"""`diffusion data verify`: read whole shards in several processes and report every defect."""

import multiprocessing
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Executor, Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import dataclass, field
from typing import Any

from tqdm import tqdm

from diffusion.errors import UserError, printable
from diffusion.inspection.shard_checks import (
    Defect,
    ShardResult,
    check_shard,
    read_index,
    source_of,
    stream_manifest,
)
from diffusion.inspection.stream_selection import Sections, with_shapes
from diffusion.models import batch_keys
from diffusion.storage.download import RemoteFolder

DEFECTS_FOUND = 3
"""Exit status if the data has defects."""


@dataclass
class VerifyReport:
    """Result of verifying one stream.

    Attributes:
        shards: Number of shards that were read.
        total_shards: Number of shards in the stream.
        samples: Number of samples that were read.
        bytes: Bytes that were read, uncompressed.
        seconds: Wall-clock time from the first shard to the last, with all processes.
        defects: Problems of single shards.
    """

    shards: int = 0
    total_shards: int = 0
    samples: int = 0
    bytes: int = 0
    seconds: float = 0.0
    defects: list[Defect] = field(default_factory=list)
    problem: str | None = None
    """Problem of the whole stream, or None."""

    def add(self, result: ShardResult) -> None:
        """Add the result of one shard to the totals of the stream."""
        self.samples += result.samples
        self.bytes += result.bytes
        self.defects += result.defects

    @property
    def is_sound(self) -> bool:
        """True if the stream has no problems apart from harmless ones."""
        return self.problem is None and all(defect.harmless for defect in self.defects)

    def lines(self, name: str) -> Iterator[str]:
        """Yield the lines to print: a summary of the stream, then one line per defect."""
        rate = self.bytes / 1e6 / self.seconds if self.seconds else 0.0
        yield (
            f'{name}: {"ok" if self.is_sound else "DAMAGED"}; {self.shards} of {self.total_shards} shards, '
            f'{self.samples} samples, {self.bytes / 1e6:.1f} MB, {self.seconds:.1f} s ({rate:.0f} MB/s)'
        )
        if self.problem is not None:
            yield f'  {self.problem}'
        for defect in sorted(self.defects):
            yield f'  {"warning: " if defect.harmless else ""}{defect}'


def verify(sections: Sections, *, sample: float = 1.0, seed: int = 0, jobs: int = 1) -> int:
    """Check the shards of streams and print a report.

    Args:
        sample: Fraction of each stream's shards to check; at least one shard is checked.
        jobs: Number of processes.

    Returns:
        The exit status: 0, or 3 if the data has defects.
    """
    sound = True
    with _pool(jobs) as pool:
        for section, streams in sections.items():
            for name, stream in with_shapes(section, streams).items():
                report = verify_stream(source_of(stream), sample=sample, seed=seed, pool=pool)
                sound &= report.is_sound
                for line in report.lines(f'{section}.{name}'):
                    print(printable(line), flush=True)
    return 0 if sound else DEFECTS_FOUND


def verify_stream(source: RemoteFolder, *, sample: float = 1.0, seed: int = 0, pool: Executor) -> VerifyReport:
    """Check the shards of one stream and return a report.

    Args:
        sample: Fraction of the shards to check; at least one shard is checked.
    """
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
    for result in _results(pool, [(source, entry, manifest) for entry in chosen]):
        report.shards += 1
        report.add(result)
    report.seconds = time.monotonic() - begin
    if not entries:
        report.problem = 'it has no shards'
    return report


def _results(pool: Executor, tasks: Sequence[tuple[Any, ...]]) -> Iterator[ShardResult]:
    """Check one shard per task, the arguments of `check_shard`; yield results as they complete, with a progress bar."""
    futures: list[Future[ShardResult]] = [pool.submit(check_shard, *task) for task in tasks]
    try:
        for future in tqdm(as_completed(futures), total=len(futures), unit=' shards', leave=False, disable=None):
            yield future.result()
    except BrokenProcessPool as error:
        raise RuntimeError(
            '--jobs: a process died in a decoder or ran out of memory; use --jobs 1 to see where'
        ) from error
    finally:
        # Cancel the rest: after an error or Ctrl-C, the executor would check all remaining shards before it shuts down.
        for future in futures:
            future.cancel()


def _pool(jobs: int) -> Executor:
    """Return an executor with this many processes, or for one job an executor that runs calls in this process."""
    if jobs == 1:
        return _InlineExecutor()
    # A fork server's children share its imports, which take seconds, and do not inherit this process's threads and
    # held locks, unlike a plain fork.
    context = multiprocessing.get_context('forkserver')
    context.set_forkserver_preload(['diffusion.inspection.shard_checks'])
    return ProcessPoolExecutor(jobs, mp_context=context)


class _InlineExecutor(Executor):
    """Executor that runs each call immediately in this process."""

    def submit(self, fn: Any, /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future
