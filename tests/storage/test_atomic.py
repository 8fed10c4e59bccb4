"""Atomic writes of files and folders."""

import errno
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from diffusion.storage import atomic
from diffusion.storage.atomic import atomic_file, atomic_folder, new_unfinished, replace_folder


def write(path: Path, content: str) -> None:
    with atomic_folder(path) as unfinished:
        (unfinished / 'below').mkdir()
        (unfinished / 'below/file').write_text(content)


def names(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir())


@pytest.mark.parametrize('failure', [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize('writer', [atomic_file, atomic_folder])
def test_failure_leaves_nothing(tmp_path: Path, writer, failure: type[BaseException]) -> None:
    def fail() -> None:
        with writer(tmp_path / 'out') as unfinished:
            (unfinished / 'file' if unfinished.is_dir() else unfinished).write_text('half')
            assert names(tmp_path) != ['out']
            raise failure

    with pytest.raises(failure):
        fail()
    assert not names(tmp_path)


def test_folder_contents_are_flushed_before_the_rename(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise a power cut could leave an empty file in a folder that looks complete."""
    flushed, fsync, rename = set(), os.fsync, os.rename

    def recording_fsync(descriptor: int) -> None:
        flushed.add(os.fstat(descriptor).st_ino)
        fsync(descriptor)

    def checking_rename(old: Path, new: Path) -> None:
        assert {path.stat().st_ino for path in (old, *Path(old).rglob('*'))} <= flushed
        rename(old, new)

    monkeypatch.setattr(os, 'fsync', recording_fsync)
    monkeypatch.setattr(os, 'rename', checking_rename)
    write(tmp_path / 'out', 'x')
    assert tmp_path.stat().st_ino in flushed
    flushed.clear()
    atomic.write_atomically(tmp_path / 'file', 'x')
    assert {path.stat().st_ino for path in (tmp_path, tmp_path / 'file')} <= flushed


def test_new_folder_replaces_an_empty_folder_only(tmp_path: Path) -> None:
    (tmp_path / 'out').mkdir()
    write(tmp_path / 'out', 'first')
    with pytest.raises(OSError, match='not empty'):
        write(tmp_path / 'out', 'second')
    assert (tmp_path / 'out/below/file').read_text() == 'first'
    assert names(tmp_path) == ['out']


@pytest.mark.parametrize('aside', [None, 'replaced'])
def test_replaced_folder_is_removed_or_restored_on_an_error(tmp_path, monkeypatch, aside):
    for name in ('out', 'new'):
        write(tmp_path / name, name)
    rename = os.rename

    def fail_once(old: Path, new: Path) -> None:
        if old.name == 'new':
            raise OSError(errno.EIO, 'Input/output error')
        rename(old, new)

    where: dict[str, Any] = {'aside': tmp_path / aside} if aside else {}
    with monkeypatch.context() as patch:
        patch.setattr(os, 'rename', fail_once)
        with pytest.raises(OSError, match='Input/output'):
            replace_folder(tmp_path / 'new', tmp_path / 'out', **where)
    assert names(tmp_path) == ['new', 'out'] and (tmp_path / 'out/below/file').read_text() == 'out'
    replace_folder(tmp_path / 'new', tmp_path / 'out', **where)
    assert names(tmp_path) == ['out'] and (tmp_path / 'out/below/file').read_text() == 'new'


def test_only_leftovers_of_killed_processes_are_removed(tmp_path: Path) -> None:
    write(tmp_path / 'out', 'x')
    for path in (tmp_path / 'out', tmp_path / 'out/below/file'):
        new_unfinished(path).mkdir()
        write(new_unfinished(path), 'half')
    atomic.remove_unfinished(tmp_path)
    assert names(tmp_path) == ['out'] and len(names(tmp_path / 'out/below')) == 3
    atomic.remove_unfinished(tmp_path, below=True)
    assert names(tmp_path / 'out/below') == ['file']


def test_remove_handles_files_folders_links_and_missing_paths(tmp_path: Path) -> None:
    write(tmp_path / 'folder', 'x')
    atomic.write_atomically(tmp_path / 'file', 'x')
    (tmp_path / 'link').symlink_to('folder')
    atomic.remove(tmp_path / 'link')
    assert names(tmp_path) == ['file', 'folder']
    for name in ('folder', 'file', 'missing'):
        atomic.remove(tmp_path / name)
    assert not names(tmp_path)


@pytest.mark.parametrize(('umask', 'mode'), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
@pytest.mark.parametrize('writer', [atomic_file, atomic_folder])
def test_weights_have_the_permissions_of_the_umask(tmp_path: Path, writer, umask: int, mode: int) -> None:
    before = os.umask(umask)
    try:
        with writer(tmp_path / 'out') as unfinished:
            file = unfinished / 'file' if unfinished.is_dir() else unfinished
            save_file({'weight': torch.zeros(2)}, file)
    finally:
        os.umask(before)
    found = tmp_path / 'out/file' if writer is atomic_folder else tmp_path / 'out'
    assert found.stat().st_mode & 0o777 == mode
    assert names(tmp_path) == ['out'] and names(found.parent) == [found.name]
