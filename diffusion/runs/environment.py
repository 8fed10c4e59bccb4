"""Environment variables with which a launch backend configures the node entry point.

Every node of every job runs `python -m diffusion.launch.node -- run.py RECIPE [key=value ...]` with these variables.
Values that are known only on the node, such as its rank, come from environment variables of the scheduler.
"""

import socket
from collections.abc import Mapping

from diffusion.errors import UserError

SCHEDULER = 'DIFFUSION_SCHEDULER'
"""Scheduler whose variables give the node's rank and the first node's address: local, slurm, jobset, kubeflow,
sagemaker, skypilot or mosaicml. If unset, the scheduler is detected from its environment variables."""
JOB = 'DIFFUSION_JOB'
"""Name of the job, the same for every attempt."""
NODES = 'DIFFUSION_NODES'
"""Number of nodes; if the scheduler reports a different number, the job fails with an error."""
PROCESSES_PER_NODE = 'DIFFUSION_PROCESSES_PER_NODE'
"""Number of processes per node, one per GPU."""
GPU = 'DIFFUSION_GPU'
"""GPU model as in planning/gpus.yaml, such as a100-80gb, with which the preflight compares the node's GPUs; `any`
accepts every model, and `none` means a CPU."""
NODE_RANK = 'DIFFUSION_NODE_RANK'
"""Rank of this node, for a scheduler that does not provide it (local)."""
MACHINE = 'DIFFUSION_MACHINE'
"""Name by which operators know the machine, if it differs from the host name (jobset: a pod has a name of its own)."""
MASTER_ADDR = 'DIFFUSION_MASTER_ADDR'
"""Address of the first node, for a scheduler that does not provide it (local, jobset)."""
MASTER_PORT = 'DIFFUSION_MASTER_PORT'
"""Port on the first node for the rendezvous of the ranks."""
PREFLIGHT = 'DIFFUSION_PREFLIGHT'
"""Level of the preflight checks: none, fast or deep."""
ATTEMPT = 'DIFFUSION_ATTEMPT'
"""Number of previous starts of this job by the scheduler, from 0; unset if the scheduler does not count them."""
MAX_RESTARTS = 'DIFFUSION_MAX_RESTARTS'
"""Maximum number of consecutive restarts of a training run without progress, counted in its attempts.jsonl. Preemptions
do not count. If it is exceeded, the node entry point prints a message and exits with 78."""
ON_EXIT = 'DIFFUSION_ON_EXIT'
"""Action after each exit status, such as `75=retry,76=elsewhere,78=stop,*=retry`."""
RESTART_IN_PLACE = 'DIFFUSION_RESTART_IN_PLACE'
"""1 if the scheduler does not restart jobs that end (sagemaker). The node entry point then restarts its workers itself
if the action in ON_EXIT is retry, until MAX_RESTARTS is exceeded."""
STANDBY = 'DIFFUSION_STANDBY'
"""1 if each node keeps standby processes, which have already imported everything that a rank needs. If a rank of a
training run crashes or is killed but all nodes survive, the node entry points turn them into the new ranks."""
EXIT_FILE = 'DIFFUSION_EXIT_FILE'
"""Path of a file on storage shared by all nodes. Each node appends one line when it ends: exit status, host name, cause
and details. The first line with a nonzero status gives the reason why the job ended; nodes after it were killed as a
consequence. The first node also appends `0 HOST begin` when it has recorded the start of an attempt. It appends
`0 HOST progress` when the run has resumed from a newer checkpoint than earlier attempts, so that the scheduler's script
can reset its count of restarts."""
NOTICE_SECONDS = 'DIFFUSION_NOTICE_SECONDS'
"""Time in seconds from the scheduler's SIGTERM (or SIGUSR1) to its SIGKILL, in which the workers must save."""
HANG_SECONDS = 'DIFFUSION_HANG_SECONDS'
"""Minimum time in seconds without a batch after which a run counts as hanging; if unset, the watchdog's default."""
SECRETS = 'DIFFUSION_SECRETS'
"""Secrets in AWS Secrets Manager, as `NAME=secret-id,NAME=secret-id`. The node entry point adds them to the workers'
environment (sagemaker, which cannot pass secrets to a job)."""
MARGIN_SECONDS = 5.0
"""Time reserved for cleanup after the workers have ended or been killed, and before the scheduler's SIGKILL."""


def machine_name(environ: Mapping[str, str]) -> str:
    """Return the name by which operators know this machine: DIFFUSION_MACHINE, else the Slurm node or the host name."""
    return environ.get(MACHINE) or environ.get('SLURMD_NODENAME') or socket.gethostname()


def worker_notice_seconds(environ: Mapping[str, str]) -> float | None:
    """Return the seconds from a worker's stop signal until its node kills it; None if no notice period is set."""
    if NOTICE_SECONDS not in environ:
        return None
    return max(1.0, number(environ, NOTICE_SECONDS, 0) - MARGIN_SECONDS)


def number(environ: Mapping[str, str], name: str, default: float) -> float:
    """Return the number in an environment variable, or the default if the variable is not set."""
    try:
        return float(environ.get(name, default))
    except ValueError:
        raise UserError(f'{name}: {environ[name]!r} is not a number; set it to a number or unset it') from None
