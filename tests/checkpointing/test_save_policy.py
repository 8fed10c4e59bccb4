"""Save intervals in seconds: fixed, and chosen from the duration of saves and the run's failures."""

import datetime
import errno
import itertools
import json
import logging
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock, call

import pytest
from composer.core import Event, Time, Timestamp, TimeUnit

from diffusion.checkpointing import save_policy
from diffusion.checkpointing.checkpoint_store import list_checkpoints
from diffusion.checkpointing.checkpoint_writer import SaveFailed
from diffusion.checkpointing.save_policy import (
    AutoInterval,
    FailedSaves,
    TimedInterval,
    make_room_after,
    timed_interval,
)
from diffusion.planning.checkpoints import chosen_interval, default_mtbf_hours
from diffusion.runs.attempts import ATTEMPTS, Attempt


def due_batches(
    interval: TimedInterval, *, batches: int, seconds: float, stall: float = 0.0, duration: float = 0.0
) -> list[int]:
    """Return the batches after which a checkpoint is due, in a run whose batches take this many seconds."""
    stamp, found, saved = Timestamp(), [], 0.0
    for batch in range(1, batches + 1):
        stamp = stamp.to_next_batch(samples=1, duration=datetime.timedelta(seconds=seconds + saved))
        state: Any = SimpleNamespace(
            timestamp=stamp, max_duration=Time(batches, TimeUnit.BATCH), dataloader_len=Time(10**6, TimeUnit.BATCH)
        )
        saved = 0.0
        assert not interval(state, Event.BATCH_END)
        if interval(state, Event.BATCH_CHECKPOINT):
            found.append(batch)
            interval.saved(stall, max(stall, duration))
            saved = stall
    return found


def test_checkpoints_are_due_after_seconds_of_training_and_at_its_end():
    assert due_batches(TimedInterval(60), batches=25, seconds=10) == [6, 12, 18, 24, 25]
    assert due_batches(TimedInterval(5), batches=3, seconds=10) == [1, 2, 3]


def test_interval_follows_the_duration_of_saves(tmp_path):
    interval = AutoInterval(tmp_path)
    interval._mtbf_hours = lambda: 1.0  # type: ignore[method-assign]
    fast = due_batches(interval, batches=200, seconds=30, stall=1)
    assert interval.seconds == chosen_interval(stall=1, mtbf=3600)
    slow = due_batches(interval, batches=2000, seconds=30, stall=40)
    assert interval.seconds == pytest.approx(chosen_interval(stall=40, mtbf=3600), rel=0.01)
    steps = [second - first for first, second in itertools.pairwise(slow)]
    assert steps[-2] > 4 * (fast[2] - fast[1])


def test_interval_leaves_time_for_a_save_in_the_background(tmp_path):
    interval = AutoInterval(tmp_path)
    interval._mtbf_hours = lambda: 1.0  # type: ignore[method-assign]
    due_batches(interval, batches=200, seconds=30, stall=0.5)
    assert interval.seconds < 100
    due_batches(interval, batches=2000, seconds=30, stall=0.5, duration=300)
    assert interval.seconds == pytest.approx(2 * 300, rel=0.01)


def test_failures_of_the_run_make_the_interval_shorter(tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    interval = AutoInterval(tmp_path)
    interval._choose()
    assert interval._mtbf_hours() == pytest.approx(default_mtbf_hours(1))
    assert interval.seconds == 3600
    write_attempts(tmp_path, ['crash', 'preempted', 'hardware', 'mistake', 'hang', 'lost'])
    interval._choose()
    # Three failures in twelve hours; the last record is that of the attempt that runs.
    assert interval._mtbf_hours() == pytest.approx((24 + 12) / 3, rel=1e-2)
    assert interval.seconds == pytest.approx(chosen_interval(stall=30, mtbf=12 * 3600), rel=1e-2)
    assert 'checkpoints every 26.' in caplog.text and 'a failure is expected every 12 hours' in caplog.text
    monkeypatch.setattr(save_policy, 'read_attempts', Mock(side_effect=OSError('stale')))
    assert interval._mtbf_hours() == default_mtbf_hours(1)
    assert f'{tmp_path}: the failures of this run cannot be read (stale)' in caplog.text


def test_room_is_made_only_after_a_full_disk(caplog):
    storage: Any = Mock(place='runs/a', make_room=Mock(side_effect=[OSError('stale'), True, False]))
    full, stale = SaveFailed(errno.ENOSPC, 'full'), SaveFailed(errno.ESTALE, 'stale')
    assert [make_room_after(each, storage, None, 3) for each in (full, full, stale, full)] == [
        False,
        True,
        False,
        False,
    ]
    assert 'runs/a: old checkpoints are not removed (stale)' in caplog.text
    assert storage.make_room.mock_calls == [call(None, 3)] * 3
    ending = FailedSaves(print).end_after(full, Mock(), 'ba2')
    assert str(ending) == 'full; newest checkpoint: ba2; free some space and start the same command again'


def write_attempts(folder, causes):
    lines = []
    for number, cause in enumerate(causes):
        begin = 1.7e9 + 7200 * number
        attempt = Attempt(number, begin, end=begin + 7200, first=0, last=1, cause=cause)
        lines.append({'event': 'end', 'at': attempt.end, **vars(attempt)})
    (folder / ATTEMPTS).write_text(''.join(json.dumps(line) + '\n' for line in lines))


def test_only_times_and_auto_are_timed_intervals(tmp_path):
    assert timed_interval('1000ba', tmp_path) is None and timed_interval('1ep', tmp_path) is None
    assert isinstance(timed_interval('auto', tmp_path), AutoInterval)
    found = timed_interval('1.5h', tmp_path)
    assert found is not None and found.seconds == 5400


@pytest.mark.slow
def test_two_ranks_save_at_the_same_batches(write_recipe, ranks, tmp_path):
    """A rank that saved alone would wait for the other until the timeout."""
    path = write_recipe('timed', small=True)
    ranks.run(2, path, 'trainer.save_interval=0.01s', 'trainer.max_duration=4ba')
    saved = [each.name for each in list_checkpoints(tmp_path / 'runs' / 'timed')]
    assert saved[0] == 'ba4' and len(saved) > 1
