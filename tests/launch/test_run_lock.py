"""One job at a time saves into a folder: the lock, by real processes; other machines are made up."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

from diffusion.config.load import load
from diffusion.exit_codes import CONFIG_ERROR, FAILED
from diffusion.launch import environment, run_lock
from diffusion.launch.run_lock import LOCK, Owner, RunLocked, held, owner_of
from diffusion.training.train import train
from tests.data.processes import Forked

JOB = {environment.JOB: 'phase1', 'SLURM_JOB_ID': '7', environment.ATTEMPT: '1'}


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(run_lock, 'REFRESH_SECONDS', 0.05)
    monkeypatch.setattr(run_lock, 'WATCH_SECONDS', 0.5)


def wait_for(what, seconds=20.0):
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until
        time.sleep(0.01)


def other_owner(path: Path, environ=JOB, **changes) -> Owner:
    """Another's lock, on another machine unless it is said."""
    owner = replace(Owner.current(environ), **({'machine': 'another', 'pid': 1, 'host': 'far'} | changes))
    path.write_text(json.dumps({'owner': vars(owner), 'count': 0, 'at': 0.0}))
    return owner


@pytest.fixture
def beating():
    """Keeps another's lock fresh, as a living job on another machine does."""
    stop = threading.Event()
    threads = []

    def keep(path: Path, **about) -> None:
        owner = other_owner(path, **about)

        def beat():
            count = 0
            while not stop.wait(0.05):
                count += 1
                path.write_text(json.dumps({'owner': vars(owner), 'count': count, 'at': 0.0}))

        threads.append(threading.Thread(target=beat))
        threads[-1].start()

    yield keep
    stop.set()
    for thread in threads:
        thread.join()


def held_as(folder, environ):
    with held(folder, environ):
        time.sleep(1000)


def held_for_ever(folder):
    held_as(folder, {})


def test_a_lock_is_kept_fresh_and_goes_with_its_owner(tmp_path):
    with held(tmp_path, {}) as own:
        first = (tmp_path / LOCK).read_text()
        assert owner_of(tmp_path / LOCK) == own
        wait_for(lambda: (tmp_path / LOCK).read_text() not in ('', first))
    assert not list(tmp_path.iterdir())


def test_who_lives_on_this_machine_is_not_waited_for(tmp_path):
    other = Forked(lambda: held_for_ever(tmp_path))
    try:
        wait_for(lambda: owner_of(tmp_path / LOCK))
        begin = time.monotonic()
        with pytest.raises(
            RunLocked, match=rf'run\.lock: process {other.pid} on .*, trains into this folder; .*name='
        ) as told:
            held(tmp_path, {}).__enter__()
        assert time.monotonic() - begin < run_lock.WATCH_SECONDS
        assert isinstance(told.value, ValueError)
    finally:
        other.kill()
    with held(tmp_path, {}):
        found = owner_of(tmp_path / LOCK)
        assert found is not None and found.pid == os.getpid(), 'and who was killed is followed at once'


def test_a_number_that_another_process_has_now_says_nothing(tmp_path):
    here = Owner.current({})
    other_owner(tmp_path / LOCK, environ={}, machine=here.machine, pid=os.getpid(), started='1')
    begin = time.monotonic()
    with held(tmp_path, {}):
        assert time.monotonic() - begin < run_lock.WATCH_SECONDS


@pytest.mark.parametrize('content', [None, '', '{"owner": {"tok'])
def test_who_gives_no_sign_of_life_elsewhere_is_followed(tmp_path, content):
    other_owner(tmp_path / LOCK)
    if content is not None:
        (tmp_path / LOCK).write_text(content)
    begin = time.monotonic()
    with held(tmp_path, {}):
        assert time.monotonic() - begin >= run_lock.WATCH_SECONDS


@pytest.mark.parametrize('other', [{environment.JOB: 'another'}, JOB | {'SLURM_JOB_ID': '8'}])
def test_who_lives_elsewhere_is_found_to(tmp_path, beating, other):
    beating(tmp_path / LOCK, environ=other)
    with pytest.raises(RunLocked, match=r'job .*, process 1 on far') as told:
        held(tmp_path, JOB).__enter__()
    assert not told.value.retry


def test_a_later_attempt_follows_an_earlier_one_at_once(tmp_path, beating):
    beating(tmp_path / LOCK, environ=JOB | {environment.ATTEMPT: '0'})
    begin = time.monotonic()
    run_lock._wait_until_free(tmp_path / LOCK, Owner.current(JOB), lambda: False)
    assert time.monotonic() - begin < run_lock.WATCH_SECONDS


@pytest.mark.parametrize('other', [{'SLURM_JOB_ID': ''}, {environment.ATTEMPT: '1'}, {environment.ATTEMPT: ''}])
def test_of_the_same_name_an_end_is_waited_for(tmp_path, beating, monkeypatch, capsys, other):
    monkeypatch.setattr(run_lock, 'SAME_JOB_SECONDS', 1.0)
    beating(tmp_path / LOCK, environ=JOB | other)
    begin = time.monotonic()
    with pytest.raises(RunLocked, match='job phase1') as told:
        held(tmp_path, JOB).__enter__()
    assert time.monotonic() - begin > 1.0 and told.value.retry
    assert capsys.readouterr().err.count('is still there; waiting for its end') == 1


def test_of_the_same_name_on_this_machine_a_short_while_is_enough(tmp_path):
    other = Forked(lambda: held_as(tmp_path, JOB))
    wait_for(lambda: owner_of(tmp_path / LOCK))
    begin = time.monotonic()
    with pytest.raises(RunLocked, match='job phase1'):
        held(tmp_path, JOB).__enter__()
    assert time.monotonic() - begin >= run_lock.WATCH_SECONDS
    threading.Timer(0.1, lambda: os.kill(other.pid, signal.SIGKILL)).start()
    with held(tmp_path, JOB):
        assert other.wait() == -signal.SIGKILL


def test_a_wait_ends_when_this_job_is_told_to(tmp_path, beating):
    beating(tmp_path / LOCK)
    with pytest.raises(RunLocked):
        held(tmp_path, JOB, stopped=lambda: True).__enter__()


def test_who_has_lost_it_ends_and_writes_no_more(tmp_path):
    first = Forked(lambda: held_for_ever(tmp_path))
    wait_for(lambda: owner_of(tmp_path / LOCK))
    # Stopped dead, as a machine that is moved, and taken for dead.
    os.kill(first.pid, signal.SIGSTOP)
    other = other_owner(tmp_path / LOCK)
    os.kill(first.pid, signal.SIGCONT)
    assert first.wait() == CONFIG_ERROR
    assert owner_of(tmp_path / LOCK) == other


@pytest.mark.slow
def test_a_second_training_into_the_same_folder_is_refused(write_recipe):
    recipe = load(write_recipe())
    other = Forked(lambda: held_for_ever(recipe.run_dir))
    wait_for(lambda: owner_of(recipe.run_dir / LOCK))
    with pytest.raises(ValueError, match='trains into this folder'):
        train(recipe)
    other.kill()
    train(recipe)
    assert not (recipe.run_dir / LOCK).exists()


def test_a_folder_that_cannot_be_written_is_said(write_recipe, tmp_path):
    recipe = write_recipe()
    (tmp_path / 'runs').write_text('a file is in the way')
    command = [sys.executable, '-m', 'diffusion.launch.node', '--', 'run.py', str(recipe)]
    environ = os.environ | {environment.SCHEDULER: 'local', environment.NODES: '1'}
    found = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == FAILED
    assert found.stderr.startswith(f'node 0: {tmp_path}/runs/run: cannot be written ('), found.stderr
    assert 'Traceback' not in found.stderr
