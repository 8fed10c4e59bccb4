"""The account of a run's attempts, and the watchdog that ends one."""

import itertools
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from diffusion.config.load import load
from diffusion.launch import attempts, environment
from diffusion.launch.attempts import Attempt, account, append_attempt, read_attempts, reason_to_give_up, report
from diffusion.launch.heartbeat_file import SAVING, TRAINING, Beat
from diffusion.launch.local_cluster import job_exit_status
from diffusion.launch.node import Node, NodeExit, Outcome, Settings, first_failed_node
from diffusion.launch.rank_discovery import NodePosition
from diffusion.launch.watchdog import LONGER, Watchdog


def attempt(number, begin, first, last, **more):
    """Ten seconds of start, a second a batch, two seconds of end."""
    first_at = begin + 10
    last_at = first_at + last - first
    whole = Attempt(number, begin, last_at + 2, first, first_at, last, last_at, status=1, cause='crash')
    return replace(whole, **more)


def test_the_last_line_of_an_attempt_counts_and_half_a_line_does_not(tmp_path):
    first = attempt(0, 100.0, 0, 7)
    append_attempt(tmp_path, 'begin', Attempt(0, 100.0))
    append_attempt(tmp_path, 'end', first)
    append_attempt(tmp_path, 'begin', Attempt(1, 200.0))
    with (tmp_path / attempts.ATTEMPTS).open('a') as file:
        file.write('{"event": "en')
    found = read_attempts(tmp_path)
    assert found[0] == first
    assert (found[1].number, found[1].cause, found[1].status) == (1, 'lost', None)
    assert found[1].end > 200.0, 'when its last line was written'


def test_a_run_without_an_account_is_said(tmp_path):
    with pytest.raises(ValueError, match='is not there; only runs under diffusion launch'):
        read_attempts(tmp_path)


def test_where_the_time_went():
    # 20 batches, of which the second attempt does 5 again; 30 s between them.
    run = [attempt(0, 0.0, 0, 20), attempt(1, 62.0, 15, 40, cause='done', status=0)]
    found, lost = account(run)
    assert (found.wall, found.productive, found.redone) == (99.0, 40.0, 5.0)
    assert (found.starting, found.ending, found.down) == (20.0, 4.0, 30.0)
    assert found.goodput == pytest.approx(40 / 99)
    assert lost == {'crash': 2 + 30 + 5 + 10}


@given(st.lists(st.tuples(st.integers(0, 30), st.integers(0, 30), st.floats(0, 100)), min_size=1, max_size=8))
def test_every_second_is_accounted_for_once(pieces):
    run, begin = [], 0.0
    for number, (first, count, pause) in enumerate(pieces):
        run.append(attempt(number, begin, first, first + count))
        begin = run[-1].end + pause
    found, _ = account(run)
    parts = found.productive + found.starting + found.redone + found.down + found.ending
    assert parts == pytest.approx(found.wall)
    assert found.redone >= 0


def test_the_report_is_for_people(tmp_path):
    for each in (attempt(0, 0.0, 0, 20, detail='rank 3 by SIGKILL'), attempt(1, 62.0, 15, 40, cause='done', status=0)):
        append_attempt(tmp_path, 'end', each)
    text = report(tmp_path)
    assert '2 attempts' in text
    assert 'batches 0 to 20; a process failed (rank 3 by SIGKILL), exit status 1' in text
    assert 'goodput 0.404 of 99.0 s: productive 40.0 s' in text
    assert 'lost because a process failed: 47.0 s' in text


def test_it_gives_up_where_attempts_end_at_one_batch_for_long():
    stuck = [attempt(number, 1000.0 * number, 40, 40) for number in range(3)]
    assert (
        reason_to_give_up(stuck, 100) == 'the last 3 attempts ended after batch 40 (); mend that, and remove the file'
    )
    assert reason_to_give_up(stuck[:2], 100) is None
    assert reason_to_give_up([attempt(number, 100.0 * number, 40, 40) for number in range(3)], 100) is None, (
        'an outage may pass'
    )
    assert reason_to_give_up([*stuck[:2], attempt(2, 2000.0, 40, 41)], 100) is None, 'it gets on'
    assert reason_to_give_up([*stuck[:2], attempt(2, 2000.0, 40, 40, cause='preempted')], 100) is None
    assert reason_to_give_up(stuck, 2) == 'all 2 restarts are used up; raise max_restarts, or remove the file'
    never = [Attempt(number, 1000.0 * number, 1000.0 * number + 9, cause='crash') for number in range(3)]
    assert 'ended before the first batch' in str(reason_to_give_up(never, 100))


def beats(*times, doing=TRAINING):
    return [{0: Beat(at, batch, doing, 0, times[0])} for batch, at in enumerate(times)]


def test_ten_batches_of_the_usual_length_are_waited_for():
    watchdog = Watchdog(0.0, patience_seconds=30.0)
    given = beats(*itertools.accumulate([20.0] * 6))
    for found in given:
        assert watchdog.check(found, found[0].at) is None
    assert watchdog.limit() == 200.0
    assert watchdog.check(given[-1], 120.0 + 199) is None
    assert 'nothing since batch 5 for 201 s, 200 are allowed' in str(watchdog.check(given[-1], 120.0 + 201))


def test_quick_batches_are_given_the_patience_asked_for():
    watchdog = Watchdog(0.0, patience_seconds=30.0)
    for found in beats(*itertools.accumulate([0.1] * 6)):
        assert watchdog.check(found, found[0].at) is None
    assert watchdog.limit() == 30.0


def test_the_start_and_a_save_may_take_longer():
    watchdog = Watchdog(0.0, patience_seconds=30.0)
    assert watchdog.check({}, 30.0 * LONGER - 1) is None
    assert 'nothing since the start' in str(watchdog.check({}, 30.0 * LONGER + 1))
    watchdog = Watchdog(0.0, patience_seconds=30.0)
    first = Watchdog(0.0, patience_seconds=30)
    # The first batch waits for cold shards and for a compiler.
    assert first.check({0: Beat(10.0, 4, TRAINING, 4, 10.0)}, 10.0 + 30 * LONGER - 1) is None
    assert first.check({0: Beat(10.0, 4, TRAINING, 4, 10.0)}, 10.0 + 30 * LONGER + 1) is not None
    saving = {0: Beat(50.0, 4, SAVING, 0, 1.0), 1: Beat(49.0, 4, TRAINING, 0, 1.0)}
    assert watchdog.check(saving, 50.0 + 30 * LONGER - 1) is None
    assert watchdog.check(saving, 50.0 + 30 * LONGER + 1) is not None


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
def test_a_job_ended_as_its_first_node_that_ended_badly(reported, codes, expected):
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
def test_the_first_node_that_ended_badly_is_named(tmp_path, content, expected):
    path = tmp_path / 'exits'
    if content is not None:
        path.write_text(content)
    assert first_failed_node({environment.EXIT_FILE: str(path)}) == expected
    assert first_failed_node({}) is None


@pytest.mark.parametrize(
    ('own', 'reported', 'expected'),
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
def test_an_attempt_ended_as_the_node_did_that_ended_it(tmp_path, write_recipe, own, reported, expected):
    (tmp_path / 'exits').write_text(f'0 n1 done\n{reported}\n')
    environ = {environment.EXIT_FILE: str(tmp_path / 'exits')}
    node = Node(
        NodePosition('local', 0, 2, 1, '127.0.0.1', 29500), Settings.from_environ({}), [], load(write_recipe()), environ
    )
    assert node._cause_of_end(own) == expected


def test_a_level_that_no_preflight_has_is_refused():
    with pytest.raises(ValueError, match="DIFFUSION_PREFLIGHT: 'deap' is none of none, fast, deep"):
        Settings.from_environ({environment.PREFLIGHT: 'deap'})
