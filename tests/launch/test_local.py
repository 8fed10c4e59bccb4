"""Local jobs of two nodes with two processes: after any disturbance, they end with the same weights."""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml
from forkserver import SOCKET, Client
from ranks import assert_same_weights, batches_done, free_port, two_free_ports
from waiting import wait_until

from diffusion.exit_codes import CONFIG_ERROR, PREEMPTED
from diffusion.launch.standby.in_place import STANDBY
from diffusion.runs import attempts
from diffusion.runs.run_status import inspect_run
from diffusion.storage.local_files import WORKING_FOLDER_VARIABLE
from tests.launch.endings import FORWARD

ROOT = Path(__file__).parents[2]
LAUNCH = [sys.executable, '-c', 'import sys; from diffusion.cli import main; sys.exit(main())', 'launch']


class Launched:
    """A running job: `diffusion launch`, or a node entry point, as a process."""

    def __init__(self, command: Sequence[str], server: Client, recipe: Path, run: Path, **variables: str) -> None:
        self.recipe, self.run, self.log = recipe, run, recipe.with_suffix('.log')
        environ = os.environ | {SOCKET: server.path, 'PYTHONPATH': str(ROOT)} | variables
        with self.log.open('ab') as output:
            self.process = subprocess.Popen(
                [*command], stdout=output, stderr=output, env=environ, cwd=recipe.parent, start_new_session=True
            )

    def wait_until(self, condition: Callable[[], object]) -> None:
        wait_until(condition, 200, running=lambda: self.process.poll() is None, shown=self.log.read_text)

    def wait_for_batches(self, count: int) -> None:
        self.wait_until(lambda: batches_done(self.run) >= count)

    def wait_for_log(self, text: str, count: int = 1) -> None:
        self.wait_until(lambda: self.log.read_text().count(text) >= count)

    def wait_for_attempt(self, count: int, run: Path | str | None = None) -> None:
        """Wait until the run, whose first attempt has begun, has begun a number of attempts."""
        wait_until(lambda: len(attempts.read_attempts(run or self.run)) >= count, 120, shown=self.log.read_text)

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

    def standbys(self) -> list[int]:
        return self.processes(STANDBY)

    def nodes(self) -> list[int]:
        return self.processes('diffusion.launch.node')

    def wait(self, timeout: float = 240) -> int:
        try:
            return self.process.wait(timeout)
        except subprocess.TimeoutExpired:
            self.process.kill()
            raise AssertionError(self.log.read_text()) from None


def write_files(work: Path, name: str, recipe: dict[str, Any], *, job: str = 'job', **spec: Any) -> tuple[Path, Path]:
    """Write a recipe and a local job of two processes per node, with its run.py; return the paths of spec and recipe.

    Args:
        spec: Keys of the job that differ from the usual ones.
    """
    # A checkpoint exists when its batch has ended, so that a test knows what a disturbance costs.
    recipe['checkpointing'] = {'asynchronous': False}
    paths = work / f'{name}-{job}.yaml', work / f'{name}.yaml'
    content = {
        'name': job,
        'backend': 'local',
        'recipe': str(paths[1]),
        'workdir': str(work),
        'gpu': None,
        'gpus_per_node': 2,
        'master_port': two_free_ports(),
        'restart': {'max_restarts': 60},
        'preflight': 'none',
        'schedule': {'notice_seconds': 40},
    }
    for path, values in zip(paths, (content | spec, recipe), strict=True):
        path.write_text(yaml.safe_dump(values))
    (work / 'run.py').unlink(missing_ok=True)
    (work / 'run.py').symlink_to(ROOT / 'tests' / 'faulty_run.py')
    return paths


@pytest.fixture
def write_job(tmp_path: Path, tiny_recipe) -> Callable[..., tuple[Path, Path, Path]]:
    """Write a job of two nodes and the tiny recipe with a checkpoint every 4 batches; return the paths of its spec,
    recipe and run folder. Keywords are keys of the job.
    """

    def write(name: str, *, batches: int = 24, runs_dir: str = '', **spec: Any) -> tuple[Path, Path, Path]:
        content = tiny_recipe(tmp_path / 'runs', name=name, algorithms={'ema': {'smoothing': 0.9}})
        content['trainer'] |= {'max_duration': f'{batches}ba', 'save_interval': '4ba'}
        content['runs_dir'] = runs_dir or content['runs_dir']
        spec = {'nodes': 2, 'gpus_per_node': 1} | spec
        return *write_files(tmp_path, name, content, **spec), tmp_path / 'runs' / name

    return write


@pytest.fixture
def launch(write_job, forkserver: Client) -> Callable[..., Launched]:
    def start(name: str, **settings) -> Launched:
        spec, recipe, run = write_job(name, **settings)
        return Launched([*LAUNCH, str(spec)], forkserver, recipe, run)

    return start


@pytest.mark.slow
def test_killed_and_stopped_processes_of_each_kind_do_not_change_the_weights(launch, ranks):
    rng = random.Random(14)
    job = launch('disturbed', batches=28)
    disturbances = [
        ('run.py', signal.SIGKILL),  # first, so that there is a checkpoint to resume from
        ('diffusion.launch.node', signal.SIGTERM),
        ('launch', signal.SIGKILL),
        ('diffusion.launch.node', signal.SIGKILL),
    ]
    for number, (kind, signal_number) in enumerate(disturbances):
        # Wait for a checkpoint of this attempt, so that every attempt makes progress.
        job.wait_for_batches(batches_done(job.run) + 6)
        time.sleep(rng.uniform(0, 0.3))
        if kind == 'launch':
            job.process.kill()
            job.process.wait()
            job = launch('disturbed', batches=28)
        else:
            os.kill(rng.choice(job.processes(kind)), signal_number)
        job.wait_for_attempt(number + 2)
    assert job.wait() == 0, job.log.read_text()
    found = attempts.read_attempts(job.run)
    assert {'preempted', 'lost', 'done'} <= {attempt.cause for attempt in found}
    assert_times_add_up(found)
    ranks.run(2, job.recipe, 'name=undisturbed')
    assert_same_weights(job.run, job.run.with_name('undisturbed'))


def assert_times_add_up(found: Sequence[attempts.Attempt]) -> None:
    breakdown, _ = attempts.time_breakdown(found)
    parts = breakdown.productive + breakdown.starting + breakdown.redone + breakdown.down + breakdown.ending
    assert parts == pytest.approx(breakdown.wall, rel=1e-6)


@pytest.mark.slow
def test_standby_processes_take_over_from_killed_ranks(launch, ranks, tmp_path):
    """Both ranks are standby processes after the first kill, and new after a second that came during the imports.

    A killed node, at last, makes the launcher restart the job.
    """
    pause = [(0, f'{FORWARD}@6', 'time.sleep(600)')]
    (tmp_path / 'faults.json').write_text(json.dumps([pause, pause, pause, []]))
    job = launch('standby', batches=16, restart={'max_restarts': 30, 'standby': True})
    job.wait_for_log('standby processes: 1 ready', 2)
    os.kill(job.ranks()[1], signal.SIGKILL)
    job.wait_for_log('restarted in place; 1 of 1 ranks are standby processes', 2)
    job.wait_for_batches(10)
    job.wait_until(job.standbys)
    os.kill(job.standbys()[0], signal.SIGKILL)
    job.wait_for_log('standby of local rank 0 ended with -9; a restart will start a new process instead')
    os.kill(job.ranks()[0], signal.SIGKILL)
    job.wait_for_log('restarted in place; 0 of 1 ranks are standby processes')
    job.wait_for_log('resumed from', 2)
    job.wait_until(lambda: (job.run / 'ba12').exists() and attempts.read_attempts(job.run)[2].first is not None)
    assert 'starting restart' not in job.log.read_text()
    os.kill(job.nodes()[0], signal.SIGKILL)
    assert job.wait() == 0, job.log.read_text()
    log = job.log.read_text()
    assert log.count('starting restart') == 1, log
    found = attempts.read_attempts(job.run)
    assert [each.cause for each in found] == ['killed', 'killed', 'lost', 'done'], log
    assert [each.first for each in found] == [0, 4, 8, 12]
    assert all('by SIGKILL' in each.detail for each in found[:2])
    assert not job.standbys() and not job.ranks()
    ranks.run(2, job.recipe, 'name=undisturbed')
    assert_same_weights(job.run, job.run.with_name('undisturbed'))


@pytest.mark.slow
def test_two_nodes_without_a_shared_folder_find_a_hang_through_a_bucket(launch, store, tmp_path, monkeypatch):
    """Each node has a working folder of its own; a second job is refused while the first runs."""
    monkeypatch.setenv(WORKING_FOLDER_VARIABLE, str(tmp_path / 'local'))
    settings = {'runs_dir': f'{store.bucket("home")}/runs', 'batches': 12, 'hang_seconds': 6}
    url, first_node = 's3://home/runs/hung', tmp_path / 'local/node0/runs/s3/home/runs/hung'
    job = launch('hung', **settings)
    job.run = first_node
    job.wait_for_batches(6)
    assert inspect_run(url).state == 'running'
    stopped = int((tmp_path / 'pid-1').read_text())
    os.kill(stopped, signal.SIGSTOP)
    other = launch('hung', job='another', **settings)
    assert other.wait() == CONFIG_ERROR, other.log.read_text()
    assert 's3://home/runs/hung/run.lock: job job, process' in other.log.read_text()
    job.wait_for_attempt(2, url)
    os.kill(stopped, signal.SIGKILL)  # it outlives its node
    assert job.wait() == 0, job.log.read_text()
    first, second = attempts.read_attempts(url)
    assert (first.status, first.cause, second.cause) == (PREEMPTED, 'hang', 'done')
    assert (second.first, second.last) == (4, 12), 'resumed from the checkpoint in the bucket'
    place, folder = first.detail.rpartition('; stacks in ')[2], first.detail.rpartition('/')[2]
    assert place == f'{url}/stacks/{folder}' and 'rank 1 on node 1' in first.detail, first.detail
    left = {key.rpartition('/')[2] for key in store.objects('home') if f'/stacks/{folder}/' in key}
    assert left == {'node0.json', 'node1.json', 'stacks-node0.txt', 'stacks-node1.txt', 'summary.txt'}
    report = inspect_run(url)
    assert (report.state, report.batch, report.newest_checkpoint) == ('ended', 12, f'{url}/ba12')
    assert report.process is None and report.goodput is not None
    assert not (tmp_path / 'runs').exists() and (tmp_path / 'local' / 'node1').exists()


@pytest.mark.slow
def test_entry_point_as_pid_1_stops_cleanly(write_job, forkserver):
    """Restart in place and checkpoint on SIGTERM as PID 1 of a PID namespace, with no process left behind."""
    unshare = ['unshare', '--pid', '--fork', '--kill-child', '--mount-proc']
    if subprocess.run([*unshare, 'true'], capture_output=True, check=False).returncode:
        pytest.skip('this machine does not support PID namespaces')
    _, recipe, run = write_job('contained')
    command = [*unshare, sys.executable, '-m', 'diffusion.launch.node', '--', 'run.py', str(recipe)]
    settings = {'SCHEDULER': 'local', 'NODES': '1', 'PROCESSES_PER_NODE': '2', 'MASTER_PORT': str(free_port())}
    settings |= {'STANDBY': '1', 'MAX_RESTARTS': '5'}
    job = Launched(command, forkserver, recipe, run, **{f'DIFFUSION_{name}': value for name, value in settings.items()})
    job.wait_for_batches(6)
    os.kill(job.ranks()[0], signal.SIGKILL)
    job.wait_for_log('restarted in place')
    job.wait_for_batches(batches_done(run) + 2)
    (node,) = job.nodes()
    os.kill(node, signal.SIGTERM)
    assert job.wait() == PREEMPTED, job.log.read_text()
    assert not job.ranks() and not job.standbys()
    assert [each.cause for each in attempts.read_attempts(job.run)] == ['killed', 'preempted']


@pytest.mark.slow
def test_preflight_runs_before_training(launch):
    job = launch('checked', batches=4, preflight='fast')
    assert job.wait() == 0, job.log.read_text()
    report = json.loads((job.run / 'preflight.json').read_text())
    assert report['status'] == 0
    found = {each['check'] for each in report['findings']}
    assert {'shared memory', 'disk', 'checkpoints', 'data', 'all-reduce'} <= found
    assert 'ok   all-reduce' in job.log.read_text()
