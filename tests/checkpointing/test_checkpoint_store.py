"""Checkpoints on disk: whole or absent, and damage is found."""

import errno
import json
import os

import pytest

from diffusion.checkpointing import checkpoint_store


def write(folder, batch, content=b'weights'):
    work = checkpoint_store.unfinished(folder, batch)
    work.mkdir()
    (work / 'state.pt').write_bytes(content)
    checkpoint_store.publish(
        work,
        folder / checkpoint_store.name_of(batch),
        checkpoint_store.records_of(work, ['state.pt']),
        {'batch': batch},
    )
    return folder / checkpoint_store.name_of(batch)


def says_the_same(receipt, other):
    try:
        one, two = json.loads(bytes(receipt)), json.loads(other)
        return one['files'] == two['files'] and one['version'] == two['version']
    except (ValueError, KeyError):
        return False


def test_latest_is_the_one_published_last(tmp_path):
    for batch in (5, 10, 15):
        write(tmp_path, batch)
    assert os.readlink(tmp_path / 'latest') == 'ba15'
    assert [path.name for path in checkpoint_store.list_checkpoints(tmp_path)] == ['ba15', 'ba10', 'ba5']
    assert checkpoint_store.newest_whole(tmp_path) == tmp_path / 'ba15'
    assert {path.name for path in tmp_path.iterdir()} == {'ba5', 'ba10', 'ba15', 'latest'}, 'nothing temporary is left'


def test_numbers_are_ordered_as_numbers(tmp_path):
    for batch in (900, 1000):
        write(tmp_path, batch)
    assert checkpoint_store.newest_whole(tmp_path) == tmp_path / 'ba1000'


def test_every_flipped_bit_is_found(tmp_path):
    checkpoint = write(tmp_path, 5, b'0123456789')
    for name in ('state.pt', 'receipt.json'):
        path = checkpoint / name
        whole = path.read_bytes()
        for bit in range(8 * len(whole)):
            flipped = bytearray(whole)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            # A receipt says more than sizes and hashes; a flip in the rest of it harms nothing.
            if name == 'receipt.json' and says_the_same(flipped, whole):
                checkpoint_store.check_whole(checkpoint)
            else:
                with pytest.raises(ValueError, match='ba5'):
                    checkpoint_store.check_whole(checkpoint)
        path.write_bytes(whole)
    checkpoint_store.check_whole(checkpoint)


@pytest.mark.parametrize(
    ('damage', 'message'),
    [
        (lambda folder: os.truncate(folder / 'state.pt', 3), r'state\.pt: 3 bytes, 7 were written'),
        (lambda folder: (folder / 'state.pt').unlink(), r'state\.pt: not readable \(No such file'),
        (lambda folder: (folder / 'receipt.json').unlink(), r'it has no receipt\.json'),
        (lambda folder: (folder / 'receipt.json').write_text('{}'), r'receipt\.json: not a receipt'),
        (lambda folder: (folder / 'receipt.json').write_bytes(b'\xff\xfe'), r'receipt\.json: not a receipt'),
    ],
)
def test_a_damaged_checkpoint_is_named_and_the_one_before_is_taken(tmp_path, caplog, damage, message):
    write(tmp_path, 5)
    newest = write(tmp_path, 10)
    damage(newest)
    with pytest.raises(ValueError, match=message):
        checkpoint_store.check_whole(newest)
    assert checkpoint_store.newest_whole(tmp_path) == tmp_path / 'ba5'
    assert 'ba10' in caplog.text
    damage(tmp_path / 'ba5')
    with pytest.raises(ValueError, match='none of its 2 checkpoints is whole.*restore one from a copy'):
        checkpoint_store.newest_whole(tmp_path)


@pytest.mark.parametrize('number', [errno.ESTALE, errno.EIO, errno.ETIMEDOUT, errno.EACCES])
def test_a_fault_in_reading_is_tried_again_and_is_no_damage(tmp_path, monkeypatch, caplog, number):
    for batch in (5, 10):
        write(tmp_path, batch)
    plain, faults = checkpoint_store.record_of, [1, 1, 1]

    def record_of(path):
        if faults:
            faults.pop()
            raise OSError(number, os.strerror(number), str(path))
        return plain(path)

    monkeypatch.setattr(checkpoint_store, 'record_of', record_of)
    monkeypatch.setattr(checkpoint_store, 'RETRY_PAUSES_SECONDS', (0.0, 0.0, 0.0))
    assert checkpoint_store.newest_whole(tmp_path) == tmp_path / 'ba10'
    assert caplog.text.count('trying again') == 3
    faults[:] = [1] * 4
    with pytest.raises(OSError, match=os.strerror(number)) as raised:
        checkpoint_store.newest_whole(tmp_path)
    assert raised.value.errno == number
    assert 'damaged' not in caplog.text


def test_a_folder_that_cannot_be_listed_is_not_taken_for_an_empty_one(tmp_path, monkeypatch):
    def scandir(path):
        raise OSError(errno.ESTALE, os.strerror(errno.ESTALE), str(path))

    monkeypatch.setattr(os, 'scandir', scandir)
    monkeypatch.setattr(checkpoint_store, 'RETRY_PAUSES_SECONDS', (0.0,))
    with pytest.raises(OSError, match='Stale'):
        checkpoint_store.newest_whole(tmp_path)


def test_latest_moves_to_the_newest_whole_one_when_its_target_is_set_aside(tmp_path):
    for batch in (5, 10, 15):
        write(tmp_path, batch)
    for batch in (10, 15):
        os.truncate(tmp_path / f'ba{batch}' / 'state.pt', 3)
    checkpoint_store.set_aside(tmp_path / 'ba5')
    assert os.readlink(tmp_path / 'latest') == 'ba5'
    assert {path.name for path in tmp_path.iterdir()} == {'ba5', 'ba10.damaged', 'ba15.damaged', 'latest'}


def test_a_run_without_checkpoints_has_none(tmp_path):
    assert checkpoint_store.newest_whole(tmp_path) is None
    assert checkpoint_store.newest_whole(tmp_path / 'absent') is None


def test_a_checkpoint_is_replaced_whole(tmp_path):
    write(tmp_path, 5, b'old')
    checkpoint = write(tmp_path, 5, b'newer')
    checkpoint_store.check_whole(checkpoint)
    assert (checkpoint / 'state.pt').read_bytes() == b'newer'


def test_what_a_killed_process_left_is_swept_away(tmp_path):
    write(tmp_path, 5)
    checkpoint_store.unfinished(tmp_path, 10).mkdir()
    (checkpoint_store.unfinished(tmp_path, 10) / 'state.pt').write_bytes(b'hal')
    (tmp_path / '.ba3.removed').mkdir()
    assert checkpoint_store.newest_whole(tmp_path) == tmp_path / 'ba5'
    checkpoint_store.remove_unfinished_saves(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {'ba5', 'latest'}


def test_pruning_keeps_the_newest(tmp_path):
    for batch in (5, 10, 15, 20):
        write(tmp_path, batch)
    assert {path.name for path in checkpoint_store.prune(tmp_path, 2)} == {'ba5', 'ba10'}
    assert [path.name for path in checkpoint_store.list_checkpoints(tmp_path)] == ['ba20', 'ba15']
    checkpoint_store.prune(tmp_path, 0)
    assert [path.name for path in checkpoint_store.list_checkpoints(tmp_path)] == ['ba20'], 'the newest always stays'


def test_the_writer_hashes_what_it_writes(tmp_path):
    with (tmp_path / 'file').open('wb') as file:
        writer = checkpoint_store.HashingWriter(file)
        for piece in (b'ab', b'', b'c' * 100_000):
            writer.write(piece)
        writer.flush()
    assert writer.record() == checkpoint_store.record_of(tmp_path / 'file')
