"""Atomic checkpoints on disk, and detection of damage."""

import errno
import json
import os

import pytest

from diffusion.checkpointing import checkpoint_store


def write(folder, batch, content=b'weights'):
    work = checkpoint_store.unfinished_path(folder, batch)
    work.mkdir()
    (work / 'state.pt').write_bytes(content)
    checkpoint_store.publish(
        work,
        folder / checkpoint_store.checkpoint_name(batch),
        checkpoint_store.records_of(work, ['state.pt']),
        {'batch': batch},
    )
    return folder / checkpoint_store.checkpoint_name(batch)


def has_same_records(receipt, other):
    try:
        one, two = json.loads(bytes(receipt)), json.loads(other)
        return one['files'] == two['files'] and one['version'] == two['version']
    except (ValueError, KeyError):
        return False


def test_latest_points_to_the_last_published_checkpoint(tmp_path):
    for batch in (5, 10, 15):
        write(tmp_path, batch)
    assert os.readlink(tmp_path / 'latest') == 'ba15'
    assert [path.name for path in checkpoint_store.list_checkpoints(tmp_path)] == ['ba15', 'ba10', 'ba5']
    assert checkpoint_store.newest_intact(tmp_path) == tmp_path / 'ba15'
    assert {path.name for path in tmp_path.iterdir()} == {'ba5', 'ba10', 'ba15', 'latest'}, (
        'no temporary files are left'
    )


def test_checkpoints_are_ordered_by_batch_number(tmp_path):
    for batch in (900, 1000):
        write(tmp_path, batch)
    assert checkpoint_store.newest_intact(tmp_path) == tmp_path / 'ba1000'


def test_every_flipped_bit_is_detected(tmp_path):
    checkpoint = write(tmp_path, 5, b'0123456789')
    for name in ('state.pt', 'receipt.json'):
        path = checkpoint / name
        intact = path.read_bytes()
        for bit in range(8 * len(intact)):
            flipped = bytearray(intact)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            # A receipt has other fields than sizes and hashes, in which a flipped bit does no harm.
            if name == 'receipt.json' and has_same_records(flipped, intact):
                checkpoint_store.verify_checkpoint(checkpoint)
            else:
                with pytest.raises(ValueError, match='ba5'):
                    checkpoint_store.verify_checkpoint(checkpoint)
        path.write_bytes(intact)
    checkpoint_store.verify_checkpoint(checkpoint)


@pytest.mark.parametrize(
    ('damage', 'message'),
    [
        (lambda folder: os.truncate(folder / 'state.pt', 3), r'state\.pt: 3 bytes, expected 7'),
        (lambda folder: (folder / 'state.pt').unlink(), r'state\.pt: the file does not exist'),
        (lambda folder: (folder / 'receipt.json').unlink(), r'receipt\.json is missing'),
        (lambda folder: (folder / 'receipt.json').write_text('{}'), r'receipt\.json: not a valid receipt'),
        (lambda folder: (folder / 'receipt.json').write_bytes(b'\xff\xfe'), r'receipt\.json: not a valid receipt'),
    ],
)
def test_damaged_checkpoint_is_reported_and_the_previous_one_is_used(tmp_path, caplog, damage, message):
    write(tmp_path, 5)
    newest = write(tmp_path, 10)
    damage(newest)
    with pytest.raises(ValueError, match=message):
        checkpoint_store.verify_checkpoint(newest)
    assert checkpoint_store.newest_intact(tmp_path) == tmp_path / 'ba5'
    assert 'ba10' in caplog.text
    damage(tmp_path / 'ba5')
    with pytest.raises(ValueError, match='all 2 checkpoints are damaged.*restore one from a backup'):
        checkpoint_store.newest_intact(tmp_path)


@pytest.mark.parametrize('number', [errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EACCES])
def test_read_error_is_retried_and_does_not_count_as_damage(tmp_path, monkeypatch, caplog, number):
    for batch in (5, 10):
        write(tmp_path, batch)
    plain, faults = checkpoint_store.hash_file, [1, 1, 1]

    def hash_file(path):
        if faults:
            faults.pop()
            raise OSError(number, os.strerror(number), str(path))
        return plain(path)

    monkeypatch.setattr(checkpoint_store, 'hash_file', hash_file)
    monkeypatch.setattr(checkpoint_store, 'RETRY_PAUSES_SECONDS', (0.0, 0.0, 0.0))
    assert checkpoint_store.newest_intact(tmp_path) == tmp_path / 'ba10'
    assert caplog.text.count('retrying') == 3
    faults[:] = [1] * 4
    with pytest.raises(OSError, match=os.strerror(number)) as raised:
        checkpoint_store.newest_intact(tmp_path)
    assert raised.value.errno == number
    assert 'damaged' not in caplog.text


def test_folder_that_cannot_be_listed_does_not_count_as_empty(tmp_path, monkeypatch):
    def scandir(path):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    monkeypatch.setattr(os, 'scandir', scandir)
    monkeypatch.setattr(checkpoint_store, 'RETRY_PAUSES_SECONDS', (0.0,))
    with pytest.raises(OSError, match='Stale'):
        checkpoint_store.newest_intact(tmp_path)


def test_latest_points_to_the_newest_intact_checkpoint_after_set_aside(tmp_path):
    for batch in (5, 10, 15):
        write(tmp_path, batch)
    for batch in (10, 15):
        os.truncate(tmp_path / f'ba{batch}' / 'state.pt', 3)
    checkpoint_store.set_aside(tmp_path / 'ba5')
    assert os.readlink(tmp_path / 'latest') == 'ba5'
    assert {path.name for path in tmp_path.iterdir()} == {'ba5', 'ba10.damaged', 'ba15.damaged', 'latest'}


def test_run_without_checkpoints_has_no_newest_one(tmp_path):
    assert checkpoint_store.newest_intact(tmp_path) is None
    assert checkpoint_store.newest_intact(tmp_path / 'absent') is None


def test_existing_checkpoint_is_replaced(tmp_path):
    write(tmp_path, 5, b'old')
    checkpoint = write(tmp_path, 5, b'newer')
    checkpoint_store.verify_checkpoint(checkpoint)
    assert (checkpoint / 'state.pt').read_bytes() == b'newer'


def test_leftovers_of_a_killed_process_are_removed(tmp_path):
    write(tmp_path, 5)
    checkpoint_store.unfinished_path(tmp_path, 10).mkdir()
    (checkpoint_store.unfinished_path(tmp_path, 10) / 'state.pt').write_bytes(b'hal')
    (tmp_path / '.ba3.removed').mkdir()
    assert checkpoint_store.newest_intact(tmp_path) == tmp_path / 'ba5'
    checkpoint_store.remove_unfinished_saves(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {'ba5', 'latest'}


def test_pruning_keeps_the_newest(tmp_path):
    for batch in (5, 10, 15, 20):
        write(tmp_path, batch)
    assert {path.name for path in checkpoint_store.prune(tmp_path, 2)} == {'ba5', 'ba10'}
    assert [path.name for path in checkpoint_store.list_checkpoints(tmp_path)] == ['ba20', 'ba15']
    checkpoint_store.prune(tmp_path, 0)
    assert [path.name for path in checkpoint_store.list_checkpoints(tmp_path)] == ['ba20'], 'the newest always stays'


def test_hashing_writer_hashes_the_written_data(tmp_path):
    with (tmp_path / 'file').open('wb') as file:
        writer = checkpoint_store.HashingWriter(file)
        for piece in (b'ab', b'', b'c' * 100_000):
            writer.write(piece)
        writer.flush()
    assert writer.record() == checkpoint_store.hash_file(tmp_path / 'file')
