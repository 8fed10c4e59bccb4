"""Restarts in place: when a node does not agree to one, and standby processes that become ranks like new processes."""

import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from unittest.mock import Mock

import pytest
import yaml
from waiting import wait_until

from diffusion.config.load import load
from diffusion.exit_codes import BAD_HARDWARE, FAILED, PREEMPTED
from diffusion.launch.node_settings import Settings
from diffusion.launch.rank_discovery import NodePosition
from diffusion.launch.standby import in_place
from diffusion.launch.standby.in_place import InPlaceRestarts, StandbyPool, modules_of
from diffusion.launch.workers import Outcome, start_rank
from diffusion.runs.attempts import Attempt
from tests.launch.specs import changed

KILLED = Outcome(FAILED, 'killed', 'rank 0 by SIGKILL')


@pytest.fixture
def restarts(write_recipe) -> Callable[..., InPlaceRestarts]:
    """Create the restarts of a job of one node."""

    def create(**variables: str) -> InPlaceRestarts:
        path = write_recipe()
        environ = {'DIFFUSION_STANDBY': '1', 'DIFFUSION_ON_EXIT': '75=retry,76=elsewhere,78=stop,*=retry'} | variables
        position, command = NodePosition('local', 0, 1, 1, '127.0.0.1', 29500), ['run.py', str(path)]
        recipe = load(path, environ=environ)
        return InPlaceRestarts(position, Settings.from_environ(environ), command, recipe, environ, print)

    return create


def reason(found: InPlaceRestarts, outcome: Outcome = KILLED, last: int | None = 10) -> str:
    """Return why a node does not restart in place after an attempt that ended at a batch, or an empty string."""
    agreement = found.agree(outcome, Attempt(0, time.time(), last=last), lambda: False)
    assert agreement.restart == (not agreement.reason)
    return agreement.reason


def test_only_a_crash_or_a_kill_of_a_run_that_may_restart_and_advances_restarts_in_place(restarts):
    assert reason(restarts(), Outcome(FAILED, 'crash', 'rank 0 with 1')) == ''
    for status, cause in ((PREEMPTED, 'preempted'), (PREEMPTED, 'hang'), (BAD_HARDWARE, 'hardware'), (78, 'mistake')):
        assert reason(restarts(), Outcome(status, cause)) != ''
    for variable in ({'DIFFUSION_ON_EXIT': '1=stop,*=retry'}, {'DIFFUSION_MAX_RESTARTS': '0'}):
        assert reason(restarts(**variable)) != ''
    assert reason(restarts(), last=None) == 'the ranks have begun no batch'
    found = restarts()
    assert [reason(found, last=last) for last in (10, 12)] == ['', '']
    assert reason(found, last=12) == 'two attempts in a row ended at batch 12 or before'


@pytest.mark.parametrize('change', [{'seed': 4}, {'unknown': 1}])
def test_changed_recipe_goes_to_the_scheduler(restarts, tmp_path, change, capsys):
    found, path = restarts(), tmp_path / 'run.yaml'
    path.write_text(yaml.safe_dump(changed(yaml.safe_load(path.read_text()), change)))
    assert reason(found) == f'{path} has changed, or cannot be read'
    assert capsys.readouterr().out == f'no restart in place: {path} has changed, or cannot be read\n'


ROOT = Path(__file__).parents[2]
PROGRAM = """
import ctypes, json, os, resource, signal, sys
death = ctypes.c_int()
ctypes.CDLL(None).prctl(2, ctypes.byref(death))  # PR_GET_PDEATHSIG
names = ('SigBlk', 'SigIgn', 'SigCgt', 'Threads')
status = dict(line.split(':', 1) for line in open('/proc/self/status') if line.startswith(names))
print(json.dumps({
    'arguments': sys.argv, 'path': sys.path, 'file': __file__, 'name': __name__, 'folder': os.getcwd(),
    'main': sys.modules['__main__'].__file__, 'environment': dict(os.environ), 'parent': os.getppid(),
    'leads': [os.getpid() == os.getpgrp(), os.getpid() == os.getsid(0)], 'death': death.value, 'status': status,
    'limits': [resource.getrlimit(each) for each in range(16)], 'nice': os.nice(0),
    'scheduler': os.sched_getscheduler(0), 'oom': open('/proc/self/oom_score_adj').read(),
    'command': open('/proc/self/cmdline').read().rstrip('\\0').split('\\0'),
    'files': sorted(os.readlink(f'/proc/self/fd/{each}') for each in range(3)),
    'imported': 'changing' in sys.modules,
}))
sys.stdout.flush()
if sys.argv[1:] == ['fail']:
    raise LookupError('on purpose')
sys.exit(7)
"""


class Starter:
    def __init__(self, folder: Path) -> None:
        self.folder, self.lines = folder, []
        self.command = ['run.py', 'recipe.yaml', 'key=value']
        self.environ = os.environ | {'PYTHONPATH': f'{ROOT}:{folder}', 'RANK': '0', 'OMP_NUM_THREADS': '1'}
        self.pool = StandbyPool(self.command, ['changing'], self.lines.append)

    def prepare(self) -> None:
        """Start a standby process, and wait until it is ready."""
        self.pool.start([self.environ])
        wait_until(lambda: self.pool.poll() or any('ready' in line or 'cannot' in line for line in self.lines), 60)

    def run(self, start: Callable[..., subprocess.Popen[bytes]], **variables: str) -> tuple[int, dict]:
        """Run PROGRAM by `start`; return its exit status and what it has printed."""
        output = self.folder / 'output.txt'
        with output.open('wb') as file:
            process = start(0, self.command, self.environ | variables, file)
        return process.wait(60), json.loads(output.read_text())


@pytest.fixture
def starter(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Starter]:
    (tmp_path / 'run.py').write_text(PROGRAM)
    (tmp_path / 'changing.py').write_text('print("warning of an import", flush=True)\n')
    monkeypatch.chdir(tmp_path)
    found = Starter(tmp_path)
    yield found
    found.pool.close()


def test_rank_that_was_a_standby_is_like_a_new_process(starter, capfd):
    starter.environ['DIFFUSION_REMOVED'] = '1'
    starter.prepare()
    del starter.environ['DIFFUSION_REMOVED']
    variables = {'RANK': '1', 'MASTER_PORT': '29511', 'DIFFUSION_ATTEMPT_FOLDER': '/elsewhere'}
    new, taken = starter.run(start_rank, **variables), starter.run(starter.pool.start_rank, **variables)
    assert taken[1].pop('imported') and not new[1].pop('imported')
    for _, found in (new, taken):
        # Ignore the signal that glibc handles once a process has had a second thread.
        found['status']['SigCgt'] = int(found['status']['SigCgt'], 16) & 0x7FFFFFFF
    assert taken == new
    assert 'warning of an import' not in capfd.readouterr().out
    assert taken[0] == 7 and taken[1]['death'] == signal.SIGKILL and taken[1]['environment']['RANK'] == '1'


def test_traceback_of_a_rank_that_was_a_standby_is_that_of_its_program(starter, capfd):
    starter.command[1:] = ['fail']
    starter.pool.command[1:] = ['fail']
    starter.prepare()
    status, _ = starter.run(starter.pool.start_rank)
    error = capfd.readouterr().err
    assert status == 1 and 'LookupError: on purpose' in error and 'standby.py' not in error


def test_standby_that_cannot_be_started_is_reported_and_ends_nothing(starter, monkeypatch):
    with monkeypatch.context() as patched:
        patched.setattr(in_place.subprocess, 'Popen', Mock(side_effect=BlockingIOError(11, 'unavailable')))
        starter.prepare()
    assert 'standby of local rank 0 cannot be started' in starter.lines[0]
    assert starter.run(starter.pool.start_rank)[0] == 7


def signaled(number: int) -> Callable[[Starter], object]:
    return lambda starter: os.kill(next(iter(starter.pool.pids)), number)


def edit_a_module(starter: Starter) -> object:
    return (starter.folder / 'changing.py').write_text('value = 2\n')


@pytest.mark.parametrize(
    ('disturb', 'variables', 'reason'),
    [
        (signaled(signal.SIGKILL), {}, 'ended with -9'),
        pytest.param(signaled(signal.SIGSTOP), {}, 'does not respond within', marks=pytest.mark.slow),
        (edit_a_module, {}, 'has an earlier version of'),
        (lambda _: None, {'OMP_NUM_THREADS': '2', 'HF_HOME': '/other'}, 'was started with another value of HF_HOME'),
    ],
)
def test_standby_that_cannot_take_over_is_replaced(starter, monkeypatch, disturb, variables, reason):
    monkeypatch.setattr(in_place, 'ANSWER_SECONDS', 1.0)
    starter.prepare()
    (pid,) = starter.pool.pids
    disturb(starter)
    status, found = starter.run(starter.pool.start_rank, **variables)
    assert status == 7 and not found['imported'] and starter.pool.taken == 0
    (line,) = starter.lines[1:]
    assert line.startswith(f'standby of local rank 0 {reason}') and line.endswith('; starting a new process')
    assert not Path(f'/proc/{pid}').exists(), 'no process is left'


def test_standby_imports_the_components_of_the_recipe_but_no_user_code(tmp_path, monkeypatch):
    (tmp_path / 'own_parts.py').write_text(
        'from diffusion import register\n\ndef own() -> None: ...\n\nregister("callback", "own", "own_parts:own")\n'
    )
    monkeypatch.syspath_prepend(tmp_path)
    recipe = load(ROOT / 'yamls' / 'quickstart.yaml', ['imports=[own_parts]', 'callbacks.own={}'])
    found = {*modules_of(recipe)}
    assert {'diffusion.training.train', 'diffusion.models.families.mmdit.builder', 'diffusion.training.adamw'} <= found
    assert 'own_parts' not in found
