"""Atomic checkpoints on disk, detection of damage, and pauses of a save that a thread writes."""

import errno
import json
import os
import random
import re
import threading
import time
from collections.abc import Callable
from unittest.mock import Mock

import pytest
import torch
import xxhash
from checkpointing.run_folders import records_of, write
from faults import Fault, active, met
from torch.distributed.checkpoint.api import CheckpointException

from diffusion.checkpointing import checkpoint_store, checkpoint_weights, run_storage
from diffusion.checkpointing.checkpoint_lookup import find_checkpoint, recipe_of_checkpoint, run_of_checkpoint
from diffusion.checkpointing.checkpoint_store import SaveAbandoned, WriteProgress
from diffusion.checkpointing.sharded_state import ShardedWrite, read_all_tensors, read_tensors
from diffusion.errors import UserError
from diffusion.runs.run_id import read_run_id


def has_same_records(receipt, other):
    try:
        one, two = json.loads(bytes(receipt)), json.loads(other)
        return all(one[key] == two[key] for key in ('files', 'format', 'batch'))
    except (ValueError, KeyError):
        return False


def test_latest_points_to_the_last_published_checkpoint(tmp_path):
    (tmp_path / '.latest.unfinished').symlink_to('ba1')  # left by a killed process
    for batch in (5, 900, 1000):
        write(tmp_path, batch)
    assert os.readlink(tmp_path / 'latest') == 'ba1000'
    assert [path.name for path in checkpoint_store.list_checkpoints(tmp_path)] == ['ba1000', 'ba900', 'ba5']
    assert run_storage.newest_intact(tmp_path) == tmp_path / 'ba1000'
    assert {path.name for path in tmp_path.iterdir()} == {'ba5', 'ba900', 'ba1000', 'latest'}, 'nothing is left over'


def test_missing_folder_of_a_run_is_not_created(tmp_path):
    work = tmp_path / 'work'
    work.mkdir()
    with pytest.raises(FileNotFoundError):
        checkpoint_store.publish(work, tmp_path / 'unmounted' / 'ba5', {}, {'batch': 5})
    assert not (tmp_path / 'unmounted').exists()


def test_every_flipped_bit_is_detected(tmp_path):
    checkpoint = write(tmp_path, 5, b'0123456789')
    for name in ('state.pt', 'receipt.json'):
        path = checkpoint / name
        intact = path.read_bytes()
        for bit in range(0, 8 * len(intact), 1 if name == 'state.pt' else 3):
            flipped = bytearray(intact)
            flipped[bit // 8] ^= 1 << bit % 8
            path.write_bytes(flipped)
            # A receipt has other fields than these three, in which a flipped bit does no harm.
            if name == 'receipt.json' and has_same_records(flipped, intact):
                checkpoint_weights.verify_checkpoint(checkpoint)
            else:
                with pytest.raises(ValueError, match='ba5'):
                    checkpoint_weights.verify_checkpoint(checkpoint)
        path.write_bytes(intact)
    checkpoint_weights.verify_checkpoint(checkpoint)


def test_permission_error_is_raised_at_once_and_is_no_damage(tmp_path, monkeypatch, caplog):
    write(tmp_path, 5)
    denied = PermissionError(errno.EACCES, 'Permission denied', 'state.pt')
    monkeypatch.setattr(checkpoint_store, 'hash_file', Mock(side_effect=denied))
    with pytest.raises(PermissionError):
        run_storage.newest_intact(tmp_path)
    assert not caplog.records and (tmp_path / 'ba5').is_dir()
    with pytest.raises(UserError, match='ba5: cannot be read .*; ask its owner for read access'):
        checkpoint_weights.weights_of(tmp_path / 'ba5')


def test_file_that_cannot_be_mapped_is_a_fault_of_storage(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_store, 'RETRY_PAUSES_SECONDS', ())
    torch.save({}, tmp_path / 'state.pt')
    for message, kind, found in (
        ('mapping: stale (116)\nmore', OSError, 'Stale.*state.pt'),
        ('a bug', RuntimeError, 'a bug'),
    ):
        monkeypatch.setattr(torch, 'load', Mock(side_effect=RuntimeError(message)))
        with pytest.raises(kind, match=found):
            checkpoint_weights.read_pickle(tmp_path / 'state.pt')


def test_folder_that_cannot_be_listed_does_not_count_as_empty(tmp_path, monkeypatch):
    monkeypatch.setattr(os, 'scandir', Mock(side_effect=OSError(errno.ESTALE, 'Stale file handle')))
    monkeypatch.setattr(checkpoint_store, 'RETRY_PAUSES_SECONDS', (0.0,))
    with pytest.raises(OSError, match='Stale'):
        run_storage.newest_intact(tmp_path)


@pytest.mark.parametrize(
    ('found', 'message'), [(None, r'has no format number'), (2, r'has format 2'), ('1', r'has format 1, but')]
)
def test_checkpoint_of_another_format_is_refused_and_not_skipped(tmp_path, found, message):
    write(tmp_path, 5)
    receipt = write(tmp_path, 10) / 'receipt.json'
    content = json.loads(receipt.read_text()) | {'format': found}
    if found is None:
        del content['format']
    receipt.write_text(json.dumps(content))
    with pytest.raises(UserError, match=rf'ba10/receipt\.json: {message}.* reads format 1; resume with the version'):
        run_storage.newest_intact(tmp_path)
    assert [path.name for path in checkpoint_store.list_checkpoints(tmp_path)] == ['ba10', 'ba5']


def test_latest_points_to_the_newest_intact_checkpoint_after_set_aside(tmp_path, caplog):
    for batch in (5, 10, 15):
        write(tmp_path, batch)
    for batch in (10, 15):
        os.truncate(tmp_path / f'ba{batch}' / 'state.pt', 3)
    checkpoint_store.set_aside(tmp_path / 'ba5')
    assert 'ba10: damaged, renamed to ba10.damaged' in caplog.text
    assert os.readlink(tmp_path / 'latest') == 'ba5'
    assert {path.name for path in tmp_path.iterdir()} == {'ba5', 'ba10.damaged', 'ba15.damaged', 'latest'}


def test_leftovers_of_a_killed_process_are_removed(tmp_path):
    write(tmp_path, 5)
    checkpoint_store.unfinished_path(tmp_path, 10).mkdir()
    (checkpoint_store.unfinished_path(tmp_path, 10) / 'state.pt').write_bytes(b'hal')
    assert run_storage.newest_intact(tmp_path) == tmp_path / 'ba5'
    checkpoint_store.remove_unfinished_saves(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == {'ba5', 'latest'}


def test_hashing_writer_writes_and_hashes_all_data_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_store, '_PIECE', 1000)
    data, progress = random.Random(0).randbytes(10_500), WriteProgress()
    with (tmp_path / 'file').open('wb') as file:
        writer = checkpoint_store.HashingWriter(file, progress)
        assert [writer.write(each) for each in (b'ab', b'', memoryview(data).cast('H'))] == [2, 0, 10_500]  # type: ignore[arg-type]
        writer.flush()
    assert (tmp_path / 'file').read_bytes() == b'ab' + data
    assert writer.record() == checkpoint_store.hash_file(tmp_path / 'file')
    assert progress.written_bytes == writer.tell() == 10_502


def test_large_file_is_hashed_in_order(tmp_path, monkeypatch):
    monkeypatch.setattr(checkpoint_store, '_CHUNK', 1000)
    for size in (0, 999, 1000, 1001, 123_456):
        content = os.urandom(size)
        (tmp_path / 'file').write_bytes(content)
        expected = checkpoint_store.FileRecord(size, xxhash.xxh3_128(content).hexdigest())
        assert checkpoint_store.hash_file(tmp_path / 'file') == expected


def rename(folder):
    return folder.rename(folder.with_name(f'{folder.name}0'))


def edit(change):
    """Return a function that changes the receipt of a checkpoint and returns the checkpoint."""

    def edited(folder):
        receipt = json.loads((folder / 'receipt.json').read_text())
        change(receipt)
        (folder / 'receipt.json').write_text(json.dumps(receipt))
        return folder

    return edited


RECORD = {'bytes': 0, 'xxh3_128': '99aa06d3014798d86001c324468d497f'}


@pytest.mark.parametrize(
    ('damage', 'message'),
    [
        (lambda folder: os.truncate(folder / 'state.pt', 3), r'state\.pt: 3 bytes, expected 7'),
        (lambda folder: (folder / 'state.pt').unlink(), r'state\.pt: the file does not exist'),
        (lambda folder: (folder / 'receipt.json').unlink(), r'receipt\.json is missing'),
        (lambda folder: (folder / 'receipt.json').write_text('{}'), r'receipt\.json: not a valid receipt'),
        (lambda folder: (folder / 'receipt.json').write_bytes(b'\xff\xfe'), r'receipt\.json: not a valid receipt'),
        (edit(lambda receipt: receipt['files'].clear()), r'does not list state\.pt, which every checkpoint of its'),
        (edit(lambda receipt: receipt['files'].update({'../../etc/passwd': RECORD})), r"lists '\.\./\.\./etc/passwd'"),
        (edit(lambda receipt: receipt['files'].update({'..': RECORD})), r"lists '\.\.', which is not the name of a"),
        (edit(lambda receipt: receipt.update(kind='sharded')), r'does not list \.metadata, which every checkpoint'),
        (edit(lambda receipt: receipt.update(files=[])), 'not a valid receipt'),
        (rename, r'belongs to batch 10, but the folder is named ba100; rename it'),
    ],
)
def test_damaged_checkpoint_is_reported_and_the_previous_one_is_used(tmp_path, caplog, damage, message):
    write(tmp_path, 5)
    damage(write(tmp_path, 10))
    newest = checkpoint_store.list_checkpoints(tmp_path)[0]
    with pytest.raises(checkpoint_store.DamagedCheckpoint, match=message):
        checkpoint_weights.verify_checkpoint(newest)
    assert run_storage.newest_intact(tmp_path) == tmp_path / 'ba5'
    assert newest.name in caplog.text
    damage(tmp_path / 'ba5')
    with pytest.raises(ValueError, match='all 2 checkpoints are damaged.*restore one from a backup'):
        run_storage.newest_intact(tmp_path)


def test_receipt_lists_every_file_that_the_index_of_a_sharded_checkpoint_names(tmp_path):
    checkpoint = tmp_path / 'ba5'
    for names in (['state.pt', '.metadata', '__0_0.distcp'], ['state.pt', '.metadata']):
        work = checkpoint_store.unfinished_path(tmp_path, 5)
        work.mkdir()
        (work / 'state.pt').write_bytes(b'state')
        save = ShardedWrite({'model.a': torch.ones(3)}, work)
        save.write_index([save.write()])
        assert save.records == records_of(work, ['.metadata', '__0_0.distcp']), 'hashed while written'
        checkpoint_store.publish(work, checkpoint, records_of(work, names), {'batch': 5, 'kind': 'sharded'})
        if '__0_0.distcp' in names:
            checkpoint_weights.verify_checkpoint(checkpoint)
    with pytest.raises(checkpoint_store.DamagedCheckpoint, match=r'does not list __0_0\.distcp, which its index names'):
        checkpoint_weights.verify_checkpoint(checkpoint)


def test_faults_while_shards_are_read_are_retried(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(checkpoint_store, 'RETRY_PAUSES_SECONDS', (0.0, 0.0))
    save = ShardedWrite({'model.a': torch.arange(3.0), 'other': torch.ones(2)}, tmp_path)
    save.write_index([save.write()])
    assert torch.equal(read_all_tensors(tmp_path, 'model.')['a'], torch.arange(3.0))
    fetched, found = [], {'model.a': torch.zeros(3)}
    with active(tmp_path, Fault('open', r'\.distcp', 'EIO', times=2)):
        read_tensors(found, tmp_path, lambda folder, names: fetched.extend([folder, *names]))
    assert torch.equal(found['model.a'], torch.arange(3.0)) and fetched == [tmp_path, '__0_0.distcp']
    assert len(re.findall(rf'{tmp_path}: .*Input/output error.*; retrying in 0 s', caplog.text)) == 2
    with active(tmp_path, Fault('open', r'\.distcp', 'EIO')):
        with pytest.raises(CheckpointException, match='Input/output error'):
            read_tensors(found, tmp_path)
        with pytest.raises(OSError, match='Input/output error'):
            read_all_tensors(tmp_path, 'model.')
    for name, problem in (('model.a', r'is \(3,\), expected \(4,\)'), ('b', 'is missing')):
        with pytest.raises(UserError, match=f'tensor {name} {problem}; use the model and optimizer that were saved'):
            read_tensors({name: torch.zeros(4)}, tmp_path)


def test_checkpoint_of_another_run_is_refused_and_one_without_id_passes(tmp_path):
    write(tmp_path, 5)
    assert run_storage.newest_intact(tmp_path, 'own') == tmp_path / 'ba5'
    write(tmp_path, 10, run='own')
    assert run_storage.newest_intact(tmp_path, 'own') == tmp_path / 'ba10'
    assert run_storage.open_run_folder(tmp_path) == read_run_id(tmp_path) == 'own', 'as the newest checkpoint has it'
    write(tmp_path, 15, run='sibling')
    with pytest.raises(
        UserError, match=r'ba15: it belongs to another run \(id sibling, .* move it out .* init_from: .*/ba15'
    ):
        run_storage.newest_intact(tmp_path, 'own')
    assert not (tmp_path / 'ba15.damaged').exists()


@pytest.mark.parametrize(
    ('operation', 'path', 'error'),
    [
        ('list', '$', 'ESTALE'),
        ('open', '/ba10/receipt.json', 'ESTALE'),
        ('open', '/ba10/state.pt', 'ETIMEDOUT'),
        ('read', '/ba10/state.pt', 'EIO'),
    ],
)
def test_fault_in_any_phase_of_reading_is_retried_and_nothing_is_renamed(
    tmp_path, monkeypatch, caplog, operation, path, error
):
    run = tmp_path / 'run'
    run.mkdir()
    for batch in (5, 10):
        write(run, batch)
    monkeypatch.setattr(checkpoint_store, 'RETRY_PAUSES_SECONDS', (0.0, 0.0))
    path = f'^{run}{path}'
    with active(tmp_path / 'counts', Fault(operation, path, error, times=2)):
        assert run_storage.newest_intact(run) == run / 'ba10'
    assert met(tmp_path / 'counts') >= 3 and caplog.text.count('retrying') >= 2
    with active(tmp_path / 'counts', Fault(operation, path, error)), pytest.raises(OSError) as raised:
        run_storage.newest_intact(run)
    assert raised.value.errno == getattr(errno, error) and 'damaged' not in caplog.text
    assert {path.name for path in run.iterdir()} == {'ba5', 'ba10', 'latest'}


def test_folder_that_vanishes_while_it_is_read_is_not_damage(tmp_path, monkeypatch):
    run = tmp_path / 'run'
    run.mkdir()
    write(run, 5)
    plain = checkpoint_store.hash_file

    def vanish(path):
        run.rename(tmp_path / 'away')
        return plain(path)

    monkeypatch.setattr(checkpoint_store, 'RETRY_PAUSES_SECONDS', ())
    monkeypatch.setattr(checkpoint_store, 'hash_file', vanish)
    with pytest.raises(FileNotFoundError):
        run_storage.newest_intact(run)


def test_evaluation_and_export_use_the_checkpoint_that_resuming_uses(tmp_path):
    for batch in (5, 10):
        write(tmp_path, batch)
    latest = tmp_path / 'latest'
    for target in ('ba5', 'ba7', 'ba10'):  # older, dangling, newest
        latest.unlink()
        latest.symlink_to(target)
        newest = run_storage.newest_intact(tmp_path)
        assert find_checkpoint(tmp_path) == find_checkpoint(latest) == newest == tmp_path / 'ba10'
    assert find_checkpoint(tmp_path / 'ba5') == tmp_path / 'ba5', 'a checkpoint that is named is used'
    composers = tmp_path / 'composer' / 'latest-rank0.pt'
    composers.parent.mkdir()
    composers.with_name('ba7.pt').touch()
    composers.symlink_to('ba7.pt')
    assert find_checkpoint(composers) == composers.with_name('ba7.pt')


def test_recipe_of_a_checkpoint_is_its_own_or_that_of_its_run(tmp_path):
    run = tmp_path / 'run'
    run.mkdir()
    (run / 'recipe.yaml').write_text('name: changed since')
    old, new = write(run, 5), write(run, 10)
    (new / 'recipe.yaml').write_text('name: as trained')
    assert recipe_of_checkpoint(old) == run / 'recipe.yaml'
    assert recipe_of_checkpoint(new) == new / 'recipe.yaml'
    assert run_of_checkpoint(new) == run
    copy = new.rename(tmp_path / 'copy')
    assert recipe_of_checkpoint(copy) == copy / 'recipe.yaml', 'one path is enough elsewhere'


PIECE_SECONDS = 0.02
PIECES = 20


def compute() -> None:
    """Take a while of the processor."""
    end = time.thread_time() + PIECE_SECONDS
    while time.thread_time() < end:
        pass


def write_pieces(progress: WriteProgress, work: Callable[[], None] = compute) -> None:
    """Write pieces that take a while each."""
    for _ in range(PIECES):
        progress.add(10)
        work()


def test_paced_save_pauses_in_proportion_to_what_it_computes():
    progress = WriteProgress()
    write_pieces(progress)
    assert progress.paused_seconds == 0, 'it is not paced yet'
    progress.pause = 2.0
    write_pieces(progress, work=lambda: time.sleep(PIECE_SECONDS))
    assert progress.paused_seconds < PIECE_SECONDS, 'waiting for the disk does not count'
    began = time.thread_time()
    write_pieces(progress)
    assert progress.paused_seconds == pytest.approx(2 * (time.thread_time() - began), rel=0.3)
    assert progress.written_bytes == 3 * 10 * PIECES


@pytest.mark.parametrize('end', ['hurry', 'abandon'])
def test_pause_ends_when_the_save_is_waited_for_or_abandoned(end):
    progress = WriteProgress()
    progress.pause = 1e6  # the first pause would last for hours
    errors: list[type[BaseException]] = []

    def run() -> None:
        try:
            write_pieces(progress)
        except SaveAbandoned as error:
            errors.append(type(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    time.sleep(5 * PIECE_SECONDS)
    assert progress.written_bytes == 10
    getattr(progress, end)()
    thread.join(30)
    assert not thread.is_alive()
    assert errors == ([SaveAbandoned] if end == 'abandon' else [])
    assert progress.written_bytes == (10 if end == 'abandon' else 10 * PIECES)
