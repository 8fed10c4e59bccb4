"""`python -m diffusion.preflight fast|deep RECIPE [key=value ...]`, in every process of a job, before training."""

import datetime
import os
import socket
import sys
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from diffusion.config import Recipe, load
from diffusion.exits import PREEMPTED
from diffusion.files import write_whole
from diffusion.launch import environment
from diffusion.preflight.alone import check_node
from diffusion.preflight.findings import Finding, as_json, status_of, table
from diffusion.preflight.gpus import load_nvml
from diffusion.preflight.together import Limits, check_together

REPORT = 'preflight.json'
TIMEOUT = datetime.timedelta(minutes=5)
"""For the slowest node to come."""


def main(argv: Sequence[str] | None = None) -> int:
    """Check; the exit status is this node's own, or 75 where only others are at fault."""
    level, path, *overrides = list(sys.argv[1:] if argv is None else argv)
    recipe = load(path, overrides)
    found = run(recipe, deep=level == 'deep')
    if dist.get_rank() == 0:
        print(table(found), flush=True)
        write_whole(recipe.run_dir / REPORT, as_json(found))
    dist.barrier()
    dist.destroy_process_group()
    own = [finding for finding in found if finding.where.split(' ')[0] in ('', socket.gethostname())]
    return status_of(own) or (PREEMPTED if status_of(found) else 0)


def run(recipe: Recipe, *, deep: bool) -> list[Finding]:
    """What all processes have found, the same in each."""
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    if device == 'cuda':
        torch.cuda.set_device(int(os.environ['LOCAL_RANK']))
    # Of both: one that has lost its GPU can still say so.
    dist.init_process_group('cpu:gloo,cuda:nccl' if device == 'cuda' else 'gloo', timeout=TIMEOUT)
    own: list[Finding] = []
    if os.environ['LOCAL_RANK'] == '0':
        kind, processes = os.environ.get(environment.GPU, 'none'), int(os.environ['LOCAL_WORLD_SIZE'])
        own = check_node(recipe, kind=kind, processes=processes, nvml=load_nvml())
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    found = [finding for findings in everyone for finding in findings]
    if status_of(found):
        return found  # who is not fit alone may hang in what follows
    return found + check_together(device, Limits.of(device, deep=deep))


if __name__ == '__main__':
    sys.exit(main())
