"""`python -m diffusion.preflight fast|deep RECIPE [key=value ...]`, in every process of a job, before training."""

import datetime
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from diffusion.config import Recipe, load
from diffusion.exits import FAILED, PREEMPTED
from diffusion.files import write_whole
from diffusion.launch import environment, reports
from diffusion.preflight.findings import Finding, as_json, status_of, table
from diffusion.preflight.together import Limits, check_together

REPORT = 'preflight.json'
TIMEOUT = datetime.timedelta(minutes=5)
"""For the slowest node to come."""
NCCL_TIMEOUT = datetime.timedelta(minutes=2)
"""For a sum over all GPUs, whose first one finds the ways between them; then NCCL ends the process."""


class Absent(Exception):
    """Some processes have not come."""


def main(argv: Sequence[str] | None = None) -> int:
    """Check; the exit status is this node's own, or 75 where only others are at fault."""
    reports.begin()
    level, path, *overrides = list(sys.argv[1:] if argv is None else argv)
    recipe = load(path, overrides)
    try:
        meet(os.environ, TIMEOUT)
    except Absent as error:
        if os.environ['LOCAL_RANK'] == '0':  # all processes of a node see the same
            print(f'error: {error}', file=sys.stderr)
        return FAILED
    found = check(recipe, deep=level == 'deep')
    if dist.get_rank() == 0:
        print(table(found), flush=True)
        _keep(recipe, found)
    dist.barrier()
    dist.destroy_process_group()
    own = [finding for finding in found if finding.where.split(' ')[0] in ('', environment.machine_name(os.environ))]
    return status_of(own) or (PREEMPTED if status_of(found) else 0)


def meet(environ: Mapping[str, str], timeout: datetime.timedelta) -> None:
    """Make the process group of all processes of the job.

    Raises:
        Absent: Some did not come in time; it says which.
    """
    rank, ranks = int(environ['RANK']), int(environ['WORLD_SIZE'])
    address, port = environ['MASTER_ADDR'], int(environ['MASTER_PORT'])
    try:
        store = TCPStore(address, port, ranks, rank == 0, timeout, wait_for_workers=False)
        store.set(f'here/{rank}', environment.machine_name(os.environ))
    except (dist.DistError, RuntimeError) as error:
        raise Absent(f'{address}:{port}: the first process does not answer ({str(error).splitlines()[0]})') from error
    try:
        store.wait([f'here/{other}' for other in range(ranks)], timeout)
    except (dist.DistError, RuntimeError):
        absent = [other for other in range(ranks) if not store.check([f'here/{other}'])]  # type: ignore[attr-defined] - its stub lacks it
        processes = int(environ['LOCAL_WORLD_SIZE'])
        nodes = sorted({other // processes for other in absent})
        raise Absent(
            f'after {timeout.total_seconds():.0f} s, ranks {", ".join(map(str, absent))} (node '
            f'{", ".join(map(str, nodes))} of {ranks // processes}) are not here; has their node started, and can it '
            f'reach {address}:{port}?'
        ) from None
    # CPUs alone: a process whose GPU is lost can still say so, and nobody uses a GPU before they are looked at.
    dist.init_process_group('gloo', store=store, rank=rank, world_size=ranks, timeout=timeout)


def check(recipe: Recipe, *, deep: bool) -> list[Finding]:
    """What all processes have found, the same in each."""
    own: list[Finding] = []
    if os.environ['LOCAL_RANK'] == '0':
        # Imports Streaming, which takes seconds of each process that does.
        from diffusion.preflight.alone import check_node
        from diffusion.preflight.gpus import load_nvml

        kind, processes = os.environ.get(environment.GPU, 'none'), int(os.environ['LOCAL_WORLD_SIZE'])
        own = check_node(recipe, kind=kind, processes=processes, nvml=load_nvml())
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    found = [finding for findings in everyone for finding in findings]
    if status_of(found):
        return found  # who is not fit alone may hang in what follows
    device, group = 'cpu', dist.group.WORLD
    if torch.cuda.is_available():
        torch.cuda.set_device(int(os.environ['LOCAL_RANK']))
        device, group = 'cuda', dist.new_group(timeout=NCCL_TIMEOUT, backend='nccl')
    return found + check_together(device, Limits.of(device, deep=deep), group)


def _keep(recipe: Recipe, found: Sequence[Finding]) -> None:
    try:
        write_whole(recipe.run_dir / REPORT, as_json(found))
    except OSError as error:  # it may be what was found
        print(f'warning: {recipe.run_dir / REPORT}: cannot be written ({error})', file=sys.stderr)


if __name__ == '__main__':
    sys.exit(main())
