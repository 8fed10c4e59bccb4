"""Files written past the page cache have the bytes of any other file, whatever the sizes of the writes."""

import errno
import fcntl
import os
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from diffusion.storage import direct_file
from diffusion.storage.direct_file import DirectFile, open_for_writing

BLOCK = 4096


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_file, 'CHUNK_BYTES', 2 * BLOCK)


def is_direct(file: DirectFile) -> bool:
    return bool(fcntl.fcntl(file.fileno(), fcntl.F_GETFL) & os.O_DIRECT)


def opened(path: Path) -> DirectFile:
    return DirectFile(path.open('wb', buffering=0))


@pytest.mark.usefixtures('small_chunks')
@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.lists(st.one_of(st.integers(0, 5 * BLOCK), st.just('flush')), max_size=12))
def test_any_writes_and_flushes(tmp_path: Path, steps: list[int | str]) -> None:
    expected = b''
    with opened(tmp_path / 'file') as file:
        for number, step in enumerate(steps):
            if isinstance(step, int):
                data = bytes([number + 1]) * step
                expected += data
                assert file.write(memoryview(data)) == step
            else:
                file.flush()
                assert (tmp_path / 'file').read_bytes() == expected
    assert (tmp_path / 'file').read_bytes() == expected


def test_whole_chunks_are_written_directly(tmp_path: Path) -> None:
    content = os.urandom(direct_file.CHUNK_BYTES * 2 + 5)
    with open_for_writing(tmp_path / 'file') as file:
        if not isinstance(file, DirectFile):
            pytest.skip('the temporary folder is on a file system that is not written directly')
        file.write(content[:-5])
        assert is_direct(file) and (tmp_path / 'file').read_bytes() == content[:-5]
        file.write(content[-5:])
        file.flush()
        assert not is_direct(file), 'the rest is not a whole block'
        os.fsync(file.fileno())
    assert (tmp_path / 'file').read_bytes() == content


def test_device_of_larger_blocks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A chunk that is not a multiple of the block size is refused by the kernel with EINVAL."""
    monkeypatch.setattr(direct_file, 'CHUNK_BYTES', 1000)
    content = os.urandom(10_500)
    with opened(tmp_path / 'file') as file:
        file.write(content)
        assert not is_direct(file) and file.writable()
    assert (tmp_path / 'file').read_bytes() == content


@pytest.mark.usefixtures('small_chunks')
def test_full_disk_raises() -> None:
    for content in (bytes(10 * BLOCK), b'less than a chunk'):
        with pytest.raises(OSError) as raised, opened(Path('/dev/full')) as file:
            file.write(content)
        assert raised.value.errno == errno.ENOSPC


def test_other_file_systems_are_written_through_the_page_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(direct_file, '_file_system', lambda device: 'nfs4')
    with open_for_writing(tmp_path / 'file') as file:
        assert not isinstance(file, DirectFile)
        file.write(b'content')
    assert (tmp_path / 'file').read_bytes() == b'content'
    shared_memory = Path('/dev/shm')
    if shared_memory.is_dir():
        monkeypatch.undo()
        assert direct_file._file_system(shared_memory.stat().st_dev) == 'tmpfs'
