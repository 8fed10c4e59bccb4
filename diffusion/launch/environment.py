"""Environment variables by which a back end configures the node entry point.

Every node of every job runs `python -m diffusion.launch.node -- run.py RECIPE [key=value ...]` with these set. Values
that are only known on a node, such as its rank, come from the scheduler's own variables; SCHEDULER names the scheduler.
"""

import socket
from collections.abc import Mapping

SCHEDULER = 'DIFFUSION_SCHEDULER'
"""The scheduler whose variables give a node's rank and the first node's address: local, slurm, jobset, kubeflow,
sagemaker, skypilot or mosaicml. Guessed from the variables that are there if unset."""

JOB = 'DIFFUSION_JOB'
"""The job's name, the same at every attempt."""

NODES = 'DIFFUSION_NODES'
"""Number of nodes; an error if the scheduler contradicts it."""

PROCESSES_PER_NODE = 'DIFFUSION_PROCESSES_PER_NODE'
"""Number of processes per node, one per GPU."""

GPU = 'DIFFUSION_GPU'
"""Kind of the GPUs as in planning/gpus.yaml, such as a100-80gb, which the preflight compares with what it finds; `any`
accepts every kind, `none` is a CPU."""

NODE_RANK = 'DIFFUSION_NODE_RANK'
"""This node's rank, if no scheduler gives it (local)."""

MACHINE = 'DIFFUSION_MACHINE'
"""The machine's name for its operators, if the host name is another (jobset: pods have their own)."""

MASTER_ADDR = 'DIFFUSION_MASTER_ADDR'
"""Address of the first node, if no scheduler gives it (local, jobset)."""

MASTER_PORT = 'DIFFUSION_MASTER_PORT'
"""Port on the first node where the ranks meet."""

PREFLIGHT = 'DIFFUSION_PREFLIGHT'
"""Level of the preflight: none, fast or deep."""

ATTEMPT = 'DIFFUSION_ATTEMPT'
"""Number of earlier starts of this job by the scheduler, from 0; unset if the scheduler does not count."""

MAX_RESTARTS = 'DIFFUSION_MAX_RESTARTS'
"""Most restarts of a run, counted in its attempts.jsonl; after them the node entry point ends with 78 and says so. For
schedulers that do not count."""

ON_EXIT = 'DIFFUSION_ON_EXIT'
"""Action after each exit status, as `75=retry,76=elsewhere,78=stop,*=retry`."""

RESTART_IN_PLACE = 'DIFFUSION_RESTART_IN_PLACE'
"""1 if the scheduler does not restart a job that ends (sagemaker): the node entry point then restarts its workers
itself while ON_EXIT says retry, up to MAX_RESTARTS times."""

EXIT_FILE = 'DIFFUSION_EXIT_FILE'
"""A file that all nodes share. Each node appends one line when it ends: its exit status, its host name, the cause and
details. The first line with another status than 0 is why the job ended; later nodes were killed because of it."""

NOTICE_SECONDS = 'DIFFUSION_NOTICE_SECONDS'
"""Seconds between the scheduler's SIGTERM (or SIGUSR1) and its SIGKILL, in which the workers must have saved."""

HANG_SECONDS = 'DIFFUSION_HANG_SECONDS'
"""Shortest time without a batch that counts as a hang; the watchdog's default if unset."""

SECRETS = 'DIFFUSION_SECRETS'
"""`NAME=secret-id,NAME=secret-id` of AWS Secrets Manager; `diffusion.launch.aws_secrets.fetch_secrets` adds them to the
environment of the workers (sagemaker, which has no secrets of its own)."""


def machine_name(environ: Mapping[str, str]) -> str:
    """Return the name by which the operators of the cluster know this machine."""
    return environ.get(MACHINE) or environ.get('SLURMD_NODENAME') or socket.gethostname()
