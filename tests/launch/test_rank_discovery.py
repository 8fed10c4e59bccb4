"""Where a node stands, by the variables of every scheduler; none may contradict the job spec."""

import json

import pytest

from diffusion.errors import ExternalError
from diffusion.launch import environment, rank_discovery
from diffusion.launch.rank_discovery import NodePosition, find_position, rank_environment

ASKED = {environment.NODES: '3', environment.PROCESSES_PER_NODE: '8', environment.MASTER_PORT: '29501'}
SKYPILOT = {'SKYPILOT_NODE_RANK': '1', 'SKYPILOT_NODE_IPS': '10.0.0.1\n10.0.0.2\n10.0.0.3'}
MOSAICML = {'NODE_RANK': '1', 'WORLD_SIZE': '24', 'LOCAL_WORLD_SIZE': '8', 'MASTER_ADDR': '10.0.0.1'}
KUBEFLOW = {'PET_NODE_RANK': '1', 'PET_NNODES': '3', 'PET_NPROC_PER_NODE': '8', 'PET_MASTER_ADDR': '10.0.0.1'}
SLURM = {'SLURM_NODEID': '1', 'SLURM_NNODES': '3', 'SLURM_GPUS_ON_NODE': '8', 'DIFFUSION_MASTER_ADDR': '10.0.0.1'}
JOBSET = {'JOB_COMPLETION_INDEX': '1', 'DIFFUSION_MASTER_ADDR': '10.0.0.1'}


@pytest.fixture
def resources(tmp_path):
    """SageMaker's file; algo-10 sorts before algo-2."""
    path = tmp_path / 'resourceconfig.json'
    path.write_text(json.dumps({'current_host': 'algo-2', 'hosts': ['algo-1', 'algo-2', 'algo-10']}))
    return path


@pytest.mark.parametrize(
    ('scheduler', 'variables'),
    [
        ('skypilot', SKYPILOT | {'SKYPILOT_NUM_GPUS_PER_NODE': '8'}),
        ('mosaicml', MOSAICML),
        ('kubeflow', KUBEFLOW),
        ('slurm', SLURM),
        ('jobset', JOBSET),
    ],
)
@pytest.mark.parametrize('told', [True, False])
def test_every_scheduler_says_the_same(scheduler, variables, told, tmp_path):
    environ = ASKED | variables | ({environment.SCHEDULER: scheduler} if told else {})
    assert find_position(environ, resources=tmp_path / 'none') == NodePosition(scheduler, 1, 3, 8, '10.0.0.1', 29501)


def test_sagemaker_says_it_in_a_file(resources, tmp_path):
    assert find_position(ASKED, resources=resources) == NodePosition('sagemaker', 1, 3, 8, 'algo-1', 29501)
    with pytest.raises(ExternalError, match='none does not say where this node stands'):
        find_position(ASKED | {environment.SCHEDULER: 'sagemaker'}, resources=tmp_path / 'none')


def test_scontrol_that_does_not_answer_may_answer_later(tmp_path, monkeypatch):
    monkeypatch.setenv('PATH', str(tmp_path))
    environ = {'SLURM_NODEID': '1', 'SLURM_NNODES': '3', 'SLURM_JOB_NODELIST': 'node[1-3]'}
    with pytest.raises(ExternalError, match=r'scontrol cannot say what node\[1-3\] is .*; set DIFFUSION_MASTER_ADDR'):
        find_position(environ, resources=tmp_path / 'none')


def test_without_a_scheduler_there_is_this_machine_with_its_gpus(tmp_path, monkeypatch):
    environ = {environment.PROCESSES_PER_NODE: '2', environment.NODES: '1'}
    alone = NodePosition('local', 0, 1, 2, '127.0.0.1', 29500)
    assert find_position(environ, resources=tmp_path / 'none') == alone
    monkeypatch.setattr(rank_discovery, 'count_gpus', lambda environ: 2)
    assert find_position({}, resources=tmp_path / 'none') == alone
    monkeypatch.setattr(rank_discovery, 'count_gpus', lambda environ: 0)
    assert find_position({}, resources=tmp_path / 'none').processes == 1


def test_what_composer_leaves_of_a_training_alone_is_no_schedulers(tmp_path):
    left = {'NODE_RANK': '0', 'WORLD_SIZE': '1', 'LOCAL_WORLD_SIZE': '1', 'RANK': '0', 'LOCAL_RANK': '0'}
    environ = left | {environment.PROCESSES_PER_NODE: '2'}
    assert find_position(environ, resources=tmp_path / 'none') == NodePosition('local', 0, 1, 2, '127.0.0.1', 29500)


def test_gpus_are_counted_by_their_devices(tmp_path):
    for name in ('nvidia0', 'nvidia1', 'nvidia11', 'nvidiactl', 'nvidia-uvm'):
        (tmp_path / name).touch()
    assert rank_discovery.count_gpus({}, tmp_path) == 3
    assert rank_discovery.count_gpus({'CUDA_VISIBLE_DEVICES': '0, 2,7'}, tmp_path) == 2
    assert rank_discovery.count_gpus({'CUDA_VISIBLE_DEVICES': ''}, tmp_path) == 0


@pytest.mark.parametrize(
    ('environ', 'told'),
    [
        (ASKED | SKYPILOT | {environment.NODES: '4'}, 'skypilot gave 3 nodes, the job spec asks for 4'),
        (ASKED | MOSAICML | {'LOCAL_WORLD_SIZE': '4'}, 'mosaicml gave 6 nodes, the job spec asks for 3'),
        (ASKED | MOSAICML | {'WORLD_SIZE': '25'}, 'WORLD_SIZE=25 is no multiple of LOCAL_WORLD_SIZE=8'),
        (ASKED | SLURM | {'SLURM_GPUS_ON_NODE': '4'}, 'slurm gave 4 processes a node, the job spec asks for 8'),
        (ASKED | JOBSET | {'JOB_COMPLETION_INDEX': '3'}, 'this is node 3 of 3; ranks count from 0'),
        (ASKED | JOBSET | {'JOB_COMPLETION_INDEX': 'x'}, "JOB_COMPLETION_INDEX: 'x' is no whole number"),
        (ASKED | {environment.SCHEDULER: 'slurm'}, 'SLURM_NODEID is not set; does slurm run this node'),
        (ASKED | {environment.SCHEDULER: 'pbs'}, "'pbs' is unknown; known: local, slurm"),
        (ASKED | {'JOB_COMPLETION_INDEX': '1'}, 'jobset does not say the first of 3 nodes; set DIFFUSION_MASTER_ADDR'),
        (ASKED | JOBSET | {environment.MASTER_PORT: '70000'}, '70000 is no port'),
        (JOBSET, 'jobset does not say how many nodes; set DIFFUSION_NODES'),
        (ASKED | JOBSET | {environment.PROCESSES_PER_NODE: '0'}, '0 processes a node; give 1 or more'),
    ],
)
def test_what_does_not_fit_together_is_said(environ, told, tmp_path):
    with pytest.raises(ValueError, match=told):
        find_position(environ, resources=tmp_path / 'none')


def test_ranks_get_what_composers_launcher_gives_and_nothing_of_a_schedulers_own():
    second = NodePosition('slurm', 1, 3, 8, '10.0.0.1', 29501)
    found = rank_environment(second, 2, {'WORLD_SIZE': '3', 'RANK': '7', 'PATH': '/bin'})
    expected = {'RANK': '10', 'WORLD_SIZE': '24', 'LOCAL_RANK': '2', 'LOCAL_WORLD_SIZE': '8', 'NODE_RANK': '1'}
    expected |= {'MASTER_ADDR': '10.0.0.1', 'MASTER_PORT': '29501', 'PYTHONUNBUFFERED': '1', 'PATH': '/bin'}
    assert found == expected


def test_nodes_of_a_local_job_share_their_machine():
    found = rank_environment(NodePosition('local', 1, 2, 2, '127.0.0.1', 29500), 1, {})
    assert (found['RANK'], found['LOCAL_RANK'], found['LOCAL_WORLD_SIZE'], found['NODE_RANK']) == ('3', '3', '4', '0')
