"""Where a node stands in its job, by the variables of whichever scheduler started it."""

import json
import os
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from diffusion.errors import UserError
from diffusion.launch import environment

RESOURCES = Path('/opt/ml/input/config/resourceconfig.json')
"""What SageMaker says of a job's machines."""
LONGEST_PORT = 65535


@dataclass(frozen=True)
class NodePlace:
    """A node of a job.

    Attributes:
        scheduler: Whose variables said so.
        rank: Of the node.
        nodes: In the job.
        processes: A node.
        master_addr: Of the first node.
        master_port: That the ranks meet at there.
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
class _Said:
    """What a scheduler says; None for what it does not."""

    rank: int
    nodes: int | None = None
    processes: int | None = None
    master: str | None = None
    port: int | None = None


def find_place(environ: Mapping[str, str], *, resources: Path = RESOURCES) -> NodePlace:
    """This node's place.

    Args:
        environ: The environment of the node entry point.
        resources: SageMaker's file.

    Raises:
        UserError: The scheduler says too little, or contradicts the job spec.
    """
    scheduler = environ.get(environment.SCHEDULER) or _guess(environ, resources)
    if scheduler not in _READERS:
        raise UserError(f'{environment.SCHEDULER}: {scheduler!r} is unknown; known: {", ".join(_READERS)}')
    said = _READERS[scheduler](environ, resources)
    nodes = _agreed('nodes', environment.NODES, environ, said.nodes, scheduler)
    processes = _agreed('processes a node', environment.PROCESSES_PER_NODE, environ, said.processes, scheduler)
    if not 0 <= said.rank < nodes:
        raise UserError(f'{scheduler}: this is node {said.rank} of {nodes}; ranks count from 0')
    master = environ.get(environment.MASTER_ADDR) or said.master or ('127.0.0.1' if nodes == 1 else None)
    if master is None:
        raise UserError(f'{scheduler} does not say the first of {nodes} nodes; set {environment.MASTER_ADDR}')
    port = said.port or _whole(environment.MASTER_PORT, environ.get(environment.MASTER_PORT, '29500'))
    if not 0 < port <= LONGEST_PORT:
        raise UserError(f'{environment.MASTER_PORT}: {port} is no port; give one from 1 to {LONGEST_PORT}')
    return NodePlace(scheduler, said.rank, nodes, processes, master, port)


def _guess(environ: Mapping[str, str], resources: Path) -> str:
    """Whose variables there are; `local` where there are none."""
    signs = {
        'slurm': 'SLURM_NODEID',
        'skypilot': 'SKYPILOT_NODE_RANK',
        'jobset': 'JOB_COMPLETION_INDEX',
        'kubeflow': 'PET_NODE_RANK',
        'mosaicml': 'NODE_RANK',
    }
    # A Slurm cluster may run inside of another scheduler's pods, never the other way round: the first one wins.
    found = [name for name, variable in signs.items() if variable in environ]
    # Composer leaves these behind in a process that trained alone, such as a notebook's, whose commands inherit them.
    if found == ['mosaicml'] and environ.get('WORLD_SIZE') == '1':
        found = []
    return found[0] if found else 'sagemaker' if resources.exists() else 'local'


def _agreed(what: str, variable: str, environ: Mapping[str, str], said: int | None, scheduler: str) -> int:
    """A number that the job spec and the scheduler must not contradict each other in."""
    asked = _whole(variable, environ[variable]) if variable in environ else None
    if asked is not None and said is not None and asked != said:
        raise UserError(f'{scheduler} gave {said} {what}, the job spec asks for {asked} ({variable}); make them equal')
    number = asked if asked is not None else said
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


def _local(environ: Mapping[str, str], resources: Path) -> _Said:
    """What the job spec says, or else this machine alone, with all its GPUs."""
    return _Said(
        _whole(environment.NODE_RANK, environ.get(environment.NODE_RANK, '0')),
        None if environment.NODES in environ else 1,
        None if environment.PROCESSES_PER_NODE in environ else max(1, count_gpus(environ)),
    )


def count_gpus(environ: Mapping[str, str], devices: Path = Path('/dev')) -> int:
    """GPUs of this machine, or of this container, that this job may use."""
    return len(visible_gpus(environ, sum(1 for path in devices.glob('nvidia[0-9]*'))))


def visible_gpus(environ: Mapping[str, str], there: int) -> list[int | str]:
    """Indices or UUIDs of the GPUs that CUDA_VISIBLE_DEVICES leaves of so many."""
    words = environ.get('CUDA_VISIBLE_DEVICES')
    if words is None:
        return list(range(there))
    names = [int(word) if word.isdigit() else word for word in map(str.strip, words.split(',')) if word]
    return [name for name in names if not isinstance(name, int) or name < there]


def _slurm(environ: Mapping[str, str], resources: Path) -> _Said:
    names = environ.get('SLURM_STEP_NODELIST') or environ.get('SLURM_JOB_NODELIST')
    nodes = _optional(environ, 'SLURM_STEP_NUM_NODES') or _optional(environ, 'SLURM_NNODES')
    return _Said(
        _needed(environ, 'SLURM_NODEID', 'slurm'),
        nodes,
        _optional(environ, 'SLURM_GPUS_ON_NODE'),
        None if names is None or nodes == 1 or environment.MASTER_ADDR in environ else _first_of(names),
    )


def _first_of(nodes: str) -> str:
    """The first name of Slurm's `node[01-04,07]`."""
    try:
        command = ['scontrol', 'show', 'hostnames', nodes]
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError) as error:
        raise UserError(f'scontrol cannot say what {nodes} is ({error}); set {environment.MASTER_ADDR}') from error
    return found[0]


def _jobset(environ: Mapping[str, str], resources: Path) -> _Said:
    return _Said(_needed(environ, 'JOB_COMPLETION_INDEX', 'the JobSet'))


def _kubeflow(environ: Mapping[str, str], resources: Path) -> _Said:
    return _Said(
        _needed(environ, 'PET_NODE_RANK', 'Kubeflow Trainer'),
        _optional(environ, 'PET_NNODES'),
        _optional(environ, 'PET_NPROC_PER_NODE'),
        environ.get('PET_MASTER_ADDR'),
        _optional(environ, 'PET_MASTER_PORT'),
    )


def _skypilot(environ: Mapping[str, str], resources: Path) -> _Said:
    addresses = environ.get('SKYPILOT_NODE_IPS', '').split()
    return _Said(
        _needed(environ, 'SKYPILOT_NODE_RANK', 'SkyPilot'),
        len(addresses) or None,
        # Of a machine without GPUs it says 0.
        _optional(environ, 'SKYPILOT_NUM_GPUS_PER_NODE') or None,
        addresses[0] if addresses else None,
    )


def _sagemaker(environ: Mapping[str, str], resources: Path) -> _Said:
    # The variables SM_* are only there in images with SageMaker's own toolkit.
    try:
        content = json.loads(resources.read_text(encoding='utf-8'))
        hosts, own = list(content['hosts']), content['current_host']
        return _Said(hosts.index(own), len(hosts), None, hosts[0])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise UserError(f'{resources} does not say where this node stands ({error})') from error


def _mosaicml(environ: Mapping[str, str], resources: Path) -> _Said:
    # Here WORLD_SIZE counts processes, elsewhere nodes.
    world, processes = _optional(environ, 'WORLD_SIZE'), _optional(environ, 'LOCAL_WORLD_SIZE')
    nodes = world // processes if world and processes else None
    if nodes and world and processes and nodes * processes != world:
        raise UserError(f'WORLD_SIZE={world} is no multiple of LOCAL_WORLD_SIZE={processes}')
    return _Said(
        _needed(environ, 'NODE_RANK', "MosaicML's platform"),
        nodes,
        processes,
        environ.get('MASTER_ADDR'),
        _optional(environ, 'MASTER_PORT'),
    )


_READERS: dict[str, Callable[[Mapping[str, str], Path], _Said]] = {
    'local': _local,
    'slurm': _slurm,
    'jobset': _jobset,
    'kubeflow': _kubeflow,
    'skypilot': _skypilot,
    'sagemaker': _sagemaker,
    'mosaicml': _mosaicml,
}

_SCRUBBED = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'NODE_RANK', 'MASTER_ADDR', 'MASTER_PORT')


def rank_environment(place: NodePlace, local_rank: int, environ: Mapping[str, str] = os.environ) -> dict[str, str]:
    """The environment of one process of a node, as Composer's launcher would make it."""
    kept = {name: value for name, value in environ.items() if name not in _SCRUBBED}
    rank = place.rank * place.processes + local_rank
    # Whoever shares a machine shares its GPUs, its memory and its caches, so the nodes of a local job are one to them.
    shared = place.scheduler == 'local'
    return kept | {
        'RANK': str(rank),
        'WORLD_SIZE': str(place.world_size),
        'LOCAL_RANK': str(rank if shared else local_rank),
        'LOCAL_WORLD_SIZE': str(place.world_size if shared else place.processes),
        'NODE_RANK': str(0 if shared else place.rank),
        'MASTER_ADDR': place.master_addr,
        'MASTER_PORT': str(place.master_port),
        'PYTHONUNBUFFERED': '1',
    }
