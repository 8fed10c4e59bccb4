"""Memory of this machine that is still available."""

import re
from pathlib import Path


def available_memory(*, meminfo: Path = Path('/proc/meminfo'), cgroup: Path = Path('/sys/fs/cgroup')) -> int | None:
    """Return the bytes of memory still available under the kernel's and the container's limits; None if unknown.

    Args:
        meminfo: Path of the kernel's memory statistics.
        cgroup: Path of the container's resource limits (cgroup v2).
    """
    found = []
    if meminfo.exists():
        line = re.search(r'MemAvailable:\s+(\d+) kB', meminfo.read_text())
        found += [int(line[1]) * 1024] if line else []
    limit, used = cgroup / 'memory.max', cgroup / 'memory.current'
    if limit.exists() and used.exists() and limit.read_text().strip() != 'max':
        found.append(int(limit.read_text()) - int(used.read_text()) + _reclaimable(cgroup / 'memory.stat'))
    return min(found, default=None)


def _reclaimable(statistics: Path) -> int:
    """Return the bytes of cached files that a container counts as used but frees when memory is needed."""
    # Without them a run that writes checkpoints soon seems to have used up its memory.
    line = re.search(r'^inactive_file (\d+)$', statistics.read_text(), re.MULTILINE) if statistics.exists() else None
    return int(line[1]) if line else 0
