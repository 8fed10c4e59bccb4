"""End of ranks: the outcome of an attempt, and the status, output, threads and exit handlers of a process."""

import os
import subprocess
import sys
from typing import Any
from unittest.mock import Mock

import pytest

from diffusion.launch.workers import Outcome, Workers

PROGRAM = """
import atexit, sys, threading, time
from diffusion.launch.workers import end_process
def work():
    time.sleep(0.3)
    print('thread')
threading.Thread(target=work).start()
threading.Thread(target=time.sleep, args=(60,), daemon=True).start()
atexit.register(print, 'handler')
sys.stderr.write('error')
print('main', end='')
end_process(78)
"""


def run(program: str) -> 'subprocess.CompletedProcess[str]':
    return subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, timeout=30, check=False)


def test_threads_and_handlers_end_before_the_process():
    done = run(PROGRAM)
    assert (done.returncode, done.stdout.replace('\n', ''), done.stderr) == (78, 'mainthreadhandler', 'error')


STUBBORN = """
import multiprocessing, signal, sys, time
from diffusion.launch.workers import end_process
def ignore_sigterm():
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    print('ready', flush=True)
    time.sleep(60)
child = multiprocessing.get_context('fork').Process(target=ignore_sigterm, daemon=True)
child.start()
time.sleep(1)
print(child.pid, flush=True)
end_process(7)
"""


def test_daemon_process_that_ignores_sigterm_does_not_keep_its_parent():
    """Like a worker of a data loader that did not end: multiprocessing would wait for it without a limit."""
    done = run(STUBBORN)
    ready, child = done.stdout.split()
    assert (done.returncode, ready, done.stderr) == (7, 'ready', '')
    with pytest.raises(ProcessLookupError):
        os.kill(int(child), 0)


@pytest.mark.parametrize(
    ('codes', 'options', 'expected'),
    [
        ([0, 0], {}, Outcome(0, 'done')),
        ([1, 78], {}, Outcome(78, 'mistake')),
        ([76, -9], {}, Outcome(76, 'hardware')),
        ([1, -9], {}, Outcome(1, 'killed', 'rank 1 by SIGKILL')),
        ([75, 1], {}, Outcome(1, 'crash', 'rank 1 with 1')),
        ([75, 0], {}, Outcome(75, 'preempted')),
        ([0, 0], {'stop_requested': True}, Outcome(0, 'done')),
        ([75, 0], {'stop_requested': True}, Outcome(75, 'preempted')),
        ([-9, 0], {'stop_requested': True}, Outcome(75, 'preempted', 'did not save in time')),
        ([75, 75], {'stop_requested': True, 'late': True}, Outcome(75, 'preempted', 'did not save in time')),
        ([1, -9], {'stop_requested': True}, Outcome(1, 'killed', 'rank 1 by SIGKILL')),
    ],
)
def test_outcome_of_an_attempt_is_the_cause_that_explains_the_other_statuses(codes, options, expected):
    processes = {rank: Mock(poll=lambda code=code: code) for rank, code in enumerate(codes)}
    workers: Any = Mock(by_rank=lambda: processes)
    assert Workers.outcome(workers, **{'stop_requested': False} | options) == expected
