"""Local jobs of two nodes with two processes: after any disturbance, they end with the same weights."""

import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import yaml
from forkserver import SOCKET, Server
from ranks import assert_same_weights, batches_done, free_port

from diffusion.exit_codes import CONFIG_ERROR, PREEMPTED
from diffusion.launch import attempts

ROOT = Path(__file__).parents[2]


class Launched:
    """A running job: `diffusion launch`, or a node entry point, as a process."""

    def __init__(self, command: Sequence[str], server: Server, recipe: Path, run: Path, **variables: str) -> None:
        self.recipe, self.run, self.log = recipe, run, recipe.with_suffix('.log')
        environ = os.environ | {SOCKET: server.path, 'PYTHONPATH': str(ROOT)} | variables
        with self.log.open('ab') as output:
            self.process = subprocess.Popen(
                [*command], stdout=output, stderr=output, env=environ, cwd=recipe.parent, start_new_session=True
            )

    def wait_for_batches(self, count: int) -> None:
        until = time.monotonic() + 120
        while batches_done(self.run) < count:
            assert self.process.poll() is None, self.log.read_text()
            assert time.monotonic() < until, self.log.read_text()
            time.sleep(0.02)

    def wait_for_attempt(self, count: int) -> None:
        until = time.monotonic() + 120
        while len(attempts.read_attempts(self.run)) < count:
            assert time.monotonic() < until, self.log.read_text()
            time.sleep(0.05)

    def processes(self, kind: str) -> list[int]:
        """Return the process ids of this job: `run.py` for its ranks, `diffusion.launch.node` for its nodes."""
        found = []
        for entry in Path('/proc').iterdir():
            if entry.name.isdecimal():
                try:
                    words = (entry / 'cmdline').read_bytes().decode(errors='replace').split('\0')
                except OSError:
                    continue
                if kind in words[1:3] and str(self.recipe) in words:
                    found.append(int(entry.name))
        return sorted(found)

    def ranks(self) -> list[int]:
        return self.processes('run.py')

    def nodes(self) -> list[int]:
        return self.processes('diffusion.launch.node')

    def wait(self, timeout: float = 240) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(self.log.read_text()) from None


@pytest.fixture
def write_job(tmp_path: Path, tiny_recipe) -> Callable[..., tuple[Path, Path, Path]]:
    """Write a job of the tiny recipe with a checkpoint every 4 batches; return the paths of its spec, recipe and run
    folder.
    """

    def write(
        name: str,
        *,
        job: str = 'job',
        batches: int = 24,
        hang_seconds: int | None = None,
        preflight: str = 'none',
        **sections,
    ) -> tuple[Path, Path, Path]:
        content = tiny_recipe(tmp_path / 'runs', name=name, algorithms={'ema': {'smoothing': 0.9}}) | sections
        content['trainer'] = content['trainer'] | {'max_duration': f'{batches}ba', 'save_interval': '4ba'}
        recipe, spec = tmp_path / f'{name}.yaml', tmp_path / f'{name}-{job}.yaml'
        recipe.write_text(yaml.safe_dump(content))
        content = {
            'name': job,
            'backend': 'local',
            'recipe': str(recipe),
            'workdir': str(tmp_path),
            'nodes': 2,
            'gpu': None,
            'gpus_per_node': 2,
            'master_port': free_port(),
            'restart': {'max_restarts': 30},
            'preflight': preflight,
            'schedule': {'notice_seconds': 40},
        }
        spec.write_text(yaml.safe_dump(content | ({} if hang_seconds is None else {'hang_seconds': hang_seconds})))
        (tmp_path / 'run.py').unlink(missing_ok=True)
        (tmp_path / 'run.py').symlink_to(ROOT / 'tests' / 'forkserver.py')
        return spec, recipe, tmp_path / 'runs' / name

    return write


@pytest.fixture
def launch(write_job, forkserver: Server) -> Callable[..., Launched]:
    """Write and launch such a job."""

    def start(name: str, **settings) -> Launched:
        spec, recipe, run = write_job(name, **settings)
        code = 'import sys; from diffusion.cli import main; sys.exit(main())'
        return Launched([sys.executable, '-c', code, 'launch', str(spec)], forkserver, recipe, run)

    return start


@pytest.fixture
def undisturbed(launch) -> Launched:
    """A job that ran without any disturbance."""
    job = launch('undisturbed')
    assert job.wait() == 0, job.log.read_text()
    (only,) = attempts.read_attempts(job.run)
    assert (only.first, only.last, only.status, only.cause) == (0, 24, 0, 'done')
    return job


class Disturbances:
    """Disturbances of a running job."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.stopped: list[int] = []

    def kill_rank(self, job: Launched, rng: random.Random) -> None:
        os.kill(rng.choice(job.ranks()), signal.SIGKILL)

    def kill_node(self, job: Launched, rng: random.Random) -> None:
        os.kill(rng.choice(job.nodes()), signal.SIGKILL)

    def stop_node(self, job: Launched, rng: random.Random) -> None:
        os.kill(rng.choice(job.nodes()), signal.SIGTERM)

    def kill_launcher(self, job: Launched, rng: random.Random) -> None:
        job.process.kill()

    def hang_rank(self, job: Launched, rng: random.Random) -> None:
        pid = int((self.folder / f'pid-{rng.randrange(1, 4)}').read_text())
        os.kill(pid, signal.SIGSTOP)
        self.stopped.append(pid)

    def kill_stopped_processes(self) -> None:
        for pid in self.stopped:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


@pytest.fixture
def disturbances(tmp_path: Path) -> Iterator[Disturbances]:
    found = Disturbances(tmp_path)
    yield found
    found.kill_stopped_processes()


@pytest.mark.slow
def test_random_disturbances_do_not_change_the_weights(launch, undisturbed, disturbances):
    rng = random.Random(6)
    kinds = [
        disturbances.kill_rank,
        disturbances.kill_node,
        disturbances.stop_node,
        disturbances.kill_launcher,
        disturbances.hang_rank,
    ]
    rng.shuffle(kinds)
    job = launch('disturbed', hang_seconds=15)
    launchers = 1
    for number, disturb in enumerate(kinds):
        # Each disturbance comes some batches later, so that the number of repeated batches stays small.
        job.wait_for_batches(4 * (number + 1))
        time.sleep(rng.uniform(0, 0.3))
        attempt = len(attempts.read_attempts(job.run))
        disturb(job, rng)
        if disturb == disturbances.kill_launcher:
            job.process.wait()
            job = launch('disturbed', hang_seconds=15)
            launchers += 1
        job.wait_for_attempt(attempt + 1)
        disturbances.kill_stopped_processes()
    assert job.wait() == 0, job.log.read_text()
    assert_same_weights(job.run, undisturbed.run)
    found = attempts.read_attempts(job.run)
    assert len(found) >= 6
    causes = {attempt.cause for attempt in found}
    assert {'hang', 'preempted', 'lost', 'done'} <= causes
    assert {'killed', 'crash'} & causes, 'the killed rank, or the rank that failed because of it, may be reported first'
    breakdown, _ = attempts.time_breakdown(found)
    parts = breakdown.productive + breakdown.starting + breakdown.redone + breakdown.down + breakdown.ending
    assert parts == pytest.approx(breakdown.wall, rel=1e-6)
    assert 0 < breakdown.goodput < 1
    assert 'time lost' in attempts.format_attempts_report(job.run)


@pytest.mark.slow
def test_user_error_found_on_nodes_is_not_retried(launch, tmp_path):
    job = launch('wrong', streams={'gone': {'local': str(tmp_path / 'gone'), 'resolution': 32}})
    assert job.wait() == CONFIG_ERROR
    (only,) = attempts.read_attempts(job.run)
    assert (only.status, only.cause, only.first) == (CONFIG_ERROR, 'mistake', None)
    assert 'gone' in job.log.read_text()


def test_hung_rank_leaves_stacks_and_job_restarts(launch, disturbances):
    job = launch('hung', batches=12, hang_seconds=15)
    job.wait_for_batches(6)
    disturbances.hang_rank(job, random.Random(1))
    job.wait_for_attempt(2)
    disturbances.kill_stopped_processes()
    assert job.wait() == 0, job.log.read_text()
    first, second = attempts.read_attempts(job.run)
    assert (first.status, first.cause, second.status) == (PREEMPTED, 'hang', 0)
    found = ''.join(path.read_text() for path in job.run.glob('stacks-*-node*.txt'))
    assert found.count('--- rank') >= 2
    assert 'loader.py' in found or 'distributed' in found or 'trainer.py' in found


@pytest.mark.slow
def test_entry_point_as_pid_1_stops_cleanly(write_job, forkserver):
    """Checkpoint on SIGTERM as PID 1 of a PID namespace, with no process left behind."""
    unshare = ['unshare', '--pid', '--fork', '--kill-child', '--mount-proc']
    if subprocess.run([*unshare, 'true'], capture_output=True, check=False).returncode:
        pytest.skip('this machine does not support PID namespaces')
    _, recipe, run = write_job('contained')
    command = [*unshare, sys.executable, '-m', 'diffusion.launch.node', '--', 'run.py', str(recipe)]
    settings = {'SCHEDULER': 'local', 'NODES': '1', 'PROCESSES_PER_NODE': '2', 'MASTER_PORT': str(free_port())}
    job = Launched(command, forkserver, recipe, run, **{f'DIFFUSION_{name}': value for name, value in settings.items()})
    job.wait_for_batches(6)
    (node,) = job.nodes()
    os.kill(node, signal.SIGTERM)
    assert job.wait() == PREEMPTED, job.log.read_text()
    assert not job.ranks()
    assert attempts.read_attempts(job.run)[-1].cause == 'preempted'


@pytest.mark.slow
def test_preflight_runs_before_training(launch):
    job = launch('checked', batches=4, preflight='fast')
    assert job.wait() == 0, job.log.read_text()
    report = json.loads((job.run / 'preflight.json').read_text())
    assert report['status'] == 0
    assert {'shared memory', 'disk', 'checkpoints', 'data', 'all-reduce'} <= {
        each['check'] for each in report['findings']
    }
    assert 'ok   all-reduce' in job.log.read_text()


@pytest.mark.slow
def test_second_job_on_same_folder_is_refused_without_disturbing_first(launch):
    first = launch('shared')
    first.wait_for_batches(2)
    second = launch('shared', job='another')
    assert second.wait() == CONFIG_ERROR and f'another: exited with status {CONFIG_ERROR}' in second.log.read_text()
    assert first.wait() == 0, first.log.read_text()
    assert 'job job, process' in first.log.read_text() and 'trains into this folder' in first.log.read_text()
    (only,) = attempts.read_attempts(first.run)
    assert (only.first, only.last, only.status) == (0, 24, 0)
