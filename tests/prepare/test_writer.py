"""A dataset appears whole or not at all."""

import errno
import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import streaming.base.format.base.writer as streaming_writer
from streaming.base.format import reader_from_json

from diffusion.prepare.writer import BucketWriter, Picture, check_sizes, new_dataset

PICTURE = Picture(b'\x00' * 1000, ['a caption'], 8, 8, 'key')


def write(out: Path, *, count: int = 3, overwrite: bool = False) -> None:
    with new_dataset(out, overwrite=overwrite) as folder:
        with BucketWriter(folder, shard_bytes=2000) as writer:
            for _ in range(count):
                writer.write(8, PICTURE)
        (folder / 'report.json').write_text('{}')


def part_of(out: Path, pid: int | str) -> Path:
    return out.with_name(f'{out.name}.part-{socket.gethostname()}-{pid}')


def test_shards_are_hashed_and_read_back(tmp_path: Path) -> None:
    write(tmp_path / 'out')
    shards = json.loads((tmp_path / 'out/8px/index.json').read_text())['shards']
    assert [shard['samples'] for shard in shards] == [1, 1, 1]
    assert all(shard['raw_data']['hashes']['xxh64'] for shard in shards)
    sample = reader_from_json(str(tmp_path / 'out'), '8px', shards[2])[0]
    assert sample == {'image': PICTURE.image, 'captions': ['a caption'], 'width': 8, 'height': 8, 'key': 'key'}
    assert [path.name for path in tmp_path.iterdir()] == ['out']


@pytest.mark.parametrize('failure', [RuntimeError, KeyboardInterrupt])
def test_failure_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failure: type[BaseException]) -> None:
    def fail(self: object, *_: object) -> None:
        raise failure

    monkeypatch.setattr(Path, 'write_text', fail)  # of the report, when all shards are written
    with pytest.raises(failure):
        write(tmp_path / 'out')
    assert not list(tmp_path.iterdir())


def test_full_disk_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(self: object, *_: object) -> None:
        raise OSError(errno.ENOSPC, 'No space left on device')

    monkeypatch.setattr(streaming_writer.Writer, '_process_file', full)
    with pytest.raises(OSError, match='No space left'):
        write(tmp_path / 'out')
    assert not list(tmp_path.iterdir())


def test_existing_dataset_is_kept(tmp_path: Path) -> None:
    write(tmp_path / 'out', count=1)
    with pytest.raises(ValueError, match='exists and is not empty'):
        write(tmp_path / 'out', count=2)
    assert len(json.loads((tmp_path / 'out/8px/index.json').read_text())['shards']) == 1


def test_dataset_written_meanwhile_is_kept(tmp_path: Path) -> None:
    def write_late() -> None:
        with new_dataset(tmp_path / 'out') as folder:
            (folder / 'late').touch()
            (tmp_path / 'out').mkdir()
            (tmp_path / 'out/first').touch()

    with pytest.raises(ValueError, match='exists and is not empty'):
        write_late()
    assert [str(path.relative_to(tmp_path)) for path in tmp_path.rglob('*')] == ['out', 'out/first']


def test_empty_folder_is_filled(tmp_path: Path) -> None:
    (tmp_path / 'out').mkdir()
    write(tmp_path / 'out')
    assert (tmp_path / 'out/8px/index.json').is_file()


def test_overwrite_replaces_a_dataset_and_nothing_else(tmp_path: Path) -> None:
    write(tmp_path / 'out', count=1)
    write(tmp_path / 'out', count=2, overwrite=True)
    assert len(json.loads((tmp_path / 'out/8px/index.json').read_text())['shards']) == 2
    assert [path.name for path in tmp_path.iterdir()] == ['out']
    (tmp_path / 'home').mkdir()
    (tmp_path / 'home/diary.txt').touch()
    with pytest.raises(ValueError, match='no prepared dataset'):
        write(tmp_path / 'home', overwrite=True)


def test_failed_overwrite_keeps_the_old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / 'out', count=1)
    rename = os.rename

    def fail_once(old: Path, new: Path) -> None:
        if not old.name.endswith('-replaced') and new.name == 'out':
            raise OSError(errno.EIO, 'Input/output error')
        rename(old, new)

    monkeypatch.setattr(os, 'rename', fail_once)
    with pytest.raises(OSError, match='Input/output'):
        write(tmp_path / 'out', count=2, overwrite=True)
    assert len(json.loads((tmp_path / 'out/8px/index.json').read_text())['shards']) == 1
    assert [path.name for path in tmp_path.iterdir()] == ['out']


KILLED = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[1])
from test_writer import PICTURE, BucketWriter, new_dataset
with new_dataset(Path(sys.argv[2])) as folder, BucketWriter(folder, shard_bytes=2000) as writer:
    for _ in range(3):
        writer.write(8, PICTURE)
    print('written', flush=True)
    time.sleep(600)
"""


def test_killed_process_leaves_no_dataset_and_its_part_goes_at_the_next_start(tmp_path: Path) -> None:
    out = tmp_path / 'out'
    command = [sys.executable, '-c', KILLED, str(Path(__file__).parent), str(out)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == 'written\n'
        process.send_signal(signal.SIGKILL)
    part = part_of(out, process.pid)
    assert list(part.rglob('*.mds'))
    assert not out.exists()
    write(out)
    assert [path.name for path in tmp_path.iterdir()] == ['out']


def test_part_of_a_living_process_stays(tmp_path: Path) -> None:
    part_of(tmp_path / 'out', os.getppid()).mkdir()
    (tmp_path / 'out.part-another-host-1').mkdir()
    write(tmp_path / 'out')
    assert part_of(tmp_path / 'out', os.getppid()).is_dir()
    assert (tmp_path / 'out.part-another-host-1').is_dir()


def test_dataset_moved_aside_by_a_killed_overwrite_comes_back(tmp_path: Path) -> None:
    write(tmp_path / 'out', count=1)
    with subprocess.Popen(['true']) as dead:
        pass
    os.rename(tmp_path / 'out', part_of(tmp_path / 'out', f'{dead.pid}-replaced'))
    with pytest.raises(ValueError, match='exists and is not empty'):
        write(tmp_path / 'out')
    assert (tmp_path / 'out/8px/index.json').is_file()


@pytest.mark.parametrize(('sizes', 'message'), [([], 'none'), ([100], '100'), ([0], '0'), ([64, 64], 'repeats')])
def test_wrong_sizes(sizes: list[int], message: str) -> None:
    with pytest.raises(ValueError, match=f'--sizes: .*{message}'):
        check_sizes(sizes)
