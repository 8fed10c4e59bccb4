"""The loader against the published recipe's, and against a bare loop over the same shards, in one run.

    python benchmarks/loader.py [pictures [turns]]

Pictures are 512 x 512 JPEGs of about 60 kB, cut at random from the photograph that matplotlib ships, with the noise of
a sensor, each with two captions of 6 to 30 words. All read them from local MDS shards, each in one process of its own
without workers, and make batches of 16 (of the recipe: 2048 over 128 GPUs) at 256 and at 512 px. The loop reads row
after row, decodes, resizes and tokenises with the same functions as the loader, and throws the result away: what the
loader adds is shuffling, checking that a shard is as it was, the choice of a caption, and batches. Everybody takes the
middle of the picture. All tokenizers have seen every word before, as after the first minutes of a training.

The published loader is written from its repository's (mosaicml/diffusion, datasets/laion): Pillow, torchvision's resize
(bilinear), ToTensor, Normalize to float32, the tokenizer in Python a sample. Its caption is the first.

Seconds are CPU seconds of a process, all its threads included: on a machine that does other things they say more than
the clock, which is given beside them. The three take turns of four batches, and figures are medians.
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
from diffusion.data.transforms import picture
from diffusion.models.pretrained import clip_tokenizer, tokenize

SIDE, BATCH = 512, 16
TURN = 4
"""Batches of a turn: the first finds the caches as another has left them."""
WARM_UP = 3
BAR_AGAINST_PUBLISHED, BAR_AGAINST_LOOP = 2.5, 0.8


def main(pictures: int = 1024, turns: int = 60) -> None:
    """Run and print."""
    torch.set_num_threads(1)  # as in a worker
    print(f'{heading()}, PyTorch {torch.__version__}, simplejpeg {simplejpeg.__version__}, Pillow ', end='')
    print(f'{Image.__version__}, OpenCV {cv2.__version__}')
    with tempfile.TemporaryDirectory() as folder:
        size = write(Path(folder), pictures)
        print(f'{pictures} JPEGs of {SIDE} px, {size / pictures / 1e3:.0f} kB each; medians of {turns} turns')
        print('\n| | ms of CPU a sample | samples/s a core | samples/s by the clock | |')
        print('|---|---|---|---|---|')
        for resolution in (256, 512):
            compare(Path(folder), resolution, turns)


def compare(folder: Path, resolution: int, turns: int) -> None:
    """The three lines of a resolution."""
    makers = {'the published loader': published, 'our loader': ours, 'a bare loop': bare}
    players = {name: Player(make, folder, resolution) for name, make in makers.items()}
    taken: dict[str, list[tuple[float, float]]] = {name: [] for name in makers}
    for number in range(WARM_UP + turns):
        for name, player in players.items():
            spent = player.turn()
            if number >= WARM_UP:
                taken[name].append(spent)
    for player in players.values():
        player.stop()
    cpu, clock = ({name: statistics.median(each[i] for each in taken[name]) for name in makers} for i in (0, 1))
    theirs, our, loop = cpu.values()
    note = f'{theirs / our:.1f} times the published (bar {BAR_AGAINST_PUBLISHED}), '
    note += f'{loop / our:.0%} of the loop (bar {BAR_AGAINST_LOOP:.0%})'
    for name in makers:
        print(
            f'| {resolution} px, {name} | {cpu[name] * 1e3:.2f} | {1 / cpu[name]:.0f} | {1 / clock[name]:.0f} ', end=''
        )
        print(f'| {note if name == "our loader" else ""} |', flush=True)


class Player:
    """A process that makes batches when it is its turn, so that nobody's threads and memory get in another's way."""

    def __init__(self, make: Callable[[Path, int], Iterator[int]], folder: Path, resolution: int) -> None:
        context = multiprocessing.get_context('fork')
        self.pipe, theirs = context.Pipe()
        self.process = context.Process(target=play, args=(make, folder, resolution, theirs), daemon=True)
        self.process.start()

    def turn(self) -> tuple[float, float]:
        """Seconds of CPU and of the clock a sample of the next batches."""
        self.pipe.send(True)
        return self.pipe.recv()

    def stop(self) -> None:
        self.pipe.send(False)
        self.process.join()


def play(make: Callable[[Path, int], Iterator[int]], folder: Path, resolution: int, pipe: Connection) -> None:
    """Take turns until told otherwise."""
    atexit._clear()  # what this process has from the one it was forked of
    batches = make(folder, resolution)
    while pipe.recv():
        cpu, clock = time.process_time(), time.perf_counter()
        samples = sum(itertools.islice(batches, TURN))
        pipe.send(((time.process_time() - cpu) / samples, (time.perf_counter() - clock) / samples))
    atexit._run_exitfuncs()  # Streaming's, which let go of shared memory; a forked process skips them


def experienced_tokenizer() -> CLIPTokenizer:
    """One that has met every word of the captions, through our way to it and through its own."""
    tokenizer = clip_tokenizer()
    for word in vocabulary()[0]:
        tokenize([tokenizer], [word])
        tokenizer(word)
    return tokenizer


def endless(batches: Iterable[Any]) -> Iterator[int]:
    """The sizes of the batches of a loader, epoch after epoch."""
    while True:
        yield from (len(batch['image']) for batch in batches)


def ours(folder: Path, resolution: int) -> Iterator[int]:
    """An epoch of our loader."""
    dataset = ImageTextDataset(
        [Bucket('photos', Stream(local=str(folder)), square(resolution))],
        batch_size=BATCH,
        tokenizers=[experienced_tokenizer()],
        shuffle=True,
    )
    loader = BucketedLoader(dataset, batch_size=BATCH, drop_last=True)
    return endless(loader)


def bare(folder: Path, resolution: int) -> Iterator[int]:
    """Read, decode, resize, tokenise."""
    tokenizers, shape = [experienced_tokenizer()], square(resolution)
    rows = itertools.cycle((shard, row) for shard in shards(folder) for row in range(shard.size))
    while True:
        for shard, row in itertools.islice(rows, BATCH):
            sample = shard[row]
            picture(sample['image'], shape)
            tokenize(tokenizers, captions_of(sample, '')[:1])
        yield BATCH


class PublishedDataset(StreamingDataset):
    """Pictures as float32 in [-1, 1] and the tokens of their first caption."""

    def __init__(self, folder: Path, resolution: int) -> None:
        super().__init__(streams=[Stream(local=str(folder))], batch_size=BATCH, shuffle=True)
        normalize = transforms.Normalize((0.5, 0.5, 0.5), (0.5, 0.5, 0.5))
        self.resolution = resolution
        self.transform = transforms.Compose([self.largest_centre_square, transforms.ToTensor(), normalize])
        self.tokenizer = experienced_tokenizer()

    def largest_centre_square(self, image: Image.Image) -> Image.Image:
        """The shorter side to the resolution, then the middle."""
        image = functional.resize(image, self.resolution, antialias=True)  # type: ignore[arg-type,assignment]
        width, height = image.size
        top, left = (height - self.resolution) // 2, (width - self.resolution) // 2
        return functional.crop(image, top, left, self.resolution, self.resolution)  # type: ignore[arg-type,return-value]

    def __getitem__(self, at: Any) -> dict[str, Any]:
        sample = super().__getitem__(at)
        image = Image.open(io.BytesIO(sample['image']))
        if image.mode != 'RGB':
            image = image.convert('RGB')
        seen = self.transform(image)
        caption = '' if torch.rand(1) < 0.1 else sample['captions'][0]
        length = self.tokenizer.model_max_length
        tokens = self.tokenizer(caption, padding='max_length', max_length=length, truncation=True)['input_ids']
        return {'image': seen, 'captions': torch.tensor(tokens)}


def published(folder: Path, resolution: int) -> Iterator[int]:
    """An epoch of the published loader."""
    loader = DataLoader(PublishedDataset(folder, resolution), batch_size=BATCH, drop_last=True)
    return endless(loader)


def shards(folder: Path) -> Iterator[MDSReader]:
    """The shards of a folder."""
    for entry in json.loads((folder / 'index.json').read_text())['shards']:
        yield MDSReader.from_json(str(folder), '', entry)


def write(folder: Path, pictures: int) -> int:
    """Write photographs with captions as `diffusion prepare` does; the bytes of all pictures."""
    size = 0
    columns = {'image': 'bytes', 'captions': 'json', 'width': 'int', 'height': 'int', 'key': 'str'}
    with MDSWriter(out=str(folder), columns=columns, hashes=['sha1'], size_limit=2**26) as writer:
        for number in range(pictures):
            encoded = photograph(number)
            size += len(encoded)
            captions = [caption(2 * number), caption(2 * number + 1)]
            sample = {'image': encoded, 'captions': captions, 'width': SIDE, 'height': SIDE, 'key': str(number)}
            writer.write(sample)
    return size


def photograph(number: int) -> bytes:
    """A JPEG of 512 x 512 pixels and about 60 kB; the same for the same number."""
    rng = np.random.default_rng(number)
    whole = portrait()
    side = int(rng.integers(300, 513))
    left, top = int(rng.integers(512 - side + 1)), int(rng.integers(600 - side + 1))
    seen = whole.resize((SIDE, SIDE), Image.Resampling.BICUBIC, box=(left, top, left + side, top + side))
    light, noise = rng.uniform(0.7, 1.2), rng.normal(0, 6, (SIDE, SIDE, 3))
    pixels = (np.asarray(seen) * light + noise).clip(0, 255).astype(np.uint8)
    buffer = io.BytesIO()
    Image.fromarray(pixels).save(buffer, 'JPEG', quality=85)
    return buffer.getvalue()


@lru_cache
def portrait() -> Image.Image:
    """Grace Hopper, 512 x 600 pixels."""
    return Image.open(Path(matplotlib.get_data_path()) / 'sample_data' / 'grace_hopper.jpg').convert('RGB')


def caption(number: int) -> str:
    """6 to 30 words, common ones more often, and a full stop."""
    rng = random.Random(number)
    return ' '.join(rng.choices(*vocabulary(), k=rng.randint(6, 30))) + '.'


@lru_cache
def vocabulary() -> tuple[Sequence[str], Sequence[float]]:
    """Words of CLIP's vocabulary and their weights, by Zipf's law."""
    found = [word.removesuffix('</w>') for word in clip_tokenizer().get_vocab() if word.endswith('</w>')]
    words = [word for word in found if word.isalpha() and word.isascii() and len(word) > 2][:20_000]
    return words, [1 / rank for rank in range(1, len(words) + 1)]


if __name__ == '__main__':
    main(*(int(word) for word in sys.argv[1:3]))
