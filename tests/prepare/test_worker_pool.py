"""The worker pool: results, errors, and processes that die; Ray gives the same dataset as local processes."""

import os
import pickle
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from drawn import DrawnSource, settings, snapshot

from diffusion.errors import DataError
from diffusion.prepare.pipeline import prepare
from diffusion.prepare.worker_pool import _run_pickled, run_jobs, run_on_ray

Note = Callable[[str], None]


@dataclass(frozen=True)
class Square:
    number: int

    @property
    def name(self) -> str:
        return f'square {self.number}'

    def __call__(self, note: Note) -> int:
        return self.number**2


@dataclass(frozen=True)
class Dying(Square):
    """Job that appends a line to `lives`, and is killed in its first `deaths` attempts."""

    lives: Path
    deaths: int

    def __call__(self, note: Note) -> int:
        with self.lives.open('a') as file:
            print(f'{self.number} {time.monotonic()}', file=file)
        if len(self.lives.read_text().split('\n')) <= self.deaths + 1:
            note('image 12')
            os.kill(os.getpid(), signal.SIGKILL)
        return -1


@dataclass(frozen=True)
class Slow(Square):
    began: Path

    def __call__(self, note: Note) -> int:
        time.sleep(0.3)
        self.began.write_text(str(time.monotonic()))
        return self.number


class Failing(Square):
    def __call__(self, note: Note) -> int:
        raise ValueError(f'number {self.number} is invalid')


class Exiting(Square):
    def __call__(self, note: Note) -> int:
        if self.number:
            note('image 7')
        os._exit(self.number)


@pytest.mark.parametrize(('jobs', 'workers'), [(20, 1), (20, 3), (0, 4)])
def test_every_job_runs_once(jobs: int, workers: int) -> None:
    assert sorted(run_jobs([Square(n) for n in range(jobs)], workers=workers)) == [n**2 for n in range(jobs)]


def test_error_of_a_job_is_raised_with_its_traceback() -> None:
    with pytest.raises(ValueError, match='number 3 is invalid') as caught:
        list(run_jobs([Failing(3)], workers=1))
    assert 'in __call__' in str(caught.value.__cause__)
    assert 'number 3' in str(pickle.loads(_run_pickled({'job': pickle.dumps(Failing(3))})['outcome'])[1])
    assert pickle.loads(_run_pickled({'job': pickle.dumps(Square(3))})['outcome']) == (9, None)


def test_job_that_exits_is_named() -> None:
    for status, what in {0: 'times, exited with status 0 with', 3: 'times at image 7, exited with status 3'}.items():
        with pytest.raises(DataError, match=f'square {status}: its process died 3 {what}'):
            list(run_jobs([Exiting(status)], workers=1))


def test_last_attempt_runs_with_no_other_job(tmp_path: Path) -> None:
    slow = [Slow(n, tmp_path / f'slow-{n}') for n in range(3)]
    assert sorted(run_jobs([Dying(9, tmp_path / 'lives', 2), *slow], workers=2)) == [-1, 0, 1, 2]
    last = float((tmp_path / 'lives').read_text().split()[-1])
    assert all(last > float(each.began.read_text()) for each in slow)


def test_closing_the_results_stops_the_processes(tmp_path: Path) -> None:
    results = run_jobs([Pid(n) for n in range(4)], workers=2)
    pids = {next(results), next(results)}
    results.close()  # type: ignore[attr-defined]
    assert not any(is_alive(pid) for pid in pids)


class Pid(Square):
    def __call__(self, note: Note) -> int:
        return os.getpid()


class Sleeping(Square):
    def __call__(self, note: Note) -> int:
        time.sleep(60)
        return 0


def is_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


PARENT = """
import sys
sys.path.insert(0, sys.argv[1])
from test_worker_pool import Pid, Sleeping, run_jobs
if __name__ == '__main__':
    for pid in run_jobs([Pid(0), *(Sleeping(n) for n in range(3))], workers=1):
        print(pid, flush=True)
"""


def test_killed_parent_leaves_no_process_behind() -> None:
    with subprocess.Popen(
        [sys.executable, '-c', PARENT, str(Path(__file__).parent)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        parent.send_signal(signal.SIGKILL)
    deadline = time.monotonic() + 20
    while is_alive(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not is_alive(pid)


SOURCE = DrawnSource(4, 15, broken=7)


@pytest.fixture(scope='module')
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    patch = pytest.MonkeyPatch()
    patch.setenv('RAY_USAGE_STATS_ENABLED', '0')
    patch.setenv('RAY_AUTH_MODE', 'disabled')
    # So that Ray's workers can import the modules of these tests.
    patch.setenv('PYTHONPATH', str(Path(__file__).parent), prepend=':')
    ray = pytest.importorskip('ray')
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 * 2**20, log_to_driver=False)
    yield ray
    ray.shutdown()
    patch.undo()


@pytest.mark.slow
@pytest.mark.filterwarnings(r'ignore::DeprecationWarning:ray\.')  # from settings that Ray uses itself
def test_ray_gives_the_same_dataset_and_the_same_errors(tmp_path: Path, ray: Any) -> None:
    values: dict[str, Any] = {'aspects': 'sdxl', 'duplicates': 'near', 'shard_mb': 0.01}
    assert prepare(settings(tmp_path / 'ray', **values), source=SOURCE, run=run_on_ray) is not None
    prepare(settings(tmp_path / 'processes', **values), source=SOURCE)
    assert snapshot(tmp_path / 'ray') == snapshot(tmp_path / 'processes')
    (tmp_path / 'gone').mkdir()
    (tmp_path / 'gone/drawn-1').touch()
    source = DrawnSource(2, 3, gone=str(tmp_path / 'gone'))
    with pytest.raises(ValueError, match=r'part 1 \(drawn-1\): cannot be read'):
        prepare(settings(tmp_path / 'failed'), source=source, run=run_on_ray)
