"""Recorded attempts of a run, the goodput computed from them, and the watchdog."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusion.config.load import load
from diffusion.launch import attempts, environment
from diffusion.launch.attempts import (
    Attempt,
    append_attempt,
    format_attempts_report,
    read_attempts,
    reason_to_give_up,
    time_breakdown,
)
from diffusion.launch.heartbeat_file import SAVING, TRAINING, Beat
from diffusion.launch.local_cluster import job_exit_status
from diffusion.launch.node import Node, NodeExit, Outcome, Settings, first_failed_node
from diffusion.launch.rank_discovery import NodePosition
from diffusion.launch.watchdog import SLOW_WORK_FACTOR, Watchdog


def attempt(number, begin, first, last, **changes):
    """Return an attempt with 10 s of startup, 1 s per batch and 2 s of shutdown."""
    first_at = begin + 10
    last_at = first_at + last - first
    result = Attempt(number, begin, last_at + 2, first, first_at, last, last_at, status=1, cause='crash')
    return replace(result, **changes)


def test_last_complete_record_of_attempt_counts(tmp_path):
    first = attempt(0, 100.0, 0, 7)
    append_attempt(tmp_path, 'begin', Attempt(0, 100.0))
    append_attempt(tmp_path, 'end', first)
    append_attempt(tmp_path, 'begin', Attempt(1, 200.0))
    with (tmp_path / attempts.ATTEMPTS).open('a') as file:
        file.write('{"event": "en')
    found = read_attempts(tmp_path)
    assert found[0] == first
    assert (found[1].number, found[1].cause, found[1].status) == (1, 'lost', None)
    assert found[1].end > 200.0, 'time of its last record'


def test_missing_attempts_file_is_reported(tmp_path):
    with pytest.raises(ValueError, match='does not exist; only runs started by diffusion launch'):
        read_attempts(tmp_path)


def test_time_breakdown():
    # 20 batches, 5 of which the second attempt repeats; 30 s between the attempts.
    run = [attempt(0, 0.0, 0, 20), attempt(1, 62.0, 15, 40, cause='done', status=0)]
    found, lost = time_breakdown(run)
    assert (found.wall, found.productive, found.redone) == (99.0, 40.0, 5.0)
    assert (found.starting, found.ending, found.down) == (20.0, 4.0, 30.0)
    assert found.goodput == pytest.approx(40 / 99)
    assert lost == {'crash': 2 + 30 + 5 + 10}


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.floats(0, 100)), min_size=1, max_size=8))
def test_breakdown_sums_to_elapsed_time(pieces):
    run, begin = [], 0.0
    for number, (first, count, pause) in enumerate(pieces):
        run.append(attempt(number, begin, first, first + count))
        begin = run[-1].end + pause
    found, _ = time_breakdown(run)
    parts = found.productive + found.starting + found.redone + found.down + found.ending
    assert parts == pytest.approx(found.wall)
    assert found.redone >= 0


def test_report(tmp_path):
    for each in (attempt(0, 0.0, 0, 20, detail='rank 3 by SIGKILL'), attempt(1, 62.0, 15, 40, cause='done', status=0)):
        append_attempt(tmp_path, 'end', each)
    text = format_attempts_report(tmp_path)
    assert '2 attempts' in text
    assert 'batches 0 to 20; process failed (rank 3 by SIGKILL), exit status 1' in text
    assert 'goodput 0.404 of 99.0 s: productive 40.0 s' in text
    assert 'time lost (process failed): 47.0 s' in text


def test_run_is_given_up_without_progress():
    stuck = [attempt(number, 1000.0 * number, 40, 40) for number in range(3)]
    assert (
        reason_to_give_up(stuck, 100)
        == 'the last 3 attempts ended after batch 40 (); fix the cause and delete this file'
    )
    assert reason_to_give_up(stuck[:2], 100) is None
    assert reason_to_give_up([attempt(number, 100.0 * number, 40, 40) for number in range(3)], 100) is None, (
        'shorter than STUCK_SECONDS'
    )
    assert reason_to_give_up([*stuck[:2], attempt(2, 2000.0, 40, 41)], 100) is None, 'the run makes progress'
    assert reason_to_give_up([*stuck[:2], attempt(2, 2000.0, 40, 40, cause='preempted')], 100) is None
    assert reason_to_give_up(stuck, 2) == 'all 2 restarts are used; raise max_restarts, or delete this file'
    never = [Attempt(number, 1000.0 * number, 1000.0 * number + 9, cause='crash') for number in range(3)]
    assert 'ended before the first batch' in str(reason_to_give_up(never, 100))


def beats(*times, doing=TRAINING):
    return [{0: Beat(at, batch, doing, 0, times[0])} for batch, at in enumerate(times)]


def test_watchdog_waits_for_ten_median_batch_times():
    watchdog = Watchdog(0.0, hang_seconds=30.0)
    given = beats(*itertools.accumulate([20.0] * 6))
    for found in given:
        assert watchdog.check(found, found[0].at) is None
    assert watchdog.limit() == 200.0
    assert watchdog.check(given[-1], 120.0 + 199) is None
    assert 'no heartbeat for 201 s since batch 5 (limit 200 s)' in str(watchdog.check(given[-1], 120.0 + 201))


def test_watchdog_waits_at_least_hang_seconds():
    watchdog = Watchdog(0.0, hang_seconds=30.0)
    for found in beats(*itertools.accumulate([0.1] * 6)):
        assert watchdog.check(found, found[0].at) is None
    assert watchdog.limit() == 30.0


def test_watchdog_waits_longer_for_start_and_save():
    watchdog = Watchdog(0.0, hang_seconds=30.0)
    assert watchdog.check({}, 30.0 * SLOW_WORK_FACTOR - 1) is None
    assert 'since the start' in str(watchdog.check({}, 30.0 * SLOW_WORK_FACTOR + 1))
    watchdog = Watchdog(0.0, hang_seconds=30.0)
    first = Watchdog(0.0, hang_seconds=30)
    # The first batch waits for cold shards and for the compiler.
    assert first.check({0: Beat(10.0, 4, TRAINING, 4, 10.0)}, 10.0 + 30 * SLOW_WORK_FACTOR - 1) is None
    assert first.check({0: Beat(10.0, 4, TRAINING, 4, 10.0)}, 10.0 + 30 * SLOW_WORK_FACTOR + 1) is not None
    saving = {0: Beat(50.0, 4, SAVING, 0, 1.0), 1: Beat(49.0, 4, TRAINING, 0, 1.0)}
    assert watchdog.check(saving, 50.0 + 30 * SLOW_WORK_FACTOR - 1) is None
    assert watchdog.check(saving, 50.0 + 30 * SLOW_WORK_FACTOR + 1) is not None


@pytest.mark.parametrize(
    ('reported', 'codes', 'expected'),
    [
        ([0, 0], [0, 0], 0),
        ([75, 1], [75, 1], 75),
        ([1, 75], [75, 1], 1),
        ([75, 78], [75, 78], 78),
        ([0], [0, -9], 1),
        ([], [1, 1], 1),
    ],
)
def test_exit_status_of_job_is_that_of_first_failed_node(reported, codes, expected):
    assert job_exit_status(reported, codes) == expected


@pytest.mark.parametrize(
    ('content', 'expected'),
    [
        (None, None),
        ('0 n1\n0 n2 done\n', None),
        ('0 n1\n1 n2\n75 n3\n', NodeExit(1, 'n2', 'crash', '')),
        ('75 n3\n1 n2\n', NodeExit(75, 'n3', 'preempted', '')),
        ('\n75 n3 hang no batch for 9 s\n1 n2\n', NodeExit(75, 'n3', 'hang', 'no batch for 9 s')),
    ],
)
def test_first_failed_node_is_found(tmp_path, content, expected):
    path = tmp_path / 'exits'
    if content is not None:
        path.write_text(content)
    assert first_failed_node({environment.EXIT_FILE: str(path)}) == expected
    assert first_failed_node({}) is None


@pytest.mark.parametrize(
    ('outcome', 'reported', 'expected'),
    [
        (Outcome(1, 'crash', 'rank 0 with 1'), '1 n2 killed rank 1 by SIGKILL', ('killed', 'n2: rank 1 by SIGKILL')),
        (Outcome(75, 'preempted'), '75 n2 hang no batch', ('hang', 'n2: no batch')),
        (Outcome(75, 'preempted'), '76 n2', ('hardware', 'n2: status 76')),
        (Outcome(75, 'preempted'), '75 n2 preempted', ('preempted', '')),
        (Outcome(1, 'crash', 'rank 0 with 1'), '1 n2 crash rank 1 with 1', ('crash', 'rank 0 with 1')),
        (Outcome(1, 'killed', 'rank 0 by SIGKILL'), '1 n2 crash rank 1 with 1', ('killed', 'rank 0 by SIGKILL')),
        (Outcome(1, 'crash', 'rank 0 with 1'), '0 n2 done', ('crash', 'rank 0 with 1')),
    ],
)
def test_attempt_has_the_cause_of_first_failed_node(tmp_path, write_recipe, outcome, reported, expected):
    (tmp_path / 'exits').write_text(f'0 n1 done\n{reported}\n')
    environ = {environment.EXIT_FILE: str(tmp_path / 'exits')}
    node = Node(
        NodePosition('local', 0, 2, 1, '127.0.0.1', 29500), Settings.from_environ({}), [], load(write_recipe()), environ
    )
    assert node._cause_of_end(outcome) == expected


def test_unknown_preflight_level_is_refused():
    with pytest.raises(ValueError, match="DIFFUSION_PREFLIGHT: 'deap' is unknown; use none, fast, deep"):
        Settings.from_environ({environment.PREFLIGHT: 'deap'})
