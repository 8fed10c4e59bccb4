"""Command `diffusion init`: write a recipe that fits prepared images and the GPUs of this machine."""

import json
import os
import textwrap
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any

from diffusion.compatibility.nvml import load_nvml
from diffusion.config.declarations import AtLeast
from diffusion.config.image_shapes import BUCKETS, read_buckets
from diffusion.config.load import load
from diffusion.config.options import Option
from diffusion.config.recipe import Recipe
from diffusion.config.yaml_files import SHIPPED
from diffusion.errors import UserError
from diffusion.launch.rank_discovery import count_gpus
from diffusion.planning import amounts
from diffusion.planning.gpus import GPU, find_gpu, load_gpus
from diffusion.planning.memory import GIB
from diffusion.planning.plan import PhasePlan, load_phases, make_plan
from diffusion.planning.throughput import Assumptions
from diffusion.prepare.source import IMAGE_SUFFIXES
from diffusion.storage import mds

SMALL = 'small'
FINE_TUNING_IMAGES = 2_000
"""Minimum number of images to fine-tune all weights. A model would memorize fewer images, so train a LoRA then."""
FROM_SCRATCH_IMAGES = 1_000_000
"""Minimum number of images to train a large model from scratch, as many as in PRX's published baseline."""
BATCHES_PER_EPOCH = 8
"""Minimum number of batches per epoch: with few images, many small steps train better than a few large ones."""
EPOCHS = 100
"""Maximum number of times that an image is seen, as in diffusers' example of a LoRA (833 images, 100 epochs)."""
SMALL_EPOCHS = 1_000
"""Maximum number of times that an image is seen by the small model, which learns everything from these images."""


@dataclass(frozen=True)
class BaseRecipe:
    """Shipped recipe to extend, and the values that fit the data and the GPUs."""

    name: str
    reason: str
    size: int
    """Side in pixels of the prepared images to use, at least the recipe's `resolution`."""
    global_batch: int
    batches: int
    settings: Recipe
    """The loaded shipped recipe, from which values such as the resolution are read."""
    microbatch: int | None = None
    """Largest microbatch that fits in memory; None without a GPU or for the small recipe."""
    plan: PhasePlan | None = None
    """Plan of a run with these values; None if `microbatch` is None."""
    precision: str | None = None
    """Precision to set, for a GPU before Ampere, which has no bfloat16; None keeps the recipe's."""

    @property
    def resolution(self) -> int:
        """Side in pixels of the images that the model is trained on."""
        return next(int(stream.resolution) for stream in self.settings.streams.values())

    @property
    def longest(self) -> int:
        """Number of batches in the shipped recipe; the new recipe never has more."""
        return int(str(self.settings.trainer['max_duration']).removesuffix('ba'))


def choose_recipe(images: Mapping[int, int], gpu: GPU | None, gpus: int) -> BaseRecipe:
    """Return the recipe for prepared images: one that starts from published weights if possible.

    Args:
        images: Number of images of each prepared size in pixels.
        gpu: GPU model of the machine; None without a GPU.
        gpus: Number of GPUs.

    Raises:
        UserError: There are fewer images than GPUs, or all images are smaller than 64 px.
    """
    for names, size, reason in _candidates(images, has_gpu=gpu is not None):
        if gpu is not None and images[size] < gpus:
            raise UserError(f'--gpus: {gpus} GPUs for {images[size]} images; pass --gpus 1')
        fitting = [found for name in names if (found := _fitted(name, reason, size, images[size], gpu, gpus))]
        if fitting:
            return min(fitting, key=lambda each: 0.0 if each.plan is None else each.plan.expected.hours)
    raise UserError(
        f'init: the largest prepared size is {max(images)} px; prepare the images with --sizes 64 or larger'
    )


def _candidates(images: Mapping[int, int], *, has_gpu: bool) -> list[tuple[list[str], int, str]]:
    """Return choices for the images, best first, as (names of equally suitable recipes, image size, reason)."""
    large, medium, any_size = (min((size for size in images if size >= side), default=0) for side in (512, 256, 64))
    found, count = [], images.get(large or medium, 0)
    if not has_gpu:
        obstacle = 'there is no GPU'
    elif large:
        obstacle = 'fine-tuning all of the published weights needs more memory than the GPU has'
        if count >= FINE_TUNING_IMAGES:
            found.append(
                (['finetune'], large, f'{count:,} images are enough to fine-tune all of the published weights')
            )
        else:
            obstacle = (
                f'{count:,} images are too few to fine-tune all of the published weights ({FINE_TUNING_IMAGES:,})'
            )
        found.append((['lora'], large, f'a LoRA, since {obstacle}'))
    elif count >= FROM_SCRATCH_IMAGES:
        obstacle = 'training a large model from scratch needs more memory than the GPU has'
        why = f'{count:,} images of {medium} px are enough to train from scratch, and this recipe takes the fewest days'
        found.append((['phase1', 'prx_256'], medium, why))
    else:
        obstacle = 'the published weights need images of at least 512 px (diffusion prepare ... --sizes 512)'
    if any_size:
        found.append(([SMALL], any_size, f'a small model from scratch, since {obstacle}'))
    return found


def _fitted(name: str, reason: str, size: int, count: int, gpu: GPU | None, gpus: int) -> BaseRecipe | None:
    """Return a recipe with the batch, duration and microbatch for `count` images; None if it exceeds GPU memory."""
    path = f'{SHIPPED}{name}'
    settings = load(path, allow_missing=True)
    # Allow the small model one batch per epoch: from scratch, the gradients of small batches are too noisy.
    least, epochs = (1, SMALL_EPOCHS) if name == SMALL else (BATCHES_PER_EPOCH, EPOCHS)
    batch = _global_batch(min(settings.global_batch, count // least), gpus if gpu is not None else 1)
    base = BaseRecipe(name, reason, size, batch, 1, settings)
    batches = max(1, min(base.longest, epochs * count // batch))
    base = replace(base, batches=batches)
    if gpu is None or name == SMALL:
        return base
    precision = None if 'bf16' in gpu.peak_tflops else 'amp_fp16'
    words = [f'global_batch={batch}', f'trainer.max_duration={batches}ba']
    words += [] if precision is None else [f'trainer.precision={precision}']

    def planned(microbatch: int) -> PhasePlan:
        phases = load_phases([path], [*words, f'device_train_microbatch_size={microbatch}'], samples=[count])
        return make_plan(phases, Assumptions(gpu, gpus), gpus={}).phases[0]

    microbatch = planned(1).fit[0].largest_microbatch
    if not microbatch:
        return None
    return replace(base, microbatch=microbatch, plan=planned(microbatch), precision=precision)


def _global_batch(limit: int, gpus: int) -> int:
    """Return the largest global batch up to `limit` with a power of two images per GPU; at least 1 image per GPU."""
    per_gpu = 1
    while 2 * per_gpu * gpus <= limit:
        per_gpu *= 2
    return per_gpu * gpus


def memory_gib(plan: PhasePlan) -> float:
    """Return the GPU memory in GiB that a plan needs, including allowances for CUDA and fragmentation."""
    return plan.fit[0].memory.reserved / GIB


STREAM = 'photos'
PROMPTS = 8
LONGEST_PROMPT = 300
"""Maximum length in characters of a caption that becomes a prompt, since prompts are titles of sample images."""
SMALL_MINUTES, SMALL_IMAGES = 10, 51_200
"""On two CPU cores, diffusion:small trains on SMALL_IMAGES in SMALL_MINUTES minutes (0.5 CPU seconds per batch)."""
CHECKS = 4
"""Number of validations (also of image grids and of saves) in a run that is shorter than the shipped recipe."""


@dataclass(frozen=True)
class InitOptions:
    """Options of `diffusion init`."""

    data: Annotated[Path, Option('DIR', positional=True, files=True)]
    """Folder that `diffusion prepare` wrote, such as data/photos."""
    out: Path
    """YAML file to write."""
    gpu: str | None = None
    """Name of the GPU model, such as a100-80gb (default: this machine's)."""
    gpus: Annotated[int | None, AtLeast(0)] = None
    """Number of GPUs; 0 for CPU cores alone (default: this machine's)."""


@dataclass(frozen=True)
class PreparedImages:
    """Images of one size that `diffusion prepare` wrote."""

    folder: Path
    count: int
    aspects: bool

    def stream(self, resolution: int) -> str:
        """Return the YAML of a recipe's stream that reads the images at `resolution`."""
        aspects = ', aspects: true' if self.aspects else ''
        return f'{{local: {json.dumps(str(self.folder))}, resolution: {resolution}{aspects}}}'


def run_init(options: InitOptions) -> int:
    """Run `diffusion init`: write the recipe, and print a description of it and the next commands.

    Raises:
        UserError: The data is not prepared or does not suit any recipe, an option is wrong, or the file exists.
    """
    if options.out.suffix not in ('.yaml', '.yml'):
        raise UserError(f'--out: {options.out} is not a YAML file; give a name such as {options.out}.yaml')
    if options.out.exists():
        raise UserError(f'--out: {options.out} exists; give another name, or remove it')
    gpu, gpus = machine(options.gpu, options.gpus)
    data, images = read_images(options.data, has_gpu=gpu is not None)
    base = choose_recipe({size: each.count for size, each in images.items()}, gpu, gpus)
    if images[base.size].aspects and base.resolution != base.size:
        side = base.resolution
        raise UserError(
            f'init: {images[base.size].folder} has aspect-ratio buckets, but '
            f'diffusion:{base.name} trains on {side} px; '
            f'prepare the images with --sizes {side} and without --aspects'
        )
    held_out = sizes_in(data.with_name(f'{data.name}-held-out')).get(base.size)
    text = recipe_text(options.out, images[base.size], held_out, base, gpu, gpus)
    try:
        with options.out.open('x', encoding='utf-8') as file:
            file.write(text)
    except FileNotFoundError:
        raise UserError(f'--out: the folder {options.out.parent} does not exist; create it') from None
    print(text[: text.index('\n\n')])
    return 0


def machine(name: str | None, count: int | None) -> tuple[GPU | None, int]:
    """Return the GPU model and number of GPUs in the options, by default this machine's; (None, 0) without GPUs."""
    found = count_gpus(os.environ)
    gpus = (found or int(name is not None)) if count is None else count
    if not gpus:
        return None, 0
    if name is None and not found:
        raise UserError(
            '--gpus: this machine has no GPU; name the model for which the recipe is, such as --gpu h100-sxm'
        )
    return (this_gpu() if name is None else find_gpu(name, load_gpus(), or_file=False)), gpus


def this_gpu() -> GPU:
    """Return the known GPU model that is closest to the first GPU of this machine."""
    nvml = load_nvml()
    if nvml is None:
        raise UserError('--gpu: NVML does not say which GPU this machine has; name it, such as --gpu h100-sxm')
    handle = nvml.nvmlDeviceGetHandleByIndex(0)
    name: Any = nvml.nvmlDeviceGetName(handle)
    memory = nvml.nvmlDeviceGetMemoryInfo(handle).total / 2**30
    return closest_gpu(name.decode() if isinstance(name, bytes) else name, memory, load_gpus().values())


def closest_gpu(name: str, memory_gib: float, gpus: Iterable[GPU]) -> GPU:
    """Return the GPU model with at most this memory that best matches `name`, such as NVIDIA A100-SXM4-80GB."""
    words = name.lower().replace('-', ' ').split()
    smaller = [gpu for gpu in gpus if gpu.memory_gib <= memory_gib + 1]
    if not smaller:
        raise UserError(
            f'--gpu: {name} has {memory_gib:.0f} GiB of memory, less than all GPUs in gpus.yaml; use --gpus 0'
        )

    def similarity(gpu: GPU) -> tuple[bool, int, float]:
        kind, *variant = gpu.name.split('-')
        return kind in words, sum(word in words for word in variant), gpu.memory_gib

    return max(smaller, key=similarity)


def read_images(data: Path, *, has_gpu: bool) -> tuple[Path, dict[int, PreparedImages]]:
    """Return the dataset's folder and its images by size in pixels; `data` is this folder or its subfolder of a size.

    Raises:
        UserError: The folder does not exist or has no prepared images; the message explains how to prepare images.
    """
    if not data.is_dir():
        raise UserError(f'init: {data} is not a folder of this machine; give the folder that `diffusion prepare` wrote')
    if images := sizes_in(data):
        return data, images
    if data.parent.is_dir() and (each := sizes_in(data.parent)) and any(one.folder == data for one in each.values()):
        return data.parent, each
    if not (count := sum(1 for path in data.rglob('*') if path.suffix.lower()[1:] in IMAGE_SUFFIXES)):
        raise UserError(f'init: {data} has neither prepared images nor image files; give the folder of your images')
    held_out = f' --hold-out {min(500, count // 8)}' if count >= 16 else ''
    out, size = Path('data') / data.resolve().name, 512 if has_gpu else 64
    raise UserError(
        f'init: the {count:,} images in {data} are not prepared. First run:\n'
        f'  diffusion prepare folder {data} --out {out} --sizes {size}{held_out}\n  diffusion init {out} --out ...'
    )


def sizes_in(data: Path) -> dict[int, PreparedImages]:
    """Return the images that `diffusion prepare` wrote to a folder, by size in pixels, without empty sizes."""
    found = {}
    for folder in sorted(data.glob('*px')):
        size = folder.name.removesuffix('px')
        aspects = (folder / BUCKETS).is_file()
        if size.isdecimal() and (count := sum(_counts(folder, aspects=aspects).values())):
            found[int(size)] = PreparedImages(folder, count, aspects)
    return found


def _counts(folder: Path, *, aspects: bool) -> Mapping[Path, int]:
    """Return the number of samples in each folder of shards: one folder, or one per image shape if `aspects`."""
    if aspects:
        return {folder / str(shape): count for shape, count in read_buckets(folder).items()}
    try:
        shards = json.loads((folder / mds.INDEX).read_text(encoding='utf-8'))['shards']
        return {folder: sum(shard['samples'] for shard in shards)}
    except FileNotFoundError:
        return {}
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(f'init: {folder / mds.INDEX} is damaged ({error}); prepare the images again') from error


def prompts_in(images: PreparedImages) -> list[str]:
    """Return up to PROMPTS prompts: different short captions without `$`, from the first samples."""
    counts = Counter(_counts(images.folder, aspects=images.aspects))
    samples = mds.first_samples(counts.most_common(1)[0][0], 4 * PROMPTS)
    captions = dict.fromkeys(str(text).strip() for sample in samples for text in (sample.get('captions') or [])[:1])
    # OmegaConf would replace ${...}, and ??? is a missing value.
    return [text for text in captions if 0 < len(text) <= LONGEST_PROMPT and '$' not in text and text != '???'][
        :PROMPTS
    ]


def recipe_text(
    out: Path, images: PreparedImages, held_out: PreparedImages | None, base: BaseRecipe, gpu: GPU | None, gpus: int
) -> str:
    """Return the recipe as YAML with comments."""
    return '\n'.join([*_header(out, images, base, gpu, gpus), '', *_body(out, images, held_out, base), ''])


def _header(out: Path, images: PreparedImages, base: BaseRecipe, gpu: GPU | None, gpus: int) -> Iterator[str]:
    """Yield the comment lines at the beginning: reason for the recipe, planned time and memory, and next commands."""
    prompt = json.dumps(next(iter(prompts_in(images)), 'a photograph'), ensure_ascii=False)
    yield f'# {images.count:,} images in {images.folder}, for diffusion:{base.name}. Written by `diffusion init`.'
    yield '#'
    yield from textwrap.wrap(base.reason, 110, initial_indent='# Base:     ', subsequent_indent='#           ')
    if base.plan is not None and gpu is not None:
        time, need = amounts.run_time(base.plan.expected.hours), memory_gib(base.plan)
        yield f'# Plan:     {time} on {gpus} x {gpu.name}, with {need:.0f} of {gpu.memory_gib:.0f} GiB of GPU memory'
    elif base.name == SMALL:
        minutes = SMALL_MINUTES * base.batches * base.global_batch / SMALL_IMAGES
        yield f'# Plan:     about {minutes:.0f} minutes on two CPU cores'
    commands = [
        f'diffusion check {out} --quiet',
        f'diffusion data look {out} --out look.png',
        f'diffusion train {out}',
        f'diffusion generate runs/{out.stem} {prompt} --out pictures',
        f'diffusion export runs/{out.stem} --out {out.stem}-model',
    ]
    for label, command in zip(['Next:', *[''] * 4], commands, strict=True):
        yield f'# {label:9} {command}'


def _body(out: Path, images: PreparedImages, held_out: PreparedImages | None, base: BaseRecipe) -> Iterator[str]:
    """Yield the lines with the settings of the recipe."""
    settings = base.settings
    yield f'extends: diffusion:{base.name}\nname: {out.stem}\n'
    steps = images.count / base.global_batch
    yield f'global_batch: {base.global_batch}  # images per step: each image is seen once in {steps:,.1f} steps'
    if base.microbatch is not None:
        yield f'device_train_microbatch_size: {base.microbatch}  # images at a time on a GPU: as many as fit in memory'
    for key, found in (('streams', images), ('eval_streams', held_out)):
        yield f'\n{key}:' + ('' if found or getattr(settings, key) else ' {}')
        yield from (f'  {name}: false' for name in getattr(settings, key) if name != STREAM or not found)
        if found:
            yield f'  {STREAM}: {found.stream(base.resolution)}'
        else:
            yield '  # No images are held out: prepare with --hold-out 8 for a loss on images that were not trained on.'
    yield from _duration(images, base)


def _duration(images: PreparedImages, base: BaseRecipe) -> Iterator[str]:
    """Yield the lines with the duration, the settings that depend on it, and the prompts of the sample images."""
    interval = max(1, base.batches // CHECKS)
    shortened = base.batches < base.longest
    epochs = base.batches * base.global_batch / images.count
    if prompts := prompts_in(images):
        yield '\ncallbacks:\n  image_grid:'
        if shortened:
            yield f'    every: {interval}ba'
        yield '    prompts:  # captions of your images'
        yield from (f'      - {json.dumps(prompt, ensure_ascii=False)}' for prompt in prompts)
    if shortened and base.settings.scheduler is not None:
        warmup = min(base.batches // 10, int(str(base.settings.scheduler.kwargs['t_warmup']).removesuffix('ba')))
        yield f'\nscheduler:\n  t_warmup: {warmup}ba'
        if 'ema' in base.settings.algorithms:
            yield f'algorithms:\n  ema:\n    ema_start: {base.batches // 2}ba'
    yield f'\ntrainer:\n  max_duration: {base.batches}ba  # each image is seen about {epochs:,.0f} times'
    if shortened:
        yield f'  eval_interval: {interval}ba\n  save_interval: {interval}ba'
    if base.precision is not None:
        yield f'  precision: {base.precision}  # this GPU has no bfloat16'
