"""A recipe as an amount of work: number and shapes of images, and FLOPs for each."""

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from diffusion.config.image_shapes import Shape, read_buckets
from diffusion.config.performance_preset import effective_parts
from diffusion.config.recipe import Recipe, SpeedConfig, StreamConfig
from diffusion.config.schema import MISSING
from diffusion.errors import UserError
from diffusion.planning import published_runs
from diffusion.planning.model_costs import ModelCosts, Precision

Encoding = Literal['pictures', 'latents', 'latents+text']
ENCODINGS: tuple[Encoding, ...] = ('pictures', 'latents', 'latents+text')
"""Form in which samples are stored: not encoded; encoded by the VAE; encoded by VAE and text encoder."""
BACKWARD = 2
"""FLOPs of the backward pass, in forward passes."""


@dataclass(frozen=True)
class Phase:
    """A recipe, and the work that follows from it."""

    recipe: Recipe
    model: ModelCosts
    shapes: Mapping[Shape, float]
    """Share of the images by shape; sums to 1."""
    batches: int
    samples: int | None
    """Number of different images, if it is known."""
    stored_bytes: float | None
    """Bytes per image with its captions in the shards, if these are local."""
    encoding: Encoding
    notes: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return self.recipe.name

    @property
    def images(self) -> int:
        """Number of images that the run sees, repeated ones counted each time."""
        return self.batches * self.recipe.global_batch

    @property
    def different_images(self) -> int:
        return self.images if self.samples is None else min(self.samples, self.images)

    @property
    def autocast(self) -> str:
        """The precision that the GPU computes in: bf16, fp16 or fp32."""
        return _autocast(self.recipe)

    def speed(self, strategy: str | None = None) -> SpeedConfig:
        """The parts of `speed` as a run on GPUs decides them; None is the recipe's own strategy."""
        return _speed(self.recipe, strategy)

    def precision(self, strategy: str | None = None) -> Precision:
        return _precision(self.recipe, strategy)

    @property
    def recomputes(self) -> bool:
        return self.recipe.parallelism.activation_checkpointing

    # -- FLOPs an image, the mean over shapes --

    @cached_property
    def forward_flops(self) -> float:
        """FLOPs of the forward pass of all that is trained."""
        return self._mean(self.model.trained_flops)

    @property
    def training_flops(self) -> float:
        """FLOPs of the forward and backward pass of all that is trained, without recomputation."""
        return (1 + BACKWARD) * self.forward_flops

    @property
    def recomputed_flops(self) -> float:
        return self.forward_flops if self.recomputes else 0.0

    @cached_property
    def image_encoder_flops(self) -> float:
        return self._mean(self.model.image_encoder_flops)

    @cached_property
    def text_encoder_flops(self) -> float:
        return 0.0 if self.model.trains_text else float(self.model.text_encoder_flops)

    def encoder_flops(self, encoding: Encoding) -> float:
        """FLOPs of frozen encoders that run while training."""
        image = self.image_encoder_flops if encoding == 'pictures' else 0.0
        text = 0.0 if encoding == 'latents+text' else self.text_encoder_flops
        return image + text

    def flops(self, encoding: Encoding | None = None) -> float:
        """All FLOPs per image while training."""
        return self.training_flops + self.encoder_flops(encoding or self.encoding)

    def precompute_flops(self, encoding: Encoding) -> float:
        """FLOPs of encoding an image beforehand."""
        return self.encoder_flops('pictures') - self.encoder_flops(encoding)

    # -- bytes --

    @cached_property
    def pixels(self) -> float:
        return self._mean(lambda shape: shape.pixels)

    @cached_property
    def latent_elements(self) -> float:
        return self._mean(self.model.latent_elements)

    @property
    def largest_shape(self) -> Shape:
        return _largest(self.shapes)

    def _mean(self, value: Any) -> float:
        return sum(share * value(shape) for shape, share in self.shapes.items())


def phase_of(recipe: Recipe, *, samples: int | None = None, encoding: Encoding | None = None) -> Phase:
    """The work that a recipe asks for.

    Args:
        recipe: One that trains; `???` may stand where the data is.
        samples: Number of different images; looked up if the shards are local.
        encoding: What is stored, instead of what the recipe says.

    Raises:
        UserError: It says too little, or its model cannot be built.
        CountingFailed: Its model is not one that ships, and could not be counted.
    """
    if recipe.task != 'train':
        raise UserError(f'task: the plan is for training, not {recipe.task}; leave it out')
    if not isinstance(recipe.global_batch, int):
        raise UserError('global_batch: is still ???; give it, such as global_batch=2048')
    model = ModelCosts(recipe.model, recipe.imports)
    notes = list(model.notes)
    shapes, known, stored = _data(recipe, notes)
    samples = known if samples is None else samples
    batches = _batches(recipe.trainer.get('max_duration'), recipe.global_batch, recipe.loader.epoch_size or samples)
    # All that a plan asks for, under every strategy that it compares, so that it is counted in one process.
    largest, strategies = _largest(shapes), (None, 'ddp', 'fsdp2')
    model.count(list(shapes), [(largest, _precision(recipe, strategy)) for strategy in strategies])
    own = _encoding(recipe, model)
    if encoding == 'latents+text' and model.trains_text:
        raise UserError('--stored latents+text: this recipe trains its text encoder; store latents')
    if encoding not in (None, 'pictures') and not model.is_latent_diffusion:
        raise UserError(f'--stored {encoding}: {recipe.model.name} trains on pictures')
    if samples is None:
        images = batches * recipe.global_batch
        samples = published_runs.published_samples(list(shapes), images, model.trained_parameters)
        if samples is not None:
            notes.append(
                f'counted with {samples / 1e6:,.0f} M different pictures, as published; --samples says otherwise'
            )
    return Phase(
        recipe=recipe,
        model=model,
        shapes=shapes,
        batches=batches,
        samples=samples,
        stored_bytes=stored if encoding in (None, own) else None,
        encoding=encoding or own,
        notes=tuple(notes),
    )


def _autocast(recipe: Recipe) -> str:
    precision = str(recipe.trainer.get('precision', 'amp_fp16')).lower()
    return {'amp_bf16': 'bf16', 'amp_fp16': 'fp16', 'amp_fp8': 'bf16'}.get(precision, 'fp32')


def _speed(recipe: Recipe, strategy: str | None) -> SpeedConfig:
    return effective_parts(recipe.speed, on_gpu=True, strategy=strategy or recipe.parallelism.strategy)


def _precision(recipe: Recipe, strategy: str | None) -> Precision:
    """The settings of a run that change what is kept for the backward pass."""
    parts = _speed(recipe, strategy)
    if _autocast(recipe) == 'fp32':
        return 'float32+compile' if parts.compile else 'float32'
    if parts.compile:
        return 'half+compile'
    names = {component.name for component in recipe.algorithms.values()}
    narrow = {'low_precision_groupnorm', 'low_precision_layernorm'} <= names
    return 'half+low_precision_norms' if narrow or parts.low_precision_norms else 'half'


def _largest(shapes: Iterable[Shape]) -> Shape:
    return max(shapes, key=lambda shape: (shape.pixels, shape.aspect))


def _batches(duration: Any, batch: int, epoch: int | None) -> int:
    where = 'trainer.max_duration'
    if duration is None or duration == MISSING:
        raise UserError(f'{where}: is missing; say how long to train, such as 550000ba')
    match = re.fullmatch(r'(\d+(?:\.\d+)?)(ba|ep|sp)', str(duration))
    if match is None:
        raise UserError(f'{where}: {duration!r} says no number of batches; give batches (550000ba), epochs or samples')
    amount, unit = float(match[1]), match[2]
    if unit == 'ep':
        if epoch is None:
            raise UserError(
                f'{where}: {duration} is as long as its epochs, and how many pictures one has is not known here; '
                'give --samples 790e6, or loader.epoch_size, or batches'
            )
        amount *= epoch // batch
    batches = int(amount if unit != 'sp' else amount / batch)
    if batches <= 0:
        raise UserError(f'{where}: {duration} is not a whole batch of {batch}; give at least one')
    return batches


def _encoding(recipe: Recipe, model: ModelCosts) -> Encoding:
    if recipe.dataset.name != 'latents':
        return 'pictures'
    stores_text = recipe.precompute.latents == 'image+text' and not model.trains_text
    return 'latents+text' if stores_text else 'latents'


def _data(recipe: Recipe, notes: list[str]) -> tuple[dict[Shape, float], int | None, float | None]:
    """Shares of shapes; number of different images and bytes of one, if all shards are local."""
    counts: dict[str, dict[Shape, int] | None] = {}
    sizes: list[float | None] = []
    for name, stream in recipe.streams.items():
        if not isinstance(stream.resolution, int):
            raise UserError(f'streams.{name}.resolution: is still ???; give the side in pixels, such as 256')
        counts[name], size = _local(stream)
        sizes.append(size)
        if counts[name] is None and stream.aspects:
            notes.append(f'streams.{name}: its shapes are not known here; counted as squares of {stream.resolution} px')
    total = sum(sum(found.values()) for found in counts.values() if found)
    known = None not in counts.values() and total > 0
    shares: dict[Shape, float] = {}
    for name, weight in _weights(recipe, counts, notes).items():
        inside = counts[name] or {recipe.streams[name].picture_shape: 1}
        for shape, count in inside.items():
            shares[shape] = shares.get(shape, 0.0) + weight * count / sum(inside.values())
    stored = sum(size for size in sizes if size is not None) / total if known and None not in sizes else None
    return shares, total if known else None, stored


def _weights(recipe: Recipe, counts: Mapping[str, Mapping[Shape, int] | None], notes: list[str]) -> dict[str, float]:
    """Share of the images by stream: as the recipe says, or by their sizes, or equal."""
    said = {name: stream.proportion or stream.choose for name, stream in recipe.streams.items()}
    sizes = {name: sum(found.values()) for name, found in counts.items() if found}
    if all(said.values()):
        given = {name: float(value or 0) for name, value in said.items()}
    elif len(sizes) == len(counts):
        given = {name: float(size) for name, size in sizes.items()}
    else:
        if len(counts) > 1:
            notes.append('streams: their sizes are not known here; counted as equal parts')
        given = dict.fromkeys(counts, 1.0)
    whole = sum(given.values())
    return {name: value / whole for name, value in given.items()}


def _local(stream: StreamConfig) -> tuple[dict[Shape, int] | None, float | None]:
    """Samples by shape and bytes in all of a stream whose shards are on this machine."""
    place = stream.remote if stream.remote is not None else stream.local
    if place is None or '://' in place or place == MISSING:
        return None, None
    folder = Path(place)
    try:
        if not stream.aspects:
            count, size = _index(folder)
            return {stream.picture_shape: count}, size
        shapes = list(read_buckets(folder))
        found = {shape: _index(folder / str(shape)) for shape in shapes}
    except (OSError, ValueError, KeyError, TypeError):
        return None, None  # not there yet, or not whole: `diffusion check` and the run itself say so
    return {shape: count for shape, (count, _) in found.items() if count}, sum(size for _, size in found.values())


def _index(folder: Path) -> tuple[int, float]:
    shards = json.loads((folder / 'index.json').read_text(encoding='utf-8'))['shards']
    size = sum((shard.get('zip_data') or shard['raw_data'])['bytes'] for shard in shards)
    return sum(shard['samples'] for shard in shards), float(size)
