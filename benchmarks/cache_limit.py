"""Benchmark of `loader.cache_limit`: time per download to keep a full cache below its limit.

    python benchmarks/cache_limit.py [SHARDS [DOWNLOADS]]

SHARDS (default: 30,000, as many as 2 TB of 64 MB each) files of 64 bytes stand for the shards of a full cache, in which
room is made for DOWNLOADS (default: 1,000) more.
"""

import shutil
import sys
import tempfile
import time
from pathlib import Path

from machine import heading

from diffusion.data.shard_cache import CacheBudget

SIZE = 64


def main(shards: int = 30_000, downloads: int = 1_000) -> None:
    """Run the benchmark and print its table."""
    print(f'{heading()}; {shards:,} shards, {downloads:,} downloads')
    print()
    print('| per download | ms |')
    print('|---|---|')
    with tempfile.TemporaryDirectory() as cache:
        folder = Path(cache, 'dataset', '0123456789abcdef')
        folder.mkdir(parents=True)
        for number in range(shards):
            (folder / f'shard.{number:06}.mds').write_bytes(bytes(SIZE))
        budget = CacheBudget({Path(cache): None}, SIZE * shards, lambda: None)
        begin = time.perf_counter()
        for number in range(shards, shards + downloads):
            path = folder / f'shard.{number:06}.mds'
            scratch = budget.make_scratch_folder(path, SIZE)
            path.write_bytes(bytes(SIZE))
            shutil.rmtree(scratch)
        print(f'| make room, evict | {1e3 * (time.perf_counter() - begin) / downloads:.2f} |')
        assert budget.used_bytes() <= SIZE * shards
        begin = time.perf_counter()
        budget.used_bytes()
        print(f'| list all shards, as a download did before | {1e3 * (time.perf_counter() - begin):.1f} |')


if __name__ == '__main__':
    main(*(int(float(word)) for word in sys.argv[1:3]))
