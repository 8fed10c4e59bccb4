"""Data loader that numbers batches within an epoch and, on any failure, stops all ranks at the same batch."""

import contextlib
import datetime
import itertools
import logging
import math
import os
import signal
import threading
import time
from collections.abc import Iterator, Mapping
from multiprocessing import connection
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import Any, NoReturn, cast

import torch
from composer.core import DataSpec
from composer.utils import dist
from streaming import StreamingDataLoader
from streaming.base.world import World
from torch.utils.data import DataLoader

from diffusion.compatibility.private_names import (
    _MultiProcessingDataLoaderIter,
    private_attribute,
    set_private_attribute,
    signal_handling,
)
from diffusion.data.bad_samples import SampleCounts, quarantine
from diffusion.data.streams import BucketedDataset
from diffusion.data.verified_dataset import describe_error
from diffusion.errors import DataError, UserError
from diffusion.models import batch_keys
from diffusion.models.randomness import Draws, Purpose, epoch_word
from diffusion.runs.heartbeats import collective_timeout
from diffusion.runs.stop_signals import STOP_SIGNALS

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Interval in seconds at which a rank looks for failures of its machine's processes while it waits for its workers."""
WORKER_EXIT_SECONDS = 5.0
"""Maximum wait in seconds for a worker to exit after its connection broke, or for a lock that a killed worker holds."""


class _EndOfWorkers:
    """Wrapper of the event that tells PyTorch's workers to exit; with it, a killed worker cannot block this process.

    Workers check the event between samples. A worker killed during the check holds the event's lock forever. The
    training process then blocks on that lock, because PyTorch sets the event when it finds the dead worker and when it
    shuts the others down.
    """

    def __init__(self, event: Event) -> None:
        self._event = event
        self._is_set = False

    def is_set(self) -> bool:
        return self._is_set

    def set(self) -> None:
        """Set the event, but give up if its lock is still held after WORKER_EXIT_SECONDS."""
        self._is_set = True
        thread = threading.Thread(target=self._event.set, name='end of the workers', daemon=True)
        # Ignore the RuntimeError of a thread started while Python exits: PyTorch then terminates the remaining workers.
        with contextlib.suppress(RuntimeError):
            thread.start()
            thread.join(WORKER_EXIT_SECONDS)


class BucketedLoader(StreamingDataLoader):
    """StreamingDataLoader that numbers its batches, never ends an epoch early, and raises errors on all ranks at once.

    The index of a global batch within its epoch does not depend on the number of devices or on resumes, so it can seed
    random draws.

    All ranks iterate in lockstep: before each batch they check that every rank has one. Otherwise, all ranks raise the
    same `DataError` at the same batch.

    Args:
        stratified: Add a timestep quantile to each sample, for `Objective.timesteps: stratified`.
        timeout: Maximum wait for a batch from a worker, in seconds; 0 means no limit.
        max_bad_samples: Maximum fraction of samples replaced because they cannot be decoded.
        quarantine: JSON Lines file in which each replaced sample is listed.
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
        # PyTorch's timeout is used only for polling: `_next_batch` catches it, checks for failures, and calls next()
        # again.
        poll_seconds = min(timeout or math.inf, POLL_SECONDS) if num_workers else 0
        # PyTorch draws a seed each time it starts the workers, and a resume starts them once more. Let it draw from a
        # separate generator, so that dropout layers get the same numbers however often workers were started.
        settings = {'collate_fn': dataset.image_block.collate, 'generator': torch.Generator()} | settings
        super().__init__(dataset, num_workers=num_workers, timeout=poll_seconds, **settings)
        if stratified and not dataset.elastic:
            raise UserError(
                'stratified: devices could get batches of different sizes; create the dataset with elastic=True, which '
                'makes them equal'
            )
        self.stratified = stratified
        self.timeout_seconds = timeout or math.inf
        self.max_bad_samples = max_bad_samples
        self.quarantine = quarantine
        self.tally = SampleCounts()
        self.wait_seconds = 0.0
        """Seconds that this rank has waited for its own workers, excluding waits for other ranks."""
        self._gloo: torch.distributed.ProcessGroup | None = None

    def __iter__(self) -> Iterator[Any]:
        world = World.detect()
        # StreamingDataset's private `_resume` reads the position from a loaded checkpoint; no public method returns it.
        # Call it before the workers start: they increment `next_epoch`, after which this position would be ignored.
        _, sample_in_epoch = private_attribute(self.dataset, '_resume')(world, self.dataset.next_epoch)
        assert self.batch_size is not None
        first = sample_in_epoch // (self.batch_size * world.num_ranks)
        # StreamingDataLoader.state_dict() reads this count. StreamingDataLoader.__iter__ would maintain it, but is
        # bypassed here: it is a generator, which ends at the first exception, so next() could not be called again after
        # a timeout.
        self.num_samples_yielded = 0
        worker_batches: Iterator[Any] | None = None
        for index in itertools.count(first):
            batch, problem, begin = None, None, time.perf_counter()
            # Hold every error until all ranks have checked this batch: if one rank raised here, the others would wait
            # for it in one of the model's collectives until the process group times out.
            try:
                worker_batches = self._start_workers() if worker_batches is None else worker_batches
                batch = self._next_batch(worker_batches)
                if batch is None:
                    problem = self._early_end(index)
            except Exception as error:
                problem = self._report_problem(error, worker_batches)
            self.wait_seconds += time.perf_counter() - begin
            notes = [] if batch is None else [note for note in batch.pop(batch_keys.REPLACED, []) if note]
            try:
                if not self._all_ranks_have_batch(index, batch, problem, notes):
                    return
            except DataError:
                self._end_workers(worker_batches)
                raise
            assert batch is not None
            batch[batch_keys.BATCH_INDEX] = torch.full_like(batch[batch_keys.SAMPLE_ID], index)
            if self.stratified:
                copies = self._gather_copies(batch)
                batch[batch_keys.TIMESTEP_QUANTILE] = timestep_quantiles(self.dataset.seed, batch, copies, world.rank)
            self.num_samples_yielded += len(batch[batch_keys.SAMPLE_ID])
            if not self.dataset.elastic:
                batch = without_repetitions(batch, int(self.dataset.evaluation_order.counts[index, world.rank]))
            yield batch

    def _start_workers(self) -> Iterator[Any]:
        worker_batches = DataLoader.__iter__(self)
        # PyTorch's SIGCHLD handler raises in the main thread as soon as a worker dies. If that happens during a forward
        # pass, the other ranks wait for this one in a collective. So remove our workers from the handler's list;
        # `_next_batch` detects a dead worker within POLL_SECONDS, and all ranks stop at the same batch.
        if isinstance(worker_batches, _MultiProcessingDataLoaderIter):
            if private_attribute(worker_batches, '_worker_pids_set'):
                private_attribute(signal_handling, '_remove_worker_pids')(id(worker_batches))
                set_private_attribute(worker_batches, '_worker_pids_set', False)
            event = _EndOfWorkers(private_attribute(worker_batches, '_workers_done_event'))
            set_private_attribute(worker_batches, '_workers_done_event', event)
        return worker_batches

    def _next_batch(self, worker_batches: Iterator[Any]) -> Any | None:
        """Return the next batch of this rank's workers, or None at the end of the epoch.

        Raises DataError after a timeout or another process's failure. A worker's exception is raised unchanged.
        """
        self.dataset.check_failures()
        begin = time.monotonic()
        while True:
            try:
                return next(worker_batches, None)
            except RuntimeError as error:
                # PyTorch raises a plain RuntimeError for the timeout, so recognize it by its message.
                if 'DataLoader timed out' not in str(error):
                    raise
                self.dataset.check_failures()
                if time.monotonic() - begin > self.timeout_seconds:
                    shards = ', '.join(self.dataset.shards_in_progress()) or 'none'
                    raise DataError(
                        f'loader.timeout_seconds: no batch within {self.timeout_seconds:g} s; shards in progress: '
                        f'{shards}. To fix: raise the timeout if the store or the disk is slow'
                    ) from error

    def _end_workers(self, worker_batches: Iterator[Any] | None) -> None:
        # Shut the workers down here: if the iterator is garbage-collected instead, PyTorch waits 5 s for each worker.
        if isinstance(worker_batches, _MultiProcessingDataLoaderIter):
            for worker in private_attribute(worker_batches, '_workers'):
                worker.kill()
            private_attribute(worker_batches, '_shutdown_workers')()
            self._iterator = None

    def _early_end(self, index: int) -> str | None:
        # Streaming silently ends an epoch early if a shard is missing, so count the batches.
        if self.dataset.elastic:
            expected = self.dataset.epoch_size // self.dataset.global_batch
        else:
            expected = len(self.dataset.evaluation_order.batches)
        if index == expected:
            return None
        return f'{self.dataset.names()}: the epoch ended after {index} of {expected} batches'

    def _report_problem(self, error: Exception, worker_batches: Iterator[Any] | None) -> str:
        """Return an error's message, after sharing it with the other processes on this machine, so that they stop."""
        assert self.dataset.failures is not None
        dead = None
        if not isinstance(error, UserError | DataError):
            log.error('rank %d:', dist.get_global_rank(), exc_info=error)
            dead = dead_workers(worker_batches, error)
        # Prefer the message that the failing process reported: PyTorch re-raises a worker's exception with the whole
        # traceback as its message.
        message = self.dataset.failures.message(now=True) or (
            f'{self.dataset.names()}: {dead}' if dead else describe_error(error)
        )
        self.dataset.failures.report(message)
        return message

    def _all_ranks_have_batch(self, index: int, batch: Any, problem: str | None, notes: list[str]) -> bool:
        """Return True if every rank has a batch, False if the epoch has ended on all of them; a collective call.

        `batch` is None after this rank's last batch. Raises DataError on all ranks if any rank has a `problem`, if only
        some ranks have reached the end of the epoch, or if too many samples were replaced.
        """
        # The sums below are the same on every rank, so every rank takes the same branches and makes the same further
        # collective calls. Deciding by a rank's own values instead would deadlock.
        count = 0 if batch is None else len(batch[batch_keys.SAMPLE_ID])
        figures = torch.tensor([problem is not None, batch is None, count, len(notes)], dtype=torch.int64)
        if dist.get_world_size() > 1:
            torch.distributed.all_reduce(figures, group=self._gloo_group())
        failed, ended, served, replaced = figures.tolist()
        if failed:
            self._raise_on_all_ranks(problem)
        if ended:
            if ended < dist.get_world_size():
                self._raise_on_all_ranks(
                    f'{self.dataset.names()}: {ended} of {dist.get_world_size()} ranks ended after {index} batches, '
                    'but the others have more'
                )
            return False
        self.tally.served += served
        if replaced:
            self._count_replaced(index, replaced, notes)
        return True

    def _raise_on_all_ranks(self, problem: str | None) -> NoReturn:
        """Raise a DataError on every rank with all ranks' messages; a collective. `problem` is this rank's, if any."""
        problems = [problem] if self._gloo is None else dist.all_gather_object(problem, group=self._gloo)
        raise DataError('\n'.join(dict.fromkeys(each for each in problems if each is not None)))

    def _count_replaced(self, index: int, replaced: int, notes: list[str]) -> None:
        """Record a batch's replaced samples; raise DataError if their rate exceeds `max_bad_samples`; a collective."""
        self.tally.replaced += replaced
        all_notes = [notes] if self._gloo is None else dist.all_gather_object(notes, group=self._gloo)
        pointer = ''
        if self.quarantine is not None:
            pointer = f'; see {self.quarantine}'
            if dist.get_global_rank() == 0:
                quarantine(self.quarantine, [note for notes in all_notes for note in notes], index)
        if (problem := self.tally.problem(self.max_bad_samples)) is not None:
            raise DataError(f'{problem}{pointer}. To fix: prepare the data again, or raise the limit')

    def _gather_copies(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return ids and occurrences of all samples of the global batch in rank order, [2, G]; a collective call."""
        copies = torch.stack([batch[batch_keys.SAMPLE_ID], batch[batch_keys.OCCURRENCE]])
        if dist.get_world_size() == 1:
            return copies
        return torch.cat(list(dist.all_gather(copies, group=self._gloo_group())), dim=1)

    def _gloo_group(self) -> torch.distributed.ProcessGroup | None:
        """Return a process group for CPU tensors, created on first use, or None without torch.distributed."""
        if self._gloo is None and torch.distributed.is_initialized():
            # Use Gloo: NCCL does not accept CPU tensors, and an all-reduce on the GPU would wait for all queued
            # kernels. Use a long timeout: one rank may save a checkpoint for several minutes, and the
            # watchdog must report hanging ranks before this timeout does.
            timeout = datetime.timedelta(seconds=collective_timeout())
            group = torch.distributed.new_group(backend='gloo', timeout=timeout)
            self._gloo = cast(torch.distributed.ProcessGroup, group)
        return self._gloo


def dead_workers(worker_batches: Iterator[Any] | None, error: Exception) -> str | None:
    """Return a message about workers that exited with an error or were killed; '' if none did, None without workers."""
    if not isinstance(worker_batches, _MultiProcessingDataLoaderIter):
        return None
    workers = private_attribute(worker_batches, '_workers')
    # A dying process closes its connections before its parent can reap it. So a killed worker may first appear in this
    # process as ConnectionResetError, EOFError or BrokenPipeError. Wait for the exit status.
    if isinstance(error, OSError | EOFError) and 'in DataLoader worker process' not in str(error):
        ending = connection.wait([worker.sentinel for worker in workers], timeout=WORKER_EXIT_SECONDS)
        for worker in workers:
            if worker.sentinel in ending:
                worker.join()
    # Ignore workers that exited with status 0: they have served all their samples.
    ended = [(number, worker) for number, worker in enumerate(workers) if worker.exitcode]
    return '; '.join(
        f'DataLoader worker {number} (pid {worker.pid}) {describe_exit(worker.exitcode)}' for number, worker in ended
    )


LIKELY_CAUSES = {
    signal.SIGKILL: '; did the machine or its container run out of memory? '
    'To fix: lower loader.num_workers or loader.prefetch_factor, or request more memory',
    signal.SIGBUS: '; is /dev/shm full? To fix: use a container with a larger /dev/shm, or lower loader.num_workers',
}


def describe_exit(exit_code: int) -> str:
    if exit_code > 0:
        return f'exited with status {exit_code}'
    return f'was killed by {signal.Signals(-exit_code).name}{LIKELY_CAUSES.get(signal.Signals(-exit_code), "")}'


def without_repetitions(batch: dict[str, torch.Tensor], count: int) -> dict[str, torch.Tensor]:
    """Return an evaluation batch without its repeated samples, and add the key `IS_COUNTED`.

    A rank with only repetitions keeps one of them, marked as not counted: under FSDP, every rank must run the same
    forward passes.
    """
    kept = {name: tensor[: max(1, count)] for name, tensor in batch.items()}
    return kept | {batch_keys.IS_COUNTED: torch.arange(max(1, count)) < count}


def timestep_quantiles(seed: int, batch: Mapping[str, torch.Tensor], copies: torch.Tensor, rank: int) -> torch.Tensor:
    """Return a stratified timestep quantile in [0, 1) per sample, float64 [B]; `copies` is from `_gather_copies`."""
    ids, occurrences = copies
    epoch, index = (batch[name][:1].expand(len(ids)) for name in (batch_keys.EPOCH, batch_keys.BATCH_INDEX))
    draws = Draws(seed, ids, epoch_word(epoch, occurrences), index)
    size = len(batch[batch_keys.SAMPLE_ID])
    return draws.stratified(Purpose.STRATUM, Purpose.TIMESTEP)[rank * size : (rank + 1) * size]


def to_data_spec(loader: BucketedLoader) -> DataSpec:
    # Replace Composer's default split_batch: it warns if the last batch is short.
    return DataSpec(loader, split_batch=_split)


def _split(batch: dict[str, torch.Tensor], size: int | float) -> list[dict[str, torch.Tensor]]:
    """Split a batch into microbatches of `size` samples; the last one may be smaller."""
    parts = zip(*(tensor.split(int(size)) for tensor in batch.values()), strict=True)
    return [dict(zip(batch, part, strict=True)) for part in parts]


def ignore_stop_signals(worker: int) -> None:
    """Make a DataLoader worker ignore stop signals; pass this function to the loader as `worker_init_fn`."""
    # These signals ask a run to stop, and reach its whole process group. The main process first finishes the current
    # batch (see `Preemption`). Until then, it needs its workers; it shuts them down afterwards.
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)


def default_num_workers(devices_on_node: int) -> int:
    """Return the default number of DataLoader workers per device: CPU cores per device minus 1, at most 8."""
    return max(0, min(8, len(os.sched_getaffinity(0)) // max(1, devices_on_node) - 1))
