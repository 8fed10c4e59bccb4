"""Saves whose files a thread writes while training continues."""

import datetime
import random
import re
import signal
import threading
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from callbacks.guarded_run import At, assert_stops, make_data, make_trainer, run_to_end
from checkpointing.saved_runs import SHARDED, assert_same_end, assert_same_tensors, the_checkpointer
from composer.core import Event, Time, Timestamp, TimeUnit
from faults import Fault, active, environment
from ranks import read_losses

from diffusion.checkpointing import background_save, checkpointer, snapshot
from diffusion.checkpointing.background_save import BackgroundSave, pause_for_training
from diffusion.checkpointing.checkpoint_store import WriteProgress
from diffusion.checkpointing.checkpoint_weights import verify_checkpoint
from diffusion.checkpointing.checkpointer import Checkpointer
from diffusion.config.checkpointing import KeepConfig
from diffusion.config.load import load
from diffusion.exit_codes import Preempted
from diffusion.loggers.metrics_file import read_metrics
from diffusion.runs.environment import NOTICE_SECONDS
from diffusion.training.train import build_trainer, train


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(checkpointer, 'LAST_SAVE_PAUSES_SECONDS', (0.0, 0.0))
    monkeypatch.setattr(background_save, 'POLL_SECONDS', 0.0)
    monkeypatch.setattr(background_save, 'ABANDON_SECONDS', 0.1)


def saved(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob('ba*'))


@pytest.mark.slow
def test_checkpoint_equals_that_of_a_blocking_save_though_training_continues(write, ranks, tmp_path):
    """The files are written half a second late, several batches after the one that they save."""
    runs = []
    for asynchronous in (False, True):
        sections = {'parallelism': SHARDED, 'checkpointing': {'asynchronous': asynchronous}}
        path = write(f'two-{asynchronous}', {'save_interval': '4ba', 'max_duration': '10ba'}, **sections)
        late = [Fault('create', r'\.ba[48]\.unfinished/(state|__)', sleep=0.5)]
        ranks.run(2, path, environment=environment(late, tmp_path) if asynchronous else None)
        runs.append(load(path).run_dir)
    one, other = runs
    for batch in (4, 8, 10):
        verify_checkpoint(other / f'ba{batch}')
        assert_same_tensors(one / f'ba{batch}', other / f'ba{batch}')
    assert read_losses(one) == read_losses(other)
    metrics = read_metrics(other / 'metrics.jsonl')
    stall, duration = (metrics[f'checkpoint/{name}_seconds'] for name in ('stall', 'save'))
    first = min(stall)  # the batch at which ba4 was published
    assert 4 < first <= 8 and duration[first] > 0.5 and stall[first] < duration[first]


def test_memory_of_snapshots_is_prepared_after_the_first_batch(write, alone):
    """The kernel needs longer to provide it than a snapshot takes to fill it."""
    sizes = []
    recipe = load(write('prepared', {'max_duration': '3ba'}, parallelism=SHARDED))
    trainer = build_trainer(recipe)
    found = the_checkpointer(trainer)
    for batch in range(3):
        trainer.state.callbacks.append(At(Event.BATCH_START, batch, lambda: sizes.append(found.snapshot_bytes)))
    run_to_end(trainer)
    assert 0 == sizes[0] < sizes[1] == sizes[2], 'the first snapshot needs just this memory'
    verify_checkpoint(recipe.run_dir / 'ba2')


@pytest.mark.cpu_seconds(15)
def test_training_that_fails_during_a_save_publishes_nothing_and_resumes(write, undisturbed, tmp_path, caplog):
    path = write('crash')
    run = load(path).run_dir
    trainer = build_trainer(load(path))
    trainer.state.callbacks.append(At(Event.AFTER_LOSS, 4, Mock(side_effect=RuntimeError('a bug'))))
    began = time.monotonic()
    with active(tmp_path / 'counts', Fault('create', r'\.ba4\.unfinished/state', sleep=3)):
        with pytest.raises(RuntimeError, match='a bug'):
            trainer.fit()
        trainer.engine.close()
    assert time.monotonic() - began < 20
    assert saved(run) == ['ba2'] and (run / '.ba4.unfinished').exists()
    assert 'ba4: not saved, since the run ended while it was being written' in caplog.text
    train(load(path)).close()
    assert not list(run.glob('.ba*'))
    assert_same_end(run, undisturbed)


@pytest.mark.parametrize(('asynchronous', 'batches'), [(True, [2, 4, 7, 8]), (False, [2, 4, 6, 8])])
def test_full_disk_makes_room_for_a_save_of_the_present_batch(tmp_path, asynchronous, batches):
    """The disk is full for ba6, which replaces ba2. A thread has found out before the end of batch 7."""
    messages: list[str] = []
    keep = KeepConfig(last=2)
    found = Checkpointer(tmp_path / 'run', save_interval='2ba', keep=keep, asynchronous=asynchronous)
    found.failed_saves.on_failure = messages.append
    wait = At(Event.BATCH_START, 6, lambda: found._running and found._running._thread.join(60))
    with active(tmp_path / 'counts', Fault('write', r'\.ba6\.unfinished/state', 'ENOSPC', times=1)):
        run_to_end(make_trainer(make_data(), [found, wait], duration='8ba'))
    assert [Path(each).name for each in found.saved_checkpoints] == [f'ba{batch}' for batch in batches]
    assert saved(tmp_path / 'run') == [f'ba{batch}' for batch in batches[2:]] and not messages


@pytest.mark.cpu_seconds(15)
def test_save_that_is_due_waits_for_the_one_before_and_says_so(write, undisturbed, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(checkpointer, 'SLOW_SECONDS', 0.2)
    path = write('pressure', {'save_interval': '1ba'})
    with active(tmp_path / 'counts', Fault('create', r'unfinished/state', sleep=0.4)):
        train(load(path)).close()
    run = load(path).run_dir
    assert saved(run) == [f'ba{batch}' for batch in range(1, 9)]
    (line,) = (each.getMessage() for each in caplog.records if 'longer than the save interval' in each.getMessage())
    assert re.search(
        r'ba1: took [\d.]+ s, longer than the save interval, so training waited [\d.]+ s for it. To fix: a longer', line
    )
    assert_same_end(run, undisturbed)


def test_without_enough_memory_saves_block_training_and_say_so_once(write, undisturbed, monkeypatch, caplog):
    monkeypatch.setattr(snapshot, 'available_memory', lambda: 1000)
    path = write('memory')
    train(load(path)).close()
    assert saved(load(path).run_dir) == ['ba2', 'ba4', 'ba6', 'ba8']
    assert caplog.text.count('saves block training: a snapshot needs') == 1
    assert_same_end(load(path).run_dir, undisturbed)


def test_time_left_for_a_save_is_estimated_from_its_bytes_and_from_the_save_before(monkeypatch, caplog):
    now, release = [0.0], threading.Event()
    monkeypatch.setattr(background_save.time, 'monotonic', lambda: now[0])
    monkeypatch.setattr(background_save, 'POLL_SECONDS', 1.0)
    save = Mock(progress=(progress := WriteProgress(total_bytes=100)), write=release.wait)
    save.name = 'ba3'
    running = BackgroundSave(save, Time(3, TimeUnit.BATCH), stall_seconds=1.0, pause=2.0)
    now[0], progress.paused_seconds = 50.0, 10.0
    left = []
    for progress.written_bytes in (25, 100, 0):
        left += [running.remaining_seconds(None), running.remaining_seconds(200.0)]
    assert left == [120.0, 160.0, 4.0, 160.0, 4000.0, 4000.0]
    assert progress.pause == 2 and not progress._hurries.is_set() and not save.start_copy.called
    progress.written_bytes = 25
    notices = ((None, None), (280, None), (279, None), (160, None), (159, None), (310, 300))
    chosen = [running.choose(*seconds) for seconds in notices]
    assert chosen == ['both', 'both', 'replace', 'replace', 'finish', 'replace']
    assert 'stopping within 160 s: ba3 needs 120 s more and a new save 160 s; it is abandoned for a new' in caplog.text
    assert 'stopping within 159 s: ba3 needs 120 s more and a new save 160 s; no new one is saved' in caplog.text
    assert len(caplog.records) == 4 and progress._hurries.is_set() and save.start_copy.called
    with monkeypatch.context() as patch:
        of_another_rank = iter([400, 300.0, 99.0])  # its notice, and the seconds that this save and a new one take
        patch.setattr(background_save.dist, 'all_gather_object', lambda own: [own, next(of_another_rank)])
        assert running.choose(None, None) == 'replace'
        assert 'within 400 s: ba3 needs 300 s more and a new save 340 s' in caplog.text
    running.abandon()
    assert 'ba3: the thread of this save has not finished' in caplog.text
    assert [each[0] for each in save.method_calls[-2:]] == ['abandon', 'discard']
    polled = []
    for seconds in (5.0, 5.9, 6.0, 6.5):
        polled.append(running.poll(Mock(timestamp=Timestamp(total_wct=datetime.timedelta(seconds=seconds)))))
        release.set()
        running.wait()
    assert polled == [False, False, True, False] and running.remaining_seconds(200.0) == 0
    running.abandon()
    assert caplog.text.count('has not finished') == 1


@pytest.mark.cpu_seconds(15)
def test_stop_during_a_save_saves_what_the_notice_allows(write, undisturbed, tmp_path, monkeypatch, restored_handlers):
    """The save before was quick, this one is not: it is abandoned."""
    monkeypatch.setenv(NOTICE_SECONDS, '15')
    path = write('stop')
    run = load(path).run_dir
    trainer = build_trainer(load(path))
    stop = At(Event.AFTER_LOSS, 6, lambda: (time.sleep(0.1), signal.raise_signal(signal.SIGTERM)))
    trainer.state.callbacks.append(stop)
    with active(tmp_path / 'counts', Fault('create', r'\.ba6\.unfinished/state', sleep=1.5)):
        assert_stops(trainer, r'stopped at batch 7 on SIGTERM; \S+/ba7 is saved', Preempted)
    assert saved(run) == ['ba2', 'ba4', 'ba7'] and not list(run.glob('.ba*'))
    assert the_checkpointer(trainer).last_checkpoint_batch == 7
    resumed = build_trainer(load(path))
    assert resumed.state.timestamp.batch == 7
    run_to_end(resumed)
    assert_same_end(run, undisturbed)


@pytest.mark.parametrize(('cores', 'threads', 'pause'), [(20, 4, 0.0), (8, 4, 0.0), (7, 3, 4.0), (1, 1, 4.0)])
def test_two_ranks_share_the_cores_and_pause_if_they_have_less_than_four_each(monkeypatch, cores, threads, pause):
    monkeypatch.setattr(snapshot.os, 'sched_getaffinity', lambda process: range(cores))
    monkeypatch.setattr(snapshot.dist, 'get_local_world_size', lambda: 2)
    assert (snapshot.copying_threads(), pause_for_training()) == (threads, pause)


@pytest.mark.slow
def test_two_ranks_killed_during_a_save_resume_bit_for_bit(write, ranks, tmp_path):
    """All ranks are killed at a random time while ba2 and ba6 are written, and one rank while ba6 is published."""
    randomness = random.Random(16)
    whole, path = (write(name, parallelism=SHARDED) for name in ('whole', 'killed'))
    ranks.run(2, whole)
    run = load(path).run_dir
    late = environment([Fault('create', r'unfinished/(state|__)', sleep=0.2)], tmp_path)
    for batch in (2, 6):
        job = ranks.start(2, path, environment=late)
        job.wait_for(run / f'.ba{batch}.unfinished')
        job.spend(randomness.random() * 0.4)
        job.kill()
    job = ranks.start(2, path, deaths={0: (4, run / '.ba6.unfinished')}, environment=late)
    job.wait_for_death(0)
    job.kill()
    ranks.run(2, path)
    assert not list(run.glob('.ba*'))
    assert_same_end(run, load(whole).run_dir)


@pytest.mark.cpu_seconds(20)
def test_one_rank_that_cannot_write_fails_the_save_of_all(write, ranks, tmp_path):
    """Saves fail in the thread of rank 1, and at the publication by rank 0; the saves after them succeed."""
    path = write('fault', {'save_interval': '1ba', 'max_duration': '3ba'}, parallelism=SHARDED)
    faults = [
        Fault('write', r'\.ba1\.unfinished/__1_', 'ENOSPC', rank=1),
        Fault('rename', r'\.ba2\.unfinished', 'ESTALE', rank=0),
    ]
    first, second = ranks.start(2, path, environment=environment(faults, tmp_path)).end()
    run = load(path).run_dir
    assert saved(run) == ['ba3'] and not list(run.glob('.ba*'))
    assert re.search(r'ba1: not saved, no space left on .* \(failed save 1 of 3\)', first)
    assert re.search(r'ba2: not saved, Stale file handle.* \(failed save 2 of 3\)', first)
    assert 'Traceback' not in first + second
