"""Saves whose files a thread writes while training continues."""

import re
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from callbacks.guarded_run import At
from checkpointing.saved_runs import SHARDED, assert_same_end, recipe_writer, the_checkpointer
from composer.core import Event
from faults import Fault, active, environment

from diffusion.checkpointing import background_save, checkpointer, snapshot
from diffusion.checkpointing.background_save import choose_when_stopping
from diffusion.checkpointing.checkpoint_weights import verify_checkpoint
from diffusion.config.load import load
from diffusion.exit_codes import Preempted
from diffusion.runs.environment import NOTICE_SECONDS
from diffusion.training.train import build_trainer, train


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    monkeypatch.setattr(checkpointer, 'LAST_SAVE_PAUSES_SECONDS', (0.0, 0.0))
    monkeypatch.setattr(background_save, 'POLL_SECONDS', 0.0)
    monkeypatch.setattr(background_save, 'ABANDON_SECONDS', 0.1)


@pytest.fixture(scope='module')
def write(tmp_path_factory, tiny_recipe) -> Callable[..., Path]:
    return recipe_writer(tmp_path_factory.mktemp('asynchronous'), tiny_recipe)


@pytest.fixture(scope='module')
def blocking(write) -> Path:
    """Folder of a run whose saves block training."""
    recipe = load(write('blocking', checkpointing={'asynchronous': False}))
    train(recipe).close()
    return recipe.run_dir


def saved(run: Path) -> list[str]:
    return sorted(path.name for path in run.glob('ba*'))


def test_memory_of_snapshots_is_prepared_after_the_first_batch(write, alone):
    """The kernel needs longer to provide it than a snapshot takes to fill it."""
    sizes = []
    recipe = load(write('prepared', {'max_duration': '3ba'}, parallelism=SHARDED))
    trainer = build_trainer(recipe)
    found = the_checkpointer(trainer)
    for batch in range(3):
        trainer.state.callbacks.append(At(Event.BATCH_START, batch, lambda: sizes.append(found.snapshot_bytes)))
    trainer.fit()
    trainer.close()
    assert 0 == sizes[0] < sizes[1] == sizes[2], 'the first snapshot needs just this memory'
    verify_checkpoint(recipe.run_dir / 'ba2')


@pytest.mark.cpu_seconds(15)
def test_training_that_fails_during_a_save_publishes_nothing_and_resumes(write, blocking, tmp_path, caplog):
    path = write('crash')
    run = load(path).run_dir
    trainer = build_trainer(load(path))

    def fail():
        raise RuntimeError('a bug')

    trainer.state.callbacks.append(At(Event.AFTER_LOSS, 4, fail))
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
    assert_same_end(run, blocking)


@pytest.mark.cpu_seconds(15)
def test_save_that_is_due_waits_for_the_one_before_and_says_so(write, blocking, tmp_path, monkeypatch, caplog):
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
    assert_same_end(run, blocking)


def test_without_enough_memory_saves_block_training_and_say_so_once(write, blocking, monkeypatch, caplog):
    monkeypatch.setattr(snapshot, 'available_memory', lambda: 1000)
    path = write('memory')
    train(load(path)).close()
    assert saved(load(path).run_dir) == ['ba2', 'ba4', 'ba6', 'ba8']
    assert caplog.text.count('saves block training: a snapshot needs') == 1
    assert_same_end(load(path).run_dir, blocking)


@pytest.mark.parametrize(
    ('remaining', 'synchronous', 'notice', 'choice'),
    [
        (100.0, 200.0, None, 'both'),
        (10.0, 20.0, 30.0, 'both'),
        (10.0, 20.0, 29.0, 'replace'),
        (0.0, 20.0, 20.0, 'both'),
        (5.0, 20.0, 19.0, 'finish'),
        (50.0, 20.0, 1.0, 'finish'),
    ],
)
def test_choice_of_saves_in_the_time_before_the_end(remaining, synchronous, notice, choice):
    assert choose_when_stopping(remaining=remaining, synchronous=synchronous, notice=notice) == choice


@pytest.mark.cpu_seconds(15)
def test_stop_during_a_save_saves_what_the_notice_allows(write, blocking, tmp_path, monkeypatch):
    """The save before was quick, this one is not: it is abandoned."""
    monkeypatch.setenv(NOTICE_SECONDS, '15')
    path = write('stop')
    run = load(path).run_dir
    trainer = build_trainer(load(path))
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)}
    stop = At(Event.AFTER_LOSS, 6, lambda: (time.sleep(0.1), signal.raise_signal(signal.SIGTERM)))
    trainer.state.callbacks.append(stop)
    try:
        with (
            active(tmp_path / 'counts', Fault('create', r'\.ba6\.unfinished/state', sleep=1.5)),
            pytest.raises(Preempted, match=r'stopped at batch 7 on SIGTERM; \S+/ba7 is saved'),
        ):
            trainer.fit()
        trainer.close()
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    assert saved(run) == ['ba2', 'ba4', 'ba7'] and not list(run.glob('.ba*'))
    assert the_checkpointer(trainer).last_checkpoint_batch == 7
    resumed = build_trainer(load(path))
    assert resumed.state.timestamp.batch == 7
    resumed.fit()
    resumed.close()
    assert_same_end(run, blocking)


@pytest.mark.cpu_seconds(20)
def test_one_rank_that_cannot_write_fails_the_save_of_all(write, ranks, tmp_path):
    """Saves fail in the thread of rank 1, and at the publication by rank 0; the saves after them succeed."""
    path = write('fault', {'save_interval': '1ba', 'max_duration': '3ba'}, parallelism=SHARDED)
    faults = [
        Fault('write', r'\.ba1\.unfinished/__1_', 'ENOSPC', rank=1),
        Fault('rename', r'\.ba2\.unfinished', 'ESTALE', rank=0),
    ]
    job = ranks.start(2, path, environment=environment(faults, tmp_path))
    assert job.wait() == [0, 0], job.output()
    run = load(path).run_dir
    assert saved(run) == ['ba3'] and not list(run.glob('.ba*'))
    first, second = job.outputs()
    assert re.search(r'ba1: not saved, no space left on .* \(failed save 1 of 3\)', first)
    assert re.search(r'ba2: not saved, Stale file handle.* \(failed save 2 of 3\)', first)
    assert 'Traceback' not in first + second
