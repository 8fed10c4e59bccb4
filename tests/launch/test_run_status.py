"""`diffusion status` of runs that `diffusion launch` did not start."""

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from diffusion.errors import UserError
from diffusion.launch import run_lock
from diffusion.launch.run_status import last_loss, report


@pytest.fixture
def run(tmp_path: Path) -> Path:
    lines = [{'step': step, 'loss/train/total': 1 / (step + 1), 'other': 5.0} for step in range(3000)]
    lines += [{'step': 3000, 'metrics/eval/loss': 0.5}, {'step': None, 'x': 1.0}]
    text = ''.join(json.dumps(line) + '\n' for line in lines)
    (tmp_path / 'metrics.jsonl').write_text(text + '{"step": 3001, "loss/tr')
    (tmp_path / 'recipe.yaml').write_text('trainer: {max_duration: 5000ba}')
    for name in ('ba900', 'ba1000', 'ba1000.damaged', '.ba2000.unfinished'):
        (tmp_path / name).mkdir()
    return tmp_path


def test_status_has_batch_loss_checkpoint_and_process(run):
    with run_lock.hold_run_lock(run):
        text = report(run)
    assert '  batch              3000 of 5000ba\n' in text
    assert f'  last loss          {1 / 3000:.4f}\n' in text
    assert f'  newest checkpoint  {run}/ba1000\n' in text
    assert f'process {os.getpid()} on ' in text and ': running\n' in text
    assert 'none, the run has ended' in report(run)


def test_status_tells_that_the_process_was_killed(run):
    program = 'import sys, time, pathlib; from diffusion.launch import run_lock\n'
    program += 'with run_lock.hold_run_lock(pathlib.Path(sys.argv[1])): print("held", flush=True); time.sleep(100)'
    process = subprocess.Popen([sys.executable, '-c', program, str(run)], stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline() == b'held\n'
    assert ': running\n' in report(run)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert f'process {process.pid} on ' in report(run)
    assert 'ended without releasing the run' in report(run)


def test_last_sign_of_life_is_the_newest_file(run):
    for path in run.iterdir():
        os.utime(path, (1e9, 1e9))
    assert 'last sign of life  2001-09-0' in report(run)
    os.utime(run / 'metrics.jsonl')
    assert report(run).endswith(' s ago')


def test_status_of_a_run_with_few_files(tmp_path):
    with pytest.raises(UserError, match=r'has no metrics\.jsonl, run\.lock or checkpoint'):
        report(tmp_path)
    assert last_loss(tmp_path / 'metrics.jsonl') is None
    (tmp_path / 'ba7').mkdir()
    assert '  batch              7 or later\n' in report(tmp_path)
    assert '  last loss          unknown\n' in report(tmp_path)
