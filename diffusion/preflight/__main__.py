"""`python -m diffusion.preflight fast|deep RECIPE [key=value ...]`, run in every process of a job before training."""

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
from diffusion.launch import environment, heartbeat_file
from diffusion.launch.findings import (
    Finding,
    blame_no_node_for_shared_faults,
    findings_exit_status,
    findings_json,
    findings_table,
)
from diffusion.preflight import collective_checks
from diffusion.preflight.collective_checks import CollectiveLimits, check_ranks
from diffusion.storage.atomic import write_whole

REPORT = 'preflight.json'
TIMEOUT = datetime.timedelta(minutes=5)
"""Time for the slowest node to join."""


class RanksMissing(Exception):
    """Some processes have not joined."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks; return this node's exit status, or 75 if only other nodes are at fault."""
    heartbeat_file.write_stacks_on_signal()
    level, path, *overrides = list(sys.argv[1:] if argv is None else argv)
    recipe = load(path, overrides)
    try:
        store = join_job(os.environ, TIMEOUT)
    except RanksMissing as error:
        if os.environ['LOCAL_RANK'] == '0':  # all processes of a node have the same error
            print(f'error: {error}', file=sys.stderr)
        return FAILED
    found = run_checks(recipe, deep=level == 'deep')
    if dist.get_rank() == 0:
        print(findings_table(found), flush=True)
        _write_report(recipe, found)
    wait_for_all(store)
    own = [finding for finding in found if finding.where.split(' ')[0] in ('', environment.machine_name(os.environ))]
    return findings_exit_status(own) or (PREEMPTED if findings_exit_status(found) else 0)


def wait_for_all(store: TCPStore) -> None:
    """Wait until all processes have the findings: one that ended earlier would break the last collective of the others.

    The process group is not destroyed, because with gloo that can wait forever for a thread of its own.
    """
    rank, ranks = dist.get_rank(), dist.get_world_size()
    with contextlib.suppress(dist.DistError, RuntimeError):  # the store is gone: the first process had seen all others
        store.set(f'done/{rank}', '')
        store.wait([f'done/{other}' for other in range(ranks)], TIMEOUT)


def join_job(environ: Mapping[str, str], timeout: datetime.timedelta) -> TCPStore:
    """Make the gloo process group of all processes of the job, and return its store.

    Raises:
        RanksMissing: Some processes did not join in time; the message names them.
    """
    rank, ranks = int(environ['RANK']), int(environ['WORLD_SIZE'])
    address, port = environ['MASTER_ADDR'], int(environ['MASTER_PORT'])
    try:
        store = TCPStore(address, port, ranks, rank == 0, timeout, wait_for_workers=False)
        store.set(f'here/{rank}', environment.machine_name(os.environ))
    except (dist.DistError, RuntimeError) as error:
        raise RanksMissing(
            f'{address}:{port}: the first process does not answer ({str(error).splitlines()[0]})'
        ) from error
    try:
        store.wait([f'here/{other}' for other in range(ranks)], timeout)
    except (dist.DistError, RuntimeError):
        missing = _missing_ranks(store, ranks)
        processes = int(environ['LOCAL_WORLD_SIZE'])
        nodes = sorted({other // processes for other in missing})
        raise RanksMissing(
            f'after {timeout.total_seconds():.0f} s, ranks {", ".join(map(str, missing))} (node '
            f'{", ".join(map(str, nodes))} of {ranks // processes}) are not here; has their node started, and can it '
            f'reach {address}:{port}?'
        ) from None
    # gloo: a process whose GPU is lost can still report it, and no GPU is used before the checks of the GPUs.
    dist.init_process_group('gloo', store=store, rank=rank, world_size=ranks, timeout=timeout)
    return store


def _missing_ranks(store: TCPStore, ranks: int) -> list[int]:
    try:
        return [rank for rank in range(ranks) if not store.check([f'here/{rank}'])]  # type: ignore[attr-defined]
    except (dist.DistError, RuntimeError) as error:  # the first process has given up, and has printed who is missing
        raise RanksMissing('the first process has given up waiting for others; its message says which') from error


def run_checks(recipe: Recipe, *, deep: bool) -> list[Finding]:
    """Run all checks; every process returns the findings of all."""
    own: list[Finding] = []
    kind = os.environ.get(environment.GPU, 'none')
    if os.environ['LOCAL_RANK'] == '0':
        # This imports Streaming, which would take seconds in every process.
        from diffusion.launch.gpu_health import load_nvml
        from diffusion.preflight.node_checks import check_node

        processes = int(os.environ['LOCAL_WORLD_SIZE'])
        own = check_node(recipe, kind=kind, processes=processes, nvml=load_nvml())
    nodes = dist.get_world_size() // int(os.environ['LOCAL_WORLD_SIZE'])
    found = blame_no_node_for_shared_faults(_gather(own), nodes)
    if findings_exit_status(found):
        return found  # a node with a fault may hang in a collective
    device = 'cpu' if kind == 'none' else 'cuda'
    if device == 'cuda':
        found += blame_no_node_for_shared_faults(_gather(check_cuda(int(os.environ['LOCAL_RANK']))), nodes)
        if findings_exit_status(found):
            return found
    group = dist.group.WORLD if device == 'cpu' else dist.new_group(timeout=collective_checks.TIMEOUT, backend='nccl')
    assert group is not None
    return found + check_ranks(device, CollectiveLimits.of(device, deep=deep), group)


def check_cuda(index: int) -> list[Finding]:
    """Find out if this process can use its GPU; the driver may see a GPU on which CUDA does not start."""
    where = f'{environment.machine_name(os.environ)} rank {os.environ["RANK"]}'
    try:
        torch.cuda.set_device(index)
        torch.zeros(1, device='cuda').item()
    except (RuntimeError, AssertionError) as error:  # the latter from a torch without CUDA
        return [Finding('cuda', False, ' '.join(str(error).split())[:300], where=where)]
    return []


def _gather(own: list[Finding]) -> list[Finding]:
    """Return the findings of all processes."""
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, own)
    return [finding for findings in everyone for finding in findings]


def _write_report(recipe: Recipe, found: Sequence[Finding]) -> None:
    try:
        write_whole(recipe.run_dir / REPORT, findings_json(found))
    except OSError as error:  # which may be one of the findings
        print(f'warning: {recipe.run_dir / REPORT}: cannot be written ({error})', file=sys.stderr)


if __name__ == '__main__':
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)  # skips the cleanup of process groups and drivers, which can hang on broken hardware
