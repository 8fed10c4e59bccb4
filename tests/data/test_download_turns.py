"""Downloads into a shared folder: one process downloads, and one that does not finish is not waited for forever."""

import os
import time
from pathlib import Path

import pytest
from processes import Forked

from diffusion.data import shard_cache
from diffusion.data.shard_cache import DownloadTurns
from diffusion.storage import locks


def turns() -> DownloadTurns:
    return DownloadTurns('streams.a', lambda: None)


def test_wait_is_limited_by_the_time_of_own_downloads():
    mine = turns()
    assert mine.patience_seconds(1000) == 10
    assert mine.patience_seconds(10**9) == 150
    mine.record(10**7, 1.0)
    assert mine.patience_seconds(10**9) == 300
    mine.record(10**9, 10.0)
    mine.record(10**7, 60.0)  # an outage
    assert mine.patience_seconds(10**9) == 30


@pytest.mark.parametrize('finishes', [True, False])
def test_one_process_downloads_while_others_wait(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, finishes: bool):
    """Three processes wait for one that finishes its download, or that never does: then one of the three downloads."""
    monkeypatch.setattr(shard_cache, 'PATIENCE_SECONDS', 30.0 if finishes else 0.5)
    path, holds = tmp_path / 'shard.0.mds', tmp_path / 'holds'

    def download(number: int, seconds: float) -> None:
        with turns().take(path, 10, path.exists) as locked:
            holds.touch()
            if locked is None:
                return
            time.sleep(seconds)
            (tmp_path / f'downloaded-by-{number}').touch()
            path.with_suffix(f'.{number}').touch()
            os.replace(path.with_suffix(f'.{number}'), path)

    first = Forked(lambda: download(0, 1.0 if finishes else 3600.0))
    while not holds.exists():
        time.sleep(0.01)
    others = [Forked(lambda number=number: download(number, 0.1)) for number in (1, 2, 3)]
    assert [other.wait() for other in others] == [0, 0, 0]
    assert first.running() is not finishes or first.wait() == 0
    if not finishes:
        first.kill()
    assert len(list(tmp_path.glob('downloaded-by-*'))) == 1
    assert (tmp_path / 'downloaded-by-0').exists() is finishes


def test_lock_that_was_not_released_is_not_waited_for_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A shard that was evicted is needed again, while the node that holds its lock is still stopped."""
    monkeypatch.setattr(shard_cache, 'PATIENCE_SECONDS', 0.5)
    path, waits = tmp_path / 'shard', []
    mine = DownloadTurns('streams.a', lambda: waits.append(None))

    def take() -> None:
        for most in (1000, 1):
            waits.clear()
            with mine.take(path, 10, path.exists) as locked:
                assert locked == tmp_path / 'shard.1'
            assert len(waits) <= most
        assert waits, 'the lock is tried again'

    with locks.hold_path_lock(path, lambda: None):
        assert Forked(take).wait() == 0
    with mine.take(path, 10, path.exists) as locked:
        assert locked == path


def test_file_of_a_process_with_another_lock_ends_the_wait(tmp_path: Path) -> None:
    path, deadline = tmp_path / 'shard', time.monotonic() + 20

    def write() -> None:
        assert time.monotonic() < deadline, 'it was not noticed'
        path.touch()

    def take() -> None:
        with DownloadTurns('streams.a', write).take(path, 10**12, path.exists) as locked:
            assert locked is None

    with locks.hold_path_lock(path, lambda: None):
        assert Forked(take).wait() == 0


def test_failure_of_another_rank_ends_the_wait(tmp_path: Path) -> None:
    class Failed(Exception):
        pass

    def fail() -> None:
        raise Failed

    def take() -> None:
        with pytest.raises(Failed), DownloadTurns('streams.a', fail).take(tmp_path / 'shard', 1, lambda: False):
            pass

    with locks.hold_path_lock(tmp_path / 'shard', lambda: None):
        assert Forked(take).wait() == 0
