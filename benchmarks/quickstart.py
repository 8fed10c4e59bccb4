"""`make quickstart` in fresh clones: how long a stranger waits, and what they get.

    python benchmarks/quickstart.py [runs [folder]]

Prints a markdown table; the first run's samples.png is copied into the folder. Each run clones the repository's last
commit into a temporary folder and installs everything anew; the same seed must give the same figures.
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


def main(runs: int, pictures: str | None = None) -> None:
    """Run and print."""
    print(heading())
    print()
    print('| run | install, minutes | in all, minutes | retrieval top-1 | validation loss |')
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
            if pictures is not None and number == 1:
                shutil.copy(clone / 'runs/quickstart/samples.png', pictures)
            print(f'| {number} | {minutes} | {figures["retrieval_top1"]:.2f} | {figures["loss"]:.6f} |', flush=True)


def make(folder: Path, target: str) -> None:
    """Make a target; its output goes to stderr, so that stdout is the table alone."""
    subprocess.run(['make', target], cwd=folder, check=True, stdout=sys.stderr)


if __name__ == '__main__':
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 1, *sys.argv[2:3])
