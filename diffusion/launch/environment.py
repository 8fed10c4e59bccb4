"""What a back end tells the node entry point: environment variables, written by one and read by the other.

Every node of every job runs `python -m diffusion.launch.node -- run.py RECIPE [key=value ...]` with these set. What is
not rendered, such as the rank of a node, comes from the scheduler's own variables; SCHEDULER says whose.
"""

import socket
from collections.abc import Mapping

SCHEDULER = 'DIFFUSION_SCHEDULER'
"""Whose variables say the rank of a node and the first node's address: local, slurm, jobset, sagemaker, skypilot or
mosaicml. Unset, the node entry point looks at what there is."""

JOB = 'DIFFUSION_JOB'
"""The job's name, the same at every attempt."""

NODES = 'DIFFUSION_NODES'
"""How many nodes there are; one that the scheduler contradicts is an error."""

PROCESSES_PER_NODE = 'DIFFUSION_PROCESSES_PER_NODE'
"""How many processes a node runs, one a GPU."""

GPU = 'DIFFUSION_GPU'
"""The kind of the GPUs as in planning/gpus.yaml, such as a100-80gb, which preflight compares; `any` for whatever there
is, `none` for a CPU."""

NODE_RANK = 'DIFFUSION_NODE_RANK'
"""This node's rank, where no scheduler says it (local)."""

MACHINE = 'DIFFUSION_MACHINE'
"""The machine's name for who runs the cluster, where a node's host name is another (jobset: pods have their own)."""

MASTER_ADDR = 'DIFFUSION_MASTER_ADDR'
"""The address of the first node, where no scheduler says it (local, jobset)."""

MASTER_PORT = 'DIFFUSION_MASTER_PORT'
"""The port that the ranks meet at on the first node."""

PREFLIGHT = 'DIFFUSION_PREFLIGHT'
"""none, fast or deep."""

ATTEMPT = 'DIFFUSION_ATTEMPT'
"""How often the scheduler has restarted this job: 0 at first. Unset where it does not say."""

MAX_RESTARTS = 'DIFFUSION_MAX_RESTARTS'
"""Restarts that a run may have in all, by its attempts.jsonl; past them the node entry point ends with 78 and says so.
For schedulers that do not count."""

ON_EXIT = 'DIFFUSION_ON_EXIT'
"""What follows an exit status, as `75=retry,76=elsewhere,78=stop,*=retry`."""

RESTART_IN_PLACE = 'DIFFUSION_RESTART_IN_PLACE'
"""1 where nobody restarts a job that ends (sagemaker): the node entry point starts its workers again by itself
while ON_EXIT says retry, up to MAX_RESTARTS."""

EXIT_FILE = 'DIFFUSION_EXIT_FILE'
"""A file that the nodes share. Before it ends, each appends one line to it: its exit status, its host name, the
cause and what more there is to say. The first that is not 0 is why the job ended; what follows was killed for it."""

NOTICE_SECONDS = 'DIFFUSION_NOTICE_SECONDS'
"""Time between the scheduler's SIGTERM (or SIGUSR1) and its SIGKILL, in which the workers must have saved."""

HANG_SECONDS = 'DIFFUSION_HANG_SECONDS'
"""Shortest time without a batch that counts as hung; unset leaves it to the node entry point."""

SECRETS = 'DIFFUSION_SECRETS'
"""`NAME=secret-id,NAME=secret-id` of AWS Secrets Manager; `diffusion.launch.aws_secrets.fetch_secrets` puts them in the
environment of the workers (sagemaker, which has no secrets of its own)."""


def machine_name(environ: Mapping[str, str]) -> str:
    """What those who run a cluster call this machine."""
    return environ.get(MACHINE) or environ.get('SLURMD_NODENAME') or socket.gethostname()
