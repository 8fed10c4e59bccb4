"""run.py under the composer launcher."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def start(processes: int, *arguments: str) -> subprocess.Popen[str]:
    launcher = [sys.executable, '-m', 'composer.cli.launcher', '-n', str(processes)]
    environment = os.environ | {'OMP_NUM_THREADS': '1', 'CUDA_VISIBLE_DEVICES': ''}
    return subprocess.Popen(
        [*launcher, str(ROOT / 'run.py'), *arguments],
        cwd=ROOT,
        env=environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


@pytest.mark.slow
def test_mistake_ends_all_processes_with_one_message(write_recipe):
    process = start(2, str(write_recipe('wrong')), 'global_batch=7')
    output, _ = process.communicate(timeout=100)
    assert process.returncode != 0
    assert output.count('global_batch: 7 does not divide over 2 devices; use 6 or 8') == 1
    assert 'Traceback' not in output
