"""Start Python processes without import time: forks of a server that has imported PyTorch, Composer and this package.

`Server.start` behaves like `python COMMAND` in all other respects: arguments, environment, working folder, output,
signals and exit status. Run as a program, this file acts as `python run.py ARGUMENTS` through the server whose socket
the environment variable FORKSERVER names, for jobs that start their processes themselves: it forwards the signals it
receives, and if it or the forked process dies, so does the other.
"""

import atexit
import collections
import contextlib
import gc
import importlib
import json
import os
import pkgutil
import runpy
import select
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
import types
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import faults

import diffusion

ROOT = Path(__file__).resolve().parents[1]  # resolved, because jobs run this file through a link of another name
SOCKET = 'FORKSERVER'
OWNER = 'PYTEST_XDIST_WORKER'
"""Variable that names the process whose tests started a process; empty without xdist."""
OWNER_BYTES = 8
START_SECONDS = 300
PASSED_ON = (signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2, signal.SIGINT, signal.SIGHUP)


class Process:
    """Process forked by a server; `outputs` are the file descriptors of its stdout and stderr.

    With `double` it trains in float64. `death` is the number of the file operation before which it kills itself, and
    the folder of the files; see `sudden_death.die_before`.
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
        """Exit status once the process has ended, negative for a signal; None before."""
        self.connection = socket.socket(socket.AF_UNIX)
        self.connection.connect(path)
        self.connection.sendall(environ.get(OWNER, '').encode().ljust(OWNER_BYTES))
        socket.send_fds(self.connection, [len(text).to_bytes(4, 'big')], outputs)
        self.connection.sendall(text)
        self.pid = self._number()

    def poll(self, timeout: float | None = 0) -> int | None:
        """Return the exit status, or None if the process still runs after some seconds; None waits for its end."""
        if self.status is None and select.select([self.connection], [], [], timeout)[0]:
            self.status = self._number()
            self.connection.close()
        return self.status

    def _number(self) -> int:
        """Read the next number that the server sends: the PID, then the exit status."""
        text = b''
        while not text.endswith(b'\n'):
            piece = self.connection.recv(1)
            assert piece, 'the fork server died'
            text += piece
        return int(text)


def own_environment() -> dict[str, str]:
    """Return this process's variables, with those by which a process imports the tests and uses one thread."""
    path = f'{ROOT}:{ROOT / "tests"}:{os.environ.get("PYTHONPATH", "")}'.rstrip(':')
    return os.environ | {'OMP_NUM_THREADS': '1', 'CUDA_VISIBLE_DEVICES': '', 'PYTHONPATH': path}


class Client:
    """Starter of processes through a server, which may be the server of another process."""

    def __init__(self, path: str) -> None:
        self.path = path
        """The server's socket."""

    def wait_for_server(self) -> None:
        end = time.monotonic() + START_SECONDS
        while not Path(self.path).exists():
            assert time.monotonic() < end, 'the fork server does not start'
            time.sleep(0.1)

    @property
    def seconds(self) -> float:
        """CPU time of the ended processes that this process's tests started."""
        record = seconds_file(self.path, os.environ.get(OWNER, ''))
        return float(record.read_text()) if record.exists() else 0.0

    def start(
        self, *command: str | Path, output: Path, folder: Path = ROOT, environment: Any = None, **settings: Any
    ) -> Process:
        """Start `python COMMAND`, with variables added to those of this process; append its output to a file.

        Keywords are further arguments of `Process`.
        """
        with output.open('ab') as file:
            outputs = (file.fileno(), file.fileno())
            return Process(
                self.path,
                [str(word) for word in command],
                environ=own_environment() | dict(environment or {}),
                folder=str(folder),
                outputs=outputs,
                **settings,
            )

    def run(self, *command: str | Path, output: Path, timeout: float = 550, **settings: Any) -> str:
        """Run `python COMMAND` to its end and return its output; fail if its exit status is not 0."""
        process = self.start(*command, output=output, **settings)
        status = process.poll(timeout)
        assert status == 0, f'{status}\n{output.read_text()}'
        return output.read_text()


class Server(Client):
    """Server process that forks; create one per test session."""

    def __init__(self) -> None:
        self._folder = tempfile.TemporaryDirectory()
        super().__init__(str(Path(self._folder.name, 'socket')))
        command = [sys.executable, __file__, '--serve', self.path]
        self._process = subprocess.Popen(command, env=own_environment(), stdin=subprocess.PIPE)

    def close(self) -> None:
        try:
            self._process.communicate(timeout=20)  # closes its stdin, at which the server exits
        except subprocess.TimeoutExpired:  # a process that a failed test has left holds the other end of stdin
            self._process.kill()
            self._process.wait()
        self._folder.cleanup()


# -- the server --


def serve(path: str) -> None:
    """Fork a process for each connection; send the client its PID, and its exit status when it has ended."""
    gc.disable()  # for the imports, a third of whose time it takes
    prepare_forks()
    gc.freeze()  # keep imported objects out of garbage collection, which would copy their pages in every fork
    gc.enable()
    # Create no tensor in the server: it would start compute threads, which a fork does not have but would wait for.
    woken, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.set_wakeup_fd(wake)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(f'{path}.starting')
    listener.listen(64)
    os.rename(f'{path}.starting', path)  # it exists from now on, and accepts connections
    running: dict[int, tuple[socket.socket, str]] = {}
    seconds: dict[str, float] = collections.defaultdict(float)
    while True:
        ready, _, _ = select.select([listener, woken, 0], [], [])
        if 0 in ready:
            # A fork that was stopped does not end by itself when its client does.
            for pid in running:
                os.kill(pid, signal.SIGKILL)
            return
        if woken in ready:
            os.read(woken, 4096)
        while running:
            pid, status, used = os.wait4(-1, os.WNOHANG)
            if not pid:
                break
            client, owner = running.pop(pid)
            seconds[owner] += used.ru_utime + used.ru_stime
            record = seconds_file(path, owner)
            record.with_suffix('.new').write_text(str(seconds[owner]))
            record.with_suffix('.new').rename(record)
            with client, contextlib.suppress(OSError):
                client.sendall(f'{os.waitstatus_to_exitcode(status)}\n'.encode())
        if listener in ready:
            connection, _ = listener.accept()
            owner = connection.recv(OWNER_BYTES, socket.MSG_WAITALL).decode().strip()
            pid = os.fork()
            if pid == 0:
                for each in (listener, *(client for client, _ in running.values())):
                    each.close()
                signal.set_wakeup_fd(-1)
                signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                os.close(woken)
                os.close(wake)
                obey(connection)
            running[pid] = connection, owner
            with contextlib.suppress(OSError):
                connection.sendall(f'{pid}\n'.encode())


def seconds_file(path: str, owner: str) -> Path:
    """Return the file in which the server at a socket writes the CPU time of an owner's ended processes."""
    return Path(f'{path}-{owner}.seconds')


def prepare_forks() -> None:
    """Import what the forked programs import, and compute what each of them would compute."""
    for module in pkgutil.walk_packages(diffusion.__path__, 'diffusion.'):
        if not module.name.endswith('.__main__'):
            with contextlib.suppress(ImportError):  # of an optional package
                importlib.import_module(module.name)
    import matplotlib.pyplot  # noqa: F401
    from composer.utils.collect_env import get_composer_env_dict

    from diffusion.config import registry
    from diffusion.models.pretrained import tiny_tokenizers
    from diffusion.storage.s3_client import S3Client

    # All of these results are cached.
    get_composer_env_dict()  # each checkpoint has it, and py-cpuinfo measures for half a second
    tiny_tokenizers()
    os.environ |= {'AWS_ACCESS_KEY_ID': 'none', 'AWS_SECRET_ACCESS_KEY': 'none'}  # a fork has its own variables
    S3Client('s3', '', 1.0)  # botocore parses its descriptions of services
    for kind in registry.TARGETS:
        for name in registry.names(kind):
            registry.signature(kind, name)


def obey(connection: socket.socket) -> None:
    """Run a client's command in the fork; never returns, but exits like a program."""
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
    faults.install_from_environment()
    try:
        run(order['command'])
    except SystemExit as exit_request:
        end(exit_request.code)


def take_signals(connection: socket.socket) -> None:
    """Send this process the signals that the client forwards, and kill it when the client dies."""
    while numbers := connection.recv(16):
        for number in numbers:
            os.kill(os.getpid(), number)
    os.kill(os.getpid(), signal.SIGKILL)


def train_in_float64() -> None:
    """Patch this process so that models are built and computed in float64."""
    import torch

    from diffusion.training import components

    torch.set_default_dtype(torch.float64)  # transformers creates its causal mask in the default dtype
    plain = components.build_model
    components.build_model = lambda recipe: plain(recipe).double()


def end(status: object) -> None:
    """End this process as the interpreter does after SystemExit, but without destroying what the server has imported.

    That would take a second, since each object that is touched copies a page of the server.
    """
    if status is not None and not isinstance(status, int):
        print(status, file=sys.stderr)
        status = 1
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):  # a closed pipe or stream
            stream.flush()
    os._exit(int(status or 0) & 0xFF)


def run(command: list[str]) -> None:
    """Run a command as `python COMMAND` would; always raises SystemExit."""
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
            # Absolute, as Python itself makes it: spawned processes look for the main module from other folders.
            runpy.run_path(os.path.abspath(first), run_name='__main__')
    except SystemExit:
        raise
    except BaseException:
        # Print it here: the traceback of an uncaught exception would include the server's frames.
        traceback.print_exc()
        sys.exit(1)
    sys.exit(0)


# -- a program through the server --


def main() -> int:
    """Run `python run.py ARGUMENTS`, or `python COMMAND` after `--run`, in a fork of the server."""
    given = sys.argv[1:]
    command = given[1:] if given[:1] == ['--run'] else [str(ROOT / 'run.py'), *given]
    process = Process(os.environ[SOCKET], command, environ=os.environ, folder=os.getcwd(), outputs=(1, 2))
    # Forward signals through the connection, since the process may be in another PID namespace.
    for number in PASSED_ON:
        signal.signal(number, lambda number, _: process.connection.sendall(bytes([number])))
    if 'RANK' in os.environ:
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
