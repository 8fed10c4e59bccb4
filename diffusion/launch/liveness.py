"""`python -m diffusion.launch.liveness`, for a container's health check: 1 where its node entry point has stopped dead.

What its ranks do is the node entry point's own concern: it ends those that hang.
"""

import contextlib
import os
import sys
import tempfile
import time
from pathlib import Path

from diffusion.launch.run_lock import started

SILENT_SECONDS = 90.0
"""The node entry point says every second that it is alive; a file system may hold it up for a while."""


def say_alive() -> None:
    """Leave the time where `liveness_problems` looks for it."""
    with contextlib.suppress(OSError):
        _sign(os.getpid()).touch()


def forget() -> None:
    """Leave nothing behind."""
    with contextlib.suppress(OSError):
        _sign(os.getpid()).unlink(missing_ok=True)


def liveness_problems(proc: Path = Path('/proc')) -> list[str]:
    """What is wrong with the node entry points of this container; nothing where it runs something else."""
    found = []
    for folder in proc.glob('[0-9]*'):
        with contextlib.suppress(OSError):  # it has ended meanwhile
            words = (folder / 'cmdline').read_bytes().split(b'\0')
            if words[1:3] != [b'-m', b'diffusion.launch.node']:
                continue
            pid = int(folder.name)
            sign, silent = _sign(pid), _age_seconds(pid)
            if sign.exists():  # one of before a restart of the container may be older than the process
                silent = min(silent, time.time() - sign.stat().st_mtime)
            if silent > SILENT_SECONDS:
                found.append(f'the node entry point, process {pid}, is silent for {silent:.0f} s')
    return found


def _age_seconds(pid: int) -> float:
    uptime = float(Path('/proc/uptime').read_text(encoding='ascii').split()[0])
    return uptime - int(started(pid) or 0) / os.sysconf('SC_CLK_TCK')


def _sign(pid: int) -> Path:
    return Path(tempfile.gettempdir(), f'diffusion-alive-{pid}')


def main() -> int:
    """Print what is wrong; the exit status."""
    found = liveness_problems()
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == '__main__':
    sys.exit(main())
