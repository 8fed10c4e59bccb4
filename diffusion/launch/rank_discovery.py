"""Find the node rank, job size and master address from the environment variables set by the scheduler."""

import json
import os
import socket
import subprocess
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from diffusion.errors import ExternalError, UserError
from diffusion.runs import environment

RESOURCES = Path('/opt/ml/input/config/resourceconfig.json')
"""File in which SageMaker lists the hosts of a job."""
MAX_PORT = 65535


@dataclass(frozen=True)
class NodePosition:
    scheduler: str
    rank: int
    nodes: int
    processes: int
    master_addr: str
    master_port: int
    """Port on the first node for the rendezvous of the ranks."""

    @property
    def world_size(self) -> int:
        return self.nodes * self.processes


@dataclass(frozen=True)
class _SchedulerValues:
    """Node rank, numbers of nodes and processes, and first node, as the scheduler gives them; None if it does not."""

    rank: int
    nodes: int | None = None
    processes: int | None = None
    master: str | None = None
    port: int | None = None


def find_position(environ: Mapping[str, str], *, resources: Path = RESOURCES) -> NodePosition:
    """Return the rank of this node, the size of its job and the address of the first node.

    Raises:
        UserError: The scheduler's variables are incomplete, or contradict the job spec.
        ExternalError: scontrol does not respond, or SageMaker's file cannot be read.
    """
    scheduler = environ.get(environment.SCHEDULER) or _detect_scheduler(environ, resources)
    if scheduler not in _READERS:
        raise UserError(f'{environment.SCHEDULER}: {scheduler!r} is unknown; use one of {", ".join(_READERS)}')
    given = _READERS[scheduler](environ, resources)
    nodes = _reconcile('nodes', environment.NODES, environ, given.nodes, scheduler)
    processes = _reconcile('processes per node', environment.PROCESSES_PER_NODE, environ, given.processes, scheduler)
    if not 0 <= given.rank < nodes:
        raise UserError(f'{scheduler}: node rank {given.rank} is out of range for {nodes} nodes; ranks start at 0')
    master = environ.get(environment.MASTER_ADDR) or given.master or ('127.0.0.1' if nodes == 1 else None)
    if master is None:
        raise UserError(f'{scheduler} does not provide the address of the first node; set {environment.MASTER_ADDR}')
    port = given.port or _parse_int(environment.MASTER_PORT, environ.get(environment.MASTER_PORT, '29500'))
    if not 0 < port <= MAX_PORT:
        raise UserError(f'{environment.MASTER_PORT}: {port} is not a port number; use 1 to {MAX_PORT}')
    return NodePosition(scheduler, given.rank, nodes, processes, master, port)


def _detect_scheduler(environ: Mapping[str, str], resources: Path) -> str:
    """Return the name of the scheduler whose environment variables are set, or `local` if none are."""
    rank_variables = {
        'slurm': 'SLURM_NODEID',
        'skypilot': 'SKYPILOT_NODE_RANK',
        'jobset': 'JOB_COMPLETION_INDEX',
        'kubeflow': 'PET_NODE_RANK',
        'mosaicml': 'NODE_RANK',
    }
    # Use the first match in this order. Several may match: Slurm may run inside the pods of another scheduler, but not
    # vice versa.
    found = [name for name, variable in rank_variables.items() if variable in environ]
    # Ignore NODE_RANK here: Composer sets it in one-process training, as in a notebook, and child processes inherit it.
    if found == ['mosaicml'] and environ.get('WORLD_SIZE') == '1':
        found = []
    return found[0] if found else 'sagemaker' if resources.exists() else 'local'


def _reconcile(quantity: str, variable: str, environ: Mapping[str, str], given: int | None, scheduler: str) -> int:
    """Return the number of nodes or processes per node; raise UserError if the job spec and the scheduler disagree."""
    requested = _parse_int(variable, environ[variable]) if variable in environ else None
    if requested is not None and given is not None and requested != given:
        raise UserError(
            f'{scheduler} provides {given} {quantity}, but the job spec has {requested} ({variable}); make them equal'
        )
    number = requested if requested is not None else given
    if number is None:
        raise UserError(f'{scheduler} does not provide the number of {quantity}; set {variable}')
    if number < 1:
        raise UserError(f'{variable}: {number} {quantity}; use 1 or more')
    return number


def _parse_int(variable: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise UserError(f'{variable}: {value!r} is not an integer; set it to an integer or unset it') from None


def _required_int(environ: Mapping[str, str], variable: str, scheduler: str) -> int:
    if variable not in environ:
        raise UserError(f'{variable} is not set; start this node with {scheduler}, or correct DIFFUSION_SCHEDULER')
    return _parse_int(variable, environ[variable])


def _optional_int(environ: Mapping[str, str], variable: str) -> int | None:
    return _parse_int(variable, environ[variable]) if variable in environ else None


def _local(environ: Mapping[str, str], resources: Path) -> _SchedulerValues:
    """Return this node's rank and the numbers of nodes and of processes per node, for a job without a scheduler.

    The rank is DIFFUSION_NODE_RANK or 0. The numbers are 1 node and 1 process per GPU. A number is None if the job spec
    sets it; the caller then uses the job spec's.
    """
    return _SchedulerValues(
        _parse_int(environment.NODE_RANK, environ.get(environment.NODE_RANK, '0')),
        None if environment.NODES in environ else 1,
        None if environment.PROCESSES_PER_NODE in environ else max(1, count_gpus(environ)),
    )


def count_gpus(environ: Mapping[str, str], devices: Path = Path('/dev')) -> int:
    """Return the number of GPUs of this machine or container that this job may use."""
    # Count device files, because importing torch takes seconds.
    return len(visible_gpus(environ, sum(1 for path in devices.glob('nvidia[0-9]*'))))


def visible_gpus(environ: Mapping[str, str], count: int) -> list[int | str]:
    """Return the indices or UUIDs of the GPUs, out of `count`, that CUDA_VISIBLE_DEVICES leaves visible."""
    visible = environ.get('CUDA_VISIBLE_DEVICES')
    if visible is None:
        return list(range(count))
    names = [int(word) if word.isdigit() else word for word in map(str.strip, visible.split(',')) if word]
    return [name for name in names if not isinstance(name, int) or name < count]


def _slurm(environ: Mapping[str, str], resources: Path) -> _SchedulerValues:
    # Prefer the node list of the Slurm step, because srun may start fewer nodes than the job has.
    names = environ.get('SLURM_STEP_NODELIST') or environ.get('SLURM_JOB_NODELIST')
    nodes = _optional_int(environ, 'SLURM_STEP_NUM_NODES') or _optional_int(environ, 'SLURM_NNODES')
    return _SchedulerValues(
        _required_int(environ, 'SLURM_NODEID', 'slurm'),
        nodes,
        _optional_int(environ, 'SLURM_GPUS_ON_NODE'),
        None if names is None or nodes == 1 or environment.MASTER_ADDR in environ else _first_hostname(names),
    )


def _first_hostname(nodes: str) -> str:
    try:
        command = ['scontrol', 'show', 'hostnames', nodes]
        found = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True).stdout.split()
    except (OSError, subprocess.SubprocessError) as error:
        raise ExternalError(f'scontrol cannot expand {nodes} ({error}); set {environment.MASTER_ADDR}') from error
    return found[0]


def _kubeflow(environ: Mapping[str, str], resources: Path) -> _SchedulerValues:
    return _SchedulerValues(
        _required_int(environ, 'PET_NODE_RANK', 'Kubeflow Trainer'),
        _optional_int(environ, 'PET_NNODES'),
        _optional_int(environ, 'PET_NPROC_PER_NODE'),
        environ.get('PET_MASTER_ADDR'),
        _optional_int(environ, 'PET_MASTER_PORT'),
    )


def _skypilot(environ: Mapping[str, str], resources: Path) -> _SchedulerValues:
    addresses = environ.get('SKYPILOT_NODE_IPS', '').split()
    return _SchedulerValues(
        _required_int(environ, 'SKYPILOT_NODE_RANK', 'SkyPilot'),
        len(addresses) or None,
        # SkyPilot sets 0 on machines without GPUs.
        _optional_int(environ, 'SKYPILOT_NUM_GPUS_PER_NODE') or None,
        addresses[0] if addresses else None,
    )


def _sagemaker(environ: Mapping[str, str], resources: Path) -> _SchedulerValues:
    """Return this node's rank, the number of nodes and the first node, read from SageMaker's resource file."""
    # Read the file, because SM_* variables exist only in images with the SageMaker training toolkit. Keep the file's
    # order for the ranks: sorted by name, algo-10 would come before algo-2.
    try:
        content = json.loads(resources.read_text(encoding='utf-8'))
        hosts, current = list(content['hosts']), content['current_host']
        return _SchedulerValues(hosts.index(current), len(hosts), None, hosts[0])
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise ExternalError(f'{resources} does not provide the rank of this node ({error})') from error


def _mosaicml(environ: Mapping[str, str], resources: Path) -> _SchedulerValues:
    # MosaicML's WORLD_SIZE counts processes; on some other platforms it counts nodes.
    world, processes = _optional_int(environ, 'WORLD_SIZE'), _optional_int(environ, 'LOCAL_WORLD_SIZE')
    if world and processes and world % processes:
        raise UserError(f'WORLD_SIZE={world} is not a multiple of LOCAL_WORLD_SIZE={processes}; correct one of them')
    nodes = world // processes if world and processes else None
    return _SchedulerValues(
        _required_int(environ, 'NODE_RANK', "MosaicML's platform"),
        nodes,
        processes,
        environ.get('MASTER_ADDR'),
        _optional_int(environ, 'MASTER_PORT'),
    )


_READERS: dict[str, Callable[[Mapping[str, str], Path], _SchedulerValues]] = {
    'local': _local,
    'slurm': _slurm,
    'jobset': lambda environ, _: _SchedulerValues(_required_int(environ, 'JOB_COMPLETION_INDEX', 'the JobSet')),
    'kubeflow': _kubeflow,
    'skypilot': _skypilot,
    'sagemaker': _sagemaker,
    'mosaicml': _mosaicml,
}

RANK_VARIABLES = ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'NODE_RANK', 'MASTER_ADDR', 'MASTER_PORT')


def rank_environment(
    position: NodePosition, local_rank: int, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return a worker process's environment: `environ`, with the variables that Composer's launcher would set."""
    # Do not inherit RANK_VARIABLES: schedulers set some with other meanings, such as WORLD_SIZE as number of nodes.
    kept = {name: value for name, value in environ.items() if name not in RANK_VARIABLES}
    rank = position.rank * position.processes + local_rank
    # All nodes of a local job share this machine's GPUs, memory and caches, so make the ranks see a single node.
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


def free_port() -> int:
    """Return a TCP port of this machine that is free now."""
    with socket.socket() as listener:
        listener.bind(('127.0.0.1', 0))
        return int(listener.getsockname()[1])


NCCL_PIPE = 'nccl-{rank}.pipe'
"""Name of the pipe, in the attempt's folder, through which a rank's NCCL flight recorder is asked to write its file."""


def nccl_environment(environ: Mapping[str, str], folder: Path, prefix: str) -> dict[str, str]:
    """Return the environment variables that turn on NCCL's flight recorder, except those that the user has set.

    The recorder keeps the last collectives of a rank with their Python stacks in memory. It writes them to a file when
    a collective times out, or on request through a pipe.

    Args:
        folder: Folder for the pipes, on a local disk: torch fails on network file systems that do not support pipes.
        prefix: Path of the files, to which NCCL appends the rank.
    """
    # These variables have torch 2.7's names, which later versions read too. They have no effect on runs without NCCL.
    values = {
        # 2000 entries hold about 20 training steps of SD2 under FSDP2; torch's tutorial uses the same number.
        'TORCH_NCCL_TRACE_BUFFER_SIZE': '2000',
        'TORCH_NCCL_DUMP_ON_TIMEOUT': '1',
        'TORCH_NCCL_DEBUG_INFO_TEMP_FILE': prefix,
        'TORCH_NCCL_DEBUG_INFO_PIPE_FILE': str(folder / NCCL_PIPE.partition('{')[0]),
    }
    return {name: value for name, value in values.items() if name not in environ}
