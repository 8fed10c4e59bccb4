"""End of a rank: its status, output, threads and exit handlers."""

import os
import subprocess
import sys

import pytest

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
