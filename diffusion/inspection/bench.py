"""`diffusion data bench`: measure data loading per stage and per number of workers, and compare with a GPU's demand."""

import gc
import itertools
import math
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import torch

from diffusion.config.load import Recipe
from diffusion.data.caption_choice import captions_of
from diffusion.data.streams import BucketedDataset
from diffusion.data.transforms import Crop, decode_crop, planes, resize
from diffusion.errors import UserError
from diffusion.inspection.stream_selection import select
from diffusion.models import batch_keys
from diffusion.models.pretrained import tokenize
from diffusion.planning.count_cache import CountingFailed
from diffusion.planning.gpus import GPU, find_gpu, load_gpus
from diffusion.planning.model_costs import ModelCosts
from diffusion.training.components import build_dataset, build_loader

MAX_SAMPLES = 512
"""Samples for timing the stages."""
MAX_BATCH = 64
"""Largest batch for timing, as a device's share of a global batch for hundreds of devices."""

Result = TypeVar('Result')


@dataclass
class BenchStage:
    """CPU seconds and input bytes of one stage of making samples."""

    seconds: float = 0.0
    bytes: int = 0


class Clock:
    """Measures stages by name and sums them up."""

    def __init__(self) -> None:
        self.stages: dict[str, BenchStage] = {}

    def time(self, name: str, bytes_in: int, call: Callable[[], Result]) -> Result:
        begin = time.process_time()
        result = call()
        stage = self.stages.setdefault(name, BenchStage())
        stage.seconds += time.process_time() - begin
        stage.bytes += bytes_in
        return result

    @property
    def seconds(self) -> float:
        return sum(stage.seconds for stage in self.stages.values())


def bench(
    recipe: Recipe,
    names: Sequence[str] = (),
    *,
    workers: Sequence[int] | None = None,
    batches: int = 20,
    gpu: str = 'h100-sxm',
    gpus_file: Path | None = None,
    mfu: float = 0.4,
) -> None:
    """Time the training streams of a recipe and print tables.

    Args:
        recipe: A training recipe.
        names: Names of streams; empty for all.
        workers: Numbers of workers to try; None for 0, 1, 2, 4 and so on up to the number of cores.
        batches: Batches to time for each number of workers.
        gpu: Name of the GPU to feed, from planning/gpus.yaml.
        gpus_file: File with more GPUs, in the format of planning/gpus.yaml.
        mfu: Fraction of the GPU's peak FLOP/s that training reaches.

    Raises:
        UserError: There are no such streams, or no such GPU.
    """
    fed = find_gpu(gpu, load_gpus(gpus_file))
    streams = select(recipe, names).get('streams')
    if not streams:
        raise UserError("bench: it times what trains; name one of the recipe's `streams`")
    recipe = replace(recipe, streams=streams, global_batch=math.gcd(recipe.global_batch, MAX_BATCH))
    a_core, needed = _print_stages(recipe, fed, mfu)
    best = _print_loader_rates(recipe, _worker_counts() if workers is None else workers, batches)
    print(f'\nA core makes {a_core:.0f} samples/s; this machine {best:.0f}.')
    if isinstance(needed, str):
        print(f'What a GPU needs is not known: {needed}')
        return
    cores = needed / a_core
    print(
        f'One {fed.name} at {mfu:.0%} of its peak trains on {needed:.0f} samples/s, less if it encodes images or '
        f'captions too.\nThat takes {cores:.1f} cores a GPU, {cores * fed.gpus_per_node:.0f} for the '
        f'{fed.gpus_per_node} of a node, besides one for each GPU; this machine feeds {best / needed:.2g} of them.'
    )


def _print_stages(recipe: Recipe, gpu: GPU, mfu: float) -> tuple[float, float | str]:
    """Print the stages; return samples per second of a core, and those that the GPU needs or why they are unknown."""
    dataset = build_dataset(
        recipe,
        streams=recipe.streams,
        component=recipe.dataset,
        batch_size=recipe.global_batch,
        shuffle=False,
    )
    indices = range(0, dataset.num_samples, -(-dataset.num_samples // MAX_SAMPLES))
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as in a worker
    make_samples(dataset, indices, recipe.global_batch)  # fetches and checks shards
    clock = make_samples(dataset, indices, recipe.global_batch)
    torch.set_num_threads(threads)
    count = len(indices)
    print(f'One process, {count} samples, batches of {recipe.global_batch}:\n')
    print('| stage | ms of CPU a sample | share, % | samples/s | MB/s in |')
    print('|---|---|---|---|---|')
    first = next(iter(clock.stages.values()))
    for name, stage in {**clock.stages, 'all of it': BenchStage(clock.seconds, first.bytes)}.items():
        seconds = max(stage.seconds, 1e-9)
        print(f'| {name} | {stage.seconds / count * 1e3:.3f} | {100 * stage.seconds / clock.seconds:.0f} ', end='')
        print(f'| {count / seconds:.0f} | {stage.bytes / 1e6 / seconds:.0f} |')
    return count / clock.seconds, demand(recipe, dataset, gpu, mfu)


def make_samples(dataset: BucketedDataset, indices: Sequence[int], batch: int) -> Clock:
    """Make samples and batches as the dataset and the loader do, with center crops and first captions; time it."""
    clock, items = Clock(), []
    for number, index in enumerate(indices):
        items.append(_make_sample(dataset, index, clock))
        whole_shape = number + 1 == len(indices) or dataset.bucket_of(indices[number + 1]) != dataset.bucket_of(index)
        if len(items) == batch or whole_shape:
            size = sum(tensor.nbytes for item in items for tensor in item.values())
            clock.time('collate', size, lambda items=items: dataset.image_block.collate(items))
            items = []
    return clock


def _make_sample(dataset: BucketedDataset, index: int, clock: Clock) -> dict[str, torch.Tensor]:
    shard, row = dataset.spanner[index]
    size = len(dataset.shards[shard].get_sample_data(row))  # type: ignore[attr-defined]
    sample: Mapping[str, Any] = clock.time('read', size, lambda: dataset.get_item(index))
    item = {}
    if 'image' in sample:
        encoded, shape = sample['image'], dataset.bucket_of(index).shape
        cut = clock.time('decode', len(encoded), lambda: decode_crop(encoded, shape, Crop()))
        item[batch_keys.IMAGE] = clock.time(
            'resize',
            cut.nbytes,
            lambda: planes(resize(cut, shape), dataset.image_block.place((3, shape.height, shape.width))),
        )
    for name in (batch_keys.LATENT_MOMENTS, batch_keys.TEXT_EMBEDS):
        if name in sample:
            values = sample[name]
            item[name] = clock.time('to tensor', values.nbytes, lambda values=values: torch.from_numpy(values.copy()))
    tokenizers = getattr(dataset, 'tokenizers', [])
    if tokenizers:
        caption = captions_of(dict(sample), '')[0]
        item[batch_keys.INPUT_IDS] = clock.time('tokenize', len(caption), lambda: tokenize(tokenizers, [caption])[0])
    return item


def _print_loader_rates(recipe: Recipe, workers: Sequence[int], batches: int) -> float:
    """Print the loader's samples per second for each number of workers, and return the largest."""
    print(f'\nThe loader, by the clock, {batches} batches of {recipe.global_batch} each:\n')
    print('| workers | samples/s | a worker |')
    print('|---|---|---|')
    best = 0.0
    for count in workers:
        rate = loader_rate(recipe, count, batches)
        best = max(best, rate)
        print(f'| {count} | {rate:.0f} | {rate / max(1, count):.0f} |', flush=True)
    return best


def loader_rate(recipe: Recipe, workers: int, batches: int) -> float:
    """Return samples per second of a loader with this many workers, over as many epochs as it takes."""
    gc.collect()  # Streaming refuses two live datasets on one folder
    loader = build_loader(replace(recipe, loader=replace(recipe.loader, num_workers=workers)))
    served = itertools.chain.from_iterable(itertools.repeat(loader))
    # Batches that the workers have prefetched are served before the clock starts.
    for _ in range((recipe.loader.prefetch_factor or 2) * workers + 1):
        next(served)
    begin = time.perf_counter()
    samples = sum(len(batch[batch_keys.SAMPLE_ID]) for batch in itertools.islice(served, batches))
    return samples / (time.perf_counter() - begin)


def demand(recipe: Recipe, dataset: BucketedDataset, gpu: GPU, mfu: float) -> float | str:
    """Return samples per second that a GPU trains on, a backward pass being two forward passes; or why unknown."""
    try:
        model = ModelCosts(recipe.model, recipe.imports)
        model.count([bucket.shape for bucket in dataset.buckets])
    except (UserError, CountingFailed) as error:
        return str(error)
    counts = dataset.samples_per_stream.tolist()
    flops = [3 * model.trained_flops(bucket.shape) for bucket in dataset.buckets]
    mean = sum(count * each for count, each in zip(counts, flops, strict=True)) / sum(counts)
    return mfu * gpu.peak_flops('bf16') / mean


def _worker_counts() -> list[int]:
    cores = len(os.sched_getaffinity(0)) if hasattr(os, 'sched_getaffinity') else os.cpu_count() or 1
    return [0, *(2**power for power in range(cores.bit_length()))]
