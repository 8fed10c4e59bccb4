"""File locks: shared and exclusive, with lock files that are kept or removed."""

import os
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path
from unittest.mock import Mock

import pytest

from diffusion.storage import locks

ROOT = Path(__file__).parents[2]


TRY = """
import sys
from pathlib import Path
from diffusion.storage import locks
locks.hold_lock(Path(sys.argv[1]), lambda: sys.exit(3), shared=sys.argv[2] == 'True').__enter__()
"""


def try_in_another_process(path: Path, *, shared: bool) -> bool:
    # A new interpreter: a fork of this process, which has threads, could wait forever for a lock that one of them held.
    status = subprocess.run([sys.executable, '-c', TRY, path, str(shared)], cwd=ROOT, check=False).returncode
    assert status in (0, 3)
    return status == 0


@pytest.mark.parametrize(
    ('first', 'second', 'expected'), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_lock_is_shared_only_by_shared_requests(tmp_path: Path, first: bool, second: bool, expected: bool) -> None:
    path = tmp_path / 'new' / 'lock'
    with locks.hold_lock(path, pytest.fail, shared=first) as is_held:
        assert is_held and try_in_another_process(path, shared=second) == expected
        open_files = len(os.listdir('/proc/self/fd'))
        assert locks._try_lock(path) is None and len(os.listdir('/proc/self/fd')) == open_files
    assert path.exists() and try_in_another_process(path, shared=False)


def test_lock_on_a_file_removed_by_its_owner_is_taken_again(tmp_path: Path) -> None:
    path, owner, waits = tmp_path / 'lock', ExitStack(), []
    owner.enter_context(locks.hold_lock(path, pytest.fail, remove=True))
    with locks.hold_lock(path, lambda: (waits.append(1), owner.close())[1], remove=True):
        assert waits == [1] and path.exists()
        assert not try_in_another_process(path, shared=False)
    assert not path.exists()


def test_lock_file_of_another_user_is_locked_without_write_access(tmp_path: Path, monkeypatch) -> None:
    path, plain = tmp_path / 'lock', locks.open_own_file
    path.touch()

    def open_readable(path: Path, flags: int, mode: int = 0) -> int:
        if flags & (os.O_CREAT | os.O_RDWR):
            raise PermissionError(13, 'Permission denied')
        return plain(path, flags)

    monkeypatch.setattr(locks, 'open_own_file', open_readable)
    with locks.hold_lock(path, pytest.fail) as is_held:
        assert is_held and not try_in_another_process(path, shared=False)


def test_nothing_is_held_if_the_file_system_has_no_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(locks.fcntl, 'flock', Mock(side_effect=OSError(38, 'Function not implemented')))
    open_files = len(os.listdir('/proc/self/fd'))
    with locks.hold_lock(tmp_path / 'lock', pytest.fail) as is_held:
        assert not is_held and len(os.listdir('/proc/self/fd')) == open_files
    running, stale = (locks.make_scratch_folder(tmp_path / 'shard', 5) for _ in range(2))
    os.utime(stale, (0, 0))
    locks.remove_stale_scratch(tmp_path)
    assert running.exists() and not stale.exists()
