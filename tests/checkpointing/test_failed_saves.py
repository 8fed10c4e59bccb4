"""Saves that fail by a storage fault: training continues to the next save, and the end of the run loses nothing."""

import errno
import os
import re
import shutil
import subprocess
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from callbacks.guarded_run import At, assert_stops, make_data, make_trainer, run_to_end
from checkpointing.saved_runs import assert_same_end, recipe_writer, the_checkpointer
from composer import Trainer
from composer.core import Event
from faults import Fault, active, met
from torch.distributed.checkpoint.api import CheckpointException

from diffusion.checkpointing import checkpoint_writer, checkpointer
from diffusion.checkpointing.checkpoint_store import read_receipt
from diffusion.checkpointing.checkpoint_weights import NoAverages, load_weights, verify_checkpoint, weights_of
from diffusion.checkpointing.checkpoint_writer import SaveFailed
from diffusion.checkpointing.checkpointer import Checkpointer
from diffusion.checkpointing.rank_agreement import raise_on_all_ranks, storage_fault
from diffusion.config.checkpointing import KeepConfig
from diffusion.config.load import load
from diffusion.errors import UserError
from diffusion.loggers.metrics_file import read_metrics
from diffusion.runs.run_id import RUN_FILE, read_run_id
from diffusion.training.train import build_trainer, train

EACH_BATCH = {'save_interval': '1ba'}
BLOCKING = {'asynchronous': False}
"""Section `checkpointing` of runs whose folder changes between two batches, in which a save must not be running."""


@pytest.fixture(autouse=True)
def _short_pauses(monkeypatch):
    monkeypatch.setattr(checkpointer, 'LAST_SAVE_PAUSES_SECONDS', (0.0, 0.0))


@pytest.fixture(scope='module')
def write(tmp_path_factory, tiny_recipe) -> Callable[..., Path]:
    return recipe_writer(tmp_path_factory.mktemp('failed-saves'), tiny_recipe, algorithms={})


@pytest.fixture(scope='module')
def undisturbed(write) -> Path:
    """Folder of a run without faults."""
    recipe = load(write('undisturbed', {'save_interval': '8ba'}))
    train(recipe).close()
    return recipe.run_dir


def checkpoints(run: Path) -> set[str]:
    return {path.name for path in run.glob('*ba*')}


def test_training_continues_after_a_fault_in_any_phase_of_a_save(write, undisturbed, tmp_path, caplog):
    recipe = load(write('phases', EACH_BATCH))
    run, calls = recipe.run_dir, []
    phases = [
        Fault('create', r'\.ba1\.unfinished/state\.pt', 'EIO'),
        Fault('write', r'\.ba2\.unfinished/state\.pt', 'ENOSPC'),
        # ba3 is saved; the rename to its final name fails once for ba4. ba5 is complete when its link fails.
        Fault('rename', r'/ba4$', 'ESTALE', times=1),
        Fault('link', r'\.latest\.unfinished', 'ETIMEDOUT', skip=1, times=1),
        # ba6 is saved
        Fault('fsync', r'\.ba7\.unfinished/receipt\.json', 'EDQUOT'),
        # the last save of the run is tried again
        Fault('mkdir', r'\.ba8\.unfinished', 'EIO', times=1),
    ]
    trainer = build_trainer(recipe)
    the_checkpointer(trainer).failed_saves.on_failure = calls.append
    with active(tmp_path / 'counts', *phases):
        trainer.fit()
    trainer.close()
    assert checkpoints(run) == {'ba3', 'ba5', 'ba6', 'ba8'}
    for name in ('ba3', 'ba5', 'ba6', 'ba8'):
        verify_checkpoint(run / name)
    assert_same_end(run, undisturbed)
    assert list(read_metrics(run / 'metrics.jsonl')['checkpoint/failed_saves'].values()) == [1, 2, 3, 4]
    # Other loggers may have errors meanwhile, such as the S3 server of earlier tests.
    ours = [record for record in caplog.records if record.name.startswith('diffusion')]
    errors = [record.getMessage() for record in ours if record.levelname == 'ERROR']
    assert errors == calls, 'one line for each failed save'
    expected = [
        r'ba1: not saved, Input/output error: \S+/state\.pt; training continues to the next save .* 1 of 3',
        r'ba2: not saved, no space left on \S+/phases: 0\.\d\d GiB needed, \d+\.\d\d GiB free; training .* 2 of 3',
        r'ba4: not saved, Stale file handle: .* 1 of 3',
        r'ba7: not saved, the disk quota is used up on \S+/phases: .* 1 of 3',
    ]
    for message, pattern in zip(errors, expected, strict=True):
        assert re.search(pattern, message), message
    assert re.search('ba5: the link latest could not be set to it .*timed out', caplog.text)
    assert 'ba8: not saved, Input/output error' in caplog.text and 'trying again' in caplog.text


def test_three_failed_saves_in_a_row_end_the_run_which_resumes(tmp_path):
    run, counts = tmp_path / 'run', tmp_path / 'counts'

    def trainer() -> Trainer:
        return make_trainer(make_data(), [Checkpointer(run, save_interval='1ba', resume='auto')], duration='6ba')

    failed = trainer()
    message = rf'ba4: not saved, Stale .*\(3 saves in a row have failed\); newest checkpoint: {run}/ba1; check the'
    with active(counts, Fault('mkdir', r'\.ba[2-9]\.unfinished', 'ESTALE', times=99)):
        end: Any = assert_stops(failed, f'{message} storage of the run and start', SaveFailed)
    assert end.errno == errno.ESTALE
    assert met(counts) == 2 + 3, 'the last one is tried three times'
    assert the_checkpointer(failed).last_checkpoint_batch == 1, 'a batch that is not saved is not called saved'
    ours, theirs = run_to_end(trainer()), run_to_end(make_trainer(make_data(), [], duration='6ba'))
    assert all(map(torch.equal, ours, theirs)) and checkpoints(run) == {f'ba{batch}' for batch in range(1, 7)}


def test_bug_in_a_save_ends_the_run_at_once(write, monkeypatch):
    trainer = build_trainer(load(write('bug', EACH_BATCH)))
    monkeypatch.setattr(checkpoint_writer, '_about', Mock(side_effect=TypeError('a bug')))
    assert_stops(trainer, 'a bug', TypeError)
    assert trainer.state.timestamp.batch.value == 1


def test_failed_save_that_ends_after_the_last_batch_is_tried_again(tmp_path, monkeypatch, caplog):
    """Use a save interval of one's own, which does not ask for a save at the end of training."""
    interval = lambda state, event: event is Event.BATCH_CHECKPOINT and state.timestamp.batch == 3  # noqa: E731
    keep = KeepConfig(last=1)
    saver = Checkpointer(tmp_path / 'run', save_interval=interval, keep=keep, asynchronous=True)  # type: ignore[arg-type]
    monkeypatch.setattr(saver.storage, 'prune', Mock(side_effect=OSError('stale')))
    with active(tmp_path / 'faults', Fault('create', r'\.ba3\.unfinished/state\.pt', 'EIO', sleep=1.0, times=1)):
        run_to_end(make_trainer(make_data(), [saver], duration='4ba'))
    assert checkpoints(tmp_path / 'run') == {'ba4'}
    assert f'{tmp_path}/run: old checkpoints are not removed (stale)' in caplog.text


MIXED = """
import errno, sys, time
from pathlib import Path
from types import SimpleNamespace
from composer.core import Time
from composer.utils import dist
from diffusion.checkpointing import retention
from diffusion.checkpointing.checkpoint_writer import _as_save_failed
from diffusion.checkpointing.checkpointer import Checkpointer, SaveFailed
from diffusion.checkpointing.checkpoint_store import DamagedCheckpoint
from diffusion.checkpointing.rank_agreement import raise_on_all_ranks, run_on_each_rank
from diffusion.config.checkpointing import KeepConfig
from diffusion.errors import RankFailed, UserError

dist.initialize_dist('cpu')
rank = dist.get_global_rank()


def meet(*errors):
    '''Return the class of the error that this rank raises when each rank meets an error.'''
    try:
        with _as_save_failed('ba1', Path()), raise_on_all_ranks('save', logs=False):
            if errors[rank] is not None:
                raise errors[rank]
    except Exception as error:
        return type(error)


full, stale, bug = OSError(errno.ENOSPC, 'full'), OSError(errno.ESTALE, 'stale'), TypeError('a bug')
assert meet(None, full) is meet(full, None) is meet(full, stale) is SaveFailed
assert meet(full, bug) is (RankFailed if rank == 0 else TypeError)
assert meet(bug, full) is (TypeError if rank == 0 else RankFailed)
mistake, damage = UserError('a mistake'), DamagedCheckpoint('damaged')
assert meet(damage, mistake) is meet(mistake, damage) is UserError, 'a caller may catch damage and go on'
assert meet(damage, full) is meet(full, damage) is DamagedCheckpoint

# Work that takes longer than the timeout of collectives may.
assert run_on_each_rank(lambda: time.sleep(1.5 * rank) or rank, 'work') == rank


# The disk is full for rank 0, and rank 1 has an I/O error: both make room, and try again.
attempts = []


def write(state, *, in_background):
    attempts.append(1)
    if len(attempts) == 1:
        raise SaveFailed((errno.ENOSPC, errno.EIO)[rank], 'not saved')
    return SimpleNamespace(name='ba3', published=True, write_seconds=1.0, total_seconds=1.0)


retention.prune = lambda folder, rules: []
retention.make_room = lambda folder, rules, batch: [folder / 'ba1']
checkpointer = Checkpointer(sys.argv[1], keep=KeepConfig(last=2))
checkpointer._write = write
logger = SimpleNamespace(log_metrics=lambda metrics: None)
checkpointer._try_to_save(SimpleNamespace(timestamp=SimpleNamespace(batch=Time(3, 'ba'))), logger)
assert checkpointer.saved_checkpoints == ['ba3']

dist.barrier()
gather, dist.all_gather_object = dist.all_gather_object, lambda value: 1 / 0
assert meet(full, full) is RankFailed, 'a lost connection is not a failed save'
"""


def test_ranks_agree_on_a_failed_save_whatever_each_has_met(ranks, tmp_path):
    (tmp_path / 'mixed.py').write_text(MIXED)
    ranks.start_program(2, tmp_path / 'mixed.py', tmp_path).end()


def mount(*arguments: str | Path) -> None:
    """Mount a tmpfs, or skip the test on a machine that does not allow it."""
    done = subprocess.run(['mount', *map(str, arguments)], capture_output=True, check=False, text=True)
    if done.returncode:
        pytest.skip(f'this machine does not allow mounts: {done.stderr.strip()}')


@pytest.mark.slow
def test_full_file_system_makes_room_and_recovers(write, undisturbed):
    """It has room for 2.6 checkpoints, of which the run keeps two; a save needs the room of one more."""
    path = write('full', EACH_BATCH | {'save_num_checkpoints_to_keep': 2}, checkpointing=BLOCKING)
    run = load(path).run_dir
    run.mkdir(parents=True)
    size = sum(file.stat().st_size for file in (undisturbed / 'ba8').iterdir())
    mount('-t', 'tmpfs', '-o', f'size={int(2.6 * size)}', 'tmpfs', run)
    messages: list[str] = []
    seen: list[set[str]] = []

    def fill() -> None:
        seen.append(checkpoints(run))
        shutil.rmtree(run / 'ba5')
        (run / 'filler').write_bytes(bytes(size))

    def free() -> None:
        seen.append(checkpoints(run))
        (run / 'filler').unlink()

    try:
        trainer = build_trainer(load(path))
        the_checkpointer(trainer).failed_saves.on_failure = messages.append
        trainer.state.callbacks += [At(Event.BATCH_START, 6, fill), At(Event.BATCH_START, 7, free)]
        run_to_end(trainer)
        assert seen == [{'ba5', 'ba6'}, {'ba6'}], 'a full disk costs the checkpoint to be replaced, never the newest'
        assert checkpoints(run) == {'ba6', 'ba8'}
        assert_same_end(run, undisturbed)
        (message,) = messages
        assert re.search(r'ba7: not saved, no space left on \S+/full: 0\.\d\d GiB needed, 0\.\d\d GiB free', message)
    finally:
        subprocess.run(['umount', '-l', run], check=True)


def test_folder_that_vanishes_fails_saves_and_is_not_created_again(write, undisturbed, tmp_path):
    """It is moved away for two batches, then hidden by an empty file system for two batches."""
    path = write('vanishes', EACH_BATCH, checkpointing=BLOCKING)
    run, away = load(path).run_dir, tmp_path / 'away'
    messages: list[str] = []
    found: list[list[str]] = []

    def back() -> None:
        found.append(['it exists'] if run.exists() else [])
        os.rename(away, run)

    def uncover() -> None:
        found.append(os.listdir(run))
        subprocess.run(['umount', '-l', run], check=True)

    trainer = build_trainer(load(path))
    the_checkpointer(trainer).failed_saves.on_failure = messages.append
    trainer.state.callbacks += [
        At(Event.BATCH_START, 1, lambda: os.rename(run, away)),
        At(Event.BATCH_START, 3, back),
        At(Event.BATCH_START, 4, lambda: mount('-t', 'tmpfs', '-o', 'size=64m', 'tmpfs', run)),
        At(Event.BATCH_START, 6, uncover),
    ]
    run_to_end(trainer)
    assert found == [[], []], 'nothing is created at the path meanwhile'
    assert checkpoints(run) == {'ba1', 'ba4', 'ba7', 'ba8'}
    assert_same_end(run, undisturbed)
    assert len(messages) == 4
    for message in messages:
        assert f'{RUN_FILE} is missing: the folder was moved, or its file system is no longer mounted on' in message


def test_folder_replaced_by_that_of_another_run_is_not_written_to(write, tmp_path):
    path = write('replaced', EACH_BATCH, checkpointing=BLOCKING)
    run = load(path).run_dir
    trainer = build_trainer(load(path))
    other = tmp_path / 'other'
    other.mkdir()
    (other / RUN_FILE).write_text('{"version": 1, "id": "f00"}')

    def replace() -> None:
        os.rename(run, tmp_path / 'own')
        os.rename(other, run)

    trainer.state.callbacks += [At(Event.BATCH_START, 1, replace)]
    assert_stops(trainer, r'run\.json has id f00, expected \w{32}: another folder is at this path', SaveFailed)
    assert not checkpoints(run)
    assert checkpoints(tmp_path / 'own') == {'ba1'}


def test_checkpoint_carries_the_runs_id_and_its_recipe(undisturbed):
    receipt = read_receipt(undisturbed / 'ba8')
    assert receipt['run'] == read_run_id(undisturbed)
    assert receipt['files'].keys() == {'state.pt', 'recipe.yaml'}
    assert load(undisturbed / 'ba8' / 'recipe.yaml') == load(undisturbed / 'recipe.yaml')
    with pytest.raises(
        NoAverages, match=r'ba8: it has no averaged weights \(its run had no EMA\); use --weights train'
    ):
        weights_of(undisturbed / 'ba8', 'ema')


def test_faults_and_bugs_are_logged_with_their_rank_and_mistakes_where_they_are_caught(caplog):
    for error, logs, expected in (
        (OSError('stale'), True, ['a.pt: not loaded (rank 0: stale)']),
        (TypeError('a bug'), True, ['a.pt: not loaded (rank 0: a bug)']),
        (TypeError('a bug'), False, []),
        (UserError('a mistake'), True, []),
    ):
        caplog.clear()
        with pytest.raises(type(error)), raise_on_all_ranks('a.pt: not loaded', logs=logs):
            raise error
        assert caplog.messages == expected
    caplog.set_level('INFO')
    model = torch.nn.Linear(2, 3)
    load_weights(model, {**model.state_dict(), 'feature_projector.a': torch.zeros(1)}, 'a.pt')
    assert caplog.messages == ['a.pt: 1 tensors of parts that only training uses are not loaded']


def test_fault_of_storage_is_found_behind_errors_of_torch_but_not_behind_a_mistake():
    disk, wrapped, later, mistake = OSError('disk'), RuntimeError('save'), RuntimeError('end'), UserError('path')
    wrapped.__cause__ = later.__context__ = mistake.__cause__ = disk
    assert [storage_fault(each) for each in (disk, wrapped, later)] == [disk] * 3
    assert storage_fault(mistake) is storage_fault(RuntimeError('other')) is None
    for second, expected in ((later, disk), (mistake, None)):
        failures: Any = {rank: (each, traceback.StackSummary()) for rank, each in enumerate((wrapped, second))}
        assert storage_fault(CheckpointException('save', failures)) is expected
    assert storage_fault(CheckpointException('save', {})) is None
