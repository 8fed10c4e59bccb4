"""Real ranks for tests: processes forked from one that has imported everything, so that a start costs no import.

`Ranks` is the client. The server is this file run as a program: it forks a process for each rank, which runs run.py's
main as the composer launcher would have it run, and tells when a process ends and how.
"""

import atexit
import contextlib
import json
import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).parents[1]


class Job:
    """The ranks of one run."""

    def __init__(self, server: 'Ranks', pids: list[int], logs: list[Path]) -> None:
        self.server, self.pids, self.logs = server, pids, logs

    def running(self) -> bool:
        self.server.listen(0)
        return any(pid not in self.server.ended for pid in self.pids)

    def send(self, number: int, rank: int) -> None:
        os.kill(self.pids[rank], number)

    def wait_for_death(self, rank: int, timeout: float = 120) -> None:
        """Return when a rank has been killed; it is an error if it ends in another way."""
        deadline = time.monotonic() + timeout
        while self.pids[rank] not in self.server.ended:
            assert time.monotonic() < deadline, f'rank {rank} goes on:\n{self.output()}'
            self.server.listen(0.2)
        assert self.server.ended[self.pids[rank]] == -signal.SIGKILL, self.output()

    def kill(self) -> None:
        """SIGKILL for all ranks, as when the machine goes."""
        for pid in self.pids:
            with contextlib.suppress(ProcessLookupError):  # it has ended, and the news is on its way
                os.kill(pid, signal.SIGKILL)
        self.wait()

    def wait(self, timeout: float = 240) -> list[int]:
        """The ranks' exit statuses; negative for a signal."""
        deadline = time.monotonic() + timeout
        while self.running():
            assert time.monotonic() < deadline, f'still running:\n{self.output()}'
            self.server.listen(0.2)
        return [self.server.ended[pid] for pid in self.pids]

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

    def output(self) -> str:
        return ''.join(f'--- rank {rank}\n{log.read_text()}' for rank, log in enumerate(self.logs))


class Ranks:
    """Starts runs; make one a session."""

    def __init__(self) -> None:
        environment = os.environ | {'OMP_NUM_THREADS': '1', 'CUDA_VISIBLE_DEVICES': '', 'PYTHONPATH': str(ROOT)}
        self._process = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )
        self._folder = tempfile.TemporaryDirectory()
        self._count = 0
        self.ended: dict[int, int] = {}
        self._started: list[list[int]] = []
        self._unfinished = ''

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
        self._count += 1
        logs = [Path(self._folder.name) / f'{self._count}-{rank}.log' for rank in range(ranks)]
        order = {
            'arguments': [str(recipe), *overrides],
            'port': free_port(),
            'logs': [str(log) for log in logs],
            'double': double,
            'environment': dict(environment or {}),
            'deaths': {rank: (step, str(folder)) for rank, (step, folder) in (deaths or {}).items()},
        }
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(order) + '\n')
        self._process.stdin.flush()
        while not self._started:
            self.listen(60)
        return Job(self, self._started.pop(), logs)

    def run(self, ranks: int, recipe: Path, *overrides: str, double: bool = False) -> str:
        """Run a recipe to its end; returns what the ranks printed."""
        job = self.start(ranks, recipe, *overrides, double=double)
        statuses = job.wait()
        assert not any(statuses), f'{statuses}\n{job.output()}'
        return job.output()

    def listen(self, timeout: float) -> None:
        """Take in what the server has to say."""
        assert self._process.stdout is not None
        if not select.select([self._process.stdout], [], [], timeout)[0]:
            return
        # Not readline: of two lines that come together it would keep one, where select does not see it.
        piece = os.read(self._process.stdout.fileno(), 65536).decode()
        assert piece, 'the server of ranks died'
        *lines, self._unfinished = (self._unfinished + piece).split('\n')
        for news in map(json.loads, lines):
            if 'started' in news:
                self._started.append(news['started'])
            else:
                self.ended |= {int(pid): status for pid, status in news['ended'].items()}

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()
        self._folder.cleanup()


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(('127.0.0.1', 0))
        return probe.getsockname()[1]


# -- the server --


def serve() -> None:
    import diffusion.models.builders
    import diffusion.training.train  # noqa: F401

    orders = ''
    while True:
        if select.select([sys.stdin], [], [], 0.02)[0]:
            piece = os.read(sys.stdin.fileno(), 65536).decode()
            if not piece:
                return
            orders += piece
        while '\n' in orders:
            line, orders = orders.split('\n', 1)
            order = json.loads(line)
            tell({'started': [fork(order, rank) for rank in range(len(order['logs']))]})
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            continue
        if pid:
            tell({'ended': {pid: os.waitstatus_to_exitcode(status)}})


def tell(news: dict[str, Any]) -> None:
    print(json.dumps(news), flush=True)


def fork(order: dict[str, Any], rank: int) -> int:
    pid = os.fork()
    if not pid:
        exit_with(lambda: be_rank(order, rank, len(order['logs'])))
    return pid


def exit_with(work: Callable[[], int], tell: Callable[[int], object] = lambda status: None) -> NoReturn:
    """End a forked process as a program ends that returns this status, or raises; first `tell` somebody the status."""
    status = 1
    try:
        status = work()
    except BaseException:
        traceback.print_exc()
    finally:
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
        tell(status)
        os._exit(status)


def be_rank(order: dict[str, Any], rank: int, world_size: int) -> int:
    log = os.open(order['logs'][rank], os.O_CREAT | os.O_WRONLY | os.O_APPEND)
    for stream in (1, 2):
        os.dup2(log, stream)
    os.environ |= {
        'RANK': str(rank),
        'LOCAL_RANK': str(rank),
        'NODE_RANK': '0',
        'WORLD_SIZE': str(world_size),
        'LOCAL_WORLD_SIZE': str(world_size),
        'MASTER_ADDR': '127.0.0.1',
        'MASTER_PORT': str(order['port']),
        **order['environment'],
    }
    import torch
    from sudden_death import die_before

    from diffusion.tasks import run_recipe
    from diffusion.training import components

    if str(rank) in order['deaths']:
        die_before(*order['deaths'][str(rank)])
    if order['double']:
        torch.set_default_dtype(torch.float64)  # transformers makes its causal mask in the default one
        plain = components.build_model
        components.build_model = lambda recipe: plain(recipe).double()
    return run_recipe.main(order['arguments'])


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


if __name__ == '__main__':
    serve()
