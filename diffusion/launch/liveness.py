"""`python -m diffusion.launch.liveness`: health check of a container, 1 if its node entry point has stopped responding.

The ranks are not looked at here: the node entry point itself ends those that hang.
"""

import contextlib
import os
import sys
import tempfile
from pathlib import Path

from diffusion.launch.heartbeat_file import heartbeat_age, write_heartbeat
from diffusion.launch.run_lock import start_ticks

SILENT_SECONDS = 90.0
"""The node entry point writes a heartbeat every second; a file system may hold it up for a while."""


def say_alive() -> None:
    """Write the heartbeat of this process, which `liveness_problems` reads."""
    write_heartbeat(_heartbeat_file(os.getpid()))


def remove_heartbeat() -> None:
    """Remove the heartbeat of this process, which is about to end."""
    with contextlib.suppress(OSError):
        _heartbeat_file(os.getpid()).unlink(missing_ok=True)


def liveness_problems(proc: Path = Path('/proc')) -> list[str]:
    """Describe the node entry points of this container that are silent; empty if it runs something else."""
    found = []
    for folder in proc.glob('[0-9]*'):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            words = (folder / 'cmdline').read_bytes().split(b'\0')
            if words[1:3] != [b'-m', b'diffusion.launch.node']:
                continue
            pid = int(folder.name)
            # The file may be left over from an earlier process of this number, before a restart of the container.
            silent = min(_process_age(pid), heartbeat_age(_heartbeat_file(pid)))
            if silent > SILENT_SECONDS:
                found.append(f'the node entry point, process {pid}, is silent for {silent:.0f} s')
    return found


def _process_age(pid: int) -> float:
    uptime = float(Path('/proc/uptime').read_text(encoding='ascii').split()[0])
    return uptime - int(start_ticks(pid) or 0) / os.sysconf('SC_CLK_TCK')


def _heartbeat_file(pid: int) -> Path:
    return Path(tempfile.gettempdir(), f'diffusion-alive-{pid}')


def main() -> int:
    """Print the problems; return the exit status."""
    found = liveness_problems()
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == '__main__':
    sys.exit(main())
