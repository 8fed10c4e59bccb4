"""Position of a node by the variables of each scheduler, which must agree with the job spec."""

import json

import pytest

from diffusion.errors import ExternalError
from diffusion.launch import rank_discovery
from diffusion.launch.rank_discovery import NodePosition, find_position, rank_environment
from diffusion.runs import environment

REQUESTED = {environment.NODES: '3', environment.PROCESSES_PER_NODE: '8', environment.MASTER_PORT: '29501'}
SKYPILOT = {'SKYPILOT_NODE_RANK': '1', 'SKYPILOT_NODE_IPS': '10.0.0.1\n10.0.0.2\n10.0.0.3'}
MOSAICML = {'NODE_RANK': '1', 'WORLD_SIZE': '24', 'LOCAL_WORLD_SIZE': '8', 'MASTER_ADDR': '10.0.0.1'}
KUBEFLOW = {'PET_NODE_RANK': '1', 'PET_NNODES': '3', 'PET_NPROC_PER_NODE': '8', 'PET_MASTER_ADDR': '10.0.0.1'}
SLURM = {'SLURM_NODEID': '1', 'SLURM_NNODES': '3', 'SLURM_GPUS_ON_NODE': '8', 'DIFFUSION_MASTER_ADDR': '10.0.0.1'}
JOBSET = {'JOB_COMPLETION_INDEX': '1', 'DIFFUSION_MASTER_ADDR': '10.0.0.1'}


@pytest.fixture
def resources(tmp_path):
    """File of SageMaker with the hosts of a job; sorted by name, algo-10 would come before algo-2."""
    path = tmp_path / 'resourceconfig.json'
    path.write_text(json.dumps({'current_host': 'algo-2', 'hosts': ['algo-1', 'algo-2', 'algo-10']}))
    return path


@pytest.mark.parametrize(
    ('scheduler', 'variables'),
    [
        ('skypilot', SKYPILOT | {'SKYPILOT_NUM_GPUS_PER_NODE': '0'}),
        ('mosaicml', MOSAICML),
        ('kubeflow', KUBEFLOW),
        ('slurm', SLURM),
        ('jobset', JOBSET),
    ],
)
@pytest.mark.parametrize('scheduler_is_set', [True, False])
def test_position_from_every_scheduler(scheduler, variables, scheduler_is_set, tmp_path):
    environ = REQUESTED | variables | ({environment.SCHEDULER: scheduler} if scheduler_is_set else {})
    assert find_position(environ, resources=tmp_path / 'none') == NodePosition(scheduler, 1, 3, 8, '10.0.0.1', 29501)


def test_position_from_sagemaker_file(resources, tmp_path):
    assert find_position(REQUESTED, resources=resources) == NodePosition('sagemaker', 1, 3, 8, 'algo-1', 29501)
    with pytest.raises(ExternalError, match='none does not provide the rank of this node'):
        find_position(REQUESTED | {environment.SCHEDULER: 'sagemaker'}, resources=tmp_path / 'none')


def test_first_node_is_that_of_scontrol_and_a_fault_of_it_is_retryable(tmp_path, monkeypatch):
    monkeypatch.setenv('PATH', str(tmp_path))
    environ = {'SLURM_NODEID': '1', 'SLURM_NNODES': '4', 'SLURM_STEP_NUM_NODES': '3', 'SLURM_GPUS_ON_NODE': '2'}
    environ |= {'SLURM_JOB_NODELIST': 'node[1-3]'}
    for status in (1, 0):
        with pytest.raises(ExternalError, match=r'scontrol cannot expand node\[1-3\] .*; set DIFFUSION_MASTER_ADDR'):
            find_position(environ, resources=tmp_path / 'none')
        (tmp_path / 'scontrol').write_text(f'#!/bin/sh\n[ $3 = "node[1-3]" ] && echo node1 node2\nexit {status}\n')
        (tmp_path / 'scontrol').chmod(0o755)
    assert find_position(environ, resources=tmp_path / 'none') == NodePosition('slurm', 1, 3, 2, 'node1', 29500)


def test_default_is_this_machine_with_all_gpus_whatever_composer_has_left(tmp_path, monkeypatch):
    left = {'NODE_RANK': '0', 'WORLD_SIZE': '1', 'LOCAL_WORLD_SIZE': '1', 'RANK': '0', 'LOCAL_RANK': '0'}
    two = {environment.PROCESSES_PER_NODE: '2'}
    monkeypatch.setattr(rank_discovery, 'count_gpus', lambda environ: 2)
    for environ in (two | {environment.NODES: '1'}, left | two, {}):
        found = find_position(environ, resources=tmp_path / 'none')
        assert found == NodePosition('local', 0, 1, 2, '127.0.0.1', 29500)
    monkeypatch.setattr(rank_discovery, 'count_gpus', lambda environ: 0)
    assert find_position({}, resources=tmp_path / 'none').processes == 1


def test_gpus_are_counted_by_device_files(tmp_path):
    for name in ('nvidia0', 'nvidia1', 'nvidia11', 'nvidiactl', 'nvidia-uvm'):
        (tmp_path / name).touch()
    assert rank_discovery.count_gpus({}, tmp_path) == 3
    assert rank_discovery.count_gpus({'CUDA_VISIBLE_DEVICES': '0, 2,3,7'}, tmp_path) == 2
    assert rank_discovery.count_gpus({'CUDA_VISIBLE_DEVICES': ''}, tmp_path) == 0


@pytest.mark.parametrize(
    ('environ', 'message'),
    [
        (REQUESTED | SKYPILOT | {environment.NODES: '4'}, 'skypilot provides 3 nodes, but the job spec has 4'),
        (REQUESTED | SKYPILOT | {'SKYPILOT_NUM_GPUS_PER_NODE': '4'}, 'skypilot provides 4 processes per node, but'),
        (REQUESTED | MOSAICML | {'LOCAL_WORLD_SIZE': '4'}, 'mosaicml provides 6 nodes, but the job spec has 3'),
        (REQUESTED | MOSAICML | {'WORLD_SIZE': '25'}, 'WORLD_SIZE=25 is not a multiple of LOCAL_WORLD_SIZE=8'),
        (REQUESTED | SLURM | {'SLURM_GPUS_ON_NODE': '4'}, 'slurm provides 4 processes per node, but the job spec has'),
        (REQUESTED | JOBSET | {'JOB_COMPLETION_INDEX': '3'}, 'node rank 3 is out of range for 3 nodes; ranks start'),
        (REQUESTED | JOBSET | {'JOB_COMPLETION_INDEX': 'x'}, "JOB_COMPLETION_INDEX: 'x' is not an integer"),
        (REQUESTED | {environment.SCHEDULER: 'slurm'}, 'SLURM_NODEID is not set; start this node with slurm'),
        (REQUESTED | {environment.SCHEDULER: 'pbs'}, "'pbs' is unknown; use one of local, slurm"),
        (REQUESTED | {'JOB_COMPLETION_INDEX': '1'}, 'jobset does not provide the address of the first node; set'),
        (REQUESTED | JOBSET | {environment.MASTER_PORT: '65536'}, '65536 is not a port number'),
        (JOBSET, 'jobset does not provide the number of nodes; set DIFFUSION_NODES'),
        (REQUESTED | JOBSET | {environment.PROCESSES_PER_NODE: '0'}, '0 processes per node; use 1 or more'),
    ],
)
def test_contradictions_are_reported(environ, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        find_position(environ, resources=tmp_path / 'none')


def test_ranks_get_environment_of_composer_launcher():
    second = NodePosition('slurm', 1, 3, 8, '10.0.0.1', 29501)
    found = rank_environment(second, 2, {'WORLD_SIZE': '3', 'RANK': '7', 'PATH': '/bin'})
    expected = {'RANK': '10', 'WORLD_SIZE': '24', 'LOCAL_RANK': '2', 'LOCAL_WORLD_SIZE': '8', 'NODE_RANK': '1'}
    expected |= {'MASTER_ADDR': '10.0.0.1', 'MASTER_PORT': '29501', 'PYTHONUNBUFFERED': '1', 'PATH': '/bin'}
    assert found == expected


def test_nodes_of_local_job_share_one_machine():
    found = rank_environment(NodePosition('local', 1, 2, 2, '127.0.0.1', 29500), 1, {})
    assert (found['RANK'], found['LOCAL_RANK'], found['LOCAL_WORLD_SIZE'], found['NODE_RANK']) == ('3', '3', '4', '0')
    assert 1024 <= rank_discovery.free_port() <= 65535
