"""Benchmark of our loader against the loader of the published recipe and against a bare loop over the same shards.

    python benchmarks/loader.py [images [rounds]]

Images are 512 x 512 JPEGs of about 60 kB: random crops of the photograph that ships with matplotlib, with sensor noise,
and two captions of 6 to 30 words each. Every loader reads them from local MDS shards in a separate process without
workers, and makes batches of 16 (as in the recipe: 2048 over 128 GPUs) at 256 and 512 px. The bare loop reads samples
in order, decodes, resizes and tokenizes with the same functions as our loader, and discards the result; our loader adds
shuffling, verification of shards, the choice of a caption, and batching. All use the center of the image. All
tokenizers have processed every word before, as after the first minutes of training.

The published loader is reimplemented from mosaicml/diffusion, datasets/laion: Pillow, torchvision's resize (bilinear),
ToTensor, Normalize to float32, and the Python tokenizer per sample. It uses the first caption.

Times are CPU time of a process with all its threads, which depends less on other load than wall time; throughput by
wall time is given too. The three alternate after every four batches, and figures are medians.
"""

import atexit
import io
import itertools
import json
import multiprocessing
import random
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import lru_cache
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import cv2
import matplotlib
import numpy as np
import simplejpeg
import torch
from machine import heading
from PIL import Image
from streaming import MDSWriter, Stream, StreamingDataset
from streaming.base.format.mds.reader import MDSReader
from torch.utils.data import DataLoader
from torchvision import transforms
from torchvision.transforms import functional
from transformers import CLIPTokenizer

from diffusion.config.image_shapes import square
from diffusion.data.caption_choice import captions_of
from diffusion.data.image_text import ImageTextDataset
from diffusion.data.loader import BucketedLoader
from diffusion.data.streams import Bucket
from diffusion.data.transforms import decode_for_model
from diffusion.models.pretrained import clip_tokenizer
from diffusion.models.text_conditioner import tokenize

SIDE, BATCH = 512, 16
ROUND_BATCHES = 4
"""Batches per round; more than one, because the first batch finds the CPU caches filled by another process."""
WARM_UP = 3
BAR_AGAINST_PUBLISHED, BAR_AGAINST_LOOP = 2.5, 0.8
"""Goals for the speed of our loader, as multiples of the speeds of the published loader and of the bare loop."""


def main(images: int = 1024, rounds: int = 60) -> None:
    """Run the benchmark and print its table."""
    torch.set_num_threads(1)  # as in a loader worker
    print(f'{heading()}, PyTorch {torch.__version__}, simplejpeg {simplejpeg.__version__}, Pillow ', end='')
    print(f'{Image.__version__}, OpenCV {cv2.__version__}')
    with tempfile.TemporaryDirectory() as folder:
        size = write(Path(folder), images)
        print(f'{images} JPEGs of {SIDE} px, {size / images / 1e3:.0f} kB each; medians of {rounds} rounds')
        print('\n| | CPU ms per sample | samples/s per core | samples/s by wall time | |')
        print('|---|---|---|---|---|')
        for resolution in (256, 512):
            compare(Path(folder), resolution, rounds)


def compare(folder: Path, resolution: int, rounds: int) -> None:
    """Measure the three loaders at a resolution and print their rows."""
    makers = {'published loader': published, 'our loader': ours, 'bare loop': bare}
    workers = {name: LoaderProcess(make, folder, resolution) for name, make in makers.items()}
    seconds: dict[str, list[tuple[float, float]]] = {name: [] for name in makers}
    for number in range(WARM_UP + rounds):
        for name, worker in workers.items():
            cpu_and_wall = worker.run_round()
            if number >= WARM_UP:
                seconds[name].append(cpu_and_wall)
    for worker in workers.values():
        worker.stop()
    cpu, wall = ({name: statistics.median(each[i] for each in seconds[name]) for name in makers} for i in (0, 1))
    published_seconds, our_seconds, loop_seconds = cpu.values()
    note = f'{published_seconds / our_seconds:.1f} times the published loader (goal {BAR_AGAINST_PUBLISHED}), '
    note += f'{loop_seconds / our_seconds:.0%} of the bare loop (goal {BAR_AGAINST_LOOP:.0%})'
    for name in makers:
        print(
            f'| {resolution} px, {name} | {cpu[name] * 1e3:.2f} | {1 / cpu[name]:.0f} | {1 / wall[name]:.0f} ', end=''
        )
        print(f'| {note if name == "our loader" else ""} |', flush=True)


class LoaderProcess:
    """Process that makes batches on request; one per loader, so that threads and memory are not shared."""

    def __init__(self, make: Callable[[Path, int], Iterator[int]], folder: Path, resolution: int) -> None:
        context = multiprocessing.get_context('fork')
        self.pipe, child_pipe = context.Pipe()
        self.process = context.Process(target=run_rounds, args=(make, folder, resolution, child_pipe), daemon=True)
        self.process.start()

    def run_round(self) -> tuple[float, float]:
        """Make the next batches; return CPU seconds and wall-clock seconds per sample."""
        self.pipe.send(True)
        return self.pipe.recv()

    def stop(self) -> None:
        """Stop the process and wait for its end."""
        self.pipe.send(False)
        self.process.join()


def run_rounds(make: Callable[[Path, int], Iterator[int]], folder: Path, resolution: int, pipe: Connection) -> None:
    """Make batches whenever the pipe receives True, until it receives False."""
    # A forked process inherits the exit functions of its parent, but multiprocessing ends it without running any.
    # Streaming releases its shared memory in one, so drop the inherited ones and run those of this process at its end.
    atexit._clear()
    batches = make(folder, resolution)
    while pipe.recv():
        cpu, wall = time.process_time(), time.perf_counter()
        samples = sum(itertools.islice(batches, ROUND_BATCHES))
        pipe.send(((time.process_time() - cpu) / samples, (time.perf_counter() - wall) / samples))
    atexit._run_exitfuncs()


def warm_tokenizer() -> CLIPTokenizer:
    """Return a tokenizer whose caches hold every word of the captions, for our `tokenize` and for its own method."""
    tokenizer = clip_tokenizer()
    for word in vocabulary()[0]:
        tokenize([tokenizer], [word])
        tokenizer(word)
    return tokenizer


def endless(batches: Iterable[Any]) -> Iterator[int]:
    """Yield the size of each batch of a loader, epoch after epoch."""
    while True:
        yield from (len(batch['image']) for batch in batches)


def ours(folder: Path, resolution: int) -> Iterator[int]:
    """Yield the batch sizes of our loader."""
    dataset = ImageTextDataset(
        [Bucket('photos', Stream(local=str(folder)), square(resolution))],
        batch_size=BATCH,
        tokenizers=[warm_tokenizer()],
        shuffle=True,
    )
    loader = BucketedLoader(dataset, batch_size=BATCH, drop_last=True)
    return endless(loader)


def bare(folder: Path, resolution: int) -> Iterator[int]:
    """Yield batch sizes of a loop that reads, decodes, resizes and tokenizes."""
    tokenizers, shape = [warm_tokenizer()], square(resolution)
    rows = itertools.cycle((shard, row) for shard in shards(folder) for row in range(shard.size))
    while True:
        for shard, row in itertools.islice(rows, BATCH):
            sample = shard[row]
            decode_for_model(sample['image'], shape)
            tokenize(tokenizers, captions_of(sample, '')[:1])
        yield BATCH


class PublishedDataset(StreamingDataset):
    """Dataset of the published recipe: images as float32 in [-1, 1], and the tokens of their first caption."""

    def __init__(self, folder: Path, resolution: int) -> None:
        super().__init__(streams=[Stream(local=str(folder))], batch_size=BATCH, shuffle=True)
        normalize = transforms.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
        self.resolution = resolution
        self.transform = transforms.Compose([self.center_square, transforms.ToTensor(), normalize])
        self.tokenizer = warm_tokenizer()

    def center_square(self, image: Image.Image) -> Image.Image:
        """Resize the shorter side to the resolution and crop the center."""
        image = functional.resize(image, self.resolution, antialias=True)  # type: ignore[arg-type,assignment]
        width, height = image.size
        top, left = (height - self.resolution) // 2, (width - self.resolution) // 2
        return functional.crop(image, top, left, self.resolution, self.resolution)  # type: ignore[arg-type,return-value]

    def __getitem__(self, at: Any) -> dict[str, Any]:
        sample = super().__getitem__(at)
        image = Image.open(io.BytesIO(sample['image']))
        if image.mode != 'RGB':
            image = image.convert('RGB')
        pixels = self.transform(image)
        caption = '' if torch.rand(1) < 0.1 else sample['captions'][0]
        length = self.tokenizer.model_max_length
        tokens = self.tokenizer(caption, padding='max_length', max_length=length, truncation=True)['input_ids']
        return {'image': pixels, 'captions': torch.tensor(tokens)}


def published(folder: Path, resolution: int) -> Iterator[int]:
    """Yield the batch sizes of the published loader."""
    loader = DataLoader(PublishedDataset(folder, resolution), batch_size=BATCH, drop_last=True)
    return endless(loader)


def shards(folder: Path) -> Iterator[MDSReader]:
    """Yield a reader for each shard of a folder."""
    for entry in json.loads((folder / 'index.json').read_text())['shards']:
        yield MDSReader.from_json(str(folder), '', entry)


def write(folder: Path, images: int) -> int:
    """Write images and captions in the format of `diffusion prepare`, and return the bytes of all images."""
    size = 0
    columns = {'image': 'bytes', 'captions': 'json', 'width': 'int', 'height': 'int', 'key': 'str'}
    with MDSWriter(out=str(folder), columns=columns, hashes=['sha1'], size_limit=2**26) as writer:
        for number in range(images):
            encoded = photograph(number)
            size += len(encoded)
            captions = [caption(2 * number), caption(2 * number + 1)]
            sample = {'image': encoded, 'captions': captions, 'width': SIDE, 'height': SIDE, 'key': str(number)}
            writer.write(sample)
    return size


def photograph(number: int) -> bytes:
    """Return a JPEG of 512 x 512 pixels and about 60 kB, determined by the number."""
    rng = np.random.default_rng(number)
    side = int(rng.integers(300, 513))
    left, top = int(rng.integers(512 - side + 1)), int(rng.integers(600 - side + 1))
    crop = portrait().resize((SIDE, SIDE), Image.Resampling.BICUBIC, box=(left, top, left + side, top + side))
    brightness, noise = rng.uniform(0.7, 1.2), rng.normal(0, 6, (SIDE, SIDE, 3))
    pixels = (np.asarray(crop) * brightness + noise).clip(0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, 'JPEG', quality=85)
    return buffer.getvalue()


@lru_cache
def portrait() -> Image.Image:
    """Return the photograph of Grace Hopper that ships with matplotlib, 512 x 600 pixels."""
    return Image.open(Path(matplotlib.get_data_path()) / 'sample_data' / 'grace_hopper.jpg').convert('RGB')


def caption(number: int) -> str:
    """Return a caption of 6 to 30 words drawn by Zipf's law, determined by the number."""
    rng = random.Random(number)
    return ' '.join(rng.choices(*vocabulary(), k=rng.randint(6, 30))) + '.'


@lru_cache
def vocabulary() -> tuple[Sequence[str], Sequence[float]]:
    """Return words of CLIP's vocabulary, and their weights by Zipf's law."""
    found = [word.removesuffix('</w>') for word in clip_tokenizer().get_vocab() if word.endswith('</w>')]
    words = [word for word in found if word.isalpha() and word.isascii() and len(word) > 2][:20_000]
    return words, [1 / rank for rank in range(1, len(words) + 1)]


if __name__ == '__main__':
    main(*(int(word) for word in sys.argv[1:3]))
