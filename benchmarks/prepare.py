"""Benchmark of `diffusion prepare folder` against a bare loop that decodes, resizes and encodes the same images.

    python benchmarks/prepare.py [IMAGES [SIDE [SIZE [ROUNDS]]]]

IMAGES (default: 1,000) JPEGs, of SIDE pixels (default: 1024) by three quarters of it, are prepared at SIZE (default:
256). The loop does what any tool must: it reads a file, decodes it with Pillow, resizes it with the same filter,
encodes it as JPEG of the same quality, and appends it to a file. Both run with one process and with one per core, in
turns; times are the shortest of ROUNDS (default: 3), with the start of the processes.
"""

import io
import math
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
from machine import heading
from PIL import Image

from diffusion.config.image_shapes import Shape
from diffusion.prepare.image_decoding import covering_size, decode_image, encode, shrink
from diffusion.prepare.pipeline import prepare
from diffusion.prepare.settings import PrepareSettings, SourceSettings

QUALITY = PrepareSettings.jpeg_quality


def main(images: int = 1000, side: int = 1024, size: int = 256, rounds: int = 3) -> None:
    """Run the benchmark and print its table."""
    cores = os.cpu_count() or 1
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        paths = write_images(folder / 'in', images, side)
        runs: dict[tuple[str, int], Callable[[], None]] = {}
        for processes in dict.fromkeys((1, cores)):
            runs['bare loop', processes] = lambda processes=processes: bare(paths, size, folder, processes)
            for what, fast in (('diffusion prepare', False), ('diffusion prepare --fast-jpeg', True)):
                runs[what, processes] = lambda processes=processes, fast=fast: prepared(folder, size, processes, fast)
        seconds = dict.fromkeys(runs, math.inf)
        for _ in range(rounds):
            seconds = {key: min(seconds[key], timed(run)) for key, run in runs.items()}
        differences = compare_pixels(paths[:8], size)
    print(f'{heading()}; {images} JPEGs of {side} x {side * 3 // 4} px to {size} px, shortest of {rounds}')
    print()
    print('| | processes | seconds | images/s | of the bare loop |')
    print('|---|---|---|---|---|')
    for (what, processes), found in seconds.items():
        ratio = seconds['bare loop', processes] / found
        print(f'| {what} | {processes} | {found:.2f} | {images / found:.0f} | {ratio:.2f} |')
    print()
    print(differences)


def compare_pixels(paths: Sequence[Path], size: int) -> str:
    """Return how much `--fast-jpeg` and the compression change the resized images, as text."""
    shape, fast, compressed = Shape(size, size), [], []
    for path in paths:
        encoded = path.read_bytes()
        whole = decode_image(encoded)
        scaled = decode_image(encoded, resized_to=lambda width, height: covering_size(width, height, shape))
        target = covering_size(whole.width, whole.height, shape)
        small = shrink(whole.image, target)
        fast.append(psnr(small, shrink(scaled.image, target)))
        file = io.BytesIO(encode(small, kind='jpeg', quality=QUALITY))
        compressed.append(psnr(small, Image.open(file)))
    ratio = f'Peak signal-to-noise ratio to the resized image, medians of {len(paths)} images'
    return f'{ratio}: {np.median(fast):.1f} dB with --fast-jpeg, {np.median(compressed):.1f} dB after JPEG {QUALITY}'


def psnr(image: Image.Image, other: Image.Image) -> float:
    """Return the peak signal-to-noise ratio of two images in dB; infinite if they are equal."""
    error = np.square(np.asarray(image, np.float64) - np.asarray(other, np.float64)).mean()
    return math.inf if error == 0 else 10 * math.log10(255**2 / error)


def write_images(folder: Path, count: int, side: int) -> list[Path]:
    """Write JPEGs with structures of all sizes like photographs', with captions, and return their paths."""
    folder.mkdir()
    paths = []
    for number in range(count):
        rng = np.random.default_rng(number)
        pixels = np.zeros((side * 3 // 4, side, 3), np.float32)
        for octave in (2, 4, 6, 8):
            coarse = Image.fromarray(rng.integers(0, 256, (2**octave, 2**octave, 3), np.uint8))
            pixels += np.asarray(coarse.resize((side, side * 3 // 4), Image.Resampling.BICUBIC)) / octave
        paths.append(folder / f'{number:06}.jpg')
        Image.fromarray((pixels / pixels.max() * 255).astype(np.uint8)).save(paths[-1], quality=90)
        paths[-1].with_suffix('.txt').write_text(f'photograph number {number}')
    return paths


def timed(run: Callable[[], None]) -> float:
    """Return the seconds of a run."""
    started = time.perf_counter()
    run()
    return time.perf_counter() - started


def bare(paths: Sequence[Path], size: int, folder: Path, processes: int) -> None:
    """Convert the images in several processes, each of which converts an equal part."""
    context = multiprocessing.get_context('fork')
    parts = [
        context.Process(target=convert, args=(paths[n::processes], size, folder / f'{n}.bin')) for n in range(processes)
    ]
    for process in parts:
        process.start()
    for process in parts:
        process.join()


def convert(paths: Sequence[Path], size: int, target: Path) -> None:
    """Convert some images, and write them to one file."""
    with target.open('wb') as file:
        for path in paths:
            image = Image.open(io.BytesIO(path.read_bytes())).convert('RGB')
            scale = size / min(image.size)
            shape = round(image.width * scale), round(image.height * scale)
            small = image.resize(shape, Image.Resampling.LANCZOS, reducing_gap=3.0)
            encoded = io.BytesIO()
            small.save(encoded, 'JPEG', quality=QUALITY, subsampling='4:2:0' if QUALITY < 95 else '4:4:4')
            file.write(encoded.getvalue() + path.with_suffix('.txt').read_bytes())


def prepared(folder: Path, size: int, processes: int, fast: bool) -> None:
    """Prepare the images as `diffusion prepare` does, and remove the dataset."""
    out = folder / 'out'
    source = SourceSettings('folder', location=str(folder / 'in'))
    prepare(PrepareSettings(source, str(out), [size], workers=processes, fast_jpeg=fast))
    shutil.rmtree(out)


if __name__ == '__main__':
    main(*(int(word) for word in sys.argv[1:5]))
