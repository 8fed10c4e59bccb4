"""Jobs of two nodes on a real Slurm: after any failure, they requeue themselves or stop for good."""

import contextlib
import io
import os
import re
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import slurm_cluster
from commands import output_of
from forkserver import SOCKET, Client
from ranks import assert_same_weights, batches_done
from waiting import wait_until

from diffusion.cli import main
from diffusion.exit_codes import BAD_HARDWARE, FAILED, PREEMPTED
from diffusion.runs.attempts import ATTEMPTS, Attempt, read_attempts
from tests.launch.test_local import write_files

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow

RUN = f"""\
import os, pathlib, sys
node = os.environ['SLURMD_NODENAME']
pathlib.Path('node-' + os.environ['DIFFUSION_ATTEMPT'] + '-' + os.environ['RANK']).write_text(node)
if node == os.environ.get('FAULTY_NODE'):
    sys.exit({BAD_HARDWARE})
# All nodes of this cluster are one machine: host names are known only to Slurm, and the nodes share memory.
os.environ.update(MASTER_ADDR='127.0.0.1', NODE_RANK='0')
os.environ.update(LOCAL_RANK=os.environ['RANK'], LOCAL_WORLD_SIZE=os.environ['WORLD_SIZE'])
sys.path.insert(0, {str(ROOT / 'tests')!r})
import forkserver
sys.exit(forkserver.main())
"""


class Job:
    def __init__(self, cluster: slurm_cluster.Cluster, name: str, number: str, spec: Path) -> None:
        self.cluster, self.number, self.spec = cluster, number, spec
        self.folder = spec.parent
        self.run = self.folder / 'runs' / name

    def field(self, name: str) -> str:
        return self.cluster.field(self.number, name)

    def ended(self) -> bool:
        return self.field('JobState') in ('COMPLETED', 'FAILED', 'CANCELLED', 'TIMEOUT')

    def wait_until(self, condition: Callable[[], bool]) -> None:
        wait_until(condition, 180, shown=self.diagnostics)

    def wait(self, state: str = 'COMPLETED') -> None:
        self.wait_until(self.ended)
        assert self.field('JobState') == state, self.diagnostics()

    def wait_for_batches(self, count: int) -> None:
        self.wait_until(lambda: batches_done(self.run) >= count)

    def attempts(self) -> list[Attempt]:
        return read_attempts(self.run) if (self.run / ATTEMPTS).exists() else []

    def nodes(self, attempt: int) -> set[str]:
        return {path.read_text() for path in self.folder.glob(f'node-{attempt}-*')}

    def kill_rank(self, rank: int) -> None:
        os.kill(int((self.folder / f'pid-{rank}').read_text()), signal.SIGKILL)

    def set_limit(self, *, minutes: int) -> None:
        self.cluster.call('scontrol', 'update', f'JobId={self.number}', f'TimeLimit={minutes}')

    def failures(self) -> list[str]:
        return [line for path in self.folder.glob('logs/*.failures') for line in path.read_text().splitlines()]

    def log(self) -> str:
        return ''.join(path.read_text() for path in self.folder.glob(f'logs/*-{self.number}.log'))

    def diagnostics(self) -> str:
        show = self.cluster.call('scontrol', 'show', 'job', self.number)
        return f'{show}\n--- log\n{self.log()}\n--- slurm\n{self.cluster.log()}'


@pytest.fixture(scope='module')
def cluster(forkserver: Client, tmp_path_factory: pytest.TempPathFactory) -> Iterator[slurm_cluster.Cluster]:
    """Cluster of three nodes, with this process on its login node."""
    why_not = slurm_cluster.why_not()
    if why_not:
        pytest.skip(why_not)
    with slurm_cluster.start(tmp_path_factory.mktemp('slurm'), nodes=3) as found, pytest.MonkeyPatch.context() as patch:
        python = {'PATH': f'{Path(sys.executable).parent}:{found.environ["PATH"]}', 'PYTHONPATH': str(ROOT)}
        # SLURM_RESTART_COUNT: the environment of a requeued job that launches others.
        variables = found.environ | python | {SOCKET: forkserver.path, 'SLURM_RESTART_COUNT': '7'}
        for name, value in variables.items():
            patch.setenv(name, value)
        yield found


@pytest.fixture(scope='module')
def submit(cluster: slurm_cluster.Cluster, tiny_recipe: Callable[..., dict[str, Any]]) -> Callable[..., list[Job]]:
    """Function that launches a job of the tiny recipe, with 12 batches and a checkpoint every 4; keywords are keys of
    its spec.
    """

    def submit(folder: Path, *, max_duration: str = '12ba', **keys: Any) -> list[Job]:
        content = tiny_recipe(folder / 'runs', name='job', algorithms={'ema': {'smoothing': 0.9}})
        content['trainer'] |= {'max_duration': max_duration, 'save_interval': '4ba'}
        job = {'nodes': 2, 'gpus_per_node': 1, 'restart': {'max_restarts': 5}, 'schedule': {'notice_seconds': 20}}
        spec, _ = write_files(folder, 'job', content, backend='slurm', **job | keys)
        (folder / 'run.py').unlink()
        (folder / 'run.py').write_text(RUN)
        with contextlib.redirect_stdout(io.StringIO()) as output:
            assert main(['launch', str(spec)]) == 0
        submitted = re.findall(r'^(\S+): Slurm job (\d+)$', output.getvalue(), re.MULTILINE)
        return [Job(cluster, name, number, spec) for name, number in submitted]

    return submit


@pytest.fixture
def launch(
    cluster: slurm_cluster.Cluster, submit: Callable[..., list[Job]], tmp_path: Path
) -> Iterator[Callable[..., list[Job]]]:
    launched: list[Job] = []

    def launch(**settings: Any) -> list[Job]:
        launched.extend(submit(tmp_path, **settings))
        return launched

    yield launch
    cluster.call('scancel', '--me', '--quiet')
    for job in launched:
        job.wait_until(job.ended)


@pytest.fixture(scope='module')
def undisturbed(submit: Callable[..., list[Job]], tmp_path_factory: pytest.TempPathFactory) -> Job:
    (job,) = submit(tmp_path_factory.mktemp('undisturbed'))
    job.wait()
    assert job.field('MinMemoryNode') == '0', 'all memory of the node, not DefMemPerNode'
    (only,) = job.attempts()
    assert (only.first, only.last, only.status, only.cause) == (0, 12, 0, 'done')
    return job


def test_killed_rank_is_restarted_and_next_stage_waits(launch, undisturbed):
    job, following = launch(stages={name: {'overrides': {'name': f'job-{name}'}} for name in ('one', 'two')})
    job.wait_for_batches(5)
    job.kill_rank(1)
    job.wait()
    assert f'attempt 1 exited with status {FAILED}' in job.log()
    assert job.failures() == [f'attempt 1: status {FAILED}']
    first, second = job.attempts()
    assert first.cause in ('killed', 'crash')
    assert second.first in (4, 8), 'a checkpoint'
    assert (second.last, second.status) == (12, 0)
    assert_same_weights(job.run, undisturbed.run)
    following.wait()
    (only,) = following.attempts()
    assert only.begin > second.end


def test_preempted_job_saves_and_resumes(launch, cluster):
    (job,) = launch(max_duration='30ba')
    job.wait_for_batches(2)
    command = 'sbatch --parsable --partition=urgent --nodes=3 --output=/dev/null --wrap=true'
    urgent = cluster.call(*command.split())
    job.wait()
    assert cluster.field(urgent, 'JobState') == 'COMPLETED'
    first, second = job.attempts()
    assert (first.status, first.cause, second.status) == (PREEMPTED, 'preempted', 0)
    assert job.failures() == [], 'a preemption uses up no restart'
    assert second.first in (first.last, first.last + 1), 'a heartbeat is written before its batch'


def test_time_limit_requeues_and_canceled_job_does_not_restart(launch, capsys):
    (job,) = launch(max_duration='100000ba', schedule={'time_limit': '1h', 'notice_seconds': 90})
    job.wait_for_batches(4)
    job.set_limit(minutes=2)  # Slurm may warn 30 s early, so it does so at its next check
    job.wait_until(lambda: job.field('Restarts') == '1')
    job.set_limit(minutes=60)
    job.wait_for_batches(batches_done(job.run) + 2)
    capsys.readouterr()
    for action, expected in {
        'status': f'{job.number} job RUNNING; .* of 1:00:00; restarts: 1; reason: None',
        'logs': 'attempt 1 exited with status 75',
        'cancel': 'canceled: job',
    }.items():
        assert re.search(expected, output_of(capsys, action, str(job.spec)))
    job.wait('CANCELLED')
    assert job.field('Restarts') == '1'
    assert 'not in the queue' in output_of(capsys, 'status', str(job.spec))
    first, second = job.attempts()
    assert (first.status, first.cause) == (PREEMPTED, 'preempted')
    assert second.first in (first.last, first.last + 1), 'a heartbeat is written before its batch'


def test_faulty_node_is_excluded(launch, undisturbed):
    (job,) = launch(env={'FAULTY_NODE': 'n2'})
    job.wait()
    assert (job.field('ExcNodeList'), job.field('Restarts')) == ('n2', '1')
    # n2 may fail before the rank on n1 has written its node name.
    assert {'n2'} <= job.nodes(0) <= {'n1', 'n2'} and job.nodes(1) == {'n1', 'n3'}
    assert_same_weights(job.run, undisturbed.run)


def test_unreachable_node_is_replaced(launch, cluster, undisturbed):
    (job,) = launch()
    job.wait_for_batches(2)
    cluster.signal('n1', 'STOP')
    # Slurm itself does this after a timeout.
    cluster.call('scontrol', 'update', 'NodeName=n1', 'State=DOWN', 'Reason=test')
    try:
        job.wait()
        # The first attempt ends on the unreachable node, and must not requeue the second.
        job.wait_until(lambda: 'attempt 1 exited' in job.log())
    finally:
        cluster.signal('n1', 'CONT')
        cluster.call('scontrol', 'update', 'NodeName=n1', 'State=RESUME')
        cluster.wait_until_idle()
    assert job.field('Restarts') == '1'
    assert job.nodes(1) == {'n2', 'n3'}
    assert_same_weights(job.run, undisturbed.run)
