"""Rank and size of the job that a node belongs to, from the variables of the scheduler that started it."""

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from diffusion.errors import ExternalError, UserError
from diffusion.launch import environment

RESOURCES = Path('/opt/ml/input/config/resourceconfig.json')
"""SageMaker's file with the hosts of a job."""
MAX_PORT = 65535


@dataclass(frozen=True)
class NodePosition:
    """The position of a node in its job.

    Attributes:
        scheduler: Name of the scheduler.
        rank: Rank of this node.
        nodes: Number of nodes.
        processes: Number of processes per node.
        master_addr: Address of the first node.
        master_port: Port on the first node where the ranks meet.
    """

    scheduler: str
    rank: int
    nodes: int
    processes: int
    master_addr: str
    master_port: int

    @property
    def world_size(self) -> int:
        return self.nodes * self.processes


@dataclass(frozen=True)
class _SchedulerValues:
    """Values that a scheduler gives; None for those it does not."""

    rank: int
    nodes: int | None = None
    processes: int | None = None
    master: str | None = None
    port: int | None = None


def find_position(environ: Mapping[str, str], *, resources: Path = RESOURCES) -> NodePosition:
    """Find the position of this node.

    Args:
        environ: The environment of the node entry point.
        resources: SageMaker's file of hosts.

    Raises:
        UserError: The scheduler's variables are incomplete, or contradict the job spec.
        ExternalError: scontrol does not answer, or SageMaker's file cannot be read.
    """
    scheduler = environ.get(environment.SCHEDULER) or _guess(environ, resources)
    if scheduler not in _READERS:
        raise UserError(f'{environment.SCHEDULER}: {scheduler!r} is unknown; known: {", ".join(_READERS)}')
    given = _READERS[scheduler](environ, resources)
    nodes = _agreed('nodes', environment.NODES, environ, given.nodes, scheduler)
    processes = _agreed('processes a node', environment.PROCESSES_PER_NODE, environ, given.processes, scheduler)
    if not 0 <= given.rank < nodes:
        raise UserError(f'{scheduler}: this is node {given.rank} of {nodes}; ranks count from 0')
    master = environ.get(environment.MASTER_ADDR) or given.master or ('127.0.0.1' if nodes == 1 else None)
    if master is None:
        raise UserError(f'{scheduler} does not say the first of {nodes} nodes; set {environment.MASTER_ADDR}')
    port = given.port or _whole(environment.MASTER_PORT, environ.get(environment.MASTER_PORT, '29500'))
    if not 0 < port <= MAX_PORT:
        raise UserError(f'{environment.MASTER_PORT}: {port} is no port; give one from 1 to {MAX_PORT}')
    return NodePosition(scheduler, given.rank, nodes, processes, master, port)


def _guess(environ: Mapping[str, str], resources: Path) -> str:
    """Guess the scheduler by its variables; `local` if there are none."""
    signs = {
        'slurm': 'SLURM_NODEID',
        'skypilot': 'SKYPILOT_NODE_RANK',
        'jobset': 'JOB_COMPLETION_INDEX',
        'kubeflow': 'PET_NODE_RANK',
        'mosaicml': 'NODE_RANK',
    }
    # A Slurm cluster may run inside of another scheduler's pods, never the other way round: the first one wins.
    found = [name for name, variable in signs.items() if variable in environ]
    # Composer leaves these in the environment of a process that trained alone, such as a notebook, for its children.
    if found == ['mosaicml'] and environ.get('WORLD_SIZE') == '1':
        found = []
    return found[0] if found else 'sagemaker' if resources.exists() else 'local'


def _agreed(what: str, variable: str, environ: Mapping[str, str], given: int | None, scheduler: str) -> int:
    """Return a number that the job spec and the scheduler must agree on if both give it."""
    asked = _whole(variable, environ[variable]) if variable in environ else None
    if asked is not None and given is not None and asked != given:
        raise UserError(f'{scheduler} gave {given} {what}, the job spec asks for {asked} ({variable}); make them equal')
    number = asked if asked is not None else given
    if number is None:
        raise UserError(f'{scheduler} does not say how many {what}; set {variable}')
    if number < 1:
        raise UserError(f'{variable}: {number} {what}; give 1 or more')
    return number


def _whole(variable: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise UserError(f'{variable}: {value!r} is no whole number') from None


def _needed(environ: Mapping[str, str], variable: str, scheduler: str) -> int:
    if variable not in environ:
        raise UserError(f'{variable} is not set; does {scheduler} run this node?')
    return _whole(variable, environ[variable])


def _optional(environ: Mapping[str, str], variable: str) -> int | None:
    return _whole(variable, environ[variable]) if variable in environ else None


def _local(environ: Mapping[str, str], resources: Path) -> _SchedulerValues:
    """Take the numbers of the job spec, or else this machine alone with all its GPUs."""
    return _SchedulerValues(
        _whole(environment.NODE_RANK, environ.get(environment.NODE_RANK, '0')),
        None if environment.NODES in environ else 1,
        None if environment.PROCESSES_PER_NODE in environ else max(1, count_gpus(environ)),
    )


def count_gpus(environ: Mapping[str, str], devices: Path = Path('/dev')) -> int:
    """Count the GPUs of this machine or container that this job may use."""
    return len(visible_gpus(environ, sum(1 for path in devices.glob('nvidia[0-9]*'))))


def visible_gpus(environ: Mapping[str, str], count: int) -> list[int | str]:
    """Return the indices or UUIDs of the GPUs, of `count` in the machine, that CUDA_VISIBLE_DEVICES leaves visible."""
    words = environ.get('CUDA_VISIBLE_DEVICES')
    if words is None:
        return list(range(count))
    names = [int(word) if word.isdigit() else word for word in map(str.strip, words.split(',')) if word]
    return [name for name in names if not isinstance(name, int) or name < count]


def _slurm(environ: Mapping[str, str], resources: Path) -> _SchedulerValues:
    names = environ.get('SLURM_STEP_NODELIST') or environ.get('SLURM_JOB_NODELIST')
    nodes = _optional(environ, 'SLURM_STEP_NUM_NODES') or _optional(environ, 'SLURM_NNODES')
    return _SchedulerValues(
        _needed(environ, 'SLURM_NODEID', 'slurm'),
        nodes,
        _optional(environ, 'SLURM_GPUS_ON_NODE'),
        None if names is None or nodes == 1 or environment.MASTER_ADDR in environ else _first_of(names),
    )


def _first_of(nodes: str) -> str:
    """Return the first name of Slurm's `node[01-04,07]`."""
    try:
        command = ['scontrol', 'show', 'hostnames', nodes]
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError) as error:
        raise ExternalError(f'scontrol cannot say what {nodes} is ({error}); set {environment.MASTER_ADDR}') from error
    return found[0]


def _jobset(environ: Mapping[str, str], resources: Path) -> _SchedulerValues:
    return _SchedulerValues(_needed(environ, 'JOB_COMPLETION_INDEX', 'the JobSet'))


def _kubeflow(environ: Mapping[str, str], resources: Path) -> _SchedulerValues:
    return _SchedulerValues(
        _needed(environ, 'PET_NODE_RANK', 'Kubeflow Trainer'),
        _optional(environ, 'PET_NNODES'),
        _optional(environ, 'PET_NPROC_PER_NODE'),
        environ.get('PET_MASTER_ADDR'),
        _optional(environ, 'PET_MASTER_PORT'),
    )


def _skypilot(environ: Mapping[str, str], resources: Path) -> _SchedulerValues:
    addresses = environ.get('SKYPILOT_NODE_IPS', '').split()
    return _SchedulerValues(
        _needed(environ, 'SKYPILOT_NODE_RANK', 'SkyPilot'),
        len(addresses) or None,
        # It is 0 on a machine without GPUs.
        _optional(environ, 'SKYPILOT_NUM_GPUS_PER_NODE') or None,
        addresses[0] if addresses else None,
    )


def _sagemaker(environ: Mapping[str, str], resources: Path) -> _SchedulerValues:
    # Only images with SageMaker's own toolkit set the variables SM_*.
    try:
        content = json.loads(resources.read_text(encoding='utf-8'))
        hosts, own = list(content['hosts']), content['current_host']
        return _SchedulerValues(hosts.index(own), len(hosts), None, hosts[0])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ExternalError(f'{resources} does not say where this node stands ({error})') from error


def _mosaicml(environ: Mapping[str, str], resources: Path) -> _SchedulerValues:
    # Here WORLD_SIZE counts processes, elsewhere nodes.
    world, processes = _optional(environ, 'WORLD_SIZE'), _optional(environ, 'LOCAL_WORLD_SIZE')
    nodes = world // processes if world and processes else None
    if nodes and world and processes and nodes * processes != world:
        raise UserError(f'WORLD_SIZE={world} is no multiple of LOCAL_WORLD_SIZE={processes}')
    return _SchedulerValues(
        _needed(environ, 'NODE_RANK', "MosaicML's platform"),
        nodes,
        processes,
        environ.get('MASTER_ADDR'),
        _optional(environ, 'MASTER_PORT'),
    )


_READERS: dict[str, Callable[[Mapping[str, str], Path], _SchedulerValues]] = {
    'local': _local,
    'slurm': _slurm,
    'jobset': _jobset,
    'kubeflow': _kubeflow,
    'skypilot': _skypilot,
    'sagemaker': _sagemaker,
    'mosaicml': _mosaicml,
}

_SCRUBBED = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'NODE_RANK', 'MASTER_ADDR', 'MASTER_PORT')


def rank_environment(
    position: NodePosition, local_rank: int, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment of one process of a node, as Composer's launcher would make it."""
    kept = {name: value for name, value in environ.items() if name not in _SCRUBBED}
    rank = position.rank * position.processes + local_rank
    # The nodes of a local job share a machine with its GPUs, memory and caches, so the ranks are told of one node.
    shared = position.scheduler == 'local'
    return kept | {
        'RANK': str(rank),
        'WORLD_SIZE': str(position.world_size),
        'LOCAL_RANK': str(rank if shared else local_rank),
        'LOCAL_WORLD_SIZE': str(position.world_size if shared else position.processes),
        'NODE_RANK': str(0 if shared else position.rank),
        'MASTER_ADDR': position.master_addr,
        'MASTER_PORT': str(position.master_port),
        'PYTHONUNBUFFERED': '1',
    }
