"""Runs of recipes on several ranks, by the server of processes; and what tests compare of runs."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from forkserver import ROOT, Process, Server


class Job:
    """The ranks of one run."""

    def __init__(self, processes: Sequence[Process], logs: Sequence[Path]) -> None:
        self.processes, self.logs = processes, logs

    def running(self) -> bool:
        return any(process.poll() is None for process in self.processes)

    def send(self, number: int, rank: int) -> None:
        os.kill(self.processes[rank].pid, number)

    def wait_for_death(self, rank: int, timeout: float = 120) -> None:
        """Return when a rank has been killed; it is an error if it ends in another way."""
        status = self.processes[rank].poll(timeout)
        assert status is not None, f'rank {rank} goes on:\n{self.output()}'
        assert status == -signal.SIGKILL, self.output()

    def kill(self) -> None:
        """SIGKILL for all ranks, as when the machine goes."""
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):  # it has ended, and the news is on its way
                    os.kill(process.pid, signal.SIGKILL)
        self.wait()

    def wait(self, timeout: float = 240) -> list[int]:
        """The ranks' exit statuses; negative for a signal."""
        deadline = time.monotonic() + timeout
        statuses = []
        for process in self.processes:
            status = process.poll(max(0.0, deadline - time.monotonic()))
            assert status is not None, f'still running:\n{self.output()}'
            statuses.append(status)
        return statuses

    def wait_for(self, path: Path, timeout: float = 120, *, or_ended: bool = False) -> None:
        """Return as soon as a file is there; with `or_ended`, also when the run has ended and it never was seen."""
        deadline = time.monotonic() + timeout
        while not path.exists():
            if or_ended and not self.running():
                return
            assert self.running(), f'ended before {path} was there:\n{self.output()}'
            assert time.monotonic() < deadline, f'{path} never came:\n{self.output()}'
            time.sleep(0.002)

    def spend(self, seconds: float) -> None:
        """Let it run on for a while."""
        time.sleep(seconds)

    def outputs(self) -> list[str]:
        """What each rank printed."""
        return [log.read_text() for log in self.logs]

    def output(self) -> str:
        return ''.join(f'--- rank {rank}\n{text}' for rank, text in enumerate(self.outputs()))


class Ranks:
    """Starts runs, with their output in a folder; make one a session."""

    def __init__(self, server: Server, folder: Path) -> None:
        self._server, self._folder = server, folder
        self._count = 0

    def start(
        self,
        ranks: int,
        recipe: Path,
        *overrides: str,
        double: bool = False,
        environment: Mapping[str, str] | None = None,
        deaths: Mapping[int, tuple[int, Path]] | None = None,
    ) -> Job:
        """Start a recipe on so many ranks, in float64 if asked, with further variables.

        `deaths` says of a rank before which operation on a folder's files it dies, see `sudden_death.die_before`.
        """
        return self.start_program(
            ranks, ROOT / 'run.py', recipe, *overrides, double=double, environment=environment, deaths=deaths
        )

    def start_program(
        self,
        ranks: int,
        *command: str | Path,
        double: bool = False,
        environment: Mapping[str, str] | None = None,
        deaths: Mapping[int, tuple[int, Path]] | None = None,
    ) -> Job:
        """Start `python COMMAND` on so many ranks, as the composer launcher would."""
        self._count += 1
        logs = [self._folder / f'{self._count}-{rank}.log' for rank in range(ranks)]
        common = {
            'NODE_RANK': '0',
            'WORLD_SIZE': str(ranks),
            'LOCAL_WORLD_SIZE': str(ranks),
            'MASTER_ADDR': '127.0.0.1',
            'MASTER_PORT': str(free_port()),
            **(environment or {}),
        }
        processes = []
        for rank, log in enumerate(logs):
            step, folder = (deaths or {}).get(rank, (None, None))
            processes.append(
                self._server.start(
                    *command,
                    output=log,
                    environment={'RANK': str(rank), 'LOCAL_RANK': str(rank)} | common,
                    double=double,
                    death=None if step is None else (step, str(folder)),
                )
            )
        return Job(processes, logs)

    def run(self, ranks: int, recipe: Path, *overrides: str, double: bool = False) -> str:
        """Run a recipe to its end; returns what the ranks printed."""
        job = self.start(ranks, recipe, *overrides, double=double)
        statuses = job.wait()
        assert not any(statuses), f'{statuses}\n{job.output()}'
        return job.output()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]


def read_losses(run: Path) -> dict[int, float]:
    from diffusion.loggers.metrics_file import TRAIN_LOSS, read_metrics

    return read_metrics(run / 'metrics.jsonl')[TRAIN_LOSS]


def largest_difference(one: dict[int, float], other: dict[int, float]) -> float:
    """The largest relative difference of two runs' losses, batch by batch."""
    assert one.keys() == other.keys()
    return max(abs(one[batch] - other[batch]) / abs(one[batch]) for batch in one)


def batches_done(run: Path) -> int:
    """Batches that a run has done, those done again included, by its metrics."""
    metrics = run / 'metrics.jsonl'
    return metrics.read_text().count('"loss/train/total"') if metrics.exists() else 0


def assert_same_weights(one: Path, other: Path) -> None:
    """The averaged weights of two runs' newest checkpoints are equal to the last bit."""
    import torch

    from diffusion.checkpointing.run_folder import find_checkpoint, weights_of

    found, expected = (weights_of(find_checkpoint(str(run)), 'ema')[0] for run in (one, other))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
