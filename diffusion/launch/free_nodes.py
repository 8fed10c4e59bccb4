"""Number of nodes that are free in a cluster, as its scheduler reports it."""

import json
from typing import Any

from diffusion.errors import ExternalError, UserError
from diffusion.launch.backends import kubernetes, slurm
from diffusion.launch.command_line_tools import call
from diffusion.launch.job_spec import JobSpec

IDLE = ('idle', 'idle~')
"""States of a node that is free: running, or switched off until a job needs it."""


def free_nodes(spec: JobSpec) -> int:
    """Return the number of idle nodes on which a job could start now; another job may take them first.

    Args:
        spec: The job spec, whose queue and GPUs the nodes must have.

    Raises:
        UserError: The backend cannot tell, or its command-line tool is missing.
        ExternalError: The scheduler does not respond.
    """
    if spec.backend == 'slurm':
        return _idle_nodes_of_slurm(spec.schedule.queue)
    if spec.backend == 'kubernetes':
        return _free_nodes_of_kubernetes(spec.options.gpu_resource, spec.gpus_per_node if spec.gpu else 0)
    raise UserError(f'--max-nodes: {spec.backend} does not tell which nodes are free; set the size of the job: nodes=N')


def _idle_nodes_of_slurm(partition: str | None) -> int:
    where = [] if partition is None else [f'--partition={partition}']
    # sinfo lists a node once per partition. Do not use --states=idle, which also matches drained nodes.
    listed = call(['sinfo', '--noheader', '--Node', '--format=%N %t', *where], install=slurm.INSTALL)
    states = dict(line.split() for line in listed.splitlines())
    return sum(state in IDLE for state in states.values())


def _free_nodes_of_kubernetes(resource: str, gpus_per_node: int) -> int:
    """Return the number of ready nodes whose allocatable GPUs, less those of running pods, suffice for a pod."""
    nodes = _kubectl('get', 'nodes')
    pods = _kubectl('get', 'pods', '--all-namespaces', '--field-selector=status.phase!=Succeeded,status.phase!=Failed')
    used: dict[str, int] = {}
    for pod in pods:
        node = pod['spec'].get('nodeName', '')
        for container in pod['spec'].get('containers', []):
            requested = container.get('resources', {}).get('limits', {}).get(resource, 0)
            used[node] = used.get(node, 0) + int(requested)
    free = 0
    for node in nodes:
        ready = any(each['type'] == 'Ready' and each['status'] == 'True' for each in node['status']['conditions'])
        gpus = int(node['status']['allocatable'].get(resource, 0)) - used.get(node['metadata']['name'], 0)
        free += ready and not node['spec'].get('unschedulable') and gpus >= max(1, gpus_per_node)
    return free


def _kubectl(*words: str) -> list[dict[str, Any]]:
    """Return the items of a list of objects."""
    text = call(['kubectl', *words, '--output=json'], install=kubernetes.INSTALL)
    try:
        return json.loads(text)['items']
    except (ValueError, KeyError) as error:
        raise ExternalError(f'kubectl {" ".join(words)}: its output is not a list of objects ({error})') from error
