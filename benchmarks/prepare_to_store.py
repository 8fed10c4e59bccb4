"""Benchmark of preparing a dataset into an object store: the local disk space it needs, and whether SIGKILL harms it.

    python benchmarks/prepare_to_store.py [GB [kills [seconds between kills [webdataset | tfrecord]]]]

Writes tars or TFRecords of JPEGs of 512 px (default: 2 GB of tars), and prepares them twice into an S3 server on
localhost: once with a work folder on the disk, and once with the converted images in the store (the setting `parts`),
killed again and again (default: 5 times, after 9 to 17 s) and started again each time. Prints the largest work folder
of both, the inputs by outcome, and whether the datasets are the same bytes. One of 250 records has a wrong checksum,
and another one no image. The server is that of the tests, which needs the packages of `pip install -e '.[dev]'`.
"""

import hashlib
import io
import json
import os
import random
import signal
import struct
import subprocess
import sys
import tarfile
import tempfile
import time
from collections.abc import Iterator
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
from machine import heading
from PIL import Image

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
from diffusion.prepare.tfrecord import masked_crc32c  # noqa: E402
from tests.object_store import Store, serve  # noqa: E402
from tests.prepare.tfrecords import example  # noqa: E402

SIDE = 512
PER_FILE = 250
SHARD_MB = 64
WORKERS = 2
BUCKET = 'mds'


def main(gigabytes: str = '2', kills: str = '5', seconds: str = '9', source: str = 'webdataset') -> None:
    """Run the benchmark and print its table."""
    with tempfile.TemporaryDirectory() as name, serve() as store:
        folder = Path(name)
        (folder / 'in').mkdir()
        images, size = WRITERS[source](folder / 'in', float(gigabytes) * 1e9)
        store.bucket(BUCKET)
        whole = Preparation(folder, store, 'whole', source)
        whole.run()
        killed = Preparation(folder, store, 'killed', source, f'parts=s3://{BUCKET}/parts')
        done = killed.run(kills=int(kills), seconds=float(seconds))
        same = whole.dataset() == killed.dataset()
        left = len(digests(store, 'parts'))
        outcomes = [each.outcomes() for each in (whole, killed)]
    print(f'{heading()}; {images} images in {size / 1e9:.2f} GB, {WORKERS} workers, shards of {SHARD_MB} MB\n')
    print('| | seconds | largest work folder, MB | killed |')
    print('|---|---|---|---|')
    print(f'| converted images in the work folder | {whole.seconds:.1f} | {whole.peak / 1e6:.0f} | 0 times |')
    print(f'| converted images in the store | {killed.seconds:.1f} | {killed.peak / 1e6:.0f} | {done} times |')
    print(f'\nThe datasets have {"the same" if same else "OTHER"} bytes; {left} converted parts are left in the store.')
    print(*dict.fromkeys(outcomes), sep='\n')


def drawn() -> Iterator[bytes]:
    """Yield JPEGs of noise."""
    draw = np.random.default_rng(0)
    while True:
        coarse = Image.fromarray(draw.integers(0, 256, (96, 96, 3), dtype=np.uint8))
        noisy = np.asarray(coarse.resize((SIDE, SIDE))) + draw.integers(-24, 24, (SIDE, SIDE, 3))
        image = io.BytesIO()
        Image.fromarray(noisy.clip(0, 255).astype(np.uint8)).save(image, 'JPEG', quality=93)
        yield image.getvalue()


def write_tars(folder: Path, size: float) -> tuple[int, int]:
    """Write tars with images and captions of this many bytes; return the number of images and the bytes."""
    images, total, number = drawn(), 0, 0
    for tar in count():
        with tarfile.open(folder / f'{tar:05}.tar', 'w') as file:
            for _ in range(PER_FILE):
                for suffix, content in (('jpg', next(images)), ('txt', f'image number {number}'.encode())):
                    member = tarfile.TarInfo(f'{number:07}.{suffix}')
                    member.size = len(content)
                    file.addfile(member, io.BytesIO(content))
                    total += len(content)
                number += 1
                if total >= size:
                    return number, total
    raise AssertionError


def write_records(folder: Path, size: float) -> tuple[int, int]:
    """Write TFRecords of at least this many bytes, and a file of another kind; return as `write_tars` does."""
    (folder / 'features.json').write_text('{}')
    images, total, number = drawn(), 0, 0
    for name in count():
        with (folder / f'{name:05}.tfrecord').open('wb') as file:
            for at in range(PER_FILE):
                captions = [f'image number {number}', f'number {number}']
                payload = example({'image': [next(images)] if at != 20 else [], 'caption': captions})
                header = struct.pack('<Q', len(payload))
                total += file.write(header + struct.pack('<I', masked_crc32c(header)) + payload)
                total += file.write(struct.pack('<I', masked_crc32c(payload) ^ (at == 10)))
                number += 1
        if total >= size:
            return number, total
    raise AssertionError


WRITERS = {'webdataset': write_tars, 'tfrecord': write_records}


class Preparation:
    """A preparation into the store, which is started again after each kill until it is complete.

    Args:
        folder: Folder with the input in `in`.
        store: The store.
        name: Name of the dataset and of the work folder.
        source: Kind of the input.
        settings: Further settings, as for `--set`.
    """

    def __init__(self, folder: Path, store: Store, name: str, source: str, *settings: str) -> None:
        self.work, self.name, self._store, self._log = folder / name, name, store, folder / f'{name}.log'
        self.seconds = 0.0
        self.peak = 0
        """Most bytes in the work folder, found 20 times per second."""
        settings = (f'work={self.work}', 'store=original', f'shard_mb={SHARD_MB}', *settings)
        words = [word for each in settings for word in ('--set', each)]
        self._command = [sys.executable, '-m', 'diffusion', 'prepare', source, str(folder / 'in')]
        self._command += ['--out', f's3://{BUCKET}/{name}', '--sizes', str(SIDE), '--workers', str(WORKERS), *words]
        self._environment = os.environ | store.environment | {'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'}

    def run(self, *, kills: int = 0, seconds: float = 0.0) -> int:
        """Run it until it is complete, but first kill it `kills` times, each after `seconds` to 2 * `seconds` - 1.

        Returns how often it was killed.
        """
        began, done, draw = time.monotonic(), 0, random.Random(1)
        while True:
            with self._log.open('ab') as log:
                process = subprocess.Popen(
                    self._command, env=self._environment, stdout=log, stderr=log, start_new_session=True
                )
            end = time.monotonic() + (draw.uniform(seconds, 2 * seconds - 1) if done < kills else float('inf'))
            while process.poll() is None and time.monotonic() < end:
                self.peak = max(self.peak, sum(sizes_in(self.work)))
                time.sleep(0.05)
            if process.poll() is not None:
                break
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
            done += 1
        self.seconds = time.monotonic() - began
        if process.returncode:
            sys.exit(f'{self._log.read_text()}\nexit status {process.returncode}')
        return done

    def dataset(self) -> dict[str, str]:
        """Return a hash of each file of the dataset by name, except the reports, whose dates and names differ."""
        found = digests(self._store, self.name)
        return {name: digest for name, digest in found.items() if 'report' not in name}

    def outcomes(self) -> str:
        """Return the inputs by outcome, from the report."""
        body = self._store.client.get_object(Bucket=BUCKET, Key=f'{self.name}/report.json')['Body']
        report = json.load(body)
        rejected, skipped = (
            {reason: found['count'] for reason, found in report[kind].items()} for kind in ('rejected', 'passed_over')
        )
        total = report['pictures'] + sum(rejected.values()) + sum(skipped.values())
        assert report['inputs'] == total, report
        return f'{report["inputs"]} inputs = {report["pictures"]} kept + rejected {rejected} + skipped {skipped}'


def digests(store: Store, prefix: str) -> dict[str, str]:
    """Return a hash of each object below a prefix, by its name without it."""
    pages: Any = store.client.get_paginator('list_objects_v2').paginate(Bucket=BUCKET, Prefix=f'{prefix}/')
    keys = [found['Key'] for page in pages for found in page.get('Contents', [])]
    return {
        key.removeprefix(f'{prefix}/'): hashlib.sha256(
            store.client.get_object(Bucket=BUCKET, Key=key)['Body'].read()
        ).hexdigest()
        for key in keys
    }


def sizes_in(folder: Path) -> Iterator[int]:
    """Yield the size in bytes of each file below a folder, while other processes change it."""
    for place, _, names in os.walk(folder):
        for name in names:
            try:
                yield os.stat(Path(place, name)).st_size
            except FileNotFoundError:
                continue


if __name__ == '__main__':
    main(*sys.argv[1:])
