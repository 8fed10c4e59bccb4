"""Every way in which an attempt ends, in real jobs: status, next step, message, record, and where the next resumes."""

import json
import re
import shutil
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from endings import CHECKPOINT, HANGS, RETRIED, SINGLE, STOP, Case, Ending, table
from forkserver import ROOT, Client
from hub_server import serve
from ranks import assert_same_weights, free_port
from recipe_files import write_yaml
from test_local import LAUNCH, Launched, assert_times_add_up, write_files

from diffusion.exit_codes import CONFIG_ERROR, FAILED
from diffusion.runs import attempts

SAVE_EVERY = 2
BATCHES = 44


class Jobs:
    """Starter of jobs in a folder, from one recipe."""

    def __init__(self, folder: Path, server: Client, tiny_recipe) -> None:
        self.folder, self.server, self.tiny_recipe = folder, server, tiny_recipe

    def recipe(self, work: Path) -> dict:
        content = self.tiny_recipe(work / 'runs', name='run', algorithms={'ema': {'smoothing': 0.9}})
        content['trainer'] |= {'max_duration': f'{BATCHES}ba', 'save_interval': f'{SAVE_EVERY}ba'}
        return content | {'checkpointing': {'asynchronous': False}}  # the batch from which a job resumes is then known

    def launch(self, name: str, faults: Sequence[Sequence[object]] = (), hang_seconds: int = 60) -> Launched:
        work = self.prepare(name, faults)
        spec, recipe = write_files(work, 'recipe', self.recipe(work), job=name, nodes=1, hang_seconds=hang_seconds)
        return Launched([*LAUNCH, str(spec)], self.server, recipe, work / 'runs' / 'run')

    def run_node(self, name: str, recipe: dict, **variables: str) -> Launched:
        """Start the node entry point of a job, by default of one node with one process."""
        path = write_yaml(self.folder / name / 'recipe.yaml', recipe)
        settings = {'SCHEDULER': 'local', 'NODES': '1', 'PROCESSES_PER_NODE': '1', 'MASTER_PORT': str(free_port())}
        variables = {'SICK_RANK': '0'} | {f'DIFFUSION_{name}': value for name, value in settings.items()} | variables
        command = [sys.executable, '-m', 'diffusion.launch.node', '--', 'run.py', str(path)]
        return Launched(command, self.server, path, path.parent / 'runs' / 'run', **variables)

    def prepare(self, name: str, faults: Sequence[Sequence[object]] = ()) -> Path:
        """Create the folder of a job, with its run.py and its faults."""
        work = self.folder / name
        work.mkdir()
        (work / 'faults.json').write_text(json.dumps(faults))
        (work / 'run.py').symlink_to(ROOT / 'tests' / 'faulty_run.py')
        return work


@pytest.fixture(scope='module')
def jobs(tmp_path_factory, tiny_recipe, forkserver: Client) -> Jobs:
    return Jobs(tmp_path_factory.mktemp('endings'), forkserver, tiny_recipe)


@pytest.fixture(scope='module')
def undisturbed(jobs: Jobs) -> Launched:
    job = jobs.launch('undisturbed')
    assert job.wait() == 0, job.log.read_text()
    return job


def expected_starts(ending: Ending, attempt: attempts.Attempt, begin: int) -> set[int]:
    """Return the batches from which the attempt after this one may resume; `begin` is where this one resumed."""
    if ending.resumes == STOP:
        return {attempt.last or 0}
    if ending.resumes != CHECKPOINT:
        return {begin}
    last = attempt.last or 0
    newest = last - last % SAVE_EVERY
    # The last heartbeat may come before the save of its batch, and the last record of a lost node before more batches.
    earlier = {last - SAVE_EVERY} if last % SAVE_EVERY == 0 else set()
    later = {newest + SAVE_EVERY} if attempt.status is None else set()
    return {newest} | earlier | later


@pytest.mark.slow
@pytest.mark.parametrize(('name', 'endings', 'hang_seconds'), [('faults', RETRIED, 60), ('hangs', HANGS, 4)])
def test_each_ending_of_a_job_is_named_and_the_next_attempt_resumes(jobs, undisturbed, name, endings, hang_seconds):
    job = jobs.launch(name, faults=[ending.faults for ending in endings], hang_seconds=hang_seconds)
    status, log = job.wait(timeout=500), job.log.read_text()
    assert status == 0, log
    found, outputs = attempts.read_attempts(job.run), re.split(r'starting restart \d+\n', log)
    assert len(found) == len(endings) + 1
    problems, position = [], 0
    for number, ending in enumerate(endings):
        attempt, following = found[number], found[number + 1].first
        correct = (attempt.status, attempt.cause) == (ending.status, ending.cause)
        # An attempt that trains no batch, or whose node is lost before it is recorded, has no start.
        expected = expected_starts(ending, attempt, position) if None not in (attempt.last, following) else {following}
        if not correct or following not in expected or not re.search(ending.pattern, outputs[number], re.DOTALL):
            problems.append(f'=== {ending.event}: {attempt}, next from {following}, not {expected}\n{outputs[number]}')
        position = position if following is None else following
    assert not problems, '\n'.join(problems)
    assert_same_weights(job.run, undisturbed.run)
    assert_times_add_up(found)


@pytest.mark.slow
@pytest.mark.parametrize('ending', SINGLE, ids=lambda ending: ending.event)
def test_ending_of_a_single_job_is_named_and_recorded(jobs, undisturbed, store, ending):
    name = re.sub(r'\W+', '-', ending.event)
    work = jobs.prepare(name)
    recipe, faults = jobs.recipe(work), list(ending.faults)
    assert ending.prepare is not None
    with serve(work) as hub:
        ending.prepare(Case(work, undisturbed.run, store, hub, faults), recipe)
        (work / 'faults.json').write_text(json.dumps([faults]))
        job = jobs.run_node(name, recipe, **store.environment)
        assert job.wait() == ending.status, job.log.read_text()
    assert re.search(ending.pattern, job.log.read_text(), re.DOTALL), job.log.read_text()
    if ending.cause:
        attempt = attempts.read_attempts(job.run)[-1]
        assert (attempt.status, attempt.cause) == (ending.status, ending.cause)


@pytest.mark.slow
@pytest.mark.parametrize(('begun', 'mounted'), [(False, 0), (True, 0), (True, 1)])
def test_nodes_that_do_not_share_the_run_folder_are_refused(jobs, undisturbed, begun, mounted):
    """Each node has a folder of its own under the same relative path."""
    port, nodes = str(free_port()), []
    for rank in range(2):
        name = f'unshared-{begun}-{mounted}-{rank}'
        work = jobs.prepare(name)
        recipe = jobs.recipe(work) | {'runs_dir': 'runs'}
        if begun and rank == mounted:
            shutil.copytree(undisturbed.run, work / 'runs' / 'run', symlinks=True)
            recipe['trainer']['max_duration'] = '100ba'
        variables = {'NODES': '2', 'NODE_RANK': str(rank), 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': port}
        nodes.append(jobs.run_node(name, recipe, **{f'DIFFUSION_{key}': value for key, value in variables.items()}))
    expected = FAILED if begun else CONFIG_ERROR
    statuses = [node.wait() for node in nodes]
    assert statuses == [expected, expected], '\n'.join(node.log.read_text() for node in nodes)
    assert 'run is not the same folder on rank 0' in nodes[1].log.read_text(), nodes[1].log.read_text()
    assert not [*nodes[1 - mounted].run.glob('ba*')], 'no node has trained from batch 0'


def test_page_has_the_table_of_endings():
    page = (ROOT / 'docs' / 'endings.md').read_text(encoding='utf-8')
    assert table() in page, f'the table in docs/endings.md must be\n{table()}'
