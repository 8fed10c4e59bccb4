"""Container health check, tested with real processes that look like node entry points."""

import os
import subprocess
import sys
import time

import pytest

from diffusion.launch import liveness
from diffusion.runs.heartbeats import write_heartbeat
from diffusion.storage import local_files

SLEEPER = 'import time, sys; print("up", flush=True); time.sleep(1000)'


@pytest.fixture
def entry_point(tmp_path, monkeypatch):
    """Idle process with the command line of a node entry point."""
    monkeypatch.setattr(local_files.tempfile, 'gettempdir', lambda: str(tmp_path))
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


def problems_of(process):
    return [problem for problem in liveness.liveness_problems() if f'(process {process.pid})' in problem]


def test_entry_point_is_healthy_while_it_is_new_or_has_a_fresh_heartbeat(entry_point, monkeypatch):
    assert not problems_of(entry_point)
    monkeypatch.setattr(liveness, 'SILENT_SECONDS', 0.2)
    time.sleep(0.5)
    (problem,) = problems_of(entry_point)
    assert 'has written no heartbeat for' in problem
    heartbeat = local_files.user_folder() / f'alive-{entry_point.pid}'
    heartbeat.touch()  # an ordinary file has a timestamp of the system clock
    assert problems_of(entry_point)
    write_heartbeat(heartbeat)
    assert not problems_of(entry_point)
    os.utime(heartbeat, (1.0, 1.0))  # left over from before a restart of the container
    monkeypatch.setattr(liveness, 'SILENT_SECONDS', 1000)
    assert not problems_of(entry_point)


def test_container_without_entry_point_is_healthy(tmp_path, monkeypatch, capsys):
    (tmp_path / '7').mkdir()
    (tmp_path / '7' / 'cmdline').write_bytes(b'/usr/bin/tini\0--\0python\0-m\0diffusion.launch.node\0')
    os.utime(tmp_path / '7', (1.0, 1.0))
    monkeypatch.setattr(liveness, 'SILENT_SECONDS', -1.0)
    assert liveness.liveness_problems(tmp_path) == []
    monkeypatch.setattr(liveness, 'liveness_problems', list)
    assert liveness.main() == 0
    monkeypatch.setattr(liveness, 'liveness_problems', lambda: ['no heartbeat'])
    assert (liveness.main(), capsys.readouterr().err) == (1, 'no heartbeat\n')


def test_heartbeat_is_written_and_removed(tmp_path, monkeypatch):
    monkeypatch.setattr(local_files.tempfile, 'gettempdir', lambda: str(tmp_path))
    liveness.update_heartbeat()
    assert [path.name for path in local_files.user_folder().iterdir()] == [f'alive-{os.getpid()}']
    liveness.remove_heartbeat()
    liveness.remove_heartbeat()
    assert not list(local_files.user_folder().iterdir())
