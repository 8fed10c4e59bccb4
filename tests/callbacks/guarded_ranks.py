"""Two gloo ranks of `guarded_run`, without a launcher that would hide their exit statuses."""

import os
import subprocess
import sys
from pathlib import Path

from ranks import free_port

PROGRAM = Path(__file__).with_name('guarded_run.py')


def run_two(what: str, folder: Path) -> tuple[list[int], list[str]]:
    """Exit statuses and outputs."""
    shared = {
        'WORLD_SIZE': '2',
        'LOCAL_WORLD_SIZE': '2',
        'NODE_RANK': '0',
        'MASTER_ADDR': '127.0.0.1',
        'MASTER_PORT': str(free_port()),
        'OMP_NUM_THREADS': '1',
        'CUDA_VISIBLE_DEVICES': '',
        'PYTHONPATH': str(PROGRAM.parents[2]),
    }
    ranks = [
        subprocess.Popen(
            [sys.executable, str(PROGRAM), what, str(folder)],
            env=os.environ | shared | {'RANK': str(rank), 'LOCAL_RANK': str(rank)},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(2)
    ]
    try:
        outputs = [rank.communicate(timeout=300)[0] for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
    return [rank.returncode for rank in ranks], outputs
