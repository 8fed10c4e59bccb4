"""Attempts whose ranks, small programs instead of training, end badly: what the node does, and the stacks it keeps."""

import json
import os
import socket
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest.mock import Mock

import pytest
from waiting import press_twice_after, wait_until

from diffusion.config.load import load
from diffusion.launch import exit_file, failure_stacks, node, workers
from diffusion.launch.failure_stacks import KEPT_ATTEMPTS, HangListener, NodeReport, StackFolder, attempt_name
from diffusion.launch.node import Node
from diffusion.launch.node_settings import Settings
from diffusion.launch.rank_discovery import NodePosition
from diffusion.launch.stack_report import RankReport
from diffusion.launch.standby import in_place
from diffusion.runs import attempts, bounded_call, environment, stop_signals
from diffusion.storage.local_files import WORKING_FOLDER_VARIABLE
from diffusion.storage.places import LocalPlace, StorePlace, files_of_run

PROGRAM = """
    import os, signal, sys, time
    from pathlib import Path
    from diffusion.runs import heartbeats
    heartbeats.write_stacks_on_signal()
    rank, folder = int(os.environ['RANK']), Path(os.environ['DIFFUSION_ATTEMPT_FOLDER'])

    def wait_for_news():
        while True:
            time.sleep(0.1)

    (folder / f'ready-{rank}').touch()
    while len(list(folder.glob('ready-*'))) < int(os.environ['LOCAL_WORLD_SIZE']):
        time.sleep(0.01)
    BODY
"""


@pytest.fixture(autouse=True)
def _short_waits(monkeypatch: pytest.MonkeyPatch, restored_handlers: None) -> None:
    monkeypatch.setattr(node, 'GRACE_SECONDS', 0.3)
    monkeypatch.setattr(workers, 'STACK_SECONDS', 1.0)
    monkeypatch.setattr(node, 'CHECK_EVERY_SECONDS', 0.2)
    monkeypatch.setattr(node, 'count_gpus', lambda environ: 2)


@pytest.fixture
def run_node(tmp_path: Path, write_recipe, monkeypatch) -> Callable[..., tuple[int, Path]]:
    """Run ranks of a program on a node; return the exit status and the run's folder."""

    def run(
        body: str,
        *,
        position: tuple[int, int] = (0, 1),
        ranks: int = 2,
        hang_seconds: float = 100,
        runs_dir: str | None = None,
        **variables: str,
    ) -> tuple[int, Path]:
        monkeypatch.chdir(tmp_path)
        program = tmp_path / 'program.py'
        program.write_text(textwrap.dedent(PROGRAM).replace('BODY', textwrap.dedent(body).strip()))
        path = write_recipe()
        recipe = load(path) if runs_dir is None else replace(load(path), runs_dir=runs_dir)
        environ = {**os.environ, environment.HANG_SECONDS: str(hang_seconds), **variables}
        where = NodePosition('slurm', position[0], position[1], ranks, '127.0.0.1', 29500)
        found = Node(where, Settings.from_environ(environ), [str(program), str(path)], recipe, environ)
        return found.run(), recipe.run_dir

    return run


def last_attempt(run: Path) -> attempts.Attempt:
    return attempts.read_attempts(run)[-1]


def test_crash_keeps_the_stacks_of_the_ranks_that_still_run(run_node):
    status, run = run_node('if rank == 1: sys.exit(1)\nwait_for_news()', SLURM_JOB_ID='4711')
    place = f'rank 0 on node 0 ({socket.gethostname()}) is in wait_for_news (program.py)'
    attempt = last_attempt(run)
    assert (status, attempt.cause) == (1, 'crash')
    assert attempt.detail.startswith(f'rank 1 with 1; {place}; rank 1 on node 0')
    folder = run / 'stacks' / '4711-0'
    assert attempt.detail.endswith(f'has ended with 1; stacks in {folder}')
    assert '--- rank 0 is in wait_for_news (program.py); -1 batches' in (folder / 'stacks-node0.txt').read_text()
    assert place in (folder / 'summary.txt').read_text()


def test_attempt_ends_with_a_message_if_its_stacks_cannot_be_written(monkeypatch):
    place = RankReport(0, 0, 'n1', 7, 900.0, 'all_reduce', True)
    monkeypatch.setattr(failure_stacks, 'rank_reports', lambda *_, **__: [place])
    ranks, lines = Mock(position=NodePosition('slurm', 0, 2, 1, '127.0.0.1', 29500)), []
    stacks = Mock(place='runs/a/stacks/1-0', write=Mock(side_effect=OSError(28, 'No space left on device')))
    found = failure_stacks.keep_stacks('crash', '', ranks, stacks, environ={}, begin=0.0, say=lines.append)
    assert found == 'rank 0 on node 0 (n1) waits in all_reduce'
    assert lines == ['runs/a/stacks/1-0 cannot be written; continuing without the stacks of the ranks']


def test_nothing_is_written_if_all_ranks_have_ended(run_node):
    status, run = run_node('sys.exit(78)')
    assert status == 78
    assert not (run / 'stacks').exists() and 'stacks' not in last_attempt(run).detail


def test_hang_requests_the_files_of_the_nccl_flight_recorder(run_node):
    """The program acts as torch's recorder: it opens the pipe, and writes its file when it reads from the pipe."""
    recorder = """
        from diffusion.launch.rank_discovery import NCCL_PIPE
        pipe = os.environ['TORCH_NCCL_DEBUG_INFO_PIPE_FILE'] + f'{rank}.pipe'
        os.mkfifo(pipe)
        fd = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
        while not os.read(fd, 128):
            time.sleep(0.05)
        Path(os.environ['TORCH_NCCL_DEBUG_INFO_TEMP_FILE'] + str(rank)).write_text('collectives')
        wait_for_news()
    """
    status, run = run_node(recorder, hang_seconds=0.4)
    (folder,) = (run / 'stacks').iterdir()
    assert status == 75
    assert [(folder / f'nccl-rank-{rank}').read_text() for rank in range(2)] == ['collectives'] * 2


def test_flight_recorder_keeps_the_settings_of_the_user(run_node, tmp_path):
    body = "import json; (Path('env-' + str(rank))).write_text(json.dumps(dict(os.environ)))"
    _, run = run_node(body, TORCH_NCCL_TRACE_BUFFER_SIZE='0', SLURM_JOB_ID='9')
    found = json.loads((tmp_path / 'env-1').read_text())
    expected = {'TRACE_BUFFER_SIZE': '0', 'DUMP_ON_TIMEOUT': '1'}
    expected['DEBUG_INFO_TEMP_FILE'] = str(run.absolute() / 'stacks' / '9-0' / 'nccl-rank-')
    expected['DEBUG_INFO_PIPE_FILE'] = found['DIFFUSION_ATTEMPT_FOLDER'] + '/nccl-'
    assert {f'TORCH_NCCL_{name}': value for name, value in expected.items()}.items() <= found.items()
    assert found['DIFFUSION_ATTEMPT_NUMBER'] == '1', 'for messages of the ranks'


def report(number: int, cause: str = 'hang') -> NodeReport:
    rank = RankReport(number, number, f'n{number}', 7, 900.0, 'all_reduce', True)
    return NodeReport(number, cause, f'no heartbeat on {number}', [rank])


def test_first_node_waits_for_the_others_and_names_the_rank_of_another_node(run_node, tmp_path):
    """Node 1 reports a stopped rank a moment after node 0 has found the hang."""
    run = tmp_path / 'runs' / 'run'
    body = "heartbeats.write_rank_heartbeat(7, 'training', 0, 0.0)\nwait_for_news()"

    def report_late() -> None:
        wait_until((run / 'stacks' / '5-0' / 'node0.json').exists)
        time.sleep(0.5)
        stopped = RankReport(2, 1, 'gpu-1', 7, 900.0, problem='is stopped (SIGSTOP)')
        StackFolder(run, '5-0', 1, 2).write(NodeReport(1, 'hang', 'no heartbeat', [stopped]), {})

    threading.Thread(target=report_late, daemon=True).start()
    status, _ = run_node(body, position=(0, 2), hang_seconds=0.4, SLURM_JOB_ID='5')
    assert status == 75
    assert '; rank 2 on node 1 (gpu-1) is stopped (SIGSTOP); stacks in' in last_attempt(run).detail


def test_node_ends_its_ranks_when_another_node_reports_a_hang(run_node, tmp_path):
    """Node 1, whose own limit is far away, follows the first node, and waits for its summary."""
    run_folder = tmp_path / 'runs' / 'run'
    run_folder.mkdir(parents=True)  # by the first node
    folder = StackFolder(run_folder, '6-0', 0, 2)

    def hang() -> None:
        wait_until((tmp_path / 'started').exists)
        folder.write(report(0), {})
        folder.write_summary('a sentence', {})

    threading.Thread(target=hang, daemon=True).start()
    begin = time.monotonic()
    status, run = run_node("Path('started').touch()\nwait_for_news()", position=(1, 2), SLURM_JOB_ID='6')
    assert status == 75 and time.monotonic() - begin < 30
    assert 'in wait_for_news' in (run / 'stacks' / '6-0' / 'stacks-node1.txt').read_text()


@pytest.fixture(params=['folder', 'bucket'])
def home(request, tmp_path, monkeypatch) -> Path | str:
    if request.param == 'folder':
        return tmp_path
    monkeypatch.setattr('diffusion.launch.failure_stacks.BUCKET_POLL_SECONDS', 0.5)
    monkeypatch.setenv(WORKING_FOLDER_VARIABLE, str(tmp_path / 'local'))
    return request.getfixturevalue('store').bucket('home') + '/runs/run'


def test_reports_of_an_earlier_attempt_of_the_same_name_do_not_count(home):
    StackFolder(home, 'job-0', 1, 2).write(report(1), {})
    later = StackFolder(home, 'job-0', 0, 2)
    listener = HangListener(later)
    assert later.read() == {}
    time.sleep(0.02)
    StackFolder(home, 'job-0', 1, 2).write(report(1), {})
    wait_until(lambda: listener.found)
    assert listener.found == later.read()[1] == report(1)


def test_summary_and_nccl_files_of_an_earlier_attempt_of_the_same_name_do_not_count(tmp_path, monkeypatch):
    monkeypatch.setattr('diffusion.launch.failure_stacks.OTHERS_SECONDS', 0.3)
    first = StackFolder(tmp_path, 'job-0', 0, 2)
    first.write(report(0), {})
    first.write_summary('an old sentence', {})
    (first.path / 'nccl-rank-1').touch()
    later = StackFolder(tmp_path, 'job-0', 1, 2)
    begin = time.monotonic()
    later.wait_for_summary()
    later.wait_for_nccl([1], 0.3)
    assert time.monotonic() - begin >= 0.6
    StackFolder(tmp_path, 'job-0', 0, 2).write_summary('a new sentence', {})
    (first.path / 'nccl-rank-1').write_text('new')
    begin = time.monotonic()
    later.wait_for_summary()
    later.wait_for_nccl([1], 0.3)
    assert time.monotonic() - begin < 0.3


def test_second_ctrl_c_ends_the_ranks_although_all_shared_storage_hangs(run_node, monkeypatch, tmp_path):
    """The run's folder and the exit file stop responding when the ranks have started."""
    never, pids = threading.Event(), tmp_path / 'pid-0'
    monkeypatch.setattr(bounded_call, 'STORAGE_SECONDS', 0.2)
    monkeypatch.setattr(stop_signals, 'REPEAT_SECONDS', 1e-9)
    monkeypatch.setattr(exit_file, 'STORAGE_SECONDS', 0.2)
    monkeypatch.setattr(node, 'RECORD_EVERY_SECONDS', 0.1)
    glob, read = Path.glob, Path.read_text

    def hang(path: Path) -> None:
        if pids.exists() and path.name in ('run', 'exits'):
            never.wait()

    monkeypatch.setattr(Path, 'glob', lambda path, pattern: (hang(path), glob(path, pattern))[1])
    monkeypatch.setattr(Path, 'read_text', lambda path, **keywords: (hang(path), read(path, **keywords))[1])
    monkeypatch.setattr(attempts, 'append_attempt', lambda *_: pids.exists() and never.wait())
    monkeypatch.setattr(node.Notifier, 'check_goodput', lambda self: never.wait())

    press_twice_after(pids, tmp_path / 'asked-1')
    responds = threading.Timer(15, never.set)
    responds.start()  # so that a node that waits for the storage fails the test, and does not hang
    handler = "lambda *_: Path(f'asked-{rank}').touch(exist_ok=False)"
    body = f"signal.signal(signal.SIGTERM, {handler})\nPath(f'pid-{{rank}}').touch()\nwait_for_news()"
    begin = time.monotonic()
    status, _ = run_node(body, DIFFUSION_EXIT_FILE=str(tmp_path / 'exits'))
    assert status == 130 and time.monotonic() - begin < 15
    responds.cancel()
    never.set()


@pytest.mark.parametrize('code', [75, 76])
def test_hardware_fault_that_a_rank_reports_is_named_and_recorded(run_node, tmp_path, capfd, code):
    (tmp_path / 'runs' / 'run').mkdir(parents=True)  # by the first node
    beat = "heartbeats.write_rank_heartbeat(2, 'training', 0, 0.0)"
    body = f"{beat}\nheartbeats.report_hardware_fault('n1: GPU lost')\nsys.exit({code})"
    status, run = run_node(body, ranks=1, position=(1, 2))
    assert status == code and 'n1: GPU lost' in capfd.readouterr().err
    assert len([*run.glob('faults/*')]) == (code == 76)


def test_standby_process_replaces_a_crashed_rank(run_node, tmp_path, monkeypatch, capfd):
    say, ready = Node._print, tmp_path / 'standby-is-ready'
    monkeypatch.setattr(Node, '_print', lambda node, text: (say(node, text), 'ready' in text and ready.touch()))
    monkeypatch.setattr(in_place, 'modules_of', lambda recipe: ['json'])
    body = """
        heartbeats.write_rank_heartbeat(6, 'training', 4 * Path('standby-is-ready').exists(), 0.0)
        if not Path('standby-is-ready').exists():
            while not Path('standby-is-ready').exists():
                time.sleep(0.01)
            sys.exit(1)
    """
    exits = {environment.EXIT_FILE: str(tmp_path / 'exits'), environment.MACHINE: 'n1'}
    status, run = run_node(body, ranks=1, DIFFUSION_STANDBY='1', **exits)
    assert status == 0 and 'restarted in place; 1 of 1 ranks are standby processes' in capfd.readouterr().err
    assert [each.cause for each in attempts.read_attempts(run)] == ['crash', 'done']
    assert (tmp_path / 'exits').read_text() == '0 n1 begin\n0 n1 begin\n0 n1 progress\n'


def test_stacks_of_the_newest_attempts_are_kept(home):
    folders = [StackFolder(home, f'job-{number}', 0, 1) for number in range(KEPT_ATTEMPTS + 4)]
    for number, folder in enumerate(folders):
        folder.create()
        folder.write(report(0), {})
        os.utime(folder.path, (number, number))
    folders[-1].clean_up()
    assert files_of_run(home).list('stacks').folders == {f'job-{number}' for number in range(4, KEPT_ATTEMPTS + 4)}


def test_listing_that_fails_at_the_start_does_not_revive_an_old_report(home, monkeypatch):
    """Otherwise the hang of an earlier attempt of the same name would end this one."""
    StackFolder(home, 'job-0', 1, 2).write(report(1), {})
    kind = StorePlace if isinstance(home, str) else LocalPlace
    with monkeypatch.context() as patch:
        patch.setattr(kind, 'list', lambda *_: (_ for _ in ()).throw(OSError('the store is down')))
        later = StackFolder(home, 'job-0', 0, 2)
        assert later.read() == {}
    assert later.read() == {}
    StackFolder(home, 'job-0', 1, 2).write(report(1, cause='crash'), {})
    assert later.read()[1].cause == 'crash'


@pytest.mark.slow
@pytest.mark.parametrize('what', [403, 9.0])
def test_hang_is_ended_although_the_bucket_fails_or_hangs(run_node, store, tmp_path, monkeypatch, what):
    monkeypatch.setattr(bounded_call, 'STORAGE_SECONDS', 0.5)
    for module in ('failure_stacks.OTHERS_SECONDS', 'failure_stacks.STORAGE_SECONDS'):
        monkeypatch.setattr(f'diffusion.launch.{module}', 0.5)
    monkeypatch.setenv(WORKING_FOLDER_VARIABLE, str(tmp_path / 'local'))
    url = store.bucket('home') + '/runs'
    store.fail('/stacks/', what)
    begin = time.monotonic()
    status, _ = run_node('wait_for_news()', hang_seconds=0.4, runs_dir=url)
    attempt = attempts.read_attempts(f'{url}/run')[-1]
    assert (status, attempt.cause) == (75, 'hang') and '2 ranks are in wait_for_news' in attempt.detail
    assert time.monotonic() - begin < 25


@pytest.mark.parametrize(
    ('environ', 'restarts', 'expected'),
    [
        ({'SLURM_JOB_ID': '4711', 'DIFFUSION_ATTEMPT': '2'}, 0, '4711-2'),
        ({'TRAINING_JOB_NAME': 'a/../b'}, 3, 'a_.._b-0-3'),
        ({'DIFFUSION_EXIT_FILE': '/tmp/diffusion-job-x/exits', 'DIFFUSION_ATTEMPT': '1'}, 0, 'diffusion-job-x-1'),
        ({}, 0, 'job-0'),
    ],
)
def test_attempt_has_the_same_name_on_all_nodes(environ, restarts, expected):
    assert attempt_name(environ, restarts) == expected


@pytest.mark.slow
def test_flight_recorder_variables_are_those_of_the_installed_torch():
    folders = [Path(folder, 'torch', 'lib') for folder in sys.path]
    folder = next((each for each in folders if (each / 'libtorch_cuda.so').exists()), None)
    if folder is None:
        pytest.skip('torch is installed without CUDA')
    import mmap

    from diffusion.launch.rank_discovery import nccl_environment

    missing = set(nccl_environment({}, Path('/tmp'), '/tmp/nccl-'))
    for library in ('libtorch_cuda.so', 'libtorch_cpu.so'):
        with (folder / library).open('rb') as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            missing = {name for name in missing if content.find(name.encode() + b'\0') < 0}
    assert not missing
