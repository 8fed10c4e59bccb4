"""End of a process: its status, what it printed, its threads and its exit handlers."""

import subprocess
import sys

PROGRAM = """
import atexit, sys, threading, time
from diffusion.launch.process_end import end_process
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


def test_threads_and_handlers_end_before_the_process():
    done = subprocess.run([sys.executable, '-c', PROGRAM], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout.replace('\n', ''), done.stderr) == (78, 'mainthreadhandler', 'error')
