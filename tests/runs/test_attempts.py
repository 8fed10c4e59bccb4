"""Recorded attempts of a run, the goodput computed from them, and the watchdog."""

import errno
import itertools
import time
from dataclasses import replace
from unittest.mock import Mock

import pytest
from hypothesis import given
from hypothesis import strategies as st
from waiting import press_twice_after

from diffusion.callbacks.status_updates import RunStatus
from diffusion.config.load import load
from diffusion.config.recipe import NotifyConfig
from diffusion.errors import UserError
from diffusion.exit_codes import CONFIG_ERROR, FAILED
from diffusion.launch.backends import local
from diffusion.launch.backends.local import LocalJob, job_exit_status
from diffusion.launch.exit_file import NodeExit, end_of_attempt, failure_elsewhere
from diffusion.launch.job_spec import Job
from diffusion.launch.node import Node
from diffusion.launch.node_settings import Settings
from diffusion.launch.rank_discovery import NodePosition
from diffusion.launch.workers import Outcome
from diffusion.runs import attempts, environment, heartbeats
from diffusion.runs.attempts import Attempt, Clock, append_attempt, read_attempts, reason_to_give_up, time_breakdown
from diffusion.runs.heartbeats import ATTEMPT_FOLDER_VARIABLE, SAVING, TRAINING, Beat, Watchdog, collective_timeout
from diffusion.training.training_run import TrainingRun


def attempt(number, begin, first, last, **changes):
    """Return an attempt with 10 s of startup, 1 s per batch and 2 s of shutdown."""
    first_at = begin + 10
    last_at = first_at + last - first
    result = Attempt(number, begin, last_at + 2, first, first_at, last, last_at, status=1, cause='crash')
    return replace(result, **changes)


def test_last_complete_record_of_attempt_counts(tmp_path):
    first = attempt(1, 100.0, 0, 7)
    append_attempt(tmp_path, 'begin', Attempt(1, 100.0))
    append_attempt(tmp_path, 'end', first)
    append_attempt(tmp_path, 'begin', Attempt(2, 200.0))
    with (tmp_path / attempts.ATTEMPTS).open('a') as file:
        file.write('{"event": "en')
    found = read_attempts(tmp_path)
    assert found[0] == first
    assert (found[1].number, found[1].cause, found[1].status) == (2, 'lost', None)
    assert found[1].end > 200.0, 'time of its last record'


def test_progress_is_recorded_at_once_and_then_at_intervals(tmp_path, monkeypatch):
    now, recorded = 0.0, []
    callback = RunStatus(tmp_path)
    callback.attempt, callback.on_record = Attempt(1, begin=0.0, first=0), lambda attempt: recorded.append(now)
    monkeypatch.setattr('diffusion.callbacks.status_updates.time.monotonic', lambda: now)
    for moment in (1.0, 2.0, 30.9, 31.0, 60.0):
        now = moment
        callback._record_progress()
    assert recorded == [1.0, 31.0]


def test_devices_are_recorded(tmp_path, monkeypatch):
    monkeypatch.setenv('WORLD_SIZE', '16')
    run = TrainingRun(str(tmp_path), NotifyConfig())
    with run.held():
        assert run.attempt is not None
        run.attempt.gpu = 'NVIDIA H200'
    (found,) = read_attempts(tmp_path)
    assert (found.devices, found.gpu, found.cause) == (16, 'NVIDIA H200', 'done')


def test_durations_have_the_largest_unit_of_which_they_are_two():
    durations = [attempts.format_duration(seconds) for seconds in (119, 120, 7199, 7200)]
    assert durations == ['119.0 s', '2.0 min', '120.0 min', '2.0 h'] and attempts.TimeBreakdown(0.0).goodput == 0.0


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


def test_run_is_given_up_without_progress():
    stuck, quick = ([attempt(i, 5e3 + pause * i, 40, 40) for i in range(3)] for pause in (894.0, 893.9))
    reason = reason_to_give_up(stuck, 100)
    assert reason == 'the last 3 attempts ended after batch 40 (); fix the cause and delete this file'
    assert reason_to_give_up(stuck[:2], 100) is None
    assert reason_to_give_up(quick, 100) is None, 'shorter than STUCK_SECONDS'
    assert reason_to_give_up([*stuck[:2], attempt(2, 9000.0, 40, 41)], 100) is None, 'the run makes progress'
    assert reason_to_give_up([*stuck[:2], attempt(2, 9000.0, 40, 40, cause='preempted')], 100) is None
    reason = 'the run failed 3 times without progress (max_restarts: 2); fix the cause, then raise restart.max_restarts'
    assert reason_to_give_up(stuck, 2) == f'{reason} or delete this file'
    never = [Attempt(number, 1000.0 * number, 1000.0 * number + 9, cause='crash') for number in range(3)]
    assert 'ended before the first batch' in str(reason_to_give_up(never, 100))


def test_attempts_with_progress_and_preemptions_use_up_no_restarts():
    advancing = [attempt(number, 1000.0 * number, 100 * number, 100 * number + 150) for number in range(50)]
    assert attempts.restarts_used(advancing) == 1, 'only the last one, whose progress is not known yet'
    assert reason_to_give_up(advancing, 1) is None
    preempted = [attempt(number, 1000.0 * number, 0, 0, cause='preempted') for number in range(50)]
    assert attempts.restarts_used(preempted) == 0
    assert reason_to_give_up([*preempted, *advancing], 1) is None
    # Batches that are never saved do not count as progress, however many they are.
    looping = [attempt(number, 10.0 * number, 0, 500 + number) for number in range(5)]
    assert attempts.restarts_used(looping) == 5
    assert 'the run failed 5 times without progress' in str(reason_to_give_up(looping, 4))
    assert attempts.restarts_used([*looping, attempt(5, 60.0, 500, 501)]) == 1
    by_hand = [replace(each, launched=False) for each in looping]
    assert reason_to_give_up(by_hand, 0) is None, 'python run.py has no restart budget'


def test_repeated_hardware_faults_on_one_machine_end_the_run():
    xid = {'cause': 'hardware', 'machine': 'n7', 'detail': 'Xid 79'}
    faults = [attempt(number, 1000.0 * number, 100 * number, 100 * number + 50, **xid) for number in range(3)]
    reason = 'the last 3 attempts ended with bad hardware on n7 (Xid 79); replace or repair the machine'
    assert reason_to_give_up(faults, 100) == f'{reason}, and delete this file'
    assert reason_to_give_up(faults[:2], 100) is None
    assert reason_to_give_up([*faults[:2], replace(faults[2], machine='n8')], 100) is None
    assert reason_to_give_up([*faults, attempt(3, 4000.0, 300, 350, cause='preempted')], 100) is None


def test_fault_that_another_node_recorded_names_its_machine(tmp_path):
    begin = time.time()
    append_attempt(tmp_path, 'begin', attempt(0, begin - 5000, 0, 5))
    append_attempt(tmp_path, 'end', attempt(0, begin - 5000, 0, 5, cause='preempted'))
    append_attempt(tmp_path, 'end', attempt(1, begin - 100, 0, 5, cause='preempted', detail='preflight'))
    attempts.record_fault(tmp_path, 'gpu/7', 'preflight: 7 of 8 GPUs')
    (tmp_path / 'faults' / '0.json').write_text('{"at": 1')
    append_attempt(tmp_path, 'begin', Attempt(2, begin + 100))
    first, second, third = read_attempts(tmp_path)
    assert (first.cause, third.cause) == ('preempted', 'lost')
    assert (second.cause, second.machine, second.detail) == ('hardware', 'gpu/7', 'gpu/7: preflight: 7 of 8 GPUs')


def test_fault_belongs_to_the_attempt_that_it_ended_and_not_to_a_quick_restart(tmp_path):
    begin = time.time()
    append_attempt(tmp_path, 'begin', Attempt(0, begin - 500))
    append_attempt(tmp_path, 'end', Attempt(0, begin - 500, begin + 1, cause='preempted'))
    attempts.record_fault(tmp_path, 'gpu7', 'Xid 79')
    append_attempt(tmp_path, 'end', Attempt(1, begin + 5, begin + 500, cause='crash'))
    assert [each.cause for each in read_attempts(tmp_path)] == ['hardware', 'crash']
    append_attempt(tmp_path, 'end', Attempt(0, begin - 500, begin + 1, cause='mistake'))
    (tmp_path / 'faults' / 'before.json').write_text('{"at": 1.0, "machine": "gpu8", "detail": "Xid 48"}')
    assert [(each.cause, each.machine) for each in read_attempts(tmp_path)] == [('mistake', ''), ('crash', '')]


@pytest.mark.parametrize('step', [1200, -3600])
@pytest.mark.parametrize('reboot', [False, True])
def test_goodput_adds_up_over_steps_of_the_system_clock(tmp_path, monkeypatch, step, reboot):
    """A step while an attempt trains, and between two attempts on the same machine or on another one."""
    wall, monotonic = [1e9], [50.0]
    monkeypatch.setattr(attempts.time, 'time', lambda: wall[0])
    monkeypatch.setattr(attempts.time, 'monotonic', lambda: monotonic[0])

    def wait(seconds):
        wall[0] += seconds
        monotonic[0] += seconds

    def train(number, first, last):
        clock = Clock(tmp_path)
        found = Attempt(number, clock.now())
        append_attempt(tmp_path, 'begin', found, clock)
        wait(10)
        found.first, found.first_at = first, clock.now()
        wait(50)
        wall[0] += step
        wait(50)
        found.last, found.last_at = last, clock.now()
        append_attempt(tmp_path, 'progress', found, clock)  # and then the node is lost

    train(0, 0, 100)
    wait(7)
    wall[0] += step
    if reboot:
        monotonic[0] = 3.0
        monkeypatch.setattr(attempts, 'boot_id', lambda: 'another')
    train(1, 100, 200)
    found, _ = time_breakdown(read_attempts(tmp_path))
    assert (found.productive, found.starting, found.redone) == (200.0, 20.0, 0.0)
    # The clock of another machine cannot be compared, but no time is negative.
    assert found.down == (7 if not reboot else 7 + 2 * step if step > 0 else 0)
    assert found.wall == found.productive + found.starting + found.down + found.ending


def test_local_job_counts_failures_but_no_preemptions(prepare, monkeypatch, tmp_path):
    checked, _ = prepare('local', restart={'max_restarts': 2}, workdir=str(tmp_path))
    statuses = iter([75, 1, 75, 1, 75, 1, 1])
    monkeypatch.setattr(LocalJob, '_attempt', lambda self, count: next(statuses))
    assert LocalJob(checked.jobs[0]).run() == 1
    assert [*statuses] == [1], 'ended after the third failure'
    run = tmp_path / checked.jobs[0].run_dir
    run.mkdir(parents=True)
    for number in range(9):
        each = attempt(number, 1000.0 * number, 10 * number, 10 * number + 5)
        append_attempt(run, 'begin', each)
        append_attempt(run, 'end', each)
    statuses = iter([1, 1, 1, 0])
    assert LocalJob(checked.jobs[0]).run() == 0, 'its training run advances'
    statuses = iter([CONFIG_ERROR])
    assert LocalJob(checked.jobs[0]).run() == CONFIG_ERROR, 'a mistake is not retried'


def beats(*times, doing=TRAINING):
    return [{0: Beat(at, 2 * index, doing, 0, times[0])} for index, at in enumerate(times)]


def test_watchdog_waits_for_ten_median_batch_times_and_at_least_hang_seconds():
    watchdog = Watchdog(0.0, hang_seconds=30.0)
    for found in beats(*itertools.accumulate([0.1] * 6)):
        assert watchdog.check(found, found[0].at) is None
    assert watchdog.limit() == 30.0
    watchdog = Watchdog(0.0, hang_seconds=60.0)
    given = beats(*itertools.accumulate([20.0] * 6))  # 10 s per batch
    for found in given:
        assert watchdog.check(found, found[0].at) is None
    assert watchdog.limit() == 100.0
    assert watchdog.check(given[-1], 120.0 + 100) is None
    assert watchdog.check(given[-1], 120.0 + 101) == 'no heartbeat for 101 s since batch 10 (limit 100 s)'


@given(
    hang_seconds=st.floats(0.1, 1e5),
    steps=st.lists(st.floats(0.001, 1e5), max_size=8),
    doing=st.sampled_from([TRAINING, SAVING]),
)
def test_collectives_time_out_after_every_limit_of_the_watchdog(hang_seconds, steps, doing):
    watchdog = Watchdog(0.0, hang_seconds)
    for found in beats(*itertools.accumulate(steps), doing=doing):
        watchdog.check(found, found[0].at)
    environ = {environment.HANG_SECONDS: repr(hang_seconds), ATTEMPT_FOLDER_VARIABLE: '/tmp/attempt'}
    assert collective_timeout(environ) >= watchdog.limit() + heartbeats.COLLECTIVE_MARGIN_SECONDS


def test_default_timeout_of_collectives_and_warning_of_a_shorter_one_with_both_values():
    assert collective_timeout({ATTEMPT_FOLDER_VARIABLE: '/tmp/attempt'}) == 4 * 900 + 60
    assert collective_timeout({}) == collective_timeout({environment.HANG_SECONDS: '5'}) == 1800
    for wrong in ('soon', '0', '-1', 'inf', 'nan'):
        with pytest.raises(UserError, match=f"DIFFUSION_HANG_SECONDS: '{wrong}' is not a number of seconds above 0"):
            collective_timeout({environment.HANG_SECONDS: wrong, ATTEMPT_FOLDER_VARIABLE: '/tmp/attempt'})
    assert heartbeats.early_timeout_warning(3601, 900) is None
    warning = str(heartbeats.early_timeout_warning(900, 900))
    assert 'trainer.dist_timeout: 900 s is shorter than the watchdog' in warning and '900 s (3600 s for slow' in warning
    assert 'so all hangs end as a failed collective' in warning and 'remove dist_timeout, which gives 3660 s' in warning
    assert 'so hangs in saves, evaluations and the first batch end' in str(heartbeats.early_timeout_warning(3600, 900))


def test_watchdog_waits_longer_for_the_start_the_first_batch_and_saves():
    watchdog, limit = Watchdog(0.0, hang_seconds=30.0), 30.0 * heartbeats.SLOW_WORK_FACTOR
    # The first batch waits for cold shards and for the compiler.
    first = {0: Beat(10.0, 0, TRAINING, 0, 10.0)}
    saving = {0: Beat(50.0, 4, SAVING, 0, 1.0), 1: Beat(49.0, 4, TRAINING, 0, 1.0)}
    for found, begin, since in (({}, 0.0, 'the start'), (first, 10.0, 'batch 0'), (saving, 50.0, 'batch 4')):
        assert watchdog.check(found, begin + limit) is None
        assert f' for 121 s since {since} (limit 120 s)' in str(watchdog.check(found, begin + limit + 1))


def test_exit_status_of_job_is_that_of_failure_elsewhere():
    reported = [([0, 0], [0, 0]), ([75, 1], [75, 1]), ([1, 75], [75, 1]), ([75, 78], [75, 78]), ([0], [0, -9])]
    assert [job_exit_status(*each) for each in [*reported, ([], [1, 1])]] == [0, 75, 1, 78, 1, 1]


@pytest.mark.parametrize(
    ('content', 'expected'),
    [
        (None, None),
        ('0 n1\n0 n2 done\n', None),
        ('0 n1\n1 n2\n75 n3\n', NodeExit(1, 'n2', 'crash', '')),
        ('75 n3\n1 n2\n', None),
        ('\n75 n3 hang no batch for 9 s\n1 n2\n', NodeExit(75, 'n3', 'hang', 'no batch for 9 s')),
    ],
)
def test_first_failed_node_is_found(tmp_path, content, expected):
    path = tmp_path / 'exits'
    if content is not None:
        path.write_text(content)
    assert failure_elsewhere({environment.EXIT_FILE: str(path)}) == expected
    assert failure_elsewhere({}) is None


@pytest.mark.parametrize(
    ('outcome', 'reported', 'expected'),
    [
        (Outcome(1, 'crash', 'rank 0 with 1'), '9 n2 killed by SIGKILL', NodeExit(9, 'n2', 'killed', 'n2: by SIGKILL')),
        (Outcome(75, 'preempted'), '75 n2 hang no batch', NodeExit(75, '', 'hang', 'n2: no batch')),
        (Outcome(75, 'preempted'), '76 n2', NodeExit(76, 'n2', 'hardware', 'n2: status 76')),
        (Outcome(75, 'preempted'), '78 n2 mistake', NodeExit(78, '', 'mistake', 'n2: status 78')),
        (Outcome(75, 'preempted'), '75 n2 preempted', NodeExit(75, '', 'preempted', '')),
        (Outcome(1, 'crash', 'rank 0 with 1'), '9 n2 crash rank 1 with 9', NodeExit(1, 'n1', 'crash', 'rank 0 with 1')),
        (Outcome(1, 'killed', 'by SIGKILL'), '1 n2 crash rank 1 with 1', NodeExit(1, 'n1', 'killed', 'by SIGKILL')),
        (Outcome(1, 'crash', 'rank 0 with 1'), '0 n2 done', NodeExit(1, 'n1', 'crash', 'rank 0 with 1')),
        (Outcome(76, 'hardware', 'Xid 79'), '75 n2 preempted', NodeExit(76, 'n1', 'hardware', 'Xid 79')),
    ],
)
def test_attempt_has_the_status_and_cause_of_failure_elsewhere(tmp_path, outcome, reported, expected):
    (tmp_path / 'exits').write_text(f'0 n1 done\n{reported}\n')
    environ = {environment.EXIT_FILE: str(tmp_path / 'exits'), environment.MACHINE: 'n1'}
    assert end_of_attempt(outcome, environ) == expected


def test_unknown_preflight_level_is_refused():
    with pytest.raises(ValueError, match="DIFFUSION_PREFLIGHT: 'deap' is unknown; use none, fast, deep"):
        Settings.from_environ({environment.PREFLIGHT: 'deap'})


@pytest.mark.parametrize('event', ['progress', 'end'])
def test_record_of_a_folder_that_has_vanished_creates_neither_folder_nor_file(tmp_path, event):
    with pytest.raises(FileNotFoundError):
        append_attempt(tmp_path / 'gone', event, Attempt(0, 100.0))
    with pytest.raises(FileNotFoundError):
        append_attempt(tmp_path, event, Attempt(0, 100.0))
    assert not [*tmp_path.iterdir()]


def test_later_attempt_with_an_empty_folder_does_not_start_from_batch_0(write_recipe, tmp_path, capsys):
    recipe = load(write_recipe())
    environ = {environment.ATTEMPT: '3', environment.MACHINE: 'node7'}
    environ |= {environment.EXIT_FILE: str(tmp_path / 'job-7.3.exits')}
    position = NodePosition('local', 0, 2, 1, '127.0.0.1', 29500)

    def status_and_message(recipe, environ):
        return Node(position, Settings.from_environ({}), ['-c', ''], recipe, environ).run(), capsys.readouterr().err

    # Attempts 1 to 3 left nothing: evicted while their image was pulled, or ended by a mistake before they began.
    (tmp_path / 'job-7.0.exits').write_text('78 node3\n')
    for each in (environ, {**environ, environment.EXIT_FILE: '/tmp/exits'}, {environment.ATTEMPT: '3'}):
        status, message = status_and_message(recipe, each)
        assert status == CONFIG_ERROR
        assert f'{recipe.run_dir} is empty although this is attempt 4. If it is not mounted on' in message
        assert f'submit it as a new job, or create {recipe.run_dir}/attempts.jsonl to start from batch 0' in message
    last = Node(replace(position, rank=1), Settings.from_environ({}), ['-c', ''], recipe, environ)
    assert last._seconds_to_save() == last.settings.notice_seconds - environment.MARGIN_SECONDS
    assert last._status_of_missing_run() == 0, 'its ranks compare its folder with those of the other nodes'
    # The second of an attempt whose attempts.jsonl could not be written.
    for exits in ('0 node1 begin\n76 node3 hardware GPU 0\n', '1 node3 crash rank 1 with 1\n'):
        (tmp_path / 'job-7.1.exits').write_text(exits)
        status, message = status_and_message(recipe, environ)
        assert status == FAILED, 'a retry on another machine may find the folder'
        assert 'attempt 4, and an earlier attempt has begun: is it mounted on node7?' in message
    assert not recipe.run_dir.exists()
    # A faulty machine can end an attempt before the first node has begun it; then nothing is missing.
    (tmp_path / 'job-7.1.exits').write_text('76 node3 hardware GPU 0\n')
    (tmp_path / 'job-7.2.exits').write_text('1 node1\n')
    assert status_and_message(recipe, environ) == (0, '')
    composer_saves = load(write_recipe(), [f'trainer.save_folder={tmp_path}/elsewhere', 'name=other'])
    assert status_and_message(composer_saves, environ) == (0, ''), 'the checkpoints are in another folder'


def test_record_that_cannot_be_read_ends_the_attempt_with_a_message(write_recipe, monkeypatch, capsys):
    monkeypatch.setattr(attempts, 'read_attempts', Mock(side_effect=OSError(errno.ESTALE, 'Stale file handle')))
    recipe = load(write_recipe())
    node = Node(NodePosition('local', 0, 1, 1, '127.0.0.1', 29500), Settings.from_environ({}), [], recipe, {})
    assert node.run() == FAILED
    assert 'Stale file handle' in capsys.readouterr().err


def test_local_job_with_restarts_turned_off_says_so(prepare, monkeypatch, capsys):
    checked, _ = prepare('local', restart={'max_restarts': 0}, overrides={'trainer.autoresume': False})
    monkeypatch.setattr(LocalJob, '_attempt', lambda self, count: 1)
    assert LocalJob(checked.jobs[0]).run() == 1
    assert capsys.readouterr().err == 'job: exited with status 1; restarts are turned off\n'


def test_second_ctrl_c_is_sent_until_the_nodes_end(prepare, monkeypatch, tmp_path):
    """The node drops the first SIGINT, as the node entry point does if it comes too soon after the SIGTERM."""
    checked, _ = prepare('local', nodes=1, workdir=str(tmp_path))
    program = f"""
import os, signal, sys, time
interrupts = []
def end(number, frame):
    interrupts.append(number)
    if len(interrupts) > 1:
        open(os.environ["{environment.EXIT_FILE}"], "w").write("130 n")
        os._exit(130)
signal.signal(signal.SIGTERM, lambda *_: open("asked", "w").close())
signal.signal(signal.SIGINT, end)
open("ready", "w").close()
while True:
    time.sleep(0.1)
"""
    monkeypatch.setattr(local, 'GRACE_SECONDS', 3.0)
    monkeypatch.setattr('diffusion.runs.stop_signals.REPEAT_SECONDS', 1e-9)

    monkeypatch.setattr(Job, 'command', ['python', '-c', program])
    press_twice_after(tmp_path / 'ready', tmp_path / 'asked')
    assert LocalJob(checked.jobs[0]).run() == 130
