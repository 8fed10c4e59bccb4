"""The loader: batches with their place in the epoch; what goes wrong on one rank stops all of them at that batch."""

import datetime
import itertools
import logging
import math
import os
import signal
import time
from collections.abc import Iterator, Mapping
from multiprocessing import connection
from pathlib import Path
from typing import Any, NoReturn

import torch
from composer.core import DataSpec
from composer.utils import dist
from streaming import StreamingDataLoader
from streaming.base.world import World
from torch.utils.data import DataLoader
from torch.utils.data._utils import signal_handling
from torch.utils.data.dataloader import _MultiProcessingDataLoaderIter

from diffusion.data.bad_samples import Tally, quarantine
from diffusion.data.streams import BucketedDataset
from diffusion.data.verified_dataset import described
from diffusion.errors import DataError, UserError
from diffusion.models import batch_keys
from diffusion.models.randomness import Draws, Purpose

log = logging.getLogger(__name__)

LOOK_EVERY_SECONDS = 1.0
"""How often a rank that waits for its workers looks whether another process has failed."""
DEATH_SECONDS = 5.0
"""Longest wait for the end of a worker whose connection is broken."""
SLOWEST_RANK = datetime.timedelta(minutes=30)
"""What the others wait for at most: a rank may be saving while they ask for the next batch."""


class BucketedLoader(StreamingDataLoader):
    """A StreamingDataLoader that numbers its batches and never ends early.

    The number of a global batch within its epoch is the same on any number of devices and after any interruption, so
    randomness may depend on it.

    All ranks iterate together: before each batch they tell each other whether they have it, so that when one cannot,
    all raise the same `DataError` at the same batch, and none waits for another in a collective of the model.

    Args:
        dataset: What it serves.
        stratified: Give samples a timestep quantile, for `Objective.timesteps: stratified`.
        timeout: Longest wait for a worker's batch, in seconds.
        max_bad_samples: Share of samples that may be replaced because they cannot be decoded.
        quarantine: File that gets a line for each of these.
        settings: Keywords of StreamingDataLoader.
    """

    dataset: BucketedDataset  # type: ignore[reportIncompatibleVariableOverride]

    def __init__(
        self,
        dataset: BucketedDataset,
        *,
        stratified: bool = False,
        timeout: float = 0,
        max_bad_samples: float = 1.0e-4,
        quarantine: Path | None = None,
        num_workers: int = 0,
        **settings: Any,
    ) -> None:
        # PyTorch raises after its timeout and can be asked again.
        look_every = min(timeout or math.inf, LOOK_EVERY_SECONDS) if num_workers else 0
        settings = {'collate_fn': dataset.image_block.collate} | settings
        super().__init__(dataset, num_workers=num_workers, timeout=look_every, **settings)
        if stratified and not dataset.elastic:
            raise UserError('stratified: devices may get batches of unequal size; make the dataset with elastic=True')
        self.stratified = stratified
        self.patience_seconds = timeout or math.inf
        self.max_bad_samples = max_bad_samples
        self.quarantine = quarantine
        self.tally = Tally()
        self._gloo: torch.distributed.ProcessGroup | None = None

    def __iter__(self) -> Iterator[Any]:
        world = World.detect()
        # Read before the workers start, since they count the epoch up.
        _, sample_in_epoch = self.dataset._resume(world, self.dataset.next_epoch)
        assert self.batch_size is not None
        first = sample_in_epoch // (self.batch_size * world.num_ranks)
        self.num_samples_yielded = 0
        served: Iterator[Any] | None = None
        for index in itertools.count(first):
            batch, problem = None, None
            try:
                served = self._start_workers() if served is None else served
                batch = self._next(served)
                if batch is None:
                    problem = self._shortfall(index)
            except Exception as error:
                problem = self._problem(error, served)
            notes = [] if batch is None else [note for note in batch.pop(batch_keys.REPLACED, []) if note]
            try:
                if not self._all_have(index, batch, problem, notes):
                    return
            except DataError:
                self._end_workers(served)
                raise
            assert batch is not None
            batch[batch_keys.BATCH_INDEX] = torch.full_like(batch[batch_keys.SAMPLE_ID], index)
            if self.stratified:
                everyone = self._of_all_ranks(batch[batch_keys.SAMPLE_ID])
                batch[batch_keys.TIMESTEP_QUANTILE] = timestep_quantiles(self.dataset.seed, batch, everyone, world.rank)
            self.num_samples_yielded += len(batch[batch_keys.SAMPLE_ID])
            yield batch

    def _start_workers(self) -> Iterator[Any]:
        served = DataLoader.__iter__(self)
        # PyTorch's SIGCHLD handler raises when a worker dies, wherever the main thread is: amid the model's forward
        # pass, say, where the other ranks then wait in a collective. Take our workers off its list; `_next` finds a
        # dead one within LOOK_EVERY_SECONDS, and all ranks stop at the same batch.
        if isinstance(served, _MultiProcessingDataLoaderIter) and served._worker_pids_set:
            signal_handling._remove_worker_pids(id(served))  # type: ignore[reportPrivateImportUsage]
            served._worker_pids_set = False
        return served

    def _next(self, served: Iterator[Any]) -> Any | None:
        """The next batch of this rank's workers, None after the last."""
        self.dataset.look_for_failures()
        begin = time.monotonic()
        while True:
            try:
                return next(served, None)
            except RuntimeError as error:
                if 'DataLoader timed out' not in str(error):
                    raise
                self.dataset.look_for_failures()
                if time.monotonic() - begin > self.patience_seconds:
                    at = ', '.join(self.dataset.being_fetched()) or 'nothing'
                    raise DataError(
                        f'loader.timeout_seconds: no batch came for {self.patience_seconds:g} s; being fetched: {at}. '
                        'Way out: raise it where the store or the disk is slow'
                    ) from error

    def _end_workers(self, served: Iterator[Any] | None) -> None:
        """End this rank's workers now: left to the garbage collector, PyTorch waits 5 s for each of them."""
        if isinstance(served, _MultiProcessingDataLoaderIter):
            served._shutdown_workers()
            self._iterator = None

    def _shortfall(self, index: int) -> str | None:
        """What is wrong with an epoch that ends before this batch, or None."""
        if not self.dataset.elastic:
            return None  # where batches need not be whole, every worker has counted its samples
        expected = self.dataset.epoch_size // self.dataset.global_batch
        if index == expected:
            return None
        return f'{self.dataset.names()}: the epoch ended after {index} of {expected} batches'

    def _problem(self, error: Exception, served: Iterator[Any] | None) -> str:
        """What this rank has to say of an error; its other processes, and those of other ranks here, stop as well."""
        assert self.dataset.failures is not None
        dead = None
        if not isinstance(error, UserError | DataError):
            log.error('rank %d:', dist.get_global_rank(), exc_info=error)
            dead = dead_workers(served, error)
        # A worker's exception has its traceback as its message.
        message = self.dataset.failures.message(now=True) or (
            f'{self.dataset.names()}: {dead}' if dead else described(error)
        )
        self.dataset.failures.report(message)
        return message

    def _all_have(self, index: int, batch: Any, problem: str | None, notes: list[str]) -> bool:
        """Whether there is a batch on every rank; False where all are at their end.

        Raises:
            DataError: A rank has failed, the ranks are not at their ends together, or too many samples are bad.
        """
        count = 0 if batch is None else len(batch[batch_keys.SAMPLE_ID])
        figures = torch.tensor([problem is not None, batch is None, count, len(notes)], dtype=torch.int64)
        if dist.get_world_size() > 1:
            torch.distributed.all_reduce(figures, group=self._group())
        failed, ended, served, replaced = figures.tolist()
        if failed:
            self._stop(problem)
        if ended:
            if ended < dist.get_world_size():
                self._stop(f'{self.dataset.names()}: {ended} ranks had {index} batches, and the others have more')
            return False
        self.tally.served += served
        if replaced:
            self._count(index, replaced, notes)
        return True

    def _stop(self, problem: str | None) -> NoReturn:
        """Raise on every rank what some of them have to say."""
        problems = [problem] if self._gloo is None else dist.all_gather_object(problem, group=self._gloo)
        raise DataError('\n'.join(dict.fromkeys(each for each in problems if each is not None)))

    def _count(self, index: int, replaced: int, notes: list[str]) -> None:
        """Count and note bad samples of this batch; every rank is here."""
        self.tally.replaced += replaced
        everyone = [notes] if self._gloo is None else dist.all_gather_object(notes, group=self._gloo)
        place = ''
        if self.quarantine is not None:
            place = f'; see {self.quarantine}'
            if dist.get_global_rank() == 0:
                quarantine(self.quarantine, [note for notes in everyone for note in notes], index)
        problem = self.tally.problem(self.max_bad_samples)
        if problem is not None:
            raise DataError(f'{problem}{place}. Way out: prepare the data again, or raise it')

    def _of_all_ranks(self, ids: torch.Tensor) -> torch.Tensor:
        """The ids of a global batch, rank after rank."""
        return ids if dist.get_world_size() == 1 else torch.cat(list(dist.all_gather(ids, group=self._group())))

    def _group(self) -> torch.distributed.ProcessGroup | None:
        if self._gloo is None and torch.distributed.is_initialized():
            # NCCL takes no tensors of the CPU, and on the GPU they would wait for all that is queued there.
            self._gloo = torch.distributed.new_group(backend='gloo', timeout=SLOWEST_RANK)
        return self._gloo


def dead_workers(served: Iterator[Any] | None, error: Exception) -> str | None:
    """Describe the workers whose death is behind an error, with the likely cause, or return None."""
    if not isinstance(served, _MultiProcessingDataLoaderIter):
        return None
    # A process that dies closes its connections before its parent can see that it has ended. So PyTorch may report a
    # killed worker as a ConnectionResetError, an EOFError or a BrokenPipeError of this process: wait for it to end.
    if isinstance(error, OSError | EOFError) and 'in DataLoader worker process' not in str(error):
        ending = connection.wait([worker.sentinel for worker in served._workers], timeout=DEATH_SECONDS)
        for worker in served._workers:
            if worker.sentinel in ending:
                worker.join()
    # One that is at the end of its samples ends with 0.
    ended = [(number, worker) for number, worker in enumerate(served._workers) if worker.exitcode]
    return '; '.join(
        f'DataLoader worker {number} (pid {worker.pid}) {death(worker.exitcode)}' for number, worker in ended
    )


LIKELY_CAUSES = {
    signal.SIGKILL: '; did the machine or its container run out of memory? '
    'Way out: lower loader.num_workers or loader.prefetch_factor, or ask for more memory',
    signal.SIGBUS: '; is /dev/shm full? Way out: give the container more, or lower loader.num_workers',
}


def death(exit_code: int) -> str:
    """Describe how a process ended and the likely cause."""
    if exit_code > 0:
        return f'ended with status {exit_code}'
    return f'was killed by {signal.Signals(-exit_code).name}{LIKELY_CAUSES.get(signal.Signals(-exit_code), "")}'


def timestep_quantiles(seed: int, batch: Mapping[str, torch.Tensor], everyone: torch.Tensor, rank: int) -> torch.Tensor:
    """Quantiles of a rank's share of a global batch, float64 [B]; `everyone` holds the ids of all ranks in turn."""
    first = {name: batch[name][:1].expand(len(everyone)) for name in (batch_keys.EPOCH, batch_keys.BATCH_INDEX)}
    draws = Draws(seed, everyone, first[batch_keys.EPOCH], first[batch_keys.BATCH_INDEX])
    size = len(batch[batch_keys.SAMPLE_ID])
    return draws.stratified(Purpose.STRATUM, Purpose.TIMESTEP)[rank * size : (rank + 1) * size]


def as_spec(loader: BucketedLoader) -> DataSpec:
    """The loader for a Trainer's evaluation: Composer's own splitting warns about a last batch that is short."""
    return DataSpec(loader, split_batch=_split)


def _split(batch: dict[str, torch.Tensor], size: int | float) -> list[dict[str, torch.Tensor]]:
    count = len(batch[batch_keys.SAMPLE_ID])
    starts = range(0, count, int(size))
    return [{name: tensor[start : start + int(size)] for name, tensor in batch.items()} for start in starts]


def outlive_signals(worker: int) -> None:
    """Let a worker ignore what tells a run to stop: its process ends it, after the batch (see `Preemption`)."""
    for number in (signal.SIGTERM, signal.SIGUSR1):
        signal.signal(number, signal.SIG_IGN)


def default_num_workers(devices_on_node: int) -> int:
    """Workers a device: the cores that this process may use, shared out, one kept for the device's own process."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    return max(0, min(8, cores // max(1, devices_on_node) - 1))
