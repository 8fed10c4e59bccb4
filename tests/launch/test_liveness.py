"""The health check of a container, by real processes that look like node entry points."""

import os
import subprocess
import sys
import time

import pytest

from diffusion.launch import liveness
from diffusion.launch.heartbeat_file import write_heartbeat

SLEEPER = 'import time, sys; print("up", flush=True); time.sleep(1000)'


@pytest.fixture
def entry_point(tmp_path, monkeypatch):
    """A process that was started as a node entry point is, and does nothing."""
    monkeypatch.setattr(liveness.tempfile, 'gettempdir', lambda: str(tmp_path))
    package = tmp_path / 'diffusion' / 'launch'
    package.mkdir(parents=True)
    (package / 'node.py').write_text(SLEEPER)
    for folder in (package, package.parent):
        (folder / '__init__.py').touch()
    command = [sys.executable, '-m', 'diffusion.launch.node', '--', 'run.py']
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None and process.stdout.readline() == b'up\n'
        yield process
        process.kill()


def own(problems, process):
    return [problem for problem in problems if f'process {process.pid},' in problem]


def test_one_that_has_just_started_is_well(entry_point):
    assert not own(liveness.liveness_problems(), entry_point)


def test_one_that_is_silent_is_not(entry_point, monkeypatch, tmp_path):
    monkeypatch.setattr(liveness, 'SILENT_SECONDS', 0.2)
    time.sleep(0.5)
    (problem,) = own(liveness.liveness_problems(), entry_point)
    assert 'is silent for' in problem
    sign = tmp_path / f'diffusion-alive-{entry_point.pid}'
    sign.touch()  # an ordinary file has the time of the system clock
    assert own(liveness.liveness_problems(), entry_point)
    write_heartbeat(sign)
    assert not own(liveness.liveness_problems(), entry_point)
    os.utime(sign, (1.0, 1.0))  # of the time before the container was started again
    monkeypatch.setattr(liveness, 'SILENT_SECONDS', 1000)
    assert not own(liveness.liveness_problems(), entry_point)


def test_a_container_that_runs_something_else_is_well(tmp_path, monkeypatch, capsys):
    (tmp_path / '7').mkdir()
    (tmp_path / '7' / 'cmdline').write_bytes(b'/usr/bin/tini\0--\0python\0-m\0diffusion.launch.node\0')
    os.utime(tmp_path / '7', (1.0, 1.0))
    monkeypatch.setattr(liveness, 'SILENT_SECONDS', -1.0)
    assert liveness.liveness_problems(tmp_path) == []
    monkeypatch.setattr(liveness, 'liveness_problems', list)
    assert liveness.main() == 0
    monkeypatch.setattr(liveness, 'liveness_problems', lambda: ['it is silent'])
    assert (liveness.main(), capsys.readouterr().err) == (1, 'it is silent\n')


def test_a_sign_is_left_and_taken_away(tmp_path, monkeypatch):
    monkeypatch.setattr(liveness.tempfile, 'gettempdir', lambda: str(tmp_path))
    liveness.say_alive()
    assert [path.name for path in tmp_path.iterdir()] == [f'diffusion-alive-{os.getpid()}']
    liveness.remove_heartbeat()
    liveness.remove_heartbeat()
    assert not list(tmp_path.iterdir())
