"""Choice of the shipped recipe that suits a number of images and some GPUs, with its batch, microbatch and duration."""

from collections.abc import Mapping
from dataclasses import dataclass, replace

from diffusion.config.load import load
from diffusion.config.recipe import Recipe
from diffusion.config.yaml_files import SHIPPED
from diffusion.errors import UserError
from diffusion.planning.gpus import GPU
from diffusion.planning.memory import GIB
from diffusion.planning.plan import PhasePlan, load_phases, make_plan
from diffusion.planning.throughput import Assumptions

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
    """Return choices that suit the images, best first: names of equally suitable recipes, image size, and reason."""
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
