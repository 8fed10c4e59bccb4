"""run.py under the composer launcher."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_mistake_ends_all_processes_with_one_message(write_recipe):
    command = [sys.executable, '-m', 'composer.cli.launcher', '-n', '2', str(ROOT / 'run.py')]
    environment = os.environ | {'OMP_NUM_THREADS': '1', 'CUDA_VISIBLE_DEVICES': ''}
    process = subprocess.run(
        [*command, str(write_recipe('wrong')), 'global_batch=7'],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=100,
    )
    assert process.returncode != 0
    assert process.stdout.count('global_batch: 7 does not divide over 2 devices; use 6 or 8') == 1
    assert 'Traceback' not in process.stdout
