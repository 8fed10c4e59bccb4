"""Ctrl-C and a closed terminal, with real pseudo-terminals: the run saves and ends, or says what is lost."""

import contextlib
import fcntl
import os
import pty
import select
import signal
import subprocess
import sys
import termios
import threading
import time
from pathlib import Path

import pytest
from forkserver import ROOT, SOCKET
from waiting import wait_until

from diffusion.exit_codes import INTERRUPTED, PREEMPTED
from diffusion.runs import attempts
from diffusion.runs.run_status import inspect_run
from diffusion.runs.stop_signals import RepeatedInterrupt, SignalThread, describe_loss


class Session:
    """Program in a session of its own, whose controlling terminal is a pseudo-terminal."""

    def __init__(self, command: list[str | Path], environ: dict[str, str], folder: Path) -> None:
        self.master, device = pty.openpty()
        self.screen = bytearray()
        self._closing = False

        def take_terminal() -> None:
            fcntl.ioctl(0, termios.TIOCSCTTY, 0)

        self.process = subprocess.Popen(
            [*map(str, command)],
            env=environ,
            cwd=folder,
            stdin=device,
            stdout=device,
            stderr=device,
            start_new_session=True,
            preexec_fn=take_terminal,
        )
        os.close(device)
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        # Do not block in read(), which would keep the terminal open while it is being closed.
        with contextlib.suppress(OSError):  # no process has the device open any longer
            while not self._closing:
                if select.select([self.master], [], [], 0.02)[0]:
                    self.screen.extend(os.read(self.master, 65536))
        os.close(self.master)

    def text(self) -> str:
        return self.screen.decode(errors='replace')

    def press_ctrl_c(self) -> None:
        os.write(self.master, b'\x03')

    def close(self) -> None:
        self._closing = True
        self._reader.join()

    def press_ctrl_c_twice(self) -> None:
        self.press_ctrl_c()
        wait_until(lambda: 'press Ctrl-C again' in self.text(), shown=self.text)
        time.sleep(0.6)
        self.press_ctrl_c()
        assert self.wait(20) == INTERRUPTED

    def wait_for(self, path: Path) -> None:
        wait_until(path.exists, 120, self.text, running=lambda: self.process.poll() is None)

    def words(self) -> str:
        """Return what the program has written, which has no traceback, on one line."""
        text = ' '.join(self.text().split())
        assert 'Traceback' not in text
        return text

    def end(self) -> None:
        """End a program that a failed test left, whose job would save 500 checkpoints."""
        if self.process.poll() is None:
            self.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                self.process.wait(30)
            self.process.kill()

    def wait(self, timeout: float = 120) -> int:
        status = self.process.wait(timeout)
        self._reader.join(5)
        return status


@pytest.fixture
def recipe(write_recipe, tmp_path):
    return lambda **callbacks: write_recipe(
        imports=['slow_parts'],
        callbacks=callbacks,
        # The checkpoint that a message names is then known.
        checkpointing={'asynchronous': False, 'keep': {'last': 3}},
        trainer={'max_duration': '2000ba', 'save_interval': '4ba', 'autoresume': True, 'device': 'cpu'},
    )


@pytest.fixture
def start(forkserver, tmp_path):
    """Function that runs `python run.py RECIPE` in a terminal, or `diffusion train` on several devices."""

    def start(recipe: Path, devices: int = 1) -> Session:
        environ = os.environ | {SOCKET: forkserver.path, 'PYTHONPATH': f'{ROOT}:{ROOT / "tests"}', 'TERM': 'xterm'}
        program = [sys.executable, ROOT / 'tests' / 'forkserver.py', recipe]
        train = [sys.executable, '-m', 'diffusion', 'train', recipe, '--devices', str(devices)]
        sessions.append(Session(program if devices == 1 else train, environ, tmp_path))
        return sessions[-1]

    sessions: list[Session] = []
    yield start
    for session in sessions:
        session.end()


def slow(tmp_path: Path, seconds: float = 1.0) -> dict[str, object]:
    """Return the callback that makes the seventh batch slow; the file of the batch is written before."""
    return {'batch': 6, 'file': str(tmp_path / 'reached'), 'seconds': seconds}


@pytest.mark.slow
@pytest.mark.parametrize('devices', [1, 2])
def test_closed_terminal_saves_and_ends(start, recipe, tmp_path, devices):
    session = start(recipe(slow_batch=slow(tmp_path)), devices)
    session.wait_for(tmp_path / 'reached')
    session.close()
    assert session.wait() == PREEMPTED
    run = tmp_path / 'runs' / 'run'
    assert (run / 'ba7').is_dir() and not (run / 'run.lock').exists()


def test_ctrl_c_saves_and_ends(start, recipe, tmp_path):
    session = start(recipe(slow_batch=slow(tmp_path)))
    session.wait_for(tmp_path / 'reached')
    session.press_ctrl_c()
    assert session.wait() == PREEMPTED
    text = session.words()
    assert 'press Ctrl-C again to end at once without saving (then batches 5 to 6 are lost; the newest' in text
    assert 'stopped at batch 7 on Ctrl-C' in text
    run = tmp_path / 'runs' / 'run'
    assert (run / 'ba7').is_dir() and attempts.read_attempts(run)[0].cause == 'stopped'


@pytest.mark.slow
def test_second_ctrl_c_ends_at_once_and_says_what_is_lost(start, recipe, tmp_path):
    session = start(recipe(slow_batch=slow(tmp_path, seconds=60)))
    session.wait_for(tmp_path / 'reached')
    run = tmp_path / 'runs' / 'run'
    # The first reports come after 1, 3 and 7 seconds.
    wait_until(lambda: (now := inspect_run(run)).batch == 6 and now.nodes)
    found = inspect_run(run)
    assert (found.state, found.total_batches, [node['node'] for node in found.nodes]) == ('running', 2000, [0])
    session.press_ctrl_c_twice()
    (only,) = attempts.read_attempts(run)
    loss = 'ended by a second Ctrl-C: batches 5 to 6 are lost; the newest checkpoint is ba4'
    assert (only.status, only.cause, only.detail) == (INTERRUPTED, 'stopped', loss)
    assert loss in session.words()


@pytest.mark.slow
def test_ctrl_c_of_diffusion_train_on_two_devices_saves_and_the_same_command_resumes(start, recipe, tmp_path):
    run = tmp_path / 'runs' / 'run'
    session = start(recipe(slow_batch=slow(tmp_path)), devices=2)
    session.wait_for(tmp_path / 'reached')
    session.press_ctrl_c()
    assert session.wait() == PREEMPTED, session.text()
    text = session.words()
    assert text.count('press Ctrl-C again to end at once without saving (then batches 5 to 6 are lost; the newest') == 1
    assert f'stopped at batch 7 on Ctrl-C; {run}/ba7 is saved, the same command resumes from it' in text
    assert 'node 0' not in text
    session = start(recipe(slow_batch={'batch': 11, 'file': str(tmp_path / 'again'), 'seconds': 60}), devices=2)
    session.wait_for(tmp_path / 'again')
    session.press_ctrl_c_twice()
    assert 'ended by a second Ctrl-C: batches 9 to 11 are lost; the newest checkpoint is ba8' in session.words()
    assert [(each.cause, each.first) for each in attempts.read_attempts(run)] == [('stopped', 0), ('stopped', 7)]


@pytest.mark.parametrize(
    'number', [signal.SIGHUP, *(pytest.param(each, marks=pytest.mark.slow) for each in (signal.SIGINT, signal.SIGTERM))]
)
def test_signal_before_the_first_batch_ends_at_once_without_traceback(forkserver, recipe, tmp_path, number):
    path = recipe(slow_start={'file': str(tmp_path / 'reached'), 'seconds': 60})
    process = forkserver.start(ROOT / 'run.py', path, output=tmp_path / 'log')
    wait_until((tmp_path / 'reached').exists, shown=(tmp_path / 'log').read_text)
    os.kill(process.pid, number)
    assert process.poll(10) == PREEMPTED
    log = (tmp_path / 'log').read_text()
    cause = 'Ctrl-C' if number == signal.SIGINT else number.name
    assert log.endswith(f'stopped before the first batch on {cause}; nothing is lost\n')
    assert 'Traceback' not in log
    assert not (tmp_path / 'runs' / 'run' / 'run.lock').exists()


def test_ignored_signals_stay_ignored():
    program = 'import signal\nfrom diffusion.runs.stop_signals import handled_signals\nprint(*handled_signals())'
    command = ['sh', '-c', f"trap '' HUP INT; exec {sys.executable} -c '{program}'"]
    environ = os.environ | {'PYTHONPATH': str(ROOT)}
    output = subprocess.run(command, capture_output=True, text=True, check=True, env=environ).stdout
    assert [int(word) for word in output.split()] == [signal.SIGTERM, signal.SIGUSR1]


def test_one_ctrl_c_that_arrives_twice_counts_once(monkeypatch):
    interrupts = RepeatedInterrupt()
    now = time.monotonic()
    monkeypatch.setattr(time, 'monotonic', lambda: now)
    assert not interrupts.is_repeated() and not interrupts.is_repeated()
    monkeypatch.setattr(time, 'monotonic', lambda: now + 1)
    assert interrupts.is_repeated()


def test_thread_of_signals_leaves_the_wakeup_descriptor_of_another_library():
    thread = SignalThread(lambda number: None)
    thread.start()
    read, write = os.pipe()
    os.set_blocking(write, False)
    ours = signal.set_wakeup_fd(write)
    thread.stop()
    assert signal.set_wakeup_fd(ours) == write
    thread.stop()
    assert signal.set_wakeup_fd(-1) == -1
    os.close(read)
    os.close(write)


@pytest.mark.parametrize(
    ('error', 'expected'),
    [
        # Composer's handler raises SystemExit while the Trainer is built.
        (SystemExit(143), (75, 'preempted', 'stopped before the first batch on SIGTERM; nothing is lost')),
        (SystemExit(130), (75, 'stopped', 'stopped before the first batch on Ctrl-C; nothing is lost')),
        (SystemExit(1), (1, 'crash', 'SystemExit: 1')),
        (KeyboardInterrupt(), (130, 'stopped', 'interrupted')),
    ],
)
def test_exit_that_is_no_signal_is_recorded_as_a_crash(error, expected):
    from diffusion.training.training_run import outcome_of

    assert outcome_of(error) == expected


@pytest.mark.parametrize(
    ('batch', 'saved', 'expected'),
    [
        (0, 0, 'nothing is lost'),
        (7, 0, 'batches 1 to 7 are lost; there is no checkpoint'),
        (1200, 1200, 'no batch is lost; the newest checkpoint is ba1200'),
        (1201, 1200, 'batch 1201 is lost; the newest checkpoint is ba1200'),
        (1234, 1200, 'batches 1201 to 1234 are lost; the newest checkpoint is ba1200'),
    ],
)
def test_lost_batches_are_described(batch, saved, expected):
    assert describe_loss(batch, saved) == expected
