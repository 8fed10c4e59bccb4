"""Python processes that start at once: forks of a server that has imported PyTorch, Composer and all of ours.

`Server.start` is `python COMMAND` otherwise: arguments, environment, working folder, output, signals and exit status.
This file itself, run as a program, is `python run.py ARGUMENTS` by the server whose socket `FORKSERVER` names, for jobs
that start their processes themselves: signals that it gets are passed on, and each of both dies with the other.
"""

import contextlib
import gc
import json
import os
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]  # jobs know this file under another name
SOCKET = 'FORKSERVER'
PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT)


class Process:
    """A process of the server whose socket is at `path`. `outputs` are its stdout and stderr.

    Args:
        double: Train in float64.
        death: Operation on a folder's files before which it is killed, and the folder, see `sudden_death.die_before`.
    """

    def __init__(
        self,
        path: str,
        command: Sequence[str],
        *,
        environ: Mapping[str, str],
        folder: str,
        outputs: tuple[int, int],
        double: bool = False,
        death: tuple[int, str] | None = None,
    ) -> None:
        order = {'command': [*command], 'environ': dict(environ), 'folder': folder, 'double': double, 'death': death}
        text = json.dumps(order).encode()
        self.status: int | None = None
        """Its exit status when it has ended; negative for a signal."""
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(path)
        socket.send_fds(self.connection, [len(text).to_bytes(4, 'big')], outputs)
        self.connection.sendall(text)
        self.pid = self._number()

    def poll(self, timeout: float | None = 0) -> int | None:
        """Its exit status, or None if it still runs after a timeout in seconds; None waits for its end."""
        if self.status is None and select.select([self.connection], [], [], timeout)[0]:
            self.status = self._number()
            self.connection.close()
        return self.status

    def _number(self) -> int:
        text = b''
        while not text.endswith(b'\n'):
            piece = self.connection.recv(1)
            assert piece, 'the server of processes has died'
            text += piece
        return int(text)


class Server:
    """The process that is forked; make one a session."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        self.path = str(Path(self._folder.name, 'socket'))
        environ = os.environ | {
            'OMP_NUM_THREADS': '1',
            'CUDA_VISIBLE_DEVICES': '',
            'PYTHONPATH': f'{ROOT}:{ROOT / "tests"}',
        }
        command = [sys.executable, __file__, '--serve', self.path]
        self._process = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b'ready\n'

    def start(
        self,
        *command: str | Path,
        output: Path,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        **settings: Any,
    ) -> Process:
        """Start `python COMMAND`, with stdout and stderr appended to a file and further variables."""
        environ = os.environ | {
            'OMP_NUM_THREADS': '1',
            'CUDA_VISIBLE_DEVICES': '',
            'PYTHONPATH': f'{ROOT}:{ROOT / "tests"}',
        }
        with output.open('ab') as file:
            outputs = (file.fileno(), file.fileno())
            return Process(
                self.path,
                [str(word) for word in command],
                environ=environ | dict(environment or {}),
                folder=str(folder or ROOT),
                outputs=outputs,
                **settings,
            )

    def run(self, *command: str | Path, output: Path, timeout: float = 550, **settings: Any) -> str:
        """Run `python COMMAND` to its end, which must be a good one; returns what it printed."""
        process = self.start(*command, output=output, **settings)
        status = process.poll(timeout)
        assert status == 0, f'{status}\n{output.read_text()}'
        return output.read_text()

    def close(self) -> None:
        self._process.communicate()  # the end of its input ends it
        self._folder.cleanup()


# -- the server --


def serve(path: str) -> None:
    """Fork a process for each connection, tell its pid and, when it has ended, its status."""
    import diffusion.models.builders
    import diffusion.training.train  # noqa: F401

    gc.freeze()  # what is here now is not collected in the forks, which would copy all of it
    # No tensor may be made here: the threads that compute would be missing in the forks, which would wait for them.
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(64)
    running: dict[int, socket.socket] = {}
    print('ready', flush=True)
    while True:
        ready, _, _ = select.select([listener, woken, 0], [], [])
        if 0 in ready:
            return
        if woken in ready:
            os.read(woken, 4096)
        while running:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if not pid:
                break
            with running.pop(pid) as client, contextlib.suppress(OSError):
                client.sendall(f'{os.waitstatus_to_exitcode(status)}\n'.encode())
        if listener in ready:
            connection, _ = listener.accept()
            pid = os.fork()
            if pid == 0:
                for each in (listener, *running.values()):
                    each.close()
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(woken)
                os.close(wake)
                obey(connection)
            running[pid] = connection
            with contextlib.suppress(OSError):
                connection.sendall(f'{pid}\n'.encode())


def obey(connection: socket.socket) -> None:
    """Run the command of a client, in a fork; ends the interpreter as a program ends."""
    length, outputs, _, _ = socket.recv_fds(connection, 4, 2)
    text = b''
    while missing := int.from_bytes(length, 'big') - len(text):
        text += connection.recv(missing)
    order = json.loads(text)
    for number, stream in enumerate((os.open(os.devnull, os.O_RDONLY), *outputs)):
        os.dup2(stream, number)
        os.close(stream)
    os.chdir(order['folder'])
    os.environ.clear()
    os.environ.update(order['environ'])
    threading.Thread(target=take_signals, args=(connection,), daemon=True).start()
    if order['death']:
        from sudden_death import die_before

        die_before(*order['death'])
    if order['double']:
        train_in_float64()
    run(order['command'])


def take_signals(connection: socket.socket) -> None:
    """Take signals from the client, and die with it."""
    while numbers := connection.recv(16):
        for number in numbers:
            os.kill(os.getpid(), number)
    os.kill(os.getpid(), signal.SIGKILL)


def train_in_float64() -> None:
    import torch

    from diffusion.training import components

    torch.set_default_dtype(torch.float64)  # transformers makes its causal mask in the default one
    plain = components.build_model
    components.build_model = lambda recipe: plain(recipe).double()


def run(command: list[str]) -> None:
    """Do as `python COMMAND` does; raises SystemExit."""
    first, *others = command
    try:
        if first == '-c':
            sys.argv, sys.path[0] = ['-c', *others[1:]], ''
            main_module = sys.modules['__main__'] = types.ModuleType('__main__')
            exec(compile(others[0], '<string>', 'exec'), vars(main_module))
        elif first == '-m':
            sys.argv, sys.path[0] = others, os.getcwd()
            runpy.run_module(others[0], run_name='__main__', alter_sys=True)
        else:
            sys.argv, sys.path[0] = command, str(Path(first).resolve().parent)
            # Absolute, as in Python itself: processes that it spawns look for it elsewhere.
            runpy.run_path(os.path.abspath(first), run_name='__main__')
    except SystemExit:
        raise
    except BaseException:
        # Without the server's own frames, which are no part of the program.
        traceback.print_exc()
        sys.exit(1)
    sys.exit(0)


# -- run.py by the server --


def main() -> int:
    command = [str(ROOT / 'run.py'), *sys.argv[1:]]
    process = Process(os.environ[SOCKET], command, environ=os.environ, folder=os.getcwd(), outputs=(1, 2))
    # Through the connection, since it need not be in this process's PID namespace.
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: process.connection.sendall(bytes([number])))
    Path(f'pid-{os.environ["RANK"]}').write_text(str(process.pid))
    status = process.poll(None)
    assert status is not None
    if status < 0:
        if -status in PASSED_ON:
            signal.signal(-status, signal.SIG_DFL)
        os.kill(os.getpid(), -status)
    return status


if __name__ == '__main__':
    if sys.argv[1:2] == ['--serve']:
        serve(sys.argv[2])
    else:
        sys.exit(main())
