"""Benchmark of `make quickstart` in fresh clones: time to install and train, and quality of the result.

    python benchmarks/quickstart.py [runs [folder]]

Prints a Markdown table, and copies samples.png of the first run to the folder. Each run clones the last commit of the
repository into a temporary folder and installs all dependencies again; the same seed must give the same figures.
"""

import json
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from machine import heading

ROOT = Path(__file__).parents[1]


def main(runs: int, images: str | None = None) -> None:
    """Run the benchmark and print its table."""
    print(heading())
    print()
    print('| run | install, minutes | total, minutes | retrieval top-1 | validation loss |')
    print('|---|---|---|---|---|')
    for number in range(1, runs + 1):
        with tempfile.TemporaryDirectory() as folder:
            clone = Path(folder) / 'diffusion'
            subprocess.run(['git', 'clone', '--quiet', str(ROOT), str(clone)], check=True)
            started = time.monotonic()
            make(clone, '.venv/installed')
            installed = time.monotonic()
            make(clone, 'quickstart')
            done = time.monotonic()
            figures = json.loads((clone / 'runs/quickstart/evaluation.json').read_text())
            minutes = f'{(installed - started) / 60:.1f} | {(done - started) / 60:.1f}'
            if images is not None and number == 1:
                shutil.copy(clone / 'runs/quickstart/samples.png', images)
            print(f'| {number} | {minutes} | {figures["retrieval_top1"]:.2f} | {figures["loss"]:.6f} |', flush=True)


def make(folder: Path, target: str) -> None:
    """Run make with its output on stderr, so that stdout has only the table."""
    subprocess.run(['make', target], cwd=folder, check=True, stdout=sys.stderr)


if __name__ == '__main__':
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1, *sys.argv[2:3])
