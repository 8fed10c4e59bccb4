"""Standby process of a rank, `python -m diffusion.launch.standby.process FD MODULE,... -- run.py ARGUMENTS`.

It imports modules, waits until `in_place.Standby` asks it to take over, and then runs run.py as
`python run.py ARGUMENTS` would.
"""

import contextlib
import ctypes
import importlib
import json
import os
import socket
import sys
import threading
import traceback
import types
from pathlib import Path

import diffusion

NICE = 15
"""Nice value of the thread that imports the modules, so that it does not slow training: on a busy core, it gets 3.5% as
much CPU time as a rank, and the imports take minutes instead of 5 s."""
MAX_OOM_SCORE = 1000
OOM_SCORE = Path('/proc/self/oom_score_adj')


def main() -> None:
    """Import the modules, wait, and become the rank; does not return."""
    descriptor, modules, command = int(sys.argv[1]), sys.argv[2].split(','), sys.argv[4:]
    channel = socket.socket(fileno=descriptor)
    outputs = os.dup(1), os.dup(2)
    # Discard output, since import warnings would otherwise be mixed into the training log.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.dup2(nowhere, 2)
    os.close(nowhere)
    score = _set_oom_score(MAX_OOM_SCORE)  # if memory runs out, kill this process rather than a rank
    if not getattr(sys.flags, 'safe_path', False):  # exists since Python 3.11
        # Set sys.path before all imports, so that they find the same modules as run.py.
        sys.path[0] = str(Path(command[0]).resolve().parent)
    problem = _import(modules)
    if problem:
        channel.sendall(f'cannot be used: {problem}\n'.encode())
        sys.exit(1)
    versions = _file_versions()
    channel.sendall(b'ready\n')
    environ, output = _receive(channel)
    _set_oom_score(score)
    current = _file_versions()
    changed = [path for path, version in versions.items() if current.get(path) != version]
    if changed:
        channel.sendall(f'has an earlier version of {changed[0]}\n'.encode())
        sys.exit(1)
    channel.sendall(b'taken\n')
    channel.close()
    for stream, number in ((output if output is not None else outputs[0], 1), (outputs[1], 2)):
        os.dup2(stream, number)
    for stream in (*outputs, *([] if output is None else [output])):
        os.close(stream)
    os.environ.clear()
    os.environ.update(environ)
    _set_command_line([sys.executable, *command])
    run(command)


def run(command: list[str]) -> None:
    """Run a program as `python COMMAND` would; does not return."""
    path = os.path.abspath(command[0])
    sys.argv = list(command)
    main_module = sys.modules['__main__'] = types.ModuleType('__main__')
    # Set __file__, by which processes spawned by multiprocessing find the main module.
    main_module.__file__ = path
    try:
        exec(compile(Path(path).read_bytes(), path, 'exec'), vars(main_module))
    except SystemExit:
        raise
    except BaseException as error:
        # Print the traceback without this file: Python would include it in the traceback of an uncaught exception.
        traceback.print_exception(error.with_traceback(error.__traceback__ and error.__traceback__.tb_next))
        sys.exit(1)
    sys.exit(0)


def _import(modules: list[str]) -> str:
    """Import modules at low priority, and call slow functions that cache their results; return the error, if any."""
    found = (finder.find_spec('diffusion', None) for finder in sys.meta_path)
    spec = next((each for each in found if each is not None), None)
    if spec is None or spec.origin != diffusion.__file__:
        return f'run.py imports another diffusion than {diffusion.__file__}'
    errors: list[str] = []

    def work() -> None:
        # Import in a thread of low priority, which Linux supports: only root could raise the process's priority again.
        if sys.platform == 'linux':
            os.setpriority(os.PRIO_PROCESS, 0, NICE)
        try:
            for module in modules:
                importlib.import_module(module)
            # Composer's Trainer calls this function, which takes a second the first time and caches its result.
            if environment := sys.modules.get('composer.utils.collect_env'):
                environment.get_cpu_model()
        except BaseException as error:
            errors.append(f'{type(error).__name__}: {error}'.splitlines()[0])

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    return errors[0] if errors else ''


def _receive(channel: socket.socket) -> tuple[dict[str, str], int | None]:
    """Wait for the order to take over; return the environment, and a file descriptor for stdout or None."""
    length, descriptors, _, _ = socket.recv_fds(channel, 4, 1)
    text = b''
    while missing := int.from_bytes(length, 'big') - len(text):
        part = channel.recv(missing)
        if not part:
            break
        text += part
    if not text:
        sys.exit(0)  # the node entry point has ended
    return json.loads(text)['environ'], descriptors[0] if descriptors else None


def _file_versions() -> dict[str, int]:
    """Return the modification time of the file of each imported module."""
    found = {}
    for module in list(sys.modules.values()):
        path = getattr(module, '__file__', None)
        if isinstance(path, str):
            with contextlib.suppress(OSError):
                found[path] = os.stat(path).st_mtime_ns
    return found


def _set_oom_score(score: int) -> int:
    """Set this process's oom_score_adj, by which the kernel chooses a process to kill; return the previous value."""
    before = 0
    with contextlib.suppress(OSError, ValueError):  # only Linux has this file
        before = int(OOM_SCORE.read_text())
        OOM_SCORE.write_text(str(score))
    return before


def _set_command_line(words: list[str]) -> None:
    """Change the command line that ps, pgrep and `diffusion.launch.liveness` see; if it is too long, do nothing."""
    with contextlib.suppress(OSError, ValueError, IndexError):  # only Linux has this file
        # Fields 48 and 49 in proc(5), counted from 1, are the addresses of the arguments. The name may have spaces.
        fields = Path('/proc/self/stat').read_text().rpartition(')')[2].split()
        begin, end = int(fields[45]), int(fields[46])
        text = b'\0'.join(os.fsencode(word) for word in words) + b'\0'
        if len(text) <= end - begin:  # 0 bytes if the kernel does not tell
            ctypes.memmove(begin, text.ljust(end - begin, b'\0'), end - begin)


if __name__ == '__main__':
    main()
