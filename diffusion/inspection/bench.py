"""`diffusion data bench`: measure data loading by stage and worker count, and compare with a GPU's demand."""

import gc
import itertools
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeVar

import torch

from diffusion.config.load import Recipe
from diffusion.data.caption_choice import captions_of
from diffusion.data.streams import BucketedDataset
from diffusion.data.transforms import Crop, decode_crop, resize, to_planar
from diffusion.errors import UserError
from diffusion.models import batch_keys
from diffusion.models.text_conditioner import tokenize
from diffusion.planning.count_cache import CountingFailed
from diffusion.planning.gpus import GPU
from diffusion.planning.model_costs import ModelCosts
from diffusion.training.components import build_dataset, build_loader

MAX_SAMPLES = 512
MAX_BATCH = 64
"""Maximum batch size to time; the size is the greatest common divisor of this and the recipe's global batch."""

Result = TypeVar('Result')


@dataclass
class BenchStage:
    """CPU seconds and input bytes of one stage of data loading, such as decoding, over all timed samples."""

    seconds: float = 0.0
    bytes: int = 0


class Clock:
    """Accumulated CPU time and input bytes of each stage of data loading, by name."""

    def __init__(self) -> None:
        self.stages: dict[str, BenchStage] = {}

    def time(self, name: str, bytes_in: int, call: Callable[[], Result]) -> Result:
        """Call a function, add its CPU time and `bytes_in` to the stage `name`, and return the function's result."""
        begin = time.process_time()
        result = call()
        stage = self.stages.setdefault(name, BenchStage())
        stage.seconds += time.process_time() - begin
        stage.bytes += bytes_in
        return result

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages.values())


def bench(recipe: Recipe, *, gpu: GPU, workers: Sequence[int], batches: int, mfu: float) -> None:
    """Print how fast a recipe's streams load, and how fast they must load to train on `gpu` at `mfu` of its peak."""
    recipe = replace(recipe, global_batch=math.gcd(recipe.global_batch, MAX_BATCH))
    rate_per_core, needed = _print_stages(recipe, gpu, mfu)
    best = _print_loader_rates(recipe, workers, batches)
    print(f'\nOne core loads {rate_per_core:.0f} samples/s, this machine {best:.0f} samples/s.')
    if isinstance(needed, str):
        print(f'The demand of a GPU is unknown: {needed}')
        return
    cores = needed / rate_per_core
    print(
        f'One {gpu.name} at {mfu:.0%} of its peak trains on {needed:.0f} samples/s, less if it also encodes images '
        f'or captions.\nThat takes {cores:.1f} cores per GPU, {cores * gpu.gpus_per_node:.0f} for the '
        f'{gpu.gpus_per_node} GPUs of a node, plus one core per GPU for training. This machine can feed '
        f'{best / needed:.2g} GPUs.'
    )


def _print_stages(recipe: Recipe, gpu: GPU, mfu: float) -> tuple[float, float | str]:
    """Print each loading stage's time; return samples/s on one core, and the GPU's demand or why that is unknown."""
    dataset = build_dataset(
        recipe, streams=recipe.streams, component=recipe.dataset, batch_size=recipe.global_batch, shuffle=False
    )
    indices = range(0, dataset.num_samples, -(-dataset.num_samples // MAX_SAMPLES))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a DataLoader worker
    # Run once without timing: the first pass downloads and checks the shards.
    make_samples(dataset, indices, recipe.global_batch)
    clock = make_samples(dataset, indices, recipe.global_batch)
    torch.set_num_threads(threads)
    count = len(indices)
    print(f'One process, {count} samples, batches of {recipe.global_batch}:\n')
    print('| stage | CPU ms per sample | share, % | samples/s | MB/s in |')
    print('|---|---|---|---|---|')
    first = next(iter(clock.stages.values()))
    for name, stage in {**clock.stages, 'total': BenchStage(clock.seconds, first.bytes)}.items():
        # With few samples, a stage may take less time than the clock can resolve.
        seconds = max(stage.seconds, 1e-9)
        print(f'| {name} | {stage.seconds / count * 1e3:.3f} | {100 * stage.seconds / clock.seconds:.0f} ', end='')
        print(f'| {count / seconds:.0f} | {stage.bytes / 1e6 / seconds:.0f} |')
    return count / clock.seconds, demand(recipe, dataset, gpu, mfu)


def make_samples(dataset: BucketedDataset, indices: Sequence[int], batch: int) -> Clock:
    """Make samples and batches as in training, with center crops and first captions; return each stage's time."""
    clock, items = Clock(), []
    for number, index in enumerate(indices):
        items.append(_make_sample(dataset, index, clock))
        # Samples are ordered by bucket, and a batch cannot mix shapes.
        end_of_bucket = number + 1 == len(indices) or dataset.bucket_of(indices[number + 1]) != dataset.bucket_of(index)
        if len(items) == batch or end_of_bucket:
            size = sum(tensor.nbytes for item in items for tensor in item.values())
            clock.time('collate', size, lambda items=items: dataset.image_block.collate(items))
            items = []
    return clock


def _make_sample(dataset: BucketedDataset, index: int, clock: Clock) -> dict[str, torch.Tensor]:
    """Make one sample, add the time of each stage to `clock`, and return the sample's tensors."""
    # Repeat the steps of `ImageTextDataset.item` and `LatentsDataset.item`, which have no hooks for timing.
    shard, row = dataset.spanner[index]
    size = len(dataset.shards[shard].get_sample_data(row))  # type: ignore[attr-defined]
    sample: Mapping[str, Any] = clock.time('read', size, lambda: dataset.get_item(index))
    item = {}
    if 'image' in sample:
        encoded, shape = sample['image'], dataset.bucket_of(index).shape
        cut = clock.time('decode', len(encoded), lambda: decode_crop(encoded, shape, Crop()).pixels)
        item[batch_keys.IMAGE] = clock.time(
            'resize',
            cut.nbytes,
            lambda: to_planar(resize(cut, shape), dataset.image_block.place((3, shape.height, shape.width))),
        )
    for name in (batch_keys.LATENT_MOMENTS, batch_keys.TEXT_EMBEDS, batch_keys.TEXT_POOLED):
        if name in sample:
            values = sample[name]
            item[name] = clock.time('to tensor', values.nbytes, lambda values=values: torch.from_numpy(values.copy()))
    tokenizers = getattr(dataset, 'tokenizers', [])
    if tokenizers:
        caption = captions_of(dict(sample), '')[0]
        item[batch_keys.INPUT_IDS] = clock.time('tokenize', len(caption), lambda: tokenize(tokenizers, [caption])[0])
    return item


def _print_loader_rates(recipe: Recipe, workers: Sequence[int], batches: int) -> float:
    print(f'\nLoader throughput in wall-clock time, {batches} batches of {recipe.global_batch} each:\n')
    print('| workers | samples/s | samples/s per worker |')
    print('|---|---|---|')
    best = 0.0
    for count in workers:
        rate = loader_rate(recipe, count, batches)
        best = max(best, rate)
        print(f'| {count} | {rate:.0f} | {rate / max(1, count):.0f} |', flush=True)
    return best


def loader_rate(recipe: Recipe, workers: int, batches: int) -> float:
    """Return the measured samples per second of a loader with this many workers, over several epochs if needed."""
    # Streaming rejects two live datasets with the same local folder, so garbage-collect the previous one.
    gc.collect()
    loader = build_loader(replace(recipe, loader=replace(recipe.loader, num_workers=workers)))
    served = itertools.chain.from_iterable(itertools.repeat(loader))
    # Skip the batches that workers prefetch at startup, so that only steady throughput is measured.
    for _ in range((recipe.loader.prefetch_factor or 2) * workers + 1):
        next(served)
    begin = time.perf_counter()
    samples = sum(len(batch[batch_keys.SAMPLE_ID]) for batch in itertools.islice(served, batches))
    return samples / (time.perf_counter() - begin)


def demand(recipe: Recipe, dataset: BucketedDataset, gpu: GPU, mfu: float) -> float | str:
    """Return how many samples per second a GPU trains on at `mfu` of its bf16 peak, or a text on why it is unknown.

    A training step counts as three forward passes, because a backward pass costs as much as two of them.
    """
    try:
        model = ModelCosts(recipe.model, recipe.imports)
        model.count([bucket.shape for bucket in dataset.buckets])
    except (UserError, CountingFailed) as error:
        return str(error)
    counts = dataset.samples_per_stream.tolist()
    flops = [3 * model.trained_flops(bucket.shape) for bucket in dataset.buckets]
    mean = sum(count * each for count, each in zip(counts, flops, strict=True)) / sum(counts)
    return mfu * gpu.peak_flops('bf16') / mean
