"""Source of small synthetic images, each drawn from its number, so that tests need no image files."""

import functools
import io
import itertools
import json
import os
import pickle
import re
import signal
import tarfile
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageCms

from diffusion.prepare.counts_report import PrepareReport
from diffusion.prepare.pipeline import prepare
from diffusion.prepare.settings import PrepareSettings, settings_of
from diffusion.prepare.source import Entry, Part
from diffusion.prepare.worker_pool import WorkerJob, run_job

Members = Iterable[tuple[str, bytes | None]]
FORMATS = ('JPEG', 'PNG', 'WEBP', 'GIF', 'BMP', 'TIFF')


def draw(number: int, *, width: int = 0, height: int = 0) -> Image.Image:
    """Return a different image for each number, with sides of 16 to 79 px unless they are given."""
    rng = np.random.default_rng(number)
    width, height = width or int(rng.integers(16, 80)), height or int(rng.integers(16, 80))
    coarse = Image.fromarray(rng.integers(0, 256, (5, 5, 3), np.uint8))
    return coarse.resize((width, height), Image.Resampling.BICUBIC)


@functools.cache
def encoded_image(number: int) -> bytes:
    return encode(draw(number), FORMATS[number % len(FORMATS)])


def smooth(width: int = 48, height: int = 32) -> Image.Image:
    """Return a color gradient with a dark corner, which looks different in each orientation."""
    y, x = np.mgrid[0:height, 0:width]
    pixels = np.stack([x * 255 / width, y * 255 / height, 255 - x * 128 / width - y * 127 / height], axis=2)
    pixels[: height // 4, : width // 4] = 20
    return Image.fromarray(pixels.astype(np.uint8))


def encode(image: Image.Image, kind: str = 'JPEG', **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def swapped_profile() -> bytes:
    """Return an sRGB profile with red and green swapped, so that applying it is obvious."""
    content = bytearray(ImageCms.ImageCmsProfile(ImageCms.createProfile('sRGB')).tobytes())
    red, green = content.index(b'rXYZ'), content.index(b'gXYZ')
    content[red : red + 1], content[green : green + 1] = b'g', b'r'
    return bytes(content)


def tar_of(found: Members, *, form: int = tarfile.GNU_FORMAT) -> bytes:
    """Return a tar with these members; a member with content None is a folder."""
    file = io.BytesIO()
    with tarfile.open(fileobj=file, mode='w', format=form) as tar:
        for name, content in found:
            info = tarfile.TarInfo(name)
            info.size = len(content or b'')
            info.type = tarfile.DIRTYPE if content is None else tarfile.REGTYPE
            tar.addfile(info, io.BytesIO(content or b''))
    return file.getvalue()


class Deadly(bytes):
    """Encoded image that kills the process that decodes it, like one that crashes the decoder."""

    def __len__(self) -> int:
        os.kill(os.getpid(), signal.SIGKILL)
        return 0


@dataclass(frozen=True)
class DrawnSource:
    """Source of synthetic images: every n-th is truncated if `broken` is n, and each takes some seconds.

    `image` returns the encoded image of a number. A part cannot be read while the folder `gone` contains a file with
    its name. The image with the key `deadly` kills the process.
    """

    parts_count: int = 4
    each: int = 8
    broken: int = 0
    seconds: float = 0.0
    stamp: str = '1'
    gone: str = ''
    deadly: str = ''
    image: Callable[[int], bytes] = encoded_image

    def parts(self) -> Sequence[Part]:
        return [Part(f'drawn-{n}', {'first': n * self.each}, self.each, self.stamp) for n in range(self.parts_count)]

    def read(self, part: Part) -> Iterator[Entry]:
        for number in range(part.where['first'], part.where['first'] + self.each):
            key = f'image-{number}'
            if self.gone and Path(self.gone, part.name).exists():
                raise FileNotFoundError(f'{part.name}: no such file')
            if self.seconds:
                time.sleep(self.seconds)
            yield self.entry(key, number)

    def entry(self, key: str, number: int) -> Entry:
        image = self.image(number)
        if self.broken and number % self.broken == 0:
            image = image[: len(image) // 2]
        if key == self.deadly:
            image = Deadly(image)
        metadata = {'aesthetic_score': number % 10, 'language': 'en'}
        return Entry(key, image, [f'a caption of image {number}', f'another {number}'], metadata)


class Backwards(DrawnSource):
    def parts(self) -> Sequence[Part]:
        return super().parts()[::-1]

    def read(self, part: Part) -> Iterator[Entry]:
        return iter(list(super().read(part))[::-1])


def settings(out: Path | str, **values: object) -> PrepareSettings:
    defaults = {'source': {'kind': 'folder', 'location': 'drawn'}, 'out': str(out), 'sizes': [16, 32], 'workers': 2}
    return settings_of(defaults | {'max_rejected': 1.0} | values)


def here(jobs: Iterable[WorkerJob]) -> Iterator[Any]:
    """Run jobs in this process, which is faster and knows the classes of the tests."""
    return map(run_job, jobs)


def interrupted(count: int) -> Callable[[Iterable[WorkerJob]], Iterator[Any]]:
    """Return a function that runs some jobs, then stops as by Ctrl-C."""

    def run_some(jobs: Iterable[WorkerJob]) -> Iterator[Any]:
        yield from map(run_job, itertools.islice(jobs, count))
        raise KeyboardInterrupt

    return run_some


def report_of(given: PrepareSettings | dict[str, Any], source: Any = None, run: Any = here) -> PrepareReport:
    report = prepare(given if isinstance(given, PrepareSettings) else settings_of(given), source=source, run=run)
    assert report is not None and 0 <= report.seconds < 600
    return report


def run(out: Path | str, source: Any = None, **values: object) -> PrepareReport:
    """Prepare a dataset in this process; by default of 20 synthetic images."""
    return report_of(settings(out, **values), source or DrawnSource(2, 10))


def contents(out: Path) -> dict[str, dict[str, dict[str, Any]]]:
    """Return the samples of each bucket by key; no key may occur twice in a bucket."""
    found = {name: {sample['key']: sample for sample in samples(out / name)} for name in keys(out)}
    assert {name: len(of) for name, of in found.items()} == {name: len(of) for name, of in keys(out).items()}
    return found


def entries(source: Any) -> list[Entry]:
    """Return the samples of all parts, read by a copy of the source, as another process reads them."""
    source = pickle.loads(pickle.dumps(source))
    return [entry for part in source.parts() for entry in source.read(part) if isinstance(entry, Entry)]


def write_files(folder: Path, files: Mapping[str, bytes | str]) -> Path:
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return folder


def samples(bucket: Path) -> list[dict[str, Any]]:
    """Return the samples of a folder of shards in order, read with Streaming."""
    from streaming.base.format import reader_from_json

    shards = json.loads((bucket / 'index.json').read_text())['shards']
    readers = [reader_from_json(str(bucket.parent), bucket.name, shard) for shard in shards]
    return [reader[at] for reader in readers for at in range(len(reader))]


def keys(out: Path) -> dict[str, list[str]]:
    folders = sorted(path.parent for path in out.rglob('index.json'))
    return {folder.relative_to(out).as_posix(): [sample['key'] for sample in samples(folder)] for folder in folders}


def held_out(out: Path) -> Path:
    return out.with_name(f'{out.name}-held-out')


def snapshot(out: Path) -> dict[str, bytes]:
    """Return the content of every file of a dataset, without its own path, the date and the elapsed seconds."""
    files = (path for path in sorted(out.rglob('*')) if path.is_file())
    train = str(out).removesuffix('-held-out').encode()
    found = {path.relative_to(out).as_posix(): path.read_bytes().replace(train, b'OUT') for path in files}
    for name in [name for name in found if name.endswith('report.json')]:
        found[name] = re.sub(rb'"(seconds|date)": [^,\n]+', rb'"\1": 0', found[name])
    return found
