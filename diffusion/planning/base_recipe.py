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
"""Number of images from which all weights are fine-tuned; fewer are learned by heart, while a LoRA changes less."""
FROM_SCRATCH_IMAGES = 1_000_000
"""Number of images from which a large model is trained from scratch: that of PRX's published baseline."""
BATCHES_PER_EPOCH = 8
"""An epoch has at least this many batches, since few images need many small steps rather than a few large ones."""
EPOCHS = 100
"""Maximum number of times that an image is seen, as in diffusers' example of a LoRA (833 images, 100 epochs)."""
SMALL_EPOCHS = 1_000
"""The same for a small model from scratch, which has to learn everything from these images."""


@dataclass(frozen=True)
class BaseRecipe:
    """Shipped recipe to extend, and the values that fit the data and the GPUs."""

    name: str
    reason: str
    size: int
    """Resolution of the prepared images to train on, in pixels."""
    global_batch: int
    batches: int
    settings: Recipe
    """The shipped recipe itself, for its values."""
    microbatch: int | None = None
    """Largest microbatch that fits in memory; None without a GPU."""
    plan: PhasePlan | None = None
    """Plan with these values; None without a GPU."""
    precision: str | None = None
    """Precision to set, for a GPU before Ampere, which has no bfloat16; None keeps the recipe's."""

    @property
    def resolution(self) -> int:
        """Side in pixels of the images that the model is trained on."""
        return next(int(stream.resolution) for stream in self.settings.streams.values())

    @property
    def longest(self) -> int:
        """Number of batches of the shipped recipe, which is the maximum."""
        return int(str(self.settings.trainer['max_duration']).removesuffix('ba'))


def choose_recipe(images: Mapping[int, int], gpu: GPU | None, gpus: int) -> BaseRecipe:
    """Return the recipe for prepared images: one that starts from published weights if possible.

    Args:
        images: Number of images of each prepared size in pixels.
        gpu: GPU model of the machine; None without a GPU.
        gpus: Number of GPUs.

    Raises:
        UserError: There are fewer images than GPUs, or all images are smaller than the smallest model's.
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
    """Return the recipes that suit the images, the best first: names of alternatives, size of images, and reason."""
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
    """Return a recipe with the batch, duration and microbatch for a number of images; None if it does not fit."""
    path = f'{SHIPPED}{name}'
    settings = load(path, allow_missing=True)
    # From scratch, noise on the gradients of a small batch costs more than it helps.
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
    """Return the largest batch up to a limit that is a power of two per GPU; at least one image per GPU."""
    per_gpu = 1
    while 2 * per_gpu * gpus <= limit:
        per_gpu *= 2
    return per_gpu * gpus


def memory_gib(plan: PhasePlan) -> float:
    """Return the GPU memory that a plan needs, with allowance, in GiB."""
    return plan.fit[0].memory.reserved / GIB
