"""Heartbeat files: atomic, independent of the system clock, and refreshed even on a full disk."""

import errno
import math
import os
import time
from unittest.mock import Mock

import pytest

from diffusion.runs import heartbeats
from diffusion.runs.heartbeats import SAVING, TRAINING, Beat, heartbeat_age, last_beats, write_rank_heartbeat


def test_heartbeats_are_read_as_written_and_not_written_without_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rank_heartbeat(7, TRAINING, 3, 1.5, {})
    assert not list(tmp_path.iterdir())
    before = time.monotonic()
    for rank, doing in ((0, TRAINING), (11, SAVING)):
        write_rank_heartbeat(7, doing, 3, 1.5, {heartbeats.ATTEMPT_FOLDER_VARIABLE: str(tmp_path), 'RANK': str(rank)})
    found = last_beats(tmp_path)
    assert found == {0: Beat(found[0].at, 7, TRAINING, 3, 1.5), 11: Beat(found[11].at, 7, SAVING, 3, 1.5)}
    assert before <= found[0].at <= found[11].at <= time.monotonic()


@pytest.mark.parametrize('jump', [-3600, 1200])
def test_setting_the_system_clock_does_not_age_a_heartbeat(tmp_path, monkeypatch, jump):
    now = time.time
    monkeypatch.setattr(time, 'time', lambda: now() + jump)
    heartbeats.write_heartbeat(tmp_path / 'beat')
    assert 0 <= heartbeat_age(tmp_path / 'beat') < 60


def test_heartbeat_from_before_boot_is_ignored(tmp_path):
    heartbeats.write_heartbeat(tmp_path / 'beat')
    later = time.monotonic() + 1000
    os.utime(tmp_path / 'beat', (later, later))
    assert heartbeat_age(tmp_path / 'beat') == math.inf
    assert heartbeat_age(tmp_path / 'none') == math.inf


def test_a_full_disk_does_not_make_a_rank_look_hung(tmp_path, monkeypatch):
    environ = {heartbeats.ATTEMPT_FOLDER_VARIABLE: str(tmp_path)}
    write_rank_heartbeat(7, TRAINING, 3, 1.5, environ)
    os.utime(tmp_path / 'beat-0', (1.0, 1.0))
    monkeypatch.setattr(heartbeats, 'open_own_file', Mock(side_effect=OSError(errno.ENOSPC, 'No space left')))
    write_rank_heartbeat(8, TRAINING, 3, 1.5, environ)
    (found,) = last_beats(tmp_path).values()
    assert found.batch == 7 and found.at > 1.0
