"""Comparison of loss curves on different numbers of processes, under DDP and FSDP2, and with killed and resumed runs.

    python benchmarks/curves.py [image [batches]]

Trains the U-Net of benchmarks/first_quickstart.yaml on OpenMoji images at 32 and 64 px under the composer launcher: on
1, 2 and 4 processes, under DDP and FSDP2, and killed repeatedly with kill -9 and resumed on other numbers of processes.
Prints a Markdown table and plots the curves to an image (default docs/curves.png).
"""

import datetime
import os
import platform
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from diffusion.loggers.metrics_file import TRAIN_LOSS, read_metrics

ROOT = Path(__file__).parents[1]
FSDP2 = ['parallelism.strategy=fsdp2', 'parallelism.checkpoints=sharded']
SETTINGS = [
    'dataset.name=image_text',
    'streams.openmoji.local=data/64px',
    'streams.small={local: data/32px, resolution: 32}',
    'eval_streams.openmoji.local=data/64px',
    'trainer.eval_interval=1000000ba',
    'scheduler=null',
    'optimizer.lr=1.0e-4',  # as in the SD2 recipe
    'trainer.save_interval=10ba',
    'trainer.save_num_checkpoints_to_keep=2',
]
Leg = tuple[int, list[str], float]
"""Number of processes, overrides, and the fraction of the batches after which the run is killed; 1 if it is not."""
RUNS: dict[str, list[Leg]] = {
    '1 process, DDP': [(1, [], 1)],
    '2 processes, DDP': [(2, [], 1)],
    '4 processes, DDP': [(4, [], 1)],
    '2 processes, FSDP2': [(2, FSDP2, 1)],
    'killed on 1, 2 and 4, finished on 2 with FSDP2': [(1, [], 0.23), (2, [], 0.48), (4, [], 0.71), (2, FSDP2, 1)],
    '1 process, killed twice': [(1, [], 0.35), (1, [], 0.77), (1, [], 1)],
}


def main(image: str = str(ROOT / 'docs' / 'curves.png'), batches: str = '120') -> None:
    """Run the benchmark, print its table and plot the curves."""
    curves = {}
    with tempfile.TemporaryDirectory() as folder:
        code = 'import sys; from diffusion.cli import main; sys.exit(main(sys.argv[1:]))'
        prepare = [sys.executable, '-c', code, 'prepare', 'openmoji', '--out', 'data', '--limit', '200']
        subprocess.run([*prepare, '--sizes', '32', '64'], cwd=folder, env=environment(), check=True, stdout=sys.stderr)
        for number, (name, legs) in enumerate(RUNS.items()):
            curves[name] = train(Path(folder), f'run{number}', legs, int(batches))
    print(f'{datetime.date.today()}, {platform.machine()}, {os.cpu_count()} cores, {batches} batches of 32')
    print()
    print('| run | relative difference of the first loss | of all losses, at most | batches equal bit for bit |')
    print('|---|---|---|---|')
    reference = next(iter(curves.values()))
    for name, curve in curves.items():
        differences = [abs(curve[batch] - loss) / loss for batch, loss in reference.items()]
        equal = sum(difference == 0 for difference in differences)
        print(f'| {name} | {differences[0]:.1e} | {max(differences):.1e} | {equal} of {len(reference)} |')
    draw(curves, Path(image))


def train(folder: Path, name: str, legs: list[Leg], batches: int) -> dict[int, float]:
    """Train a run in one or more legs, and return its loss by batch."""
    metrics = folder / 'runs' / name / 'metrics.jsonl'
    for processes, overrides, share in legs:
        launcher = [sys.executable, '-m', 'composer.cli.launcher', '-n', str(processes), str(ROOT / 'run.py')]
        duration = [f'name={name}', f'trainer.max_duration={batches}ba']
        command = [*launcher, str(ROOT / 'benchmarks' / 'first_quickstart.yaml'), *SETTINGS, *duration, *overrides]
        process = subprocess.Popen(
            command, cwd=folder, env=environment(), stdout=sys.stderr, stderr=sys.stderr, start_new_session=True
        )
        while share < 1 and process.poll() is None:
            if metrics.exists() and max(read_metrics(metrics).get(TRAIN_LOSS, {0: 0.0})) >= share * batches:
                # The launcher and its ranks are one process group, so that all of them die at the same moment.
                os.killpg(process.pid, signal.SIGKILL)
                break
            time.sleep(0.1)
        if process.wait() and share == 1:
            raise SystemExit(f'{name}: the run failed; see above')
    return read_metrics(metrics)[TRAIN_LOSS]


def environment() -> dict[str, str]:
    """Return the environment of runs on CPUs without network."""
    threads = str(max(1, (os.cpu_count() or 1) // 2))
    return os.environ | {'OMP_NUM_THREADS': threads, 'CUDA_VISIBLE_DEVICES': '', 'PYTHONPATH': str(ROOT)}


def draw(curves: dict[str, dict[int, float]], image: Path) -> None:
    """Plot the curves on top of each other, and their differences from the first below."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9, 6), layout='constrained')
    FigureCanvasAgg(figure)
    above, below = figure.subplots(2, 1, sharex=True, height_ratios=(3, 2))
    reference = next(iter(curves.values()))
    for number, (name, curve) in enumerate(curves.items()):
        batches = sorted(curve)
        width = 1 + 1.3 * (len(curves) - 1 - number)  # thin curves on top of thick ones, so that all are visible
        above.plot(batches, [curve[batch] for batch in batches], linewidth=width, label=name)
        differences = [max(abs(curve[batch] - reference[batch]) / reference[batch], 1e-9) for batch in batches]
        below.plot(batches, differences, linewidth=1)
    for _, legs in zip(curves, RUNS.values(), strict=True):
        for _, _, share in legs[:-1]:
            above.axvline(share * len(reference), color='gray', linewidth=0.5, linestyle=':')
    above.set(ylabel='training loss', title='Loss curves of six runs with five kill -9 (dotted)')
    above.legend(fontsize='small')
    below.axhline(2.0**-23, color='black', linewidth=0.5, linestyle='--')
    below.annotate('float32 epsilon', (0, 2.0**-23), fontsize='small', va='bottom')
    below.set(yscale='log', ylim=(5e-10, 1e-3), xlabel='batch', ylabel='relative difference to the first')
    image.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(image, dpi=120)


if __name__ == '__main__':
    main(*sys.argv[1:])
