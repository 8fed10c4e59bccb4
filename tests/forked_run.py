"""run.py in a second: a client that has a process which has imported everything fork itself and run the recipe.

`forked_run.py RECIPE [key=value ...]` is run.py for whoever starts it: output, signals, exit status, and death by
SIGKILL on either side are those of the forked process, whose server is `Server`.
"""

import array
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from pathlib import Path
from typing import NoReturn

from ranks import exit_with

SOCKET = 'FORKED_RUN_SOCKET'
HANDED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)
LONGEST = 2**20


class Server:
    """The process that is forked; make one a session."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.path = str(Path(self._folder.name, 'socket'))
        environ = os.environ | {'OMP_NUM_THREADS': '1', 'CUDA_VISIBLE_DEVICES': ''}
        environ['PYTHONPATH'] = str(Path(__file__).parents[1])
        command = [sys.executable, __file__, '--serve', self.path]
        self._process = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b'ready\n'

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()
        self._folder.cleanup()


def serve(path: str) -> None:
    import diffusion.models.builders
    import diffusion.training.train  # noqa: F401

    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # whom nobody waits for
    server = socket.socket(socket.AF_UNIX)
    server.bind(path)
    server.listen()
    print('ready', flush=True)
    while True:
        connection, _ = server.accept()
        if os.fork() == 0:
            server.close()
            be_run(connection)
        connection.close()


def be_run(connection: socket.socket) -> NoReturn:
    message, control, _, _ = connection.recvmsg(LONGEST, socket.CMSG_SPACE(8))
    while not message.endswith(b'\n'):
        message += connection.recv(LONGEST)
    order = json.loads(message)
    streams = array.array('i', control[0][2])
    for number, stream in zip((1, 2), streams, strict=True):
        os.dup2(stream, number)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.chdir(order['folder'])
    os.environ.clear()
    os.environ.update(order['environ'])
    Path(f'pid-{os.environ["RANK"]}').write_text(str(os.getpid()))
    connection.sendall(b'begun\n')
    threading.Thread(target=listen, args=(connection,), daemon=True).start()
    from diffusion.tasks import run_recipe

    exit_with(lambda: run_recipe.main(order['arguments']), lambda status: connection.sendall(f'{status}\n'.encode()))


def listen(connection: socket.socket) -> None:
    """Take signals from the client, and die with it."""
    while numbers := connection.recv(16):
        for number in numbers:
            os.kill(os.getpid(), number)
    os.kill(os.getpid(), signal.SIGKILL)


def main() -> int:
    connection = socket.socket(socket.AF_UNIX)
    connection.connect(os.environ[SOCKET])
    order = {'arguments': sys.argv[1:], 'folder': os.getcwd(), 'environ': dict(os.environ)}
    streams = array.array('i', [1, 2])
    connection.sendmsg([json.dumps(order).encode() + b'\n'], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, streams)])
    for number in HANDED_ON:
        signal.signal(number, lambda number, _: connection.sendall(bytes([number])))
    said = b''
    while piece := connection.recv(64):
        said += piece
    lines = said.decode().splitlines()
    if len(lines) < 2:  # it was killed
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGKILL)
    return int(lines[1])


if __name__ == '__main__':
    if sys.argv[1:2] == ['--serve']:
        serve(sys.argv[2])
    else:
        sys.exit(main())
