"""Check this library on a machine with GPUs: tests, step benchmark and short training runs, on one page to send in.

    make gpu-check [GPU_CHECK_ARGS='--retry']
    python benchmarks/gpu_check.py [--out gpu-check] [--retry] [--only WORD ...] [--device cpu] [--list] [--help]

It runs in slices of less than nine minutes. Each has its result in OUT/slices; after an interruption the same command
continues with the slices that have none. OUT/gpu-check.zip holds the page and all results, without host name, user
name, paths and values of environment variables. Without a GPU, or with --device cpu, all slices are small and show only
that everything runs.
"""

import argparse
import datetime
import json
import os
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from gpu_check_page import gpu_check_page
from gpu_check_slices import LIMIT_SECONDS, OFFLINE, make_slices
from gpu_check_summary import count_tests, failed_slices, failed_tests, largest_losses
from redaction import Redaction
from slice_runner import Result, Slice, read_result, run_slices

import diffusion
from diffusion.errors import UserError
from diffusion.storage.atomic import atomic_file, write_atomically
from diffusion.storage.locks import hold_lock

ROOT = Path(__file__).parents[1]
ARCHIVE, PAGE, RESULTS = 'gpu-check.zip', 'gpu-check.html', 'results.json'
GPU, CPU = 'cuda', 'cpu'


def main(argv: Sequence[str] | None = None) -> int:
    """Run the check and return its exit status: 0 if all slices passed, 1 if not, 2 for a mistake of the user."""
    args = parse_arguments(argv)
    try:
        return run(args)
    except UserError as error:
        print(f'error: {error}', file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print('\ninterrupted; the same command continues with the slice that was interrupted', file=sys.stderr)
        return 130


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, default=Path('gpu-check'), help='folder of the results (%(default)s)')
    parser.add_argument('--retry', action='store_true', help='run slices again that failed or took too long')
    parser.add_argument('--only', nargs='+', default=[], metavar='WORD', help='run slices whose name has a WORD')
    parser.add_argument('--device', choices=(GPU, CPU), help='device to check (default: GPUs if there are any)')
    parser.add_argument(
        '--limit-seconds', type=float, default=LIMIT_SECONDS, help='time limit of a slice (default: %(default)g)'
    )
    parser.add_argument('--list', action='store_true', help='list the slices and their state, and run none')
    return parser.parse_args(argv)


def run(args: argparse.Namespace) -> int:
    """Run the slices that have no result, and write the page and the archive.

    Raises:
        UserError: Another check uses the folder, there is no GPU to check, or no slice has the name.
    """
    folder = args.out.absolute()
    with hold_lock(folder / '.lock', lambda: _in_use(args.out)):
        redaction = Redaction(folders={str(folder): 'OUT'})
        machine = redaction.clean(describe_machine(args.device))
        memory_gib = [gpu['memory_gib'] for gpu in machine['gpus']]
        conditions = {'machine': machine, 'version': diffusion.__version__, 'commit': commit()}
        slices = make_slices(folder, memory_gib=memory_gib, limit_seconds=args.limit_seconds)
        chosen = [each for each in slices if not args.only or any(word in each.name for word in args.only)]
        if not chosen:
            words = ' '.join(args.only)
            raise UserError(f'--only {words}: no slice has such a name; --list prints the names')
        if args.list:
            print_states(chosen, folder, conditions)
            return 0

        def write() -> None:
            write_files(folder, slices, conditions)

        results = run_slices(chosen, folder, conditions, redaction, retry=args.retry, finished=write)
        write()
        print_summary(results, folder)
        return 1 if failed_slices(results) else 0


def describe_machine(device: str | None) -> dict[str, Any]:
    """Return versions and GPUs as `gpu_check_machine.py` prints them; no GPUs if the device is the CPU.

    Raises:
        UserError: There is no GPU, although GPUs were asked for, or PyTorch cannot be imported.
    """
    environment = (
        os.environ | OFFLINE | {'PYTHONPATH': str(ROOT)} | ({'CUDA_VISIBLE_DEVICES': ''} if device == CPU else {})
    )
    command = [sys.executable, str(ROOT / 'benchmarks' / 'gpu_check_machine.py')]
    ended = subprocess.run(command, env=environment, capture_output=True, text=True)
    if ended.returncode:
        raise UserError(f'PyTorch does not start on this machine; reinstall it (docs/install.md):\n{ended.stderr}')
    machine = json.loads(ended.stdout.splitlines()[-1])
    if device == GPU and not machine['gpus']:
        raise UserError('--device cuda: torch.cuda finds no GPU; see nvidia-smi, or use --device cpu')
    return machine


def commit() -> str:
    """Return the commit of the repository, followed by + if files have changed since; '' outside of a repository."""

    def git(*words: str) -> str:
        try:
            ended = subprocess.run(['git', '-C', str(ROOT), *words], capture_output=True, text=True)
        except FileNotFoundError:
            return ''
        return ended.stdout.strip() if ended.returncode == 0 else ''

    return git('rev-parse', '--short=12', 'HEAD') + '+' * bool(git('status', '--porcelain', '--untracked-files=no'))


def write_files(folder: Path, slices: Sequence[Slice], conditions: Mapping[str, Any]) -> None:
    """Write the page, and the archive of the page and all results under these conditions."""
    found = (read_result(folder, each.name) for each in slices)
    results = [result for result in found if result is not None and result.conditions == conditions]
    missing = len(slices) - len(results)
    now = f'{datetime.datetime.now(datetime.timezone.utc):%Y-%m-%d %H:%M} UTC'
    page = gpu_check_page(results, conditions, date=now, missing=missing)
    content = {'date': now, 'conditions': conditions, 'missing': missing, 'results': [asdict(each) for each in results]}
    write_atomically(folder / PAGE, page)
    with atomic_file(folder / ARCHIVE) as path, zipfile.ZipFile(path, 'w', zipfile.ZIP_DEFLATED) as archive:
        archive.writestr(PAGE, page)
        archive.writestr(RESULTS, json.dumps(content, indent=1))


def print_states(slices: Sequence[Slice], folder: Path, conditions: Mapping[str, Any]) -> None:
    """Print the name and state of each slice."""
    for each in slices:
        result = read_result(folder, each.name)
        state = 'no result' if result is None else result.status
        if result is not None and result.conditions != conditions:
            state = 'result of other versions, devices or code'
        print(f'{each.name:32} {state}')


def print_summary(results: Sequence[Result], folder: Path) -> None:
    """Print failures, the largest losses, and where the files are."""
    tests, failures = count_tests(results), failed_slices(results)
    print(f'\n{len(results) - len(failures)} of {len(results)} slices passed; ', end='')
    print(f'tests: {tests["passed"]} passed, {tests["failed"]} failed, {tests["skipped"]} skipped')
    for result in failures:
        print(f'  {result.name}: {result.status}, {result.reason}')
    for test in failed_tests(results):
        print(f'  {test["name"]}: {test["reason"][:200]}')
    losses = largest_losses(results)
    if losses:
        print('largest losses of time:')
    for loss in losses:
        print(f'  {100 * loss.share:.1f}% of a step, {1e3 * loss.seconds:.1f} ms ({loss.source}): {loss.name}')
    print(f'page: {folder / PAGE}')
    print(f'file to send in: {folder / ARCHIVE}')


def _in_use(folder: Path) -> None:
    raise UserError(f'--out {folder}: another check is running in this folder; wait for its end, or use another folder')


if __name__ == '__main__':
    sys.exit(main())
