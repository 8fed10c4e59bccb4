"""Choice of the checkpoints that a run keeps, against an independent reference, and removal of the others."""

import os
import signal
from collections.abc import Sequence
from pathlib import Path

import pytest
from checkpointing.run_folders import names, write, write_at
from hypothesis import given, settings
from hypothesis import strategies as st
from sudden_death import die_before

from diffusion.checkpointing import checkpoint_store, retention
from diffusion.checkpointing.checkpoint_store import list_checkpoints
from diffusion.checkpointing.checkpoint_weights import verify_checkpoint
from diffusion.checkpointing.retention import CheckpointInfo, kept, make_room, prune, select_removable
from diffusion.config.checkpointing import KeepConfig, keep_rules
from diffusion.config.load import load

RULES = st.builds(
    KeepConfig,
    last=st.integers(1, 5),
    hourly=st.integers(0, 6),
    daily=st.integers(0, 4),
    every=st.none() | st.integers(1, 40).map('{}ba'.format),
)
GAPS = st.lists(
    st.tuples(st.integers(1, 15), st.one_of(st.floats(0, 600), st.floats(0, 40_000), st.floats(0, 200_000))),
    max_size=40,
)
"""Batches and seconds from each save to the next."""


def run_of(gaps: Sequence[tuple[int, float]], start: float = 1.7e9) -> list[CheckpointInfo]:
    """Return the checkpoints of a run on a good clock, oldest first."""
    found, batch, saved = [], 0, start
    for batches, seconds in gaps:
        batch, saved = batch + batches, saved + seconds
        found.append(CheckpointInfo(batch, saved))
    return found


def reference(checkpoints: list[CheckpointInfo], rules: KeepConfig) -> set[int]:
    """Return the batches to keep by the words of the documentation, with a search for each hour, day and multiple."""
    batches = sorted(each.batch for each in checkpoints)
    found = {batch for batch in batches if sum(other > batch for other in batches) < rules.last}
    for seconds, count in ((3600, rules.hourly), (86400, rules.daily)):
        periods = sorted({int(each.saved // seconds) for each in checkpoints if each.saved is not None})
        for period in periods[len(periods) - min(count, len(periods)) :]:
            found.add(max(each.batch for each in checkpoints if int((each.saved or 0) // seconds) == period))
    if rules.every is not None:
        step = int(rules.every[:-2])
        for multiple in range(step, max(batches, default=0) + 1, step):
            found |= set([batch for batch in batches if multiple <= batch < multiple + step][:1])
    return found


@settings(max_examples=150)
@given(GAPS, RULES)
def test_rules_keep_what_the_reference_keeps(gaps, rules):
    checkpoints = run_of(gaps)
    found = kept(checkpoints, rules)
    assert found == reference(checkpoints, rules)
    assert {*select_removable(checkpoints, rules)} == {each.batch for each in checkpoints} - found


@settings(max_examples=150)
@given(st.lists(st.none() | st.floats(0, 3e9), max_size=30), RULES)
def test_pruning_after_each_save_leaves_the_same_as_pruning_once(times, rules):
    """Also where the clock jumps, or the time of a checkpoint is unknown."""
    saves = [CheckpointInfo(3 * number, saved) for number, saved in enumerate(times, 1)]
    left: list[CheckpointInfo] = []
    for save in saves:
        left.append(save)
        staying = kept(left, rules)
        left = [each for each in left if each.batch in staying]
        assert left[-1] == save, 'the newest stays'
        assert kept(left, rules) == staying, 'pruning twice removes nothing more'
    assert {each.batch for each in left} == kept(saves, rules)


@settings(max_examples=100)
@given(GAPS, RULES, st.sets(st.integers(0, 39)))
def test_claimed_checkpoints_stay_and_change_nothing_else(gaps, rules, claimed):
    free = run_of(gaps)
    held = [CheckpointInfo(each.batch, each.saved, number in claimed) for number, each in enumerate(free)]
    assert kept(held, rules) == kept(free, rules) | {each.batch for each in held if each.claimed}


def test_a_day_of_saves_every_ten_minutes():
    saves = run_of([(100, 600)] * 6 * 30, start=86400 * 20_000)  # 30 hours, from midnight on
    found = kept(saves, KeepConfig(last=3, hourly=24, daily=7, every='10000ba'))
    # At 30:00, 29:50 and 29:40; then at 28:50, 27:50, ... 07:50, with 23:50, the last one of the first day; at 16:40.
    assert found == {18_000, 17_900, 17_800, *range(4_700, 17_400, 600), 10_000}


def test_times_are_those_of_the_receipts(tmp_path):
    for batch, hours in ((10, 0.1), (20, 0.9), (30, 1.5), (40, 3.2), (50, 3.4)):
        write_at(tmp_path, batch, hours)
    for path in list_checkpoints(tmp_path):  # as after a copy
        os.utime(path, (0, 0))
        os.utime(path / 'receipt.json', (0, 0))
    assert [path.name for path in prune(tmp_path, KeepConfig(hourly=2))] == ['ba10', 'ba20', 'ba40']
    assert {path.name for path in tmp_path.iterdir()} == {'ba30', 'ba50', 'latest'}, 'nothing is left over'
    assert prune(tmp_path, KeepConfig(hourly=2)) == []


def test_damaged_receipt_has_no_time_and_an_unreadable_one_stops_the_removal(tmp_path, monkeypatch):
    for batch in (10, 20, 30, 40):
        write_at(tmp_path, batch, batch)
    (tmp_path / 'ba20' / 'receipt.json').write_text('{')
    write(tmp_path, 50, saved='yesterday')
    read = retention.read_receipt

    def stale(path: Path):
        if path.name == 'ba10':
            raise OSError(116, 'Stale file handle', str(path))
        return read(path)

    monkeypatch.setattr(retention, 'read_receipt', stale)
    with pytest.raises(OSError, match='Stale'):
        prune(tmp_path, KeepConfig(hourly=3))
    assert len(names(tmp_path)) == 5
    monkeypatch.setattr(retention, 'read_receipt', read)
    prune(tmp_path, KeepConfig(hourly=3))
    assert names(tmp_path) == ['ba10', 'ba30', 'ba40', 'ba50']
    monkeypatch.setattr(retention, 'read_receipt', stale)
    prune(tmp_path, KeepConfig(last=3))  # needs no times
    assert names(tmp_path) == ['ba30', 'ba40', 'ba50']


def test_room_is_made_from_what_the_next_save_would_replace(tmp_path):
    for batch in (10, 20, 30):
        write_at(tmp_path, batch, batch)
    assert make_room(tmp_path, KeepConfig(last=4), 40) == []
    assert [path.name for path in make_room(tmp_path, KeepConfig(last=3), 40)] == ['ba10']
    assert [path.name for path in make_room(tmp_path, KeepConfig(last=1, every='20ba'), 40)] == []
    assert names(tmp_path) == ['ba20', 'ba30'], 'the newest stays until another one is complete'
    # A save that is tried again replaces its own checkpoint.
    assert make_room(tmp_path, KeepConfig(last=2), 30) == []


def test_checkpoint_that_is_pinned_or_claimed_while_it_is_removed_stays(tmp_path, monkeypatch):
    for batch in (10, 20, 30):
        write(tmp_path, batch)
    with monkeypatch.context() as patch:
        answers = iter([set(), {10}, set()])  # at the choice, and after the rename of each
        patch.setattr(retention, 'claimed_batches', lambda folder: next(answers))
        assert [path.name for path in prune(tmp_path, KeepConfig())] == ['ba20']
    assert names(tmp_path) == ['ba10', 'ba30']
    (tmp_path / 'ba10.pinned').touch()
    assert prune(tmp_path, KeepConfig()) == []
    (tmp_path / 'ba10.pinned').unlink()
    prune(tmp_path, KeepConfig())
    assert names(tmp_path) == ['ba30']


def test_kill_at_any_step_of_a_removal_leaves_whole_checkpoints(tmp_path):
    rules, kills = KeepConfig(last=2), 0
    for step in range(100):
        folder = tmp_path / str(step)
        folder.mkdir()
        for batch in (10, 20, 30):
            write(folder, batch)
        if (child := os.fork()) == 0:
            die_before(step, folder)
            prune(folder, rules)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert {'ba20', 'ba30'} <= {*names(folder)}
        for path in list_checkpoints(folder):
            verify_checkpoint(path)
        checkpoint_store.remove_unfinished_saves(folder)  # as at the start of the next attempt
        prune(folder, rules)
        assert {path.name for path in folder.iterdir()} == {'ba20', 'ba30', 'latest'}
        if status == 0:
            break
        assert os.WTERMSIG(status) == signal.SIGKILL
        kills += 1
    assert kills >= 4, 'a rename, two files and a folder'


def test_composers_name_means_the_last_ones(write_recipe):
    def rules(*words: str) -> KeepConfig | None:
        recipe = load(write_recipe(), words)
        return keep_rules(recipe.checkpointing, recipe.trainer)

    assert rules() is None and rules('trainer.save_num_checkpoints_to_keep=-1') is None
    assert rules('trainer.save_num_checkpoints_to_keep=2') == KeepConfig(last=2)
    hourly = 'checkpointing.keep={hourly: 24}'
    assert rules(hourly) == rules(hourly, 'trainer.save_num_checkpoints_to_keep=-1') == KeepConfig(last=1, hourly=24)
