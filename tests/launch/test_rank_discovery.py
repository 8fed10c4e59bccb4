"""Position of a node by the variables of each scheduler, which must agree with the job spec."""

import json
from pathlib import Path

import pytest

from diffusion.errors import ExternalError, UserError
from diffusion.launch import rank_discovery
from diffusion.launch.rank_discovery import NodePosition, find_position, rank_environment
from diffusion.runs import environment
from tests.golden import check_golden

REQUESTED = {environment.NODES: '3', environment.PROCESSES_PER_NODE: '8', environment.MASTER_PORT: '29501'}
SKYPILOT = {'SKYPILOT_NODE_RANK': '1', 'SKYPILOT_NODE_IPS': '10.0.0.1\n10.0.0.2\n10.0.0.3'}
MOSAICML = {'NODE_RANK': '1', 'WORLD_SIZE': '24', 'LOCAL_WORLD_SIZE': '8', 'MASTER_ADDR': '10.0.0.1'}
KUBEFLOW = {'PET_NODE_RANK': '1', 'PET_NNODES': '3', 'PET_NPROC_PER_NODE': '8', 'PET_MASTER_ADDR': '10.0.0.1'}
SLURM = {'SLURM_NODEID': '1', 'SLURM_NNODES': '3', 'SLURM_GPUS_ON_NODE': '8', 'DIFFUSION_MASTER_ADDR': '10.0.0.1'}
JOBSET = {'JOB_COMPLETION_INDEX': '1', 'DIFFUSION_MASTER_ADDR': '10.0.0.1'}
SCHEDULERS = {'skypilot': SKYPILOT, 'mosaicml': MOSAICML, 'kubeflow': KUBEFLOW, 'slurm': SLURM, 'jobset': JOBSET}
PROCESSES = {environment.PROCESSES_PER_NODE: '2'}


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
    monkeypatch.setattr(rank_discovery, 'count_gpus', lambda environ: 2)
    for environ in (PROCESSES | {environment.NODES: '1'}, left | PROCESSES, {}):
        found = find_position(environ, resources=tmp_path / 'none')
        assert found == NodePosition('local', 0, 1, 2, '127.0.0.1', 29500)
    monkeypatch.setattr(rank_discovery, 'count_gpus', lambda environ: 0)
    assert find_position({}, resources=tmp_path / 'none').processes == 1
    assert 1024 <= rank_discovery.free_port() <= 65535


def test_gpus_are_counted_by_device_files(tmp_path):
    for name in ('nvidia0', 'nvidia1', 'nvidia11', 'nvidiactl', 'nvidia-uvm'):
        (tmp_path / name).touch()
    assert rank_discovery.count_gpus({}, tmp_path) == 3
    assert rank_discovery.count_gpus({'CUDA_VISIBLE_DEVICES': '0, 2,3,7'}, tmp_path) == 2
    assert rank_discovery.count_gpus({'CUDA_VISIBLE_DEVICES': ''}, tmp_path) == 0


FOUND = {
    **{f'detected: {next(iter(each))}': REQUESTED | each for each in SCHEDULERS.values()},
    **{f'given: {name}': REQUESTED | each | {environment.SCHEDULER: name} for name, each in SCHEDULERS.items()},
    'skypilot without GPUs': REQUESTED | SKYPILOT | {'SKYPILOT_NUM_GPUS_PER_NODE': '0'},
    'skypilot alone': SKYPILOT | {'SKYPILOT_NUM_GPUS_PER_NODE': '4'},
    'mosaicml alone': MOSAICML | {'MASTER_PORT': '5000', 'CUDA_VISIBLE_DEVICES': ''},
    'mosaicml without processes': MOSAICML | {'LOCAL_WORLD_SIZE': '0', environment.NODES: '2'},
    'kubeflow alone': KUBEFLOW | {'PET_MASTER_PORT': '5001'},
    'slurm in a pod': REQUESTED | SLURM | JOBSET,
    'slurm step of one node': {'SLURM_NODEID': '0', 'SLURM_NNODES': '1', 'SLURM_JOB_NODELIST': 'n[1-3]'} | PROCESSES,
    'local node': REQUESTED | {environment.NODE_RANK: '2', environment.MASTER_ADDR: '10.0.0.9'},
    'last port': REQUESTED | JOBSET | {environment.MASTER_PORT: '65535'},
    'sagemaker': REQUESTED | {'RESOURCES': 'resourceconfig.json'},
    'sagemaker without its file': REQUESTED | {environment.SCHEDULER: 'sagemaker'},
    'skypilot has fewer nodes': REQUESTED | SKYPILOT | {environment.NODES: '4'},
    'skypilot has fewer GPUs': REQUESTED | SKYPILOT | {'SKYPILOT_NUM_GPUS_PER_NODE': '4'},
    'mosaicml has more nodes': REQUESTED | MOSAICML | {'LOCAL_WORLD_SIZE': '4'},
    'mosaicml has 25 processes': REQUESTED | MOSAICML | {'WORLD_SIZE': '25'},
    'slurm has fewer GPUs': REQUESTED | SLURM | {'SLURM_GPUS_ON_NODE': '4'},
    'rank out of range': REQUESTED | JOBSET | {'JOB_COMPLETION_INDEX': '3'},
    'rank is not a number': REQUESTED | JOBSET | {'JOB_COMPLETION_INDEX': 'x'},
    **{f'no rank: {name}': REQUESTED | {environment.SCHEDULER: name} for name in SCHEDULERS},
    'unknown scheduler': REQUESTED | {environment.SCHEDULER: 'pbs'},
    'no address': REQUESTED | {'JOB_COMPLETION_INDEX': '1'},
    'port 65536': REQUESTED | JOBSET | {environment.MASTER_PORT: '65536'},
    'port 0': REQUESTED | JOBSET | {environment.MASTER_PORT: '0'},
    'no number of nodes': JOBSET,
    'no processes': REQUESTED | JOBSET | {environment.PROCESSES_PER_NODE: '0'},
}
"""Environments, and the file of SageMaker."""


def test_position_from_every_scheduler_or_contradictions_are_as_reviewed(tmp_path):
    # Sorted by name, algo-10 would come before algo-2.
    hosts = {'current_host': 'algo-2', 'hosts': ['algo-1', 'algo-2', 'algo-10']}
    (tmp_path / 'resourceconfig.json').write_text(json.dumps(hosts))
    lines = []
    for name, environ in FOUND.items():
        try:
            found = str(find_position(environ, resources=tmp_path / environ.get('RESOURCES', 'none')))
        except (UserError, ExternalError) as error:
            found = f'{type(error).__name__}: {error}'.replace(f'{tmp_path}/', '')
        lines.append(f'{name}\n  {found}\n')
    for position in (NodePosition('slurm', 1, 3, 8, '10.0.0.1', 29501), NodePosition('local', 1, 2, 2, '::1', 29500)):
        environ = rank_environment(position, 1, {'WORLD_SIZE': '3', 'RANK': '7', 'PATH': '/bin'})
        lines.append(f'rank of the launcher of Composer on {position.scheduler}\n  {environ}\n')
    check_golden(Path(__file__).parent / 'golden' / 'positions', {'positions.txt': ''.join(lines)})
