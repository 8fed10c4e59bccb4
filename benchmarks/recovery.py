"""How long a run stands still when something happens to it.

    python benchmarks/recovery.py [batches between two disturbances]

Trains the quickstart's model on OpenMoji pictures at 64 px under `diffusion launch`, as two nodes of one process. For
each disturbance it prints the seconds until the next batch and what they went into; then `diffusion status` of the run.
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
    'callbacks.image_grid.every': '1000000ba',
    'scheduler': None,
    'global_batch': 16,
    'trainer.eval_interval': '1000000ba',
    'trainer.save_interval': '10ba',
}


def main(batches: str = '25') -> None:
    """Run and print."""
    print(heading())
    with tempfile.TemporaryDirectory() as name:
        folder, every = Path(name), int(batches)
        (folder / 'run.py').symlink_to(ROOT / 'run.py')
        code = 'import sys; from diffusion.cli import main; sys.exit(main(sys.argv[1:]))'
        prepare = [sys.executable, '-c', code, 'prepare', 'openmoji', '--out', 'data', '--limit', '200']
        subprocess.run([*prepare, '--sizes', '64'], cwd=folder, env=environment(), check=True, stdout=sys.stderr)
        rows = disturbed_run(folder, [sys.executable, '-c', code, 'launch'], every)
        report = attempts.report(folder / 'runs' / 'disturbed')
    print()
    print('| disturbance | to the end of all processes, s | to the next start, s | to the first batch, s | in all, s |')
    print('|---|---|---|---|---|')
    for disturbance, seconds in rows.items():
        print(f'| {disturbance} | {" | ".join(f"{part:.1f}" for part in (*seconds, sum(seconds)))} |')
    print()
    print(report)


def disturbed_run(folder: Path, launch: list[str], every: int) -> dict[str, tuple[float, float, float]]:
    """Seconds after each disturbance: until all processes had ended, the next attempt began, its first batch began."""
    spec = {'name': 'recovery', 'backend': 'local', 'recipe': str(ROOT / 'yamls' / 'quickstart.yaml')}
    spec |= {'overrides': {**OVERRIDES, 'trainer.max_duration': f'{4 * every}ba'}, 'workdir': str(folder)}
    spec |= {'nodes': 2, 'gpus_per_node': 1, 'preflight': 'none', 'hang_seconds': HANG_SECONDS}
    (folder / 'job.yaml').write_text(yaml.safe_dump(spec))
    run, times = folder / 'runs' / 'disturbed', []
    process = subprocess.Popen([*launch, 'job.yaml'], cwd=folder, env=environment(), stdout=sys.stderr)
    for number, disturb in enumerate((kill_rank, stop_node, hang_rank)):
        wait_for_batch(process, run, (number + 1) * every)
        times.append(time.time())
        disturb(folder)
        while process.poll() is None and len(attempts.read_attempts(run)) < number + 2:
            time.sleep(0.05)
    if process.wait():
        raise SystemExit('the run failed; see above')
    names = ('a process killed', 'a node told to stop', f'a process that hangs, {HANG_SECONDS} s allowed')
    rows, tries = {}, attempts.read_attempts(run)
    for name, at, attempt, following in zip(names, times, tries, tries[1:], strict=False):
        rows[name] = attempt.end - at, following.begin - attempt.end, following.first_at - following.begin
    return rows


def wait_for_batch(process: subprocess.Popen[bytes], run: Path, batch: int) -> None:
    """Until a run has done so many batches."""
    metrics = run / 'metrics.jsonl'
    while not metrics.exists() or batch not in read_metrics(metrics).get(TRAIN_LOSS, {}):
        if process.poll() is not None:
            raise SystemExit(f'{run}: ended before batch {batch}; see above')
        time.sleep(0.02)


def kill_rank(folder: Path) -> None:
    """Kill the second process of a run."""
    os.kill(processes(folder, 'run.py')[1], signal.SIGKILL)


def stop_node(folder: Path) -> None:
    """Tell the second node to stop, as a scheduler does."""
    os.kill(processes(folder, 'diffusion.launch.node')[1], signal.SIGTERM)


def hang_rank(folder: Path) -> None:
    """Stop the second process dead."""
    os.kill(processes(folder, 'run.py')[1], signal.SIGSTOP)


def processes(folder: Path, word: str) -> list[int]:
    """The processes in a folder whose second or third word is this, in the order of their start."""
    found = []
    for entry in Path('/proc').glob('[0-9]*'):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            words = (entry / 'cmdline').read_bytes().decode(errors='replace').split('\0')
            if word in words[1:3] and (entry / 'cwd').resolve() == folder.resolve():
                found.append(int(entry.name))
    return sorted(found)


def environment() -> dict[str, str]:
    """For runs on CPU without network."""
    return os.environ | {'OMP_NUM_THREADS': '1', 'CUDA_VISIBLE_DEVICES': '', 'PYTHONPATH': str(ROOT)}


if __name__ == '__main__':
    main(*sys.argv[1:])
