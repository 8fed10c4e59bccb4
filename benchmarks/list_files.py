"""Benchmark of the plan of `diffusion prepare folder` for many files: time and memory, from a synthetic listing.

    python benchmarks/list_files.py [FILES [FOLDER]]

Half of the FILES (default: 1,000,000) are images, each with a text file beside it, in folders of 10,000, and they are
listed in another order than that of their names. The plan is written to FOLDER (default: a temporary folder), as before
a preparation, read again, and compared, as at a restart. The files themselves do not exist and are not opened.
"""

import os
import resource
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from machine import heading

from diffusion.prepare import file_listing
from diffusion.prepare.file_listing import File
from diffusion.prepare.folder_source import FolderSource
from diffusion.prepare.input_plan import InputPlan
from diffusion.prepare.settings import PrepareSettings, SourceSettings
from diffusion.prepare.work_dir import WorkFolder


def synthetic(count: int) -> Iterator[File]:
    """Yield this many files, like a walk through folders: a folder after the other, in no order inside."""
    images = count // 2
    for number in range(images):
        folder, inside = divmod(number, 10_000)
        name = f'{folder:05}/{(inside * 7919) % 10_000:09}'
        for suffix, size in (('jpg', 200_000), ('txt', 100)):
            path = f'{name}.{suffix}'
            yield File(f'/data/images/{path}', size, f'{size}-1764150000000000000', path)


def main() -> None:
    count = int(sys.argv[1]) if len(sys.argv) > 1 else 1_000_000
    with tempfile.TemporaryDirectory(dir=sys.argv[2] if len(sys.argv) > 2 else None) as folder:
        settings = PrepareSettings(SourceSettings('folder', location='/data/images'), f'{folder}/out', [256])
        file_listing._walk = lambda location, broken: synthetic(count)
        work = WorkFolder(Path(folder))
        print(heading())
        imports = peak_gb()
        phases: dict[str, tuple[float, float]] = {}

        @contextmanager
        def phase(name: str) -> Iterator[None]:
            began, cpu = time.monotonic(), time.process_time()
            yield
            phases[name] = (time.monotonic() - began, time.process_time() - cpu)

        with phase('list and plan'):
            plan = InputPlan.make(settings, FolderSource('/data/images'))
        with phase('write the plan'):
            plan.write_or_check(work)
        size = os.path.getsize(work.plan) / 1e9
        parts = len(plan.parts)
        del plan
        with phase('list, plan and compare at a restart'):
            InputPlan.make(settings, FolderSource('/data/images')).write_or_check(work)
        print(f'\n{count:,} files in {parts:,} parts; {size:.2f} GB of plan; peak memory {peak_gb():.2f} GB, of which')
        print(f'{imports:.2f} GB for imports\n\n| | seconds | of the processor |\n|---|---|---|')
        for name, (wall, cpu) in phases.items():
            print(f'| {name} | {wall:.0f} | {cpu:.0f} |')


def peak_gb() -> float:
    """Return the peak of this process's resident memory so far, in GB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6


if __name__ == '__main__':
    main()
