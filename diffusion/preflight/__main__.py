"""`python -m diffusion.preflight fast|deep RECIPE [key=value ...]`, in every process of a job, before training."""

import contextlib
import datetime
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from diffusion.config.load import Recipe, load
from diffusion.exit_codes import FAILED, PREEMPTED
from diffusion.launch import environment, heartbeat
from diffusion.launch.findings import Finding, excuse, findings_exit_status, findings_json, findings_table
from diffusion.preflight import collective_checks
from diffusion.preflight.collective_checks import CollectiveLimits, check_together
from diffusion.storage.atomic import write_whole

REPORT = 'preflight.json'
TIMEOUT = datetime.timedelta(minutes=5)
"""For the slowest node to come."""


class Absent(Exception):
    """Some processes have not come."""


def main(argv: Sequence[str] | None = None) -> int:
    """Check; the exit status is this node's own, or 75 where only others are at fault."""
    heartbeat.begin()
    level, path, *overrides = list(sys.argv[1:] if argv is None else argv)
    recipe = load(path, overrides)
    try:
        store = meet(os.environ, TIMEOUT)
    except Absent as error:
        if os.environ['LOCAL_RANK'] == '0':  # all processes of a node see the same
            print(f'error: {error}', file=sys.stderr)
        return FAILED
    found = run_checks(recipe, deep=level == 'deep')
    if dist.get_rank() == 0:
        print(findings_table(found), flush=True)
        _keep(recipe, found)
    leave_together(store)
    own = [finding for finding in found if finding.where.split(' ')[0] in ('', environment.machine_name(os.environ))]
    return findings_exit_status(own) or (PREEMPTED if findings_exit_status(found) else 0)


def leave_together(store: TCPStore) -> None:
    """Wait until all have all findings: whoever ends first would break the others' last collective.

    The process group is not destroyed: on gloo that can wait for ever for a thread of its own.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with contextlib.suppress(dist.DistError, RuntimeError):  # the store has gone: the first process had seen all end
        store.set(f'done/{rank}', '')
        store.wait([f'done/{other}' for other in range(ranks)], TIMEOUT)


def meet(environ: Mapping[str, str], timeout: datetime.timedelta) -> TCPStore:
    """Make the process group of all processes of the job; the store that they met at.

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
        absent = _absent(store, ranks)
        processes = int(environ['LOCAL_WORLD_SIZE'])
        nodes = sorted({other // processes for other in absent})
        raise Absent(
            f'after {timeout.total_seconds():.0f} s, ranks {", ".join(map(str, absent))} (node '
            f'{", ".join(map(str, nodes))} of {ranks // processes}) are not here; has their node started, and can it '
            f'reach {address}:{port}?'
        ) from None
    # CPUs alone: a process whose GPU is lost can still say so, and nobody uses a GPU before they are looked at.
    dist.init_process_group('gloo', store=store, rank=rank, world_size=ranks, timeout=timeout)
    return store


def _absent(store: TCPStore, ranks: int) -> list[int]:
    try:
        return [rank for rank in range(ranks) if not store.check([f'here/{rank}'])]  # type: ignore[attr-defined]
    except (dist.DistError, RuntimeError) as error:  # the first process was the first to give up, and has said who
        raise Absent('the first process has given up waiting for others; its message says which') from error


def run_checks(recipe: Recipe, *, deep: bool) -> list[Finding]:
    """What all processes have found, the same in each."""
    own: list[Finding] = []
    kind = os.environ.get(environment.GPU, 'none')
    if os.environ['LOCAL_RANK'] == '0':
        # Imports Streaming, which takes seconds of each process that does.
        from diffusion.launch.gpu_health import load_nvml
        from diffusion.preflight.node_checks import check_node

        processes = int(os.environ['LOCAL_WORLD_SIZE'])
        own = check_node(recipe, kind=kind, processes=processes, nvml=load_nvml())
    nodes = dist.get_world_size() // int(os.environ['LOCAL_WORLD_SIZE'])
    found = excuse(_all(own), nodes)
    if findings_exit_status(found):
        return found  # who is not fit alone may hang in what follows
    device = 'cpu' if kind == 'none' else 'cuda'
    if device == 'cuda':
        found += excuse(_all(cuda_starts(int(os.environ['LOCAL_RANK']))), nodes)
        if findings_exit_status(found):
            return found
    group = dist.group.WORLD if device == 'cpu' else dist.new_group(timeout=collective_checks.TIMEOUT, backend='nccl')
    assert group is not None
    return found + check_together(device, CollectiveLimits.of(device, deep=deep), group)


def cuda_starts(index: int) -> list[Finding]:
    """What is wrong where a process cannot use its GPU, though the driver sees it."""
    where = f'{environment.machine_name(os.environ)} rank {os.environ["RANK"]}'
    try:
        torch.cuda.set_device(index)
        torch.zeros(1, device='cuda').item()
    except (RuntimeError, AssertionError) as error:  # of a torch without CUDA, the latter
        return [Finding('cuda', False, ' '.join(str(error).split())[:300], where=where)]
    return []


def _all(own: list[Finding]) -> list[Finding]:
    """What all processes have found."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return [finding for findings in everyone for finding in findings]


def _keep(recipe: Recipe, found: Sequence[Finding]) -> None:
    try:
        write_whole(recipe.run_dir / REPORT, findings_json(found))
    except OSError as error:  # it may be what was found
        print(f'warning: {recipe.run_dir / REPORT}: cannot be written ({error})', file=sys.stderr)


if __name__ == '__main__':
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # past the ends of process groups and drivers, which can hang where something is broken
