"""Run lock: one job per run. Jobs on this machine are real processes, other machines are simulated."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from waiting import wait_until

from diffusion.exit_codes import CONFIG_ERROR, FAILED
from diffusion.runs import environment, run_lock
from diffusion.runs.run_lock import LOCK, RELEASED, LockContent, Owner, RunLock, RunLocked, hold_run_lock, owner_of
from diffusion.storage import object_store
from diffusion.storage.retry import PreconditionFailed
from tests.data.processes import Forked
from tests.object_store import ALWAYS

JOB = {environment.JOB: 'phase1', 'SLURM_JOB_ID': '7', environment.ATTEMPT: '1'}
Run = Path | str
"""The run's folder, or its URL."""


@pytest.fixture(autouse=True)
def _short_intervals(monkeypatch):
    for name in ('REFRESH_SECONDS', 'BUCKET_REFRESH_SECONDS', 'BUCKET_POLL_SECONDS'):
        monkeypatch.setattr(run_lock, name, 0.05)
    monkeypatch.setattr(run_lock, 'STALE_SECONDS', 0.5)


@pytest.fixture
def bucket_run(store, monkeypatch) -> str:
    monkeypatch.setattr(run_lock, 'STALE_SECONDS', 1.5)  # a request takes some hundredths of a second
    return f'{store.bucket("home")}/runs/run'


@pytest.fixture(params=['folder', 'bucket'])
def run(request, tmp_path) -> Run:
    return tmp_path / 'run' if request.param == 'folder' else request.getfixturevalue('bucket_run')


FOLDER_BY_DEFAULT = pytest.mark.parametrize(
    'run', ['folder', pytest.param('bucket', marks=pytest.mark.slow)], indirect=True
)
"""Mark for tests that do not depend on the place of the lock: a lock object takes several times as long as a file."""


def lock_text(run: Run) -> str | None:
    return run_lock.read_lock(RunLock(run))


def wait_until_held(run: Run) -> None:
    """Wait until the lock was refreshed: only then has its owner seen that it holds the lock."""
    wait_until(lambda: (text := lock_text(run)) and '"count": 0,' not in text)


def assert_locked(run: Run, match: str, environ: dict[str, str] = JOB, **settings) -> RunLocked:
    """Assert that a job cannot take the lock, and return the error."""
    with pytest.raises(RunLocked, match=match) as raised:
        hold_run_lock(run, environ, **settings).__enter__()
    return raised.value


def write_text(run: Run, text: str) -> None:
    """Write the content of a lock unconditionally."""
    if isinstance(run, Path):
        run.mkdir(exist_ok=True)
        (run / LOCK).write_text(text)
    else:
        object_store.write(f'{run}/{LOCK}', text.encode())


def other_owner(run: Run, environ=JOB, **changes) -> Owner:
    """Write the lock of another owner, by default on another machine."""
    owner = replace(Owner.current(environ), **({'machine': 'another', 'pid': 1, 'host': 'far'} | changes))
    write_text(run, json.dumps({'owner': vars(owner), 'count': 0, 'at': 0.0}))
    return owner


@pytest.fixture
def refreshed_lock():
    """Function that refreshes another owner's lock in a thread, like a live job on another machine."""
    stop = threading.Event()
    threads = []

    def keep(run: Run, **owner_fields) -> None:
        owner = other_owner(run, **owner_fields)

        def refresh():
            count = 0
            while not stop.wait(0.05):
                count += 1
                write_text(run, json.dumps({'owner': vars(owner), 'count': count, 'at': 0.0}))

        threads.append(threading.Thread(target=refresh))
        threads[-1].start()

    yield keep
    stop.set()
    for thread in threads:
        thread.join()


def hold_forever(run, environ: dict[str, str] | None = None) -> Forked:
    """Start a process that holds the lock."""

    def hold() -> None:
        with hold_run_lock(run, environ or {}):
            time.sleep(1000)

    return Forked(hold)


def test_lock_is_refreshed_and_released_by_owner(run):
    with hold_run_lock(run, {}) as owner:
        first = lock_text(run)
        assert owner_of(run) == owner
        number = (run / LOCK).stat().st_ino if isinstance(run, Path) else 0
        wait_until(lambda: lock_text(run) not in ('', first))
        assert not isinstance(run, Path) or (run / LOCK).stat().st_ino == number
    assert lock_text(run) is None
    assert not isinstance(run, Path) or not list(run.iterdir())
    with hold_run_lock(run, {}) as owner:
        assert owner_of(run) == owner


@pytest.mark.parametrize(
    ('place', 'target', 'name'),
    [('folder', Path, 'unlink'), ('bucket', RunLock, 'write'), ('bucket', RunLock, 'release')],
)
def test_release_ends_although_the_storage_hangs(request, tmp_path, monkeypatch, place, target, name):
    """The thread that refreshes the lock hangs in a write, or the release does."""
    run = tmp_path if place == 'folder' else request.getfixturevalue('bucket_run')
    responds, hangs = threading.Event(), threading.Event()
    # A release comes only after a refresh that is under way, which takes a while on a busy machine.
    limit = 0.3 if name == 'write' else 2.0
    monkeypatch.setattr(run_lock, 'STORAGE_SECONDS', limit)
    monkeypatch.setattr('diffusion.runs.bounded_call.STORAGE_SECONDS', limit)
    timer = threading.Timer(10, responds.set)  # so that a release that waits for the storage fails the test
    timer.start()
    with hold_run_lock(run, {}):
        monkeypatch.setattr(target, name, lambda *_, **__: (hangs.set(), responds.wait(), None)[2])
        assert name != 'write' or hangs.wait(10)
        begin = time.monotonic()
    assert hangs.is_set() and time.monotonic() - begin < 5
    responds.set()
    timer.cancel()


def test_live_owner_on_same_machine_is_refused_without_waiting(run):
    other = hold_forever(run)
    try:
        wait_until(lambda: owner_of(run))
        begin = time.monotonic()
        error = assert_locked(run, rf'run\.lock: process {other.pid} on .*, trains this run; .*name=', {})
        assert time.monotonic() - begin < run_lock.STALE_SECONDS
        assert isinstance(error, ValueError)
    finally:
        other.kill()
    with hold_run_lock(run, {}):
        found = owner_of(run)
        assert found is not None and found.pid == os.getpid(), 'the lock of a killed owner is taken immediately'


@FOLDER_BY_DEFAULT
def test_reused_process_id_is_not_the_owner(run, monkeypatch):
    monkeypatch.setattr(run_lock, 'STALE_SECONDS', 60.0)
    other_owner(run, environ={}, machine=Owner.current({}).machine, pid=os.getpid(), started='1')
    begin = time.monotonic()
    with hold_run_lock(run, {}):
        assert time.monotonic() - begin < run_lock.STALE_SECONDS


@pytest.mark.parametrize(
    ('run', 'content'),
    [('folder', None), ('folder', ''), ('folder', '{"owner": {"tok'), ('bucket', None)],
    indirect=['run'],
)
def test_unchanged_lock_of_other_machine_is_taken_after_timeout(run, content):
    other_owner(run)
    if content is not None:
        write_text(run, content)
    begin = time.monotonic()
    with hold_run_lock(run, {}):
        assert time.monotonic() - begin >= run_lock.STALE_SECONDS


@FOLDER_BY_DEFAULT
@pytest.mark.parametrize('other', [{environment.JOB: 'another'}, JOB | {'SLURM_JOB_ID': '8'}])
def test_changing_lock_of_other_machine_is_refused(run, refreshed_lock, other):
    refreshed_lock(run, environ=other)
    assert not assert_locked(run, r'job .*, process 1 on far').retry


@FOLDER_BY_DEFAULT
def test_later_attempt_takes_lock_without_waiting(run, refreshed_lock):
    refreshed_lock(run, environ=JOB | {environment.ATTEMPT: '0'})
    begin = time.monotonic()
    run_lock._wait_until_free(RunLock(run), Owner.current(JOB), lambda: False)
    assert time.monotonic() - begin < run_lock.STALE_SECONDS


@FOLDER_BY_DEFAULT
@pytest.mark.parametrize('other', [{'SLURM_JOB_ID': ''}, {environment.ATTEMPT: '1'}, {environment.ATTEMPT: ''}])
def test_job_with_same_name_waits_for_other_to_end(run, refreshed_lock, monkeypatch, capsys, other):
    monkeypatch.setattr(run_lock, 'SAME_JOB_SECONDS', 1.0)
    refreshed_lock(run, environ=JOB | other)
    begin = time.monotonic()
    assert assert_locked(run, 'job phase1').retry and time.monotonic() - begin > 1.0
    assert capsys.readouterr().err.count('holds the lock; waiting for it to end') == 1


@FOLDER_BY_DEFAULT
def test_job_with_same_name_waits_less_on_same_machine(run):
    other = hold_forever(run, JOB)
    wait_until(lambda: owner_of(run))
    begin = time.monotonic()
    assert_locked(run, 'job phase1')
    assert time.monotonic() - begin >= run_lock.STALE_SECONDS
    threading.Timer(0.1, lambda: os.kill(other.pid, signal.SIGKILL)).start()
    with hold_run_lock(run, JOB):
        assert other.wait() == -signal.SIGKILL


@FOLDER_BY_DEFAULT
def test_waiting_stops_on_request(run, refreshed_lock):
    refreshed_lock(run)
    assert_locked(run, r'run\.lock', stopped=lambda: True)


def test_owner_that_lost_lock_exits_without_writing(run, capfd):
    first = hold_forever(run)
    wait_until_held(run)
    # Suspended, like a machine during migration, and taken for dead.
    os.kill(first.pid, signal.SIGSTOP)
    other = other_owner(run)
    os.kill(first.pid, signal.SIGCONT)
    assert first.wait() == CONFIG_ERROR
    assert owner_of(run) == other
    assert f'run.lock: {other}, took over the lock; this process exits' in capfd.readouterr().err


@pytest.mark.slow
def test_owner_whose_lock_was_taken_and_released_meanwhile_exits(bucket_run):
    first = hold_forever(bucket_run)
    wait_until_held(bucket_run)
    os.kill(first.pid, signal.SIGSTOP)
    write_text(bucket_run, RELEASED)
    os.kill(first.pid, signal.SIGCONT)
    assert first.wait() == CONFIG_ERROR
    assert owner_of(bucket_run) is None, 'nothing was written over it'


def test_lock_that_is_released_while_it_is_watched_is_taken(run):
    """The release is a change of a live owner, but no reason to refuse the next job."""
    other_owner(run)
    do = (run / LOCK).unlink if isinstance(run, Path) else lambda: write_text(run, RELEASED)
    release = threading.Timer(0.2, do)
    release.start()
    with hold_run_lock(run, {}):
        found = owner_of(run)
        assert found is not None and found.pid == os.getpid()
    release.join()


def test_content_after_a_fault_of_the_storage_is_no_evidence_of_a_live_owner(tmp_path, monkeypatch):
    other_owner(tmp_path)
    plain, reads = RunLock.read, []

    def read(lock: RunLock, *, patient: bool = False) -> LockContent | None:
        reads.append(1)
        return run_lock.UNREADABLE if len(reads) == 1 else plain(lock)

    monkeypatch.setattr(RunLock, 'read', read)
    with hold_run_lock(tmp_path, {}):
        assert len(reads) > 2


def test_bug_in_a_refresh_does_not_end_the_refreshes(bucket_run, monkeypatch, capsys):
    plain, calls = RunLock.read, []

    def read(lock: RunLock, *, patient: bool = False) -> LockContent | None:
        calls.append(1)
        if len(calls) in (3, 4):
            raise RuntimeError("can't start new thread")
        return plain(lock, patient=patient)

    monkeypatch.setattr(RunLock, 'read', read)
    with hold_run_lock(bucket_run, {}):
        wait_until(lambda: len(calls) > 6)
        first = lock_text(bucket_run)
        wait_until(lambda: lock_text(bucket_run) != first)
    assert "can't start new thread; the lock of the run is not refreshed meanwhile" in capsys.readouterr().err


def test_store_that_does_not_recognize_its_etags_is_an_error(bucket_run, monkeypatch):
    monkeypatch.setattr(RunLock, 'write', Mock(side_effect=PreconditionFailed('412')))
    with pytest.raises(OSError, match='changed at each of 10 tries to take it'):
        hold_run_lock(bucket_run, {}).__enter__()


@pytest.mark.parametrize(
    'before', ['absent', *(pytest.param(each, marks=pytest.mark.slow) for each in ('released', 'dead'))]
)
def test_only_one_of_many_jobs_takes_a_lock_object(bucket_run, monkeypatch, tmp_path, before):
    """Four processes have found the lock free at the same time, and each then writes it."""
    monkeypatch.setattr(run_lock, 'BUCKET_REFRESH_SECONDS', 1000.0)  # so that no refresh ends a second owner
    monkeypatch.setattr(run_lock, 'STALE_SECONDS', 1000.0)
    if before == 'released':
        write_text(bucket_run, RELEASED)
    if before == 'dead':
        machine = Owner.current({}).machine
        other_owner(bucket_run, environ={}, machine=machine, pid=os.getpid(), started='1')
    write = RunLock.write

    def write_together(lock: RunLock, *arguments, **keywords) -> None:
        ready = tmp_path / f'ready-{os.getpid()}'
        if not ready.exists():
            ready.touch()
            wait_until(lambda: len(list(tmp_path.glob('ready-*'))) == 4)
        write(lock, *arguments, **keywords)

    monkeypatch.setattr(RunLock, 'write', write_together)

    def hold() -> None:
        try:
            with hold_run_lock(bucket_run, {}):
                (tmp_path / f'holds-{os.getpid()}').touch()
                wait_until(lambda: len(list(tmp_path.glob('refused-*'))) == 3)
        except RunLocked:
            (tmp_path / f'refused-{os.getpid()}').touch()

    assert [job.wait() for job in [Forked(hold) for _ in range(4)]] == [0] * 4
    assert len(list(tmp_path.glob('holds-*'))) == 1 and len(list(tmp_path.glob('refused-*'))) == 3


def test_lock_whose_every_answer_was_lost_is_recognized_by_its_token(bucket_run):
    owner = Owner.current({})
    write_text(bucket_run, run_lock._content(owner, 0))
    begin = time.monotonic()
    run_lock._acquire(RunLock(bucket_run), owner, lambda: False)
    assert time.monotonic() - begin < run_lock.STALE_SECONDS


@pytest.mark.parametrize(('words', 'what'), [('PUT', 500), ('HEAD', 403)])
def test_store_that_fails_for_a_while_is_said_once_and_ends_nothing(bucket_run, store, capsys, words, what):
    with hold_run_lock(bucket_run, {}) as owner:
        fault = store.fail(f'{words} run.lock', what)
        wait_until(lambda: fault.times < ALWAYS - 3)
        store.faults.clear()
        first = lock_text(bucket_run)
        wait_until(lambda: lock_text(bucket_run) != first)
        assert owner_of(bucket_run) == owner
    err = capsys.readouterr().err
    assert err.count('the lock of the run is not refreshed meanwhile') == 1
    assert err.startswith(f'warning: {bucket_run}/run.lock: '), err


class PolledLock(RunLock):
    """Lock object that runs a function before each poll after the first read."""

    def __init__(self, run: str, before_poll: Callable[[], object]) -> None:
        super().__init__(run)
        self.before_poll = before_poll

    def poll(self, content: LockContent) -> LockContent | None:
        self.before_poll()
        return super().poll(content)


def test_outage_of_the_store_is_no_evidence_that_an_owner_is_dead(bucket_run, store):
    """The owner cannot refresh its lock during the outage, in which this job waits for it."""
    other_owner(bucket_run)
    polls: list[float] = []

    def fail_four_times() -> None:
        polls.append(time.monotonic())
        store.fail('run.lock', 500, times=1) if len(polls) <= 4 else None

    run_lock._wait_until_free(PolledLock(bucket_run, fail_four_times), Owner.current({}), lambda: False)
    assert time.monotonic() - polls[3] >= run_lock.STALE_SECONDS


def test_lock_object_that_is_deleted_while_it_is_watched_is_free(bucket_run, store):
    other_owner(bucket_run)
    lock = PolledLock(bucket_run, lambda: store.delete(bucket_run, LOCK))
    assert run_lock._wait_until_free(lock, Owner.current({}), lambda: False) is None


def test_store_that_stops_responding_or_refuses_access_is_an_error(bucket_run, store):
    other_owner(bucket_run)
    lock = PolledLock(bucket_run, lambda: store.fail('run.lock', 500))
    with pytest.raises(OSError, match=r's3://home/runs/run/run\.lock: cannot be read for'):
        run_lock._wait_until_free(lock, Owner.current({}), lambda: False)
    store.faults.clear()
    write_text(bucket_run, RELEASED)
    store.fail('PUT run.lock', 403)
    with pytest.raises(ValueError, match=r'run\.lock: the store refuses access \(403\)'):
        hold_run_lock(bucket_run, {}).__enter__()


def test_lock_object_that_a_later_attempt_took_during_the_release_stays(bucket_run):
    lock = RunLock(bucket_run)
    lock.write(run_lock._content(Owner.current({}), 0), None)
    seen = lock.read()
    other = other_owner(bucket_run)
    assert seen is not None
    with pytest.raises(PreconditionFailed):
        lock.release(seen)
    assert owner_of(bucket_run) == other


def test_unwritable_run_folder_is_reported(write_recipe, tmp_path):
    recipe = write_recipe()
    (tmp_path / 'runs').write_text('a file is in the way')
    command = [sys.executable, '-m', 'diffusion.launch.node', '--', 'run.py', str(recipe)]
    environ = os.environ | {environment.SCHEDULER: 'local', environment.NODES: '1'}
    found = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert found.returncode == FAILED
    assert found.stderr.startswith(f'node 0: {tmp_path}/runs/run cannot be written ('), found.stderr
    assert 'Traceback' not in found.stderr
