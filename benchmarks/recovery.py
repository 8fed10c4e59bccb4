"""Benchmark of recovery time: seconds without training after a killed process, a stopped node and a hang.

    python benchmarks/recovery.py [batches between two faults]

Trains the U-Net of benchmarks/first_quickstart.yaml on OpenMoji images at 64 px under `diffusion launch`, as two nodes
with one process each. For each fault it prints the seconds until the next batch, split into parts, and finally
`diffusion status` of the run.
"""

import contextlib
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import yaml
from machine import heading

from diffusion.launch import attempts
from diffusion.loggers.metrics_file import TRAIN_LOSS, read_metrics

ROOT = Path(__file__).parents[1]
HANG_SECONDS = 30
OVERRIDES = {
    'name': 'disturbed',
    'dataset.name': 'image_text',
    'streams.openmoji.local': 'data/64px',
    'eval_streams.openmoji.local': 'data/64px',
    'scheduler': None,
    'global_batch': 16,
    'trainer.eval_interval': '1000000ba',
    'trainer.save_interval': '10ba',
}


def main(batches: str = '25') -> None:
    """Run the benchmark and print its table."""
    print(heading())
    with tempfile.TemporaryDirectory() as name:
        folder, every = Path(name), int(batches)
        (folder / 'run.py').symlink_to(ROOT / 'run.py')
        code = 'import sys; from diffusion.cli import main; sys.exit(main(sys.argv[1:]))'
        prepare = [sys.executable, '-c', code, 'prepare', 'openmoji', '--out', 'data', '--limit', '200']
        subprocess.run([*prepare, '--sizes', '64'], cwd=folder, env=environment(), check=True, stdout=sys.stderr)
        rows = run_with_faults(folder, [sys.executable, '-c', code, 'launch'], every)
        report = '\n'.join(attempts.attempts_table(attempts.read_attempts(folder / 'runs' / 'disturbed')))
    print()
    print('| fault | until all processes ended, s | until the next start, s | until its first batch, s | total, s |')
    print('|---|---|---|---|---|')
    for fault, seconds in rows.items():
        print(f'| {fault} | {" | ".join(f"{part:.1f}" for part in (*seconds, sum(seconds)))} |')
    print()
    print(report)


def run_with_faults(folder: Path, launch: list[str], every: int) -> dict[str, tuple[float, float, float]]:
    """Train with a fault after every so many batches.

    Returns:
        Seconds by fault: from the fault until all processes had ended, from then until the next attempt started, and
        from its start to its first batch.
    """
    spec = {'name': 'recovery', 'backend': 'local', 'recipe': str(ROOT / 'benchmarks' / 'first_quickstart.yaml')}
    spec |= {'overrides': {**OVERRIDES, 'trainer.max_duration': f'{4 * every}ba'}, 'workdir': str(folder)}
    spec |= {'nodes': 2, 'gpus_per_node': 1, 'preflight': 'none', 'hang_seconds': HANG_SECONDS}
    (folder / 'job.yaml').write_text(yaml.safe_dump(spec))
    run, times = folder / 'runs' / 'disturbed', []
    process = subprocess.Popen([*launch, 'job.yaml'], cwd=folder, env=environment(), stdout=sys.stderr)
    for number, inject_fault in enumerate((kill_rank, stop_node, hang_rank)):
        wait_for_batch(process, run, (number + 1) * every)
        times.append(time.time())
        inject_fault(folder)
        while process.poll() is None and len(attempts.read_attempts(run)) < number + 2:
            time.sleep(0.05)
    if process.wait():
        raise SystemExit('the run failed; see above')
    names = ('process killed', 'node stopped by SIGTERM', f'process hangs (timeout {HANG_SECONDS} s)')
    rows, recorded = {}, attempts.read_attempts(run)
    for name, fault_time, attempt, following in zip(names, times, recorded, recorded[1:], strict=False):
        rows[name] = attempt.end - fault_time, following.begin - attempt.end, following.first_at - following.begin
    return rows


def wait_for_batch(process: subprocess.Popen[bytes], run: Path, batch: int) -> None:
    """Wait until a run has trained this many batches."""
    metrics = run / 'metrics.jsonl'
    while not metrics.exists() or batch not in read_metrics(metrics).get(TRAIN_LOSS, {}):
        if process.poll() is not None:
            raise SystemExit(f'{run}: ended before batch {batch}; see above')
        time.sleep(0.02)


def kill_rank(folder: Path) -> None:
    """Kill the second process of a run."""
    os.kill(processes(folder, 'run.py')[1], signal.SIGKILL)


def stop_node(folder: Path) -> None:
    """Send SIGTERM to the second node, as a scheduler does to stop it."""
    os.kill(processes(folder, 'diffusion.launch.node')[1], signal.SIGTERM)


def hang_rank(folder: Path) -> None:
    """Suspend the second process, so that it hangs."""
    os.kill(processes(folder, 'run.py')[1], signal.SIGSTOP)


def processes(folder: Path, word: str) -> list[int]:
    """Return the IDs of the processes in a folder whose second or third command-line word is this, sorted."""
    found = []
    for entry in Path('/proc').glob('[0-9]*'):
        with contextlib.suppress(OSError):  # a process may end while it is inspected
            words = (entry / 'cmdline').read_bytes().decode(errors='replace').split('\0')
            if word in words[1:3] and (entry / 'cwd').resolve() == folder.resolve():
                found.append(int(entry.name))
    return sorted(found)


def environment() -> dict[str, str]:
    """Return the environment of runs on CPUs without network."""
    return os.environ | {'OMP_NUM_THREADS': '1', 'CUDA_VISIBLE_DEVICES': '', 'PYTHONPATH': str(ROOT)}


if __name__ == '__main__':
    main(*sys.argv[1:])
