"""`diffusion status` of a run's folder, as far as its files tell, and the files of heartbeats."""

import errno
import json
import math
import os
import threading
import time
from dataclasses import asdict
from pathlib import Path
from unittest.mock import Mock

import pytest
from commands import output_of
from golden import check_golden
from waiting import wait_until

from diffusion.cli import main
from diffusion.errors import UserError
from diffusion.launch.node_records import NodeRecords
from diffusion.runs import heartbeats, run_lock
from diffusion.runs.attempts import Attempt, append_attempt, has_begun
from diffusion.runs.heartbeats import SAVING, TRAINING, Beat, heartbeat_age, last_beats, write_rank_heartbeat
from diffusion.runs.node_status import NodeStatus, StatusWriter, position_of_node, read_statuses
from diffusion.runs.run_status import RunReport, format_report, inspect_run
from diffusion.runs.stop_signals import describe_loss
from diffusion.storage import object_store
from diffusion.storage.local_files import WORKING_FOLDER_VARIABLE
from tests.data.processes import Forked


def report(run: Path | str) -> str:
    return format_report(inspect_run(run))


def write_status(run: Path, status: NodeStatus, *, since_batch: float) -> None:
    """Write the status file of a node whose last batch ended some seconds ago."""
    (run / 'status').mkdir(exist_ok=True)
    status.seconds_since_batch, status.written_at, status.written = since_batch, time.monotonic(), time.time()
    (run / 'status' / f'node-{status.node}.json').write_text(json.dumps(asdict(status)))


@pytest.fixture
def run(tmp_path: Path) -> Path:
    lines = [{'step': step, 'loss/train/total': 1 / (step + 1), 'other': 5.0} for step in range(3000)]
    lines += [{'step': 3000, 'metrics/eval/loss': 0.5}, {'step': None, 'x': 1.0}]
    text = ''.join(json.dumps(line) + '\n' for line in lines)
    (tmp_path / 'metrics.jsonl').write_text(text + '{"step": 3001, "loss/tr')
    (tmp_path / 'recipe.yaml').write_text('trainer: {max_duration: 5000ba}')
    for name in ('ba900', 'ba1000', 'ba1000.damaged', '.ba2000.unfinished'):
        (tmp_path / name).mkdir()
    return tmp_path


def test_reports_of_runs_in_each_state(monkeypatch):
    monkeypatch.setattr(time, 'localtime', time.gmtime)
    monkeypatch.setattr(time, 'time', lambda: 9600.0)
    attempts = [
        Attempt(1, 0.0, 500.0, 0, 100.0, 200, 480.0, 75, 'preempted', 'SIGUSR1'),
        Attempt(2, 600.0, 630.0, status=76, cause='hardware', detail='n7: Xid 79', machine='n7'),
        Attempt(3, 700.0, 1500.0, 150, 760.0, 400, 1460.0, 1, 'crash', 'rank 3 with 1'),
        Attempt(4, 1520.0, 1900.0, 100, 1600.0, 100, 1600.0),
        Attempt(5, 2000.0, 9500.0, 120, 2100.0, 3000, 8950.0, 0, 'done'),
    ]
    recorded = [asdict(each) for each in attempts]
    node = {'node': 0, 'host': 'gpu0', 'doing': 'saving', 'batch': 3000, 'silent_seconds': 300.0}
    speed = {'batches_per_second': 3.456, 'seconds_left': 7300.0, 'silent_seconds': 300.0, 'nodes': [node]}
    running = {'batch': 3000, 'duration': '5000ba', 'process': 'process 5 on gpu0: running', 'last_activity': 9599.4}
    reports = {
        'starting': RunReport('runs/a', 'starting', process='unknown', attempts=recorded[3:4], last_activity=9610.0),
        'running': RunReport('runs/a', 'running', total_batches=6000, attempts=recorded[:4], **running, **speed),
        'silent': RunReport('s3://b/a', 'silent', **running, **speed | {'nodes': [], 'seconds_left': None}),
        'ended': RunReport(
            'runs/a', 'ended', 3000, '3ep', last_loss=0.01234, newest_checkpoint='ba2', attempts=recorded
        ),
        'ended early': RunReport('runs/a', 'ended', attempts=recorded[:2], last_activity=2000.0),
        'without records': RunReport('runs/a', 'ended', 7, newest_checkpoint='runs/a/ba7'),
    }
    found = {f'{name}.txt': format_report(each) + '\n' for name, each in reports.items()}
    check_golden(Path(__file__).parent / 'golden' / 'reports', found)


def test_status_has_batch_loss_checkpoint_and_process(run):
    with run_lock.hold_run_lock(run):
        text = report(run)
    assert '  batch              3000 of 5000\n' in text
    assert f'  last loss          {1 / 3000:.4f}\n' in text
    assert f'  newest checkpoint  {run}/ba1000\n' in text
    assert f'process {os.getpid()} on ' in text and ': running\n' in text
    assert 'none, the run has ended' in report(run)


def test_status_tells_that_the_process_was_killed(run):
    lock = run_lock.hold_run_lock(run)
    process = Forked(lambda: (lock.__enter__(), time.sleep(100)))
    wait_until(lambda: ': running\n' in report(run))
    process.kill()
    assert f'process {process.pid} on ' in report(run)
    assert 'ended without releasing the run' in report(run)


def test_status_of_a_run_with_few_files(tmp_path):
    for name in ('backup', 'xx12', 'ba'):
        (tmp_path / name).mkdir()
    assert not has_begun(tmp_path)
    (tmp_path / 'ba7').mkdir()
    assert '  batch              7 or later\n' in report(tmp_path) and has_begun(tmp_path)
    assert '  last loss          unknown\n' in report(tmp_path)


def test_fault_of_the_store_is_no_end_of_a_run(store):
    url = store.bucket('home') + '/runs/run'
    with run_lock.hold_run_lock(url):
        append_attempt(url, 'begin', Attempt(0, time.time()))
        store.fail('HEAD run.lock', 500, times=1)
        assert inspect_run(url).state == 'starting'


def test_checkpoint_that_is_being_uploaded_is_not_counted_as_saved(store):
    url = store.bucket('home') + '/runs/run'
    for name in ('ba4/receipt.json', 'ba4/state.pt', 'ba8/state.pt'):
        object_store.write(f'{url}/{name}', b'{}')
    records = NodeRecords(url, {}, owns_run=False, say=print)
    assert records.describe_loss(Attempt(0, 0.0, last=9)) == describe_loss(9, 4)


def training(node: int, batch: int, *, nodes: int = 2, **changes) -> NodeStatus:
    given = {'host': f'gpu{node}', 'doing': 'training', 'total_batches': 5000, 'seconds_per_batch': 0.25}
    return NodeStatus(node, nodes, batch=batch, **(given | changes))


def test_running_job_shows_speed_time_left_and_each_node(run):
    with run_lock.hold_run_lock(run):
        append_attempt(run, 'begin', Attempt(0, time.time() - 100))
        append_attempt(run, 'progress', Attempt(0, time.time() - 100, 0.0, 0, time.time() - 90, 3000, time.time()))
        write_status(run, training(0, 3001), since_batch=0.1)
        write_status(run, training(1, 3000), since_batch=0.3)
        write_status(run, training(2, 999, nodes=3, written=1.0), since_batch=900.0)
        os.utime(run / 'status' / 'node-2.json', (1e9, 1e9))
        stale = json.loads((run / 'status' / 'node-2.json').read_text()) | {'written': 1.0}
        (run / 'status' / 'node-2.json').write_text(json.dumps(stale))
        text, found = report(run), inspect_run(run)
    assert text.startswith(f'{run}: running\n  batch              3001 of 5000\n  speed              4.00 batches/s\n')
    assert [each['host'] for each in found.nodes] == ['gpu0', 'gpu1'], 'an earlier attempt had one node more'
    assert (found.state, found.batch, found.total_batches, found.cause) == ('running', 3001, 5000, None)
    assert found.attempts[-1]['cause'] == 'running' and found.seconds_left == pytest.approx(499.75)
    ended = report(run)
    assert ended.startswith(f'{run}: ended, without a report\n') and 'batches/s' not in ended


def test_job_is_starting_whatever_an_earlier_one_has_left_and_silent_when_it_hangs(run):
    with run_lock.hold_run_lock(run):
        for left in ({'owner': 'an earlier job'}, {'doing': 'ended'}):
            write_status(run, training(0, 10, nodes=1, **left), since_batch=0.0)
            assert inspect_run(run).state == 'starting'
        write_status(run, training(0, 3001), since_batch=240.0)
        write_status(run, training(1, 3000), since_batch=241.0)
        assert report(run).startswith(f'{run}: silent, no batch for 4.0 min\n')
        write_status(run, training(0, 3001, seconds_per_batch=23.0), since_batch=228.0)
        assert inspect_run(run).state == 'running', 'less than ten batches'
        append_attempt(run, 'begin', Attempt(0, time.time() - 5))
        assert report(run).startswith(f'{run}: starting\n') and 'no batch; running' in report(run)


def test_lock_of_another_machine_is_watched(run, monkeypatch):
    owner = run_lock.Owner('token', 'job', '7', 0, 'gpu0', 'another boot', 1, '1', time.time())
    lock = run / run_lock.LOCK
    lock.write_text(json.dumps({'owner': asdict(owner), 'count': 0}))
    os.utime(lock, (1e9, 1e9))
    monkeypatch.setattr('diffusion.runs.run_status.WATCH_SECONDS', 1.0)
    assert inspect_run(run).state == 'ended'
    for age, state in ((8.0, 'starting'), (11.0, 'ended')):
        moment = time.time() - age
        os.utime(lock, (moment, moment))
        assert inspect_run(run).state == state
    writer = threading.Timer(0.2, lambda: lock.write_text(json.dumps({'owner': asdict(owner), 'count': 1})))
    writer.start()
    assert inspect_run(run).state != 'ended', 'although its clock is years behind'
    writer.join()


@pytest.mark.parametrize(
    ('environ', 'expected'),
    [
        ({}, (0, 1)),
        ({'RANK': '8', 'WORLD_SIZE': '16', 'LOCAL_WORLD_SIZE': '8'}, (1, 2)),
        ({'RANK': '9', 'WORLD_SIZE': '16', 'LOCAL_WORLD_SIZE': '8'}, None),
        ({'RANK': '2', 'WORLD_SIZE': '4', 'LOCAL_WORLD_SIZE': '4', 'DIFFUSION_NODE': '1/2'}, (1, 2)),
        ({'RANK': '3', 'WORLD_SIZE': '4', 'LOCAL_WORLD_SIZE': '4', 'DIFFUSION_NODE': '1/2'}, None),
    ],
)
def test_first_rank_of_each_node_writes_its_status(environ, expected):
    assert position_of_node(environ) == expected


def test_writer_that_hangs_delays_neither_training_nor_the_end(tmp_path, monkeypatch):
    hangs = threading.Event()
    monkeypatch.setattr('diffusion.runs.node_status._JOIN_SECONDS', 0.1)
    writer = StatusWriter(tmp_path, training(0, 5, nodes=1), on_write=lambda: (hangs.set(), time.sleep(5))[0])
    begin = time.monotonic()
    writer.start()
    assert hangs.wait(2)
    writer.stop()
    assert time.monotonic() - begin < 2


@pytest.mark.parametrize(('run', 'last'), [('runs/a', [10.0, 10.0]), ('s3://b/a', [16.0, 30.0])])
def test_intervals_between_writes_double_up_to_a_limit(monkeypatch, run, last):
    monkeypatch.setattr(run_lock, 'owner_of', lambda run: None)
    monkeypatch.setattr(StatusWriter, '_write', lambda self: None)
    writer, done = StatusWriter(run, training(0, 5)), Mock()
    done.is_set.side_effect = [*[False] * 6, True]
    monkeypatch.setattr(writer, '_done', done)
    writer._write_until_done()
    assert [each.args[0] for each in done.wait.call_args_list] == [1.0, 2.0, 4.0, 8.0, *last]


def test_writer_neither_creates_a_missing_run_folder_nor_fails(tmp_path):
    for folder in (tmp_path / 'gone', tmp_path):
        writer = StatusWriter(folder, training(0, 5, nodes=1))
        writer.start()
        writer.stop()
    assert not (tmp_path / 'gone').exists()
    ((status, silent),) = read_statuses(tmp_path)
    assert (status.batch, status.doing) == (5, 'ended') and silent < 2, 'the writer ends at once'


@pytest.fixture
def bucket_run(store, run, tmp_path, monkeypatch) -> str:
    """URL of a run with the files of `run`, whose newest checkpoint was not uploaded completely."""
    monkeypatch.setenv(WORKING_FOLDER_VARIABLE, str(tmp_path / 'local'))
    url = store.bucket('home') + '/runs/phase1'
    for name in ('metrics.jsonl', 'recipe.yaml'):
        store.put(url, name, (run / name).read_bytes())
    for name in ('ba900/receipt.json', 'ba1000/receipt.json', 'ba1100/state.pt'):
        store.put(url, name, b'{}')
    return url


def test_status_of_a_run_in_a_bucket(bucket_run, store):
    text = report(bucket_run)
    assert text.startswith(f'{bucket_run}: ended\n  batch              3000 of 5000\n')
    assert f'  last loss          {1 / 3000:.4f}\n  newest checkpoint  {bucket_run}/ba1000\n' in text
    with run_lock.hold_run_lock(bucket_run):
        attempt = Attempt(0, time.time() - 100, 0.0, 0, time.time() - 90, 3000, time.time())
        append_attempt(bucket_run, 'begin', attempt)
        append_attempt(bucket_run, 'progress', attempt)
        writers = [StatusWriter(bucket_run, training(node, 3001 - node)) for node in range(2)]
        for writer in writers:
            writer.last_batch_at -= 70.0
            writer._write()
        found, text = inspect_run(bucket_run), report(bucket_run)
        for writer in writers:
            writer.last_batch_at -= 25.0
            writer._write()
        assert inspect_run(bucket_run).state == 'silent'
    assert (found.state, found.batch, found.newest_checkpoint) == ('running', 3001, f'{bucket_run}/ba1000')
    assert [node['host'] for node in found.nodes] == ['gpu0', 'gpu1'] and 'no batch' not in text
    assert f'process {os.getpid()} on ' in text and 'batches 0 to 3000; running\ngoodput ' in text
    assert abs(found.last_activity - time.time()) < 60
    assert inspect_run(bucket_run).cause == 'lost'


def test_status_of_a_bucket_without_a_run_and_of_a_store_that_fails(bucket_run, store, capsys):
    with pytest.raises(UserError, match=r's3://home/runs/none has no metrics\.jsonl, run\.lock or checkpoint'):
        inspect_run('s3://home/runs/none')
    assert json.loads(output_of(capsys, 'status', bucket_run, '--json'))['newest_checkpoint'] == f'{bucket_run}/ba1000'
    store.fail('list-type', 403)
    assert main(['status', bucket_run]) == 1
    assert 'error: status: s3://home/runs/phase1: the store refuses access' in capsys.readouterr().err


def test_heartbeats_are_read_as_written_and_not_written_without_a_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    write_rank_heartbeat(7, TRAINING, 3, 1.5, {})
    assert not list(tmp_path.iterdir())
    before = time.monotonic()
    for rank, doing in ((0, TRAINING), (11, SAVING)):
        write_rank_heartbeat(7, doing, 3, 1.5, {heartbeats.ATTEMPT_FOLDER_VARIABLE: str(tmp_path), 'RANK': str(rank)})
    found = last_beats(tmp_path)
    assert found == {0: Beat(found[0].at, 7, TRAINING, 3, 1.5), 11: Beat(found[11].at, 7, SAVING, 3, 1.5)}
    assert before <= found[0].at <= found[11].at <= time.monotonic()


def test_heartbeat_is_aged_by_a_boot_and_not_by_the_system_clock(tmp_path, monkeypatch):
    heartbeats.write_heartbeat(tmp_path / 'beat')
    now = time.time
    for jump in (-3600, 1200):
        monkeypatch.setattr(time, 'time', lambda jump=jump: now() + jump)
        assert 0 <= heartbeat_age(tmp_path / 'beat') < 60
    later = time.monotonic() + 1000
    os.utime(tmp_path / 'beat', (later, later))
    assert heartbeat_age(tmp_path / 'beat') == math.inf
    assert heartbeat_age(tmp_path / 'none') == math.inf


def test_a_full_disk_does_not_make_a_rank_look_hung(tmp_path, monkeypatch):
    environ = {heartbeats.ATTEMPT_FOLDER_VARIABLE: str(tmp_path)}
    write_rank_heartbeat(7, TRAINING, 3, 1.5, environ)
    os.utime(tmp_path / 'beat-0', (1.0, 1.0))
    monkeypatch.setattr(heartbeats, 'open_own_file', Mock(side_effect=OSError(errno.ENOSPC, 'No space left')))
    write_rank_heartbeat(8, TRAINING, 3, 1.5, environ)
    (found,) = last_beats(tmp_path).values()
    assert found.batch == 7 and found.at > 1.0
