"""Start recipes on several ranks through the fork server, and compare the results of runs."""

import contextlib
import os
import signal
import socket
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from forkserver import ROOT, Client, Process
from recipe_files import write_yaml


class Job:
    """Processes of a run, one per rank, with the log file of each."""

    def __init__(self, processes: Sequence[Process], logs: Sequence[Path]) -> None:
        self.processes, self.logs = processes, logs

    def running(self) -> bool:
        return any(process.poll() is None for process in self.processes)

    def send(self, number: int, rank: int) -> None:
        os.kill(self.processes[rank].pid, number)

    def wait_for_death(self, rank: int, timeout: float = 120) -> None:
        """Wait until a rank was killed by SIGKILL; fail if it ends in another way, or not within the timeout."""
        status = self.processes[rank].poll(timeout)
        assert status is not None, f'rank {rank} is still running:\n{self.output()}'
        assert status == -signal.SIGKILL, self.output()

    def kill(self) -> None:
        """Send SIGKILL to all ranks, as if the machine failed, and wait for their end."""
        for process in self.processes:
            if process.poll() is None:
                with contextlib.suppress(ProcessLookupError):  # it has just ended, and its status has not arrived yet
                    os.kill(process.pid, signal.SIGKILL)
        self.wait()

    def wait(self, timeout: float = 240) -> list[int]:
        """Wait for the end of all ranks, and return their exit statuses; negative for a signal."""
        deadline = time.monotonic() + timeout
        statuses = []
        for process in self.processes:
            status = process.poll(max(0.0, deadline - time.monotonic()))
            assert status is not None, f'still running:\n{self.output()}'
            statuses.append(status)
        return statuses

    def end(self, status: int = 0) -> list[str]:
        """Wait for the end of all ranks with the same exit status, and return the output of each."""
        assert self.wait() == [status] * len(self.processes), self.output()
        return self.outputs()

    def wait_for(self, path: Path, timeout: float = 120, *, or_ended: bool = False) -> None:
        """Wait until a file exists; with `or_ended`, return also if the run ends without the file being seen."""
        deadline = time.monotonic() + timeout
        while not path.exists():
            if or_ended and not self.running():
                return
            assert self.running(), f'the run ended before {path} existed:\n{self.output()}'
            assert time.monotonic() < deadline, f'{path} does not exist after {timeout} s:\n{self.output()}'
            time.sleep(0.002)

    def wait_for_batch(self, run: Path, batch: int) -> None:
        """Wait until the loss of a batch is in the metrics of a run."""
        metrics = run / 'metrics.jsonl'
        self.wait_for(metrics)
        while f'"step": {batch}, "loss/train/total"' not in metrics.read_text():
            assert self.running(), self.output()
            self.spend(0.005)

    def spend(self, seconds: float) -> None:
        """Let the run continue for some seconds."""
        time.sleep(seconds)

    def outputs(self) -> list[str]:
        return [log.read_text() for log in self.logs]

    def output(self) -> str:
        """Return the output of all ranks as one text, with a header per rank."""
        return ''.join(f'--- rank {rank}\n{text}' for rank, text in enumerate(self.outputs()))


class Ranks:
    """Starter of runs, with their logs in a folder; create one per test session."""

    def __init__(self, server: Client, folder: Path) -> None:
        self._server, self._folder = server, folder
        self._count = 0

    def start(self, ranks: int, recipe: Path, *overrides: str, **settings: Any) -> Job:
        """Start a recipe with changes as `key=value` on several ranks; keywords as for `start_program`."""
        return self.start_program(ranks, ROOT / 'run.py', recipe, *overrides, **settings)

    def start_program(
        self, ranks: int, *command: str | Path, double: bool = False, environment: Any = None, deaths: Any = None
    ) -> Job:
        """Start `python COMMAND` on several ranks, as the composer launcher would, with additional variables.

        With `double` they train in float64. `deaths` has the number of the file operation before which a rank kills
        itself, and the folder of the files, by rank; see `sudden_death.die_before`.
        """
        self._count += 1
        logs = [self._folder / f'{self._count}-{rank}.log' for rank in range(ranks)]
        common = {'NODE_RANK': '0', 'WORLD_SIZE': str(ranks), 'LOCAL_WORLD_SIZE': str(ranks)}
        common |= {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(free_port()), **(environment or {})}
        processes = []
        for rank, log in enumerate(logs):
            step, folder = (deaths or {}).get(rank, (None, None))
            environ = {'RANK': str(rank), 'LOCAL_RANK': str(rank)} | common
            death = None if step is None else (step, str(folder))
            processes.append(self._server.start(*command, output=log, environment=environ, double=double, death=death))
        return Job(processes, logs)

    def run(self, ranks: int, recipe: Path, *overrides: str, **settings: Any) -> str:
        """Run a recipe to its end on several ranks, and return their output; fail if a rank fails."""
        job = self.start(ranks, recipe, *overrides, **settings)
        job.end()
        return job.output()


@dataclass
class Runs:
    root: Path
    content: dict[str, Any]
    ranks: Ranks

    def recipe(self, name: str, **sections: Any) -> Path:
        return write_yaml(self.root / f'{name}.yaml', self.content | {'name': name} | sections)

    def folder(self, name: str) -> Path:
        return self.root / 'runs' / name


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]


def two_free_ports() -> int:
    """Return a TCP port that is free on localhost like the one after it, over which nodes agree to restart."""
    while True:
        port = free_port()
        with contextlib.suppress(OSError, OverflowError), socket.create_server(('', port + 1)):
            return port


def read_losses(run: Path) -> dict[int, float]:
    from diffusion.loggers.metrics_file import TRAIN_LOSS, read_metrics

    return read_metrics(run / 'metrics.jsonl')[TRAIN_LOSS]


def largest_difference(one: dict[int, float], other: dict[int, float]) -> float:
    """Return the largest relative difference between the losses of two runs over all batches."""
    assert one.keys() == other.keys()
    return max(abs(one[batch] - other[batch]) / abs(one[batch]) for batch in one)


def batches_done(run: Path) -> int:
    """Return the number of batches in a run's metrics; batches that were repeated after a restart count again."""
    metrics = run / 'metrics.jsonl'
    return metrics.read_text().count('"loss/train/total"') if metrics.exists() else 0


def assert_same_weights(one: Path, other: Path) -> None:
    """Assert that the averaged weights of two runs' newest checkpoints are equal bit for bit."""
    import torch

    from diffusion.checkpointing.checkpoint_lookup import find_checkpoint
    from diffusion.checkpointing.checkpoint_weights import weights_of

    found, expected = (weights_of(find_checkpoint(str(run)), 'ema')[0] for run in (one, other))
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)
