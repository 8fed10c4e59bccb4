"""Run lock: one job per folder. Jobs on this machine are real processes, other machines are simulated."""

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
from diffusion.launch.run_lock import LOCK, Owner, RunLocked, hold_run_lock, owner_of
from diffusion.training.train import train
from tests.data.processes import Forked

JOB = {environment.JOB: 'phase1', 'SLURM_JOB_ID': '7', environment.ATTEMPT: '1'}


@pytest.fixture(autouse=True)
def _short_intervals(monkeypatch):
    monkeypatch.setattr(run_lock, 'REFRESH_SECONDS', 0.05)
    monkeypatch.setattr(run_lock, 'STALE_SECONDS', 0.5)


def wait_for(condition, seconds=20.0):
    until = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < until
        time.sleep(0.01)


def other_owner(path: Path, environ=JOB, **changes) -> Owner:
    """Write a lock file of another owner, by default on another machine."""
    owner = replace(Owner.current(environ), **({'machine': 'another', 'pid': 1, 'host': 'far'} | changes))
    path.write_text(json.dumps({'owner': vars(owner), 'count': 0, 'at': 0.0}))
    return owner


@pytest.fixture
def refreshed_lock():
    """Function that refreshes another owner's lock in a thread, like a live job on another machine."""
    stop = threading.Event()
    threads = []

    def keep(path: Path, **owner_fields) -> None:
        owner = other_owner(path, **owner_fields)

        def refresh():
            count = 0
            while not stop.wait(0.05):
                count += 1
                path.write_text(json.dumps({'owner': vars(owner), 'count': count, 'at': 0.0}))

        threads.append(threading.Thread(target=refresh))
        threads[-1].start()

    yield keep
    stop.set()
    for thread in threads:
        thread.join()


def hold_as(folder, environ):
    with hold_run_lock(folder, environ):
        time.sleep(1000)


def hold_forever(folder):
    hold_as(folder, {})


def test_lock_is_refreshed_and_removed_by_owner(tmp_path):
    with hold_run_lock(tmp_path, {}) as owner:
        first = (tmp_path / LOCK).read_text()
        assert owner_of(tmp_path / LOCK) == owner
        wait_for(lambda: (tmp_path / LOCK).read_text() not in ('', first))
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize('name', ['_write', 'unlink'])
def test_release_ends_although_the_storage_hangs(tmp_path, monkeypatch, name):
    """The thread that refreshes the lock hangs in a write, or the removal of the file does."""
    responds, hangs = threading.Event(), threading.Event()
    monkeypatch.setattr(run_lock, 'STORAGE_SECONDS', 0.3)
    monkeypatch.setattr('diffusion.launch.bounded_call.STORAGE_SECONDS', 0.3)
    timer = threading.Timer(10, responds.set)  # so that a release that waits for the storage fails the test
    timer.start()
    with hold_run_lock(tmp_path, {}):
        target = run_lock if name == '_write' else Path
        monkeypatch.setattr(target, name, lambda *_, **__: (hangs.set(), responds.wait(), None)[2])
        assert name == 'unlink' or hangs.wait(10)
        begin = time.monotonic()
    assert hangs.is_set() and time.monotonic() - begin < 5
    responds.set()
    timer.cancel()


def test_live_owner_on_same_machine_is_refused_without_waiting(tmp_path):
    other = Forked(lambda: hold_forever(tmp_path))
    try:
        wait_for(lambda: owner_of(tmp_path / LOCK))
        begin = time.monotonic()
        with pytest.raises(
            RunLocked, match=rf'run\.lock: process {other.pid} on .*, trains into this folder; .*name='
        ) as raised:
            hold_run_lock(tmp_path, {}).__enter__()
        assert time.monotonic() - begin < run_lock.STALE_SECONDS
        assert isinstance(raised.value, ValueError)
    finally:
        other.kill()
    with hold_run_lock(tmp_path, {}):
        found = owner_of(tmp_path / LOCK)
        assert found is not None and found.pid == os.getpid(), 'the lock of a killed owner is taken immediately'


def test_reused_process_id_is_not_the_owner(tmp_path):
    here = Owner.current({})
    other_owner(tmp_path / LOCK, environ={}, machine=here.machine, pid=os.getpid(), started='1')
    begin = time.monotonic()
    with hold_run_lock(tmp_path, {}):
        assert time.monotonic() - begin < run_lock.STALE_SECONDS


@pytest.mark.parametrize('content', [None, '', '{"owner": {"tok'])
def test_unchanged_lock_of_other_machine_is_taken_after_timeout(tmp_path, content):
    other_owner(tmp_path / LOCK)
    if content is not None:
        (tmp_path / LOCK).write_text(content)
    begin = time.monotonic()
    with hold_run_lock(tmp_path, {}):
        assert time.monotonic() - begin >= run_lock.STALE_SECONDS


@pytest.mark.parametrize('other', [{environment.JOB: 'another'}, JOB | {'SLURM_JOB_ID': '8'}])
def test_changing_lock_of_other_machine_is_refused(tmp_path, refreshed_lock, other):
    refreshed_lock(tmp_path / LOCK, environ=other)
    with pytest.raises(RunLocked, match=r'job .*, process 1 on far') as raised:
        hold_run_lock(tmp_path, JOB).__enter__()
    assert not raised.value.retry


def test_later_attempt_takes_lock_without_waiting(tmp_path, refreshed_lock):
    refreshed_lock(tmp_path / LOCK, environ=JOB | {environment.ATTEMPT: '0'})
    begin = time.monotonic()
    run_lock._wait_until_free(tmp_path / LOCK, Owner.current(JOB), lambda: False)
    assert time.monotonic() - begin < run_lock.STALE_SECONDS


@pytest.mark.parametrize('other', [{'SLURM_JOB_ID': ''}, {environment.ATTEMPT: '1'}, {environment.ATTEMPT: ''}])
def test_job_with_same_name_waits_for_other_to_end(tmp_path, refreshed_lock, monkeypatch, capsys, other):
    monkeypatch.setattr(run_lock, 'SAME_JOB_SECONDS', 1.0)
    refreshed_lock(tmp_path / LOCK, environ=JOB | other)
    begin = time.monotonic()
    with pytest.raises(RunLocked, match='job phase1') as raised:
        hold_run_lock(tmp_path, JOB).__enter__()
    assert time.monotonic() - begin > 1.0 and raised.value.retry
    assert capsys.readouterr().err.count('holds the lock; waiting for it to end') == 1


def test_job_with_same_name_waits_less_on_same_machine(tmp_path):
    other = Forked(lambda: hold_as(tmp_path, JOB))
    wait_for(lambda: owner_of(tmp_path / LOCK))
    begin = time.monotonic()
    with pytest.raises(RunLocked, match='job phase1'):
        hold_run_lock(tmp_path, JOB).__enter__()
    assert time.monotonic() - begin >= run_lock.STALE_SECONDS
    threading.Timer(0.1, lambda: os.kill(other.pid, signal.SIGKILL)).start()
    with hold_run_lock(tmp_path, JOB):
        assert other.wait() == -signal.SIGKILL


def test_waiting_stops_on_request(tmp_path, refreshed_lock):
    refreshed_lock(tmp_path / LOCK)
    with pytest.raises(RunLocked):
        hold_run_lock(tmp_path, JOB, stopped=lambda: True).__enter__()


def test_owner_that_lost_lock_exits_without_writing(tmp_path):
    first = Forked(lambda: hold_forever(tmp_path))
    wait_for(lambda: owner_of(tmp_path / LOCK))
    # Suspended, like a machine during migration, and taken for dead.
    os.kill(first.pid, signal.SIGSTOP)
    other = other_owner(tmp_path / LOCK)
    os.kill(first.pid, signal.SIGCONT)
    assert first.wait() == CONFIG_ERROR
    assert owner_of(tmp_path / LOCK) == other


@pytest.mark.slow
def test_second_training_into_same_folder_is_refused(write_recipe):
    recipe = load(write_recipe())
    other = Forked(lambda: hold_forever(recipe.run_dir))
    wait_for(lambda: owner_of(recipe.run_dir / LOCK))
    with pytest.raises(ValueError, match='trains into this folder'):
        train(recipe)
    other.kill()
    train(recipe)
    assert not (recipe.run_dir / LOCK).exists()


def test_unwritable_run_folder_is_reported(write_recipe, tmp_path):
    recipe = write_recipe()
    (tmp_path / 'runs').write_text('a file is in the way')
    command = [sys.executable, '-m', 'diffusion.launch.node', '--', 'run.py', str(recipe)]
    environ = os.environ | {environment.SCHEDULER: 'local', environment.NODES: '1'}
    found = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == FAILED
    assert found.stderr.startswith(f'node 0: {tmp_path}/runs/run cannot be written ('), found.stderr
    assert 'Traceback' not in found.stderr
