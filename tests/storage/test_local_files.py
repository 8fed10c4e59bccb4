"""Files of fixed names are neither links nor pipes, private folders are private, output folders are writable."""

import os
import time
from typing import Any
from unittest.mock import Mock

import pytest

from diffusion.data.bad_samples import quarantine
from diffusion.errors import UserError
from diffusion.launch import liveness
from diffusion.loggers.metrics_file import MetricsFile
from diffusion.runs import run_lock
from diffusion.runs.attempts import Attempt, append_attempt
from diffusion.runs.heartbeats import write_heartbeat
from diffusion.storage import local_files
from diffusion.storage.host_memory import keep_freed_memory
from diffusion.storage.local_files import check_writable, why_not_writable
from diffusion.storage.locks import hold_lock


def take_run_lock(run):
    with run_lock.hold_run_lock(run, {}):
        pass


def take_lock(run):
    with hold_lock(run / 'lock', lambda: None):
        pass


def write_metrics(run):
    logger: Any = MetricsFile(str(run))
    try:
        logger.log_metrics({'loss': 1.0}, 1)
    finally:
        logger.close(None, None)


WRITERS = {
    'run.lock': take_run_lock,
    'lock': take_lock,
    'attempts.jsonl': lambda run: append_attempt(run, 'begin', Attempt(0, 1.0)),
    'quarantine.jsonl': lambda run: quarantine(run / 'quarantine.jsonl', ['{"shard": 1}'], 3),
    'metrics.jsonl': write_metrics,
    '.beat-0': lambda run: write_heartbeat(run / 'beat-0', 'x'),
}


@pytest.mark.parametrize('kind', ['link to a file', 'link to nothing', 'pipe', 'folder'])
@pytest.mark.parametrize('name', WRITERS)
def test_file_that_is_no_regular_file_is_refused_and_its_target_untouched(name, kind, tmp_path):
    run, target = tmp_path / 'run', tmp_path / 'target'
    run.mkdir()
    if kind == 'pipe':
        os.mkfifo(run / name)
    elif kind == 'folder':
        (run / name).mkdir()
    else:
        (run / name).symlink_to(target)
    if kind == 'link to a file':
        target.write_text('precious')
        os.utime(target, (1.0, 1.0))
    began = time.monotonic()
    with pytest.raises(UserError, match='is a link, a pipe or a folder instead of a regular file; remove it'):
        WRITERS[name](run)
    assert time.monotonic() - began < 10
    assert target.exists() == (kind == 'link to a file')
    if target.exists():
        assert (target.read_text(), target.stat().st_mtime) == ('precious', 1.0)


def test_heartbeat_that_is_a_link_is_replaced(tmp_path):
    target, beat = tmp_path / 'target', tmp_path / 'beat-0'
    target.write_text('precious')
    beat.symlink_to(target)
    write_heartbeat(beat, 'x')
    assert target.read_text() == 'precious' and not beat.is_symlink()


def test_folder_of_the_user_is_private(tmp_path, monkeypatch):
    monkeypatch.setattr(local_files.tempfile, 'gettempdir', lambda: str(tmp_path))
    folder = local_files.user_folder()
    assert folder.stat().st_mode & 0o777 == 0o700
    folder.chmod(0o777)
    assert local_files.user_folder().stat().st_mode & 0o022 == 0


def test_folder_of_the_user_that_is_a_link_or_of_another_user_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(local_files.tempfile, 'gettempdir', lambda: str(tmp_path))
    folder = tmp_path / f'diffusion-{os.getuid()}'
    (tmp_path / 'elsewhere').mkdir()
    folder.symlink_to(tmp_path / 'elsewhere')
    with pytest.raises(UserError, match='is a link or belongs to another user .*set TMPDIR'):
        liveness.update_heartbeat()
    assert not any((tmp_path / 'elsewhere').iterdir())
    if os.getuid() == 0:  # only root can give a folder to another user
        folder.unlink()
        folder.mkdir()
        os.chown(folder, 12345, 12345)
        with pytest.raises(UserError, match=r'belongs to another user \(id 12345\)'):
            local_files.user_folder()


def test_error_has_the_part_of_the_path_that_is_wrong(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [why_not_writable(path) for path in (tmp_path, tmp_path / 'new' / 'deeper', 'relative')] == [None] * 3
    assert not list(tmp_path.iterdir()), 'nothing is created'
    (tmp_path / 'file').touch()
    (tmp_path / 'link').symlink_to('nowhere')
    assert why_not_writable(tmp_path / 'file' / 'a' / 'b') == f'{tmp_path}/file is not a folder; choose another path'
    assert str(why_not_writable(tmp_path / 'link' / 'a')).startswith(f'{tmp_path}/link is a dangling link')
    reason = why_not_writable(tmp_path / ('long' * 100))
    assert str(reason).endswith('longlong cannot be reached (File name too long); choose another folder')
    monkeypatch.setattr(os, 'access', lambda *_: False)
    assert str(why_not_writable(tmp_path / 'a')).startswith(f'{tmp_path} cannot be written to (permissions, or a read-')
    with pytest.raises(UserError, match='^--out: .*file is not a folder'):
        check_writable(tmp_path / 'file', '--out')


@pytest.mark.parametrize(('accepted', 'used'), [(2**26, [2**26]), (2**25, [2**26, 2**25])])
def test_freed_memory_is_kept_in_the_largest_blocks_that_malloc_accepts(monkeypatch, accepted, used):
    mallopt = Mock(side_effect=lambda option, size: size <= accepted)
    monkeypatch.setattr('ctypes.CDLL', lambda name: Mock(mallopt=mallopt))
    keep_freed_memory()
    assert [each.args for each in mallopt.call_args_list] == [*((-3, size) for size in used), (-1, 2**28)]
