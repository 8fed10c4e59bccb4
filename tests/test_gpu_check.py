"""The GPU check: slices with a limit each, resumption, its page, and the file to send in."""

import os
import signal
import subprocess
import sys
import time
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[1]
BENCHMARKS = ROOT / 'benchmarks'
CONDITIONS = {'version': '1'}


@pytest.fixture(autouse=True)
def _benchmarks_on_path(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))


@pytest.fixture
def runner():
    return import_module('slice_runner')


@pytest.fixture
def redaction():
    return import_module('redaction').Redaction({}, host='node-17', user='someone')


def make_slice(runner, name: str, code: str, *, limit_seconds: float = 60.0, kind: str = 'step') -> Any:
    """Return a slice that runs Python code; DATA is the path of the file for its figures."""
    prefix = 'import pathlib, sys, time; DATA = pathlib.Path(sys.argv[1]); '
    return runner.Slice(name, f'slice {name}', [sys.executable, '-c', prefix + code, runner.DATA], kind, limit_seconds)


def counting(path: Path) -> str:
    """Return code that appends a line to a file and writes figures."""
    return f'open({str(path)!r}, "a").write("ran\\n"); DATA.write_text("[1]")'


def test_finished_slices_are_not_run_again(runner, redaction, tmp_path):
    count = tmp_path / 'count'
    slices = [make_slice(runner, 'one', counting(count)), make_slice(runner, 'two', counting(count))]
    for _ in range(2):
        results = runner.run_slices(slices, tmp_path, CONDITIONS, redaction)
        assert [(each.status, each.data) for each in results] == [('passed', [1])] * 2
        assert count.read_text().count('ran') == 2
    runner.run_slices(slices, tmp_path, {'version': '2'}, redaction)
    assert count.read_text().count('ran') == 4, 'results of another version are not kept'


def test_slices_that_fail_or_take_too_long_are_recorded_and_the_next_one_runs(runner, redaction, tmp_path):
    count = tmp_path / 'count'
    sleeper = 'import subprocess; subprocess.Popen(["sleep", "1234.5"]); print("before", flush=True); time.sleep(60)'
    slices = [
        make_slice(runner, 'fails', 'print("on node-17"); sys.exit(3)'),
        make_slice(runner, 'dies', 'import os; os.kill(os.getpid(), 9)'),
        make_slice(runner, 'hangs', sleeper, limit_seconds=1.0),
        make_slice(runner, 'silent', 'pass'),
        make_slice(runner, 'broken', 'DATA.write_text("{")'),
        make_slice(runner, 'works', counting(count)),
    ]
    results = {each.name: each for each in runner.run_slices(slices, tmp_path, CONDITIONS, redaction)}
    found = {name: (each.status, each.reason) for name, each in results.items()}
    assert found['fails'] == ('failed', 'it ended with status 3')
    assert results['fails'].output == 'on HOST\n'
    assert found['dies'] == ('failed', 'it was ended by SIGKILL')
    assert found['hangs'] == ('timed out', 'it took more than 1 s') and results['hangs'].output == 'before\n'
    assert found['silent'] == ('failed', 'it wrote no figures')
    assert found['broken'][0] == 'failed' and 'cannot be read' in found['broken'][1]
    assert found['works'] == ('passed', '')
    assert '1234.5' not in subprocess.run(['ps', '-eo', 'args'], capture_output=True, text=True).stdout

    # The second run repeats nothing, unless asked to.
    runner.run_slices(slices, tmp_path, CONDITIONS, redaction)
    slices[0] = make_slice(runner, 'fails', counting(count))
    assert runner.run_slices(slices[:1], tmp_path, CONDITIONS, redaction)[0].status == 'failed'
    slices[-1] = make_slice(runner, 'works', counting(count))
    again = runner.run_slices([slices[0], slices[-1]], tmp_path, CONDITIONS, redaction, retry=True)
    assert [each.status for each in again] == ['passed', 'passed']
    assert count.read_text().count('ran') == 2


def test_check_killed_in_a_slice_continues_with_that_slice(runner, redaction, tmp_path):
    count, child = tmp_path / 'count', tmp_path / 'child'
    slow = f'import os; pathlib.Path({str(child)!r}).write_text(str(os.getpid())); time.sleep(100)'
    program = tmp_path / 'program.py'
    program.write_text(
        f'import sys; sys.path[:0] = [{str(BENCHMARKS)!r}, {str(ROOT / "tests")!r}]\n'
        'from pathlib import Path; import slice_runner, redaction; from test_gpu_check import make_slice\n'
        f'slices = [make_slice(slice_runner, "one", {counting(count)!r}), make_slice(slice_runner, "two", {slow!r})]\n'
        f'slice_runner.run_slices(slices, Path({str(tmp_path)!r}), {CONDITIONS!r}, redaction.Redaction())\n'
    )
    process = subprocess.Popen([sys.executable, str(program)], env=os.environ | {'PYTHONPATH': str(ROOT)})
    until = time.monotonic() + 60
    while not (child.exists() and child.read_text()):
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.02)
    os.kill(process.pid, signal.SIGKILL)
    process.wait()
    orphan, until = Path(f'/proc/{child.read_text()}'), time.monotonic() + 10
    while orphan.exists() and 'Z' not in (orphan / 'stat').read_text().rpartition(')')[2].split()[0]:
        assert time.monotonic() < until, 'the slice continues without the check, and would disturb the next one'
        time.sleep(0.02)

    slices = [make_slice(runner, 'one', counting(count)), make_slice(runner, 'two', counting(count))]
    results = runner.run_slices(slices, tmp_path, CONDITIONS, redaction)
    assert [each.status for each in results] == ['passed', 'passed']
    assert count.read_text().count('ran') == 2, 'the first slice has run once, and the second to its end once'


def test_results_contain_neither_secrets_nor_names_of_the_machine(tmp_path):
    environment = {
        'WANDB_API_KEY': 'abc123def',
        'S3_ENDPOINT_URL': 'https://storage.corp.example:9000',
        'HOME': '/home/someone',
        'CUDA_VERSION': '12.8.1.004',
        'MODE': 'training',
    }
    redaction = import_module('redaction').Redaction(environment, host='node-17.corp.example', user='someone')
    token = 'hf_' + 'aBcD' * 9
    text = (
        f'{ROOT}/run.py\nabc123def at https://storage.corp.example:9000/a\n/home/someone/.cache\nnode-17: someone\n'
        f'10.20.30.40:29500 and 127.0.0.1\ntoken {token}\ntraining with CUDA 12.8.1.004'
    )
    found = redaction.clean({'rows': [{'text': text, 'value': 1.5}]})['rows'][0]
    assert found['value'] == 1.5
    assert found['text'].splitlines() == [
        './run.py',
        '$WANDB_API_KEY at $S3_ENDPOINT_URL/a',
        '~/.cache',
        'HOST: USER',
        'ADDRESS:29500 and 127.0.0.1',
        '(line removed: it contains what looks like a Hugging Face token)',
        'training with CUDA 12.8.1.004',
    ]
