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
from pathlib import Path

from machine import heading

from diffusion.prepare import file_listing
from diffusion.prepare.folder_source import FolderSource
from diffusion.prepare.input_plan import InputPlan
from diffusion.prepare.settings import PrepareSettings, SourceSettings
from diffusion.prepare.sorted_files import File
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
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        began, cpu = time.monotonic(), time.process_time()
        plan = InputPlan.make(settings, FolderSource('/data/images'))
        listed = time.monotonic()
        plan.write_or_check(work)
        written = time.monotonic()
        size = os.path.getsize(work.plan)
        InputPlan.make(settings, FolderSource('/data/images')).write_or_check(work)
        again = time.monotonic()
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1e6
        print(f'\n{count:,} files in {len(plan.parts):,} parts\n')
        print('| | |\n|---|---|')
        for name, value in {
            'list and plan, s': listed - began,
            'write the plan, s': written - listed,
            'list, plan and compare at a restart, s': again - written,
            'processor time of all, s': time.process_time() - cpu,
            'plan on disk, GB': size / 1e9,
            'peak memory, GB': peak,
            'of which imports, GB': before,
        }.items():
            print(f'| {name} | {value:.2f} |')


if __name__ == '__main__':
    main()
