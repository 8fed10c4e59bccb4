"""`python -m diffusion.preflight fast|deep RECIPE [key=value ...]`: run the preflight checks in a process of a job."""

import contextlib
import datetime
import os
import sys
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[reportPrivateImportUsage]  # documented as public

from diffusion.compatibility.torch_versions import kernels_problem
from diffusion.config.load import Recipe, load
from diffusion.exit_codes import CONFIG_ERROR, FAILED, PREEMPTED
from diffusion.launch.gpu_health import (
    Finding,
    downgrade_shared_faults,
    findings_exit_status,
    findings_json,
    findings_table,
)
from diffusion.preflight import collective_checks
from diffusion.preflight.collective_checks import CollectiveLimits, check_ranks, gather
from diffusion.preflight.storage_checks import check_same_store, check_shared_folder, check_write_speed
from diffusion.runs import environment, heartbeats
from diffusion.storage.places import files_of_run

REPORT = 'preflight.json'
TIMEOUT = datetime.timedelta(minutes=5)


class RanksMissing(Exception):
    """Raised if some processes of the job do not join the preflight in time."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the preflight checks, and return this node's exit status: 75 (retry) if only other nodes failed."""
    heartbeats.write_stacks_on_signal()
    level, path, *overrides = list(sys.argv[1:] if argv is None else argv)
    recipe = load(path, overrides)
    try:
        store = join_job(os.environ, TIMEOUT)
    except RanksMissing as error:
        if os.environ['LOCAL_RANK'] == '0':  # print once per node: all processes of a node have the same error
            print(f'error: {error}', file=sys.stderr)
        return FAILED
    findings = run_checks(recipe, deep=level == 'deep')
    if dist.get_rank() == 0:
        print(findings_table(findings), flush=True)
        _write_report(recipe.run_place, findings)
    wait_for_all(store)
    host = environment.machine_name(os.environ)
    # Exit with PREEMPTED on healthy nodes, so that the scheduler excludes only the faulty node and retries the job.
    node_findings = [finding for finding in findings if finding.where.split(' ')[0] in ('', host)]
    return findings_exit_status(node_findings) or (PREEMPTED if findings_exit_status(findings) else 0)


def wait_for_all(store: TCPStore) -> None:
    """Wait until all processes of the job have received the findings; call this before this process exits."""
    # If a process exited earlier, its connections would close, and the last collective would fail in the others.
    # dist.destroy_process_group() is not an alternative: with gloo it can wait forever for a gloo thread.
    rank, ranks = dist.get_rank(), dist.get_world_size()
    # An error means that rank 0, which hosts the store, has exited, which it does only after all ranks have reported.
    with contextlib.suppress(dist.DistError, RuntimeError):
        store.set(f'done/{rank}', '')
        store.wait([f'done/{other}' for other in range(ranks)], TIMEOUT)


def join_job(environ: Mapping[str, str], timeout: datetime.timedelta) -> TCPStore:
    """Create the gloo group of all ranks, and return its store; raise RanksMissing if ranks are late or unreachable."""
    rank, ranks = int(environ['RANK']), int(environ['WORLD_SIZE'])
    address, port = environ['MASTER_ADDR'], int(environ['MASTER_PORT'])
    # Let every rank announce itself in the store first, so that the error can name the missing ranks and nodes:
    # init_process_group would only report a timeout.
    try:
        store = TCPStore(address, port, ranks, rank == 0, timeout, wait_for_workers=False)
        store.set(f'here/{rank}', environment.machine_name(os.environ))
    except (dist.DistError, RuntimeError) as error:
        raise RanksMissing(f'{address}:{port}: cannot connect to rank 0 ({str(error).splitlines()[0]})') from error
    try:
        store.wait([f'here/{other}' for other in range(ranks)], timeout)
    except (dist.DistError, RuntimeError):
        missing = _missing_ranks(store, ranks)
        processes = int(environ['LOCAL_WORLD_SIZE'])
        nodes = sorted({other // processes for other in missing})
        raise RanksMissing(
            f'after {timeout.total_seconds():.0f} s, ranks {", ".join(map(str, missing))} (node '
            f'{", ".join(map(str, nodes))} of {ranks // processes}) have not joined; check that these nodes have '
            f'started and can reach {address}:{port}'
        ) from None
    # Use gloo instead of NCCL, so that a process with a failed GPU can report the failure, and no GPU is used before
    # the GPU checks.
    dist.init_process_group('gloo', store=store, rank=rank, world_size=ranks, timeout=timeout)
    return store


def _missing_ranks(store: TCPStore, ranks: int) -> list[int]:
    try:
        return [rank for rank in range(ranks) if not store.check([f'here/{rank}'])]  # type: ignore[attr-defined]
    except (dist.DistError, RuntimeError) as error:  # rank 0 has printed the missing ranks and exited
        raise RanksMissing('rank 0 stopped waiting for missing ranks; see its message for their numbers') from error


def run_checks(recipe: Recipe, *, deep: bool) -> list[Finding]:
    """Run the preflight checks, longer if `deep`, until one fails; return all processes' findings on every process."""
    node_findings: list[Finding] = []
    size: int | None = None
    kind = os.environ.get(environment.GPU, 'none')
    if os.environ['LOCAL_RANK'] == '0':
        # Import this here, only where it is needed: it imports Streaming, which takes seconds in every process.
        from diffusion.compatibility.nvml import load_nvml
        from diffusion.preflight.node_checks import check_node, checkpoint_bytes

        processes = int(os.environ['LOCAL_WORLD_SIZE'])
        node_findings = check_node(recipe, kind=kind, processes=processes, nvml=load_nvml())
        size = checkpoint_bytes(recipe)
    nodes = dist.get_world_size() // int(os.environ['LOCAL_WORLD_SIZE'])
    findings = downgrade_shared_faults(_gather_findings(node_findings), nodes)
    # Stop after the first stage with a fault: a faulty node may hang in the next collective, and hide its finding.
    if findings_exit_status(findings):
        return findings
    # Other tasks and Composer's own saver do not need a shared folder or a bucket.
    if recipe.task == 'train' and 'save_folder' not in recipe.trainer:
        shared = check_shared_folder(recipe.run_dir) if recipe.run_url is None else check_same_store(recipe.run_url)
        findings += downgrade_shared_faults(shared, nodes)
        if findings_exit_status(findings):
            return findings
        findings += check_write_speed(recipe, gather(size)[0], deep=deep)
        if findings_exit_status(findings):
            return findings
    device = 'cpu' if kind == 'none' else 'cuda'
    if device == 'cuda':
        findings += downgrade_shared_faults(_gather_findings(check_cuda(int(os.environ['LOCAL_RANK']))), nodes)
        if findings_exit_status(findings):
            return findings
    group: Any = dist.group.WORLD
    if device == 'cuda':
        group = dist.new_group(timeout=collective_checks.TIMEOUT, backend='nccl')
    assert group is not None
    return findings + check_ranks(device, CollectiveLimits.of(device, deep=deep), group)


def check_cuda(index: int) -> list[Finding]:
    """Return a list with a finding if CUDA cannot use this process's GPU although NVML lists it; else []."""
    where = f'{environment.machine_name(os.environ)} rank {os.environ["RANK"]}'
    try:
        # Check before the first kernel is launched, whose error ("no kernel image is available") suggests no remedy.
        if (problem := kernels_problem(index)) is not None:
            return [Finding('cuda', False, problem, CONFIG_ERROR, where=where)]
        torch.cuda.set_device(index)
        torch.zeros(1, device='cuda').item()
    except (RuntimeError, AssertionError) as error:  # AssertionError: torch has no CUDA
        return [Finding('cuda', False, ' '.join(str(error).split())[:300], where=where)]
    return []


def _gather_findings(local: list[Finding]) -> list[Finding]:
    return [finding for findings in gather(local) for finding in findings]


def _write_report(run: str, findings: Sequence[Finding]) -> None:
    files = files_of_run(run)
    try:
        files.write(REPORT, findings_json(findings))
    except OSError as error:  # not fatal: an unwritable folder is already a finding
        print(f'warning: {files.locate(REPORT)} cannot be written ({error})', file=sys.stderr)


if __name__ == '__main__':
    status = main()
    sys.stdout.flush()
    sys.stderr.flush()
    # Skip the cleanup of process groups and drivers at interpreter exit, which can hang on broken hardware.
    os._exit(status)
