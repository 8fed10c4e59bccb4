"""Container health check, `python -m diffusion.launch.liveness`: exit with 1 if the node entry point does not respond.

The check ignores the ranks: if they hang, the node entry point itself ends them.
"""

import contextlib
import os
import sys
from pathlib import Path

from diffusion.runs.heartbeats import heartbeat_age, write_heartbeat
from diffusion.runs.run_lock import start_ticks
from diffusion.storage.local_files import user_folder

SILENT_SECONDS = 90.0
"""Time without a heartbeat after which the node entry point counts as hanging. It writes one per second, but a slow
file system can delay it."""


def update_heartbeat() -> None:
    """Write the heartbeat file of this node entry point, which the container health check reads."""
    write_heartbeat(_heartbeat_file(os.getpid()))


def remove_heartbeat() -> None:
    """Remove the heartbeat file of this node entry point; call it before the process ends."""
    with contextlib.suppress(OSError):
        _heartbeat_file(os.getpid()).unlink(missing_ok=True)


def liveness_problems(proc: Path = Path('/proc')) -> list[str]:
    """Return a message for each node entry point in this container that has no recent heartbeat."""
    found = []
    for folder in proc.glob('[0-9]*'):
        with contextlib.suppress(OSError):  # the process may end during the scan
            arguments = (folder / 'cmdline').read_bytes().split(b'\0')
            if arguments[1:3] != [b'-m', b'diffusion.launch.node']:
                continue
            pid = int(folder.name)
            # Use the process's age if it is less: the heartbeat file may be from an earlier process of the same id,
            # since a restarted container reuses process ids.
            seconds = min(_process_age(pid), heartbeat_age(_heartbeat_file(pid)))
            if seconds > SILENT_SECONDS:
                found.append(f'the node entry point (process {pid}) has written no heartbeat for {seconds:.0f} s')
    return found


def _process_age(pid: int) -> float:
    uptime = float(Path('/proc/uptime').read_text(encoding='ascii').split()[0])
    return uptime - int(start_ticks(pid) or 0) / os.sysconf('SC_CLK_TCK')


def _heartbeat_file(pid: int) -> Path:
    return user_folder() / f'alive-{pid}'


def main() -> int:
    """Run the container health check: print each problem; return 1 if there are any, else 0."""
    found = liveness_problems()
    for problem in found:
        print(problem, file=sys.stderr)
    return 1 if found else 0


if __name__ == '__main__':
    sys.exit(main())
