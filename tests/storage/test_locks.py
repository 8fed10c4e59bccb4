"""The lock of all programs: shared or alone, kept or removed, and never two on one file."""

import multiprocessing
from pathlib import Path

import pytest

from diffusion.storage import locks


class Taken(Exception):
    """Another process holds the lock."""


def taken() -> None:
    raise Taken


def try_in_another_process(path: Path, *, shared: bool) -> bool:
    """Return whether another process gets the lock."""
    with multiprocessing.get_context('fork').Pool(1) as pool:
        return pool.apply(gets, (path, shared))


def gets(path: Path, shared: bool) -> bool:
    try:
        with locks.held(path, taken, shared=shared):
            return True
    except Taken:
        return False


@pytest.mark.parametrize(
    ('first', 'second', 'expected'), [(True, True, True), (True, False, False), (False, True, False)]
)
def test_a_lock_is_shared_among_those_alone_who_ask_for_it(
    tmp_path: Path, first: bool, second: bool, expected: bool
) -> None:
    path = tmp_path / 'new' / 'lock'
    with locks.held(path, taken, shared=first) as is_held:
        assert is_held and try_in_another_process(path, shared=second) == expected
    assert path.exists() and try_in_another_process(path, shared=False)


def test_a_lock_on_a_file_that_its_owner_removed_is_not_one(tmp_path: Path) -> None:
    path = tmp_path / 'lock'
    waits = 0

    def wait() -> None:
        nonlocal waits
        waits += 1
        owner.close()

    owner = closing_lock(path)
    with locks.held(path, wait, remove=True):
        assert waits == 1 and path.exists()
        assert not try_in_another_process(path, shared=False)
    assert not path.exists()


class closing_lock:
    """A lock that is let go of by a call."""

    def __init__(self, path: Path) -> None:
        self.context = locks.held(path, taken, remove=True)
        self.context.__enter__()

    def close(self) -> None:
        self.context.__exit__(None, None, None)


def test_without_locks_of_the_file_system_nothing_is_held(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(handle: int, operation: int) -> None:
        raise OSError(38, 'Function not implemented')

    monkeypatch.setattr(locks.fcntl, 'flock', no_locks)
    with locks.held(tmp_path / 'lock', taken) as is_held:
        assert not is_held
