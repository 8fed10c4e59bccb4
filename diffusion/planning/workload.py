"""Amount of work in a recipe: number of batches, number and shapes of images, and FLOPs per image."""

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from diffusion.config.image_shapes import Shape, read_buckets
from diffusion.config.model_checks import routes_tokens, trains_on_pairs
from diffusion.config.recipe import Recipe, SpeedConfig, StreamConfig, effective_parts
from diffusion.config.schema import MISSING
from diffusion.errors import UserError
from diffusion.planning import published_runs
from diffusion.planning.model_costs import (
    AlignmentCosts,
    ModelCosts,
    PerceptualCosts,
    Precision,
    TokenRoute,
    alignment_of,
    newton_schulz_flops,
    perceptual_of,
    route_of,
)

Encoding = Literal['pictures', 'latents', 'latents+text']
ENCODINGS: tuple[Encoding, ...] = ('pictures', 'latents', 'latents+text')
"""Forms in which samples can be stored: as images, as VAE latents, or as VAE latents and text embeddings."""
MANY_EPOCHS = 1000
"""Number of times that a run may see an image before this causes a warning."""
BACKWARD = 2
"""FLOPs of the backward pass, as a multiple of the forward pass."""


@dataclass(frozen=True)
class Phase:
    """Training phase: a recipe and the work that it requires, in batches, images and FLOPs."""

    recipe: Recipe
    model: ModelCosts
    shapes: Mapping[Shape, float]
    """Fraction of the images by shape; the fractions sum to 1."""
    batches: int
    samples: int | None
    """Number of distinct images; None if unknown."""
    stored_bytes: float | None
    """Mean bytes per sample in the shards, including the caption; None unless the shards are local."""
    encoding: Encoding
    notes: tuple[str, ...] = ()
    route: TokenRoute | None = None
    """Blocks that some tokens skip (TREAD, SPRINT), or None."""
    alignment: AlignmentCosts | None = None
    perceptual: PerceptualCosts | None = None
    optimizer_flops: int = 0
    """FLOPs of Muon's orthogonalization per optimizer step, over all devices; 0 for other optimizers."""

    @property
    def name(self) -> str:
        return self.recipe.name

    @property
    def images(self) -> int:
        """Number of images that the run trains on, counting repetitions."""
        return self.batches * self.recipe.global_batch

    @property
    def distinct_images(self) -> int:
        """Number of distinct images that the run trains on; all `images` if the size of the dataset is unknown."""
        return self.images if self.samples is None else min(self.samples, self.images)

    @property
    def autocast(self) -> str:
        """Precision in which the GPU computes: bf16, fp16 or fp32."""
        # Composer's default precision on GPUs is amp_fp16. gpus.yaml has no FP8 peaks, so amp_fp8 is planned as bf16.
        precision = str(self.recipe.trainer.get('precision', 'amp_fp16')).lower()
        return {'amp_bf16': 'bf16', 'amp_fp16': 'fp16', 'amp_fp8': 'bf16'}.get(precision, 'fp32')

    def speed(self, strategy: str | None = None) -> SpeedConfig:
        """Return `speed` settings on GPUs. Those that `strategy` (default: the recipe's) does not support are off."""
        return effective_parts(self.recipe.speed, on_gpu=True, strategy=strategy or self.recipe.parallelism.strategy)

    def precision(self, strategy: str | None = None) -> Precision:
        """Return the settings that determine activation memory under a parallelism strategy (default: the recipe's)."""
        parts = self.speed(strategy)
        if self.autocast == 'fp32':
            return 'float32+compile' if parts.compile else 'float32'
        if parts.compile:
            return 'half+compile'
        names = {component.name for component in self.recipe.algorithms.values()}
        # Composer's algorithms and `speed.low_precision_norms` have the same effect on memory.
        low_precision = {'low_precision_groupnorm', 'low_precision_layernorm'} <= names
        return 'half+low_precision_norms' if low_precision or parts.low_precision_norms else 'half'

    @property
    def recomputes(self) -> bool:
        """True if model blocks are recomputed in the backward pass (activation checkpointing)."""
        return self.recipe.parallelism.activation_checkpointing

    @property
    def auxiliary_precision(self) -> Precision:
        """Precision of the networks that only losses use; the settings of `speed` do not apply to them."""
        return 'float32' if self.autocast == 'fp32' else 'half'

    @property
    def auxiliary_parameters(self) -> int:
        """Number of trained parameters that losses and SPRINT add to the model."""
        fusion = self.model.fusion_parameters if self._fuses else 0
        return fusion + (0 if self.alignment is None else self.alignment.facts['trained_parameters'])

    @property
    def _fuses(self) -> bool:
        return self.route is not None and self.route.fuses

    @property
    def trained_parameters(self) -> int:
        return self.model.trained_parameters + self.auxiliary_parameters

    @property
    def images_per_sample(self) -> int:
        """2 if samples are preference pairs, else 1; the planner's other image counts count each pair as one image."""
        return 1 + trains_on_pairs(self.recipe)

    @cached_property
    def forward_flops(self) -> float:
        """FLOPs per image of the forward pass of the trained modules, including the denoiser if a LoRA is trained."""
        fusion = self._mean(self.model.fusion_flops) if self._fuses else 0.0
        return fusion + self._mean(lambda shape: self.model.trained_flops(shape, self.route))

    @property
    def passes(self) -> int:
        """FLOPs of the denoiser's forward and backward passes, as a multiple of the forward pass."""
        # With a LoRA, the backward pass takes half the FLOPs: it skips the gradients of frozen weights. With pairs, the
        # reference has a forward pass too.
        return 1 + BACKWARD - bool(self.model.frozen_denoiser_parameters) + trains_on_pairs(self.recipe)

    @property
    def training_flops(self) -> float:
        """FLOPs per sample of the forward and backward passes of the trained modules, without recomputation."""
        return self.images_per_sample * self.passes * self.forward_flops

    def alignment_flops(self, encoding: Encoding | None = None) -> float:
        """Return representation alignment's FLOPs per image with samples in this form (default: the recipe's)."""
        alignment, route = self.alignment, self.route
        if alignment is None:
            return 0.0
        encodes = (encoding or self.encoding) == 'pictures'  # stored latents include the encoder's features
        return self._mean(lambda shape: alignment.training_flops(shape, route, encodes=encodes))

    @cached_property
    def perceptual_flops(self) -> float:
        return 0.0 if self.perceptual is None else self._mean(self.perceptual.training_flops)

    @property
    def recomputed_flops(self) -> float:
        """FLOPs per sample of recomputation in the backward pass: a forward pass of each image, or 0."""
        return self.images_per_sample * self.forward_flops if self.recomputes else 0.0

    @cached_property
    def image_encoder_flops(self) -> float:
        return self._mean(self.model.image_encoder_flops)

    @cached_property
    def text_encoder_flops(self) -> float:
        """FLOPs per image of the frozen text encoder; 0 if it is trained, since then `forward_flops` includes it."""
        return 0.0 if self.model.trains_text else float(self.model.text_encoder_flops)

    def encoder_flops(self, encoding: Encoding) -> float:
        """Return the FLOPs per image of the frozen encoders that run in training if samples are stored in this form."""
        image = self.image_encoder_flops if encoding == 'pictures' else 0.0
        text = 0.0 if encoding == 'latents+text' else self.text_encoder_flops
        return image + text

    def flops(self, encoding: Encoding | None = None) -> float:
        """Return the total FLOPs per image in training, as `flops_per_batch` of a model counts them.

        They include the encoders that run online with data in the form `encoding` (default: the recipe's) and the
        networks that only losses use, but neither recomputation nor the optimizer.
        """
        encoding = encoding or self.encoding
        online = self.encoder_flops(encoding) + self.alignment_flops(encoding)
        return self.training_flops + self.images_per_sample * online + self.perceptual_flops

    def executed_flops(self, encoding: Encoding | None = None) -> float:
        """Return the executed FLOPs per image: `flops`, recomputation, and an image's share of the optimizer step."""
        return self.flops(encoding) + self.recomputed_flops + self.optimizer_flops / self.recipe.global_batch

    def precompute_flops(self, encoding: Encoding) -> float:
        """Return the FLOPs per image of encoding the dataset to the form `encoding` before training."""
        return self.encoder_flops('pictures') - self.encoder_flops(encoding)

    @cached_property
    def pixels(self) -> float:
        return self._mean(lambda shape: shape.pixels)

    @cached_property
    def latent_elements(self) -> float:
        """Mean number of elements per latent, without variances."""
        return self._mean(self.model.latent_elements)

    @property
    def largest_shape(self) -> Shape:
        """Image shape with the most pixels, which determines the memory that training needs."""
        return max(self.shapes, key=lambda shape: (shape.pixels, shape.aspect))

    def _mean(self, value: Any) -> float:
        return sum(share * value(shape) for shape, share in self.shapes.items())


def phase_of(recipe: Recipe, *, samples: int | None = None, encoding: Encoding | None = None) -> Phase:
    """Return a recipe together with its amount of work: batches, images, shapes and FLOPs.

    `samples` (number of distinct images) and `encoding` take precedence over the recipe and its data, unless None.

    Raises:
        UserError: A value that the plan needs is missing, or the model cannot be built.
        CountingFailed: The model has no shipped counts, and counting it failed.
    """
    if recipe.task != 'train':
        raise UserError(f'task: the plan is for training, not {recipe.task}; use task=train')
    if not isinstance(recipe.global_batch, int):
        raise UserError('global_batch is not set (???); set it, such as global_batch=2048')
    model = ModelCosts(recipe.model, recipe.imports, recipe.lora)
    notes = list(model.notes)
    if recipe.lora is not None:
        notes.append(
            'a LoRA: of the denoiser, only the LoRA has gradients, optimizer states and averages; the backward pass '
            'computes no gradients of the frozen weights, so that FLOPs are two thirds of those of training them'
        )
    if trains_on_pairs(recipe):
        notes.append(
            'diffusion_dpo: a pair counts as one image, but both of its images are trained, each with one more forward '
            'pass, of the reference'
        )
    shapes, known, stored = _data(recipe.streams, notes)
    samples = known if samples is None else samples
    batches = _batches(recipe.trainer.get('max_duration'), recipe.global_batch, recipe.loader.epoch_size or samples)
    recipe_encoding = _encoding(recipe, model)
    stored_bytes = stored if encoding in (None, recipe_encoding) else None
    phase = Phase(recipe, model, shapes, batches, samples, stored_bytes, encoding or recipe_encoding)
    # Request everything that the plan needs, for every strategy that it compares, in one call per network: each call
    # that has to count starts a process that imports torch for 15 s. With TREAD, an earlier call must count the blocks.
    route = None
    if routes_tokens(recipe):
        route = route_of(recipe.model, recipe.algorithms, model.facts['token_blocks'])
    largest, strategies = phase.largest_shape, (None, 'ddp', 'fsdp2')
    model.count(list(shapes), [(largest, phase.precision(strategy)) for strategy in strategies], route)
    alignment, perceptual = alignment_of(recipe.model, model, notes), perceptual_of(recipe.model, notes)
    for each in (alignment, perceptual):
        if each is not None:
            each.require([str(shape) for shape in shapes], [(largest, phase.auxiliary_precision)])
    if encoding not in (None, 'pictures'):
        _check_encoding(encoding, phase)
    if alignment is not None and phase.encoding != 'pictures':
        notes.append('representation_alignment: the bytes and the computation of stored image features are not counted')
    if samples is None:
        samples = published_runs.published_samples(list(shapes), phase.images, model.published_parameters)
        if samples is not None:
            notes.append(f'assumed {samples / 1e6:,.0f} M distinct images, as published; change it with --samples')
    return replace(
        phase,
        samples=samples,
        notes=tuple(notes),
        route=route,
        alignment=alignment,
        perceptual=perceptual,
        optimizer_flops=newton_schulz_flops(recipe.optimizer, model),
    )


def repetition_warnings(recipe: Recipe, batches: int, samples: int | None) -> list[str]:
    """Return warnings about a dataset that is far too small for a recipe's duration or batch.

    Args:
        batches: Number of batches of the run.
        samples: Number of distinct images; None if unknown.
    """
    found, batch = [], recipe.global_batch
    if samples and batches * batch > MANY_EPOCHS * samples:
        found.append(
            f'{recipe.name}: {samples:,} images are seen {batches * batch / samples:,.0f} times each in {batches:,} '
            f'batches of {batch:,}; shorten trainer.max_duration, or use a recipe for few images: diffusion:lora'
        )
    if samples and batch > samples:
        found.append(f'{recipe.name}: a batch of {batch:,} repeats some of the {samples:,} images; lower global_batch')
    return found


def local_repetition_warnings(recipe: Recipe) -> list[str]:
    """Return `repetition_warnings` for a complete training recipe with only local streams; none for any other."""
    if recipe.task != 'train' or recipe.missing:
        return []
    try:
        _, samples, _ = _data(recipe.streams, [])
        batches = _batches(recipe.trainer.get('max_duration'), recipe.global_batch, recipe.loader.epoch_size or samples)
    except UserError:  # no warning: the run reports mistakes, and some durations have no known number of batches
        return []
    return repetition_warnings(recipe, batches, samples)


def _check_encoding(encoding: Encoding, phase: Phase) -> None:
    model = phase.model
    if encoding == 'latents+text' and model.trains_text:
        raise UserError('--stored latents+text: this recipe trains its text encoder; use --stored latents')
    if not model.is_latent_diffusion:
        raise UserError(f'--stored {encoding}: {phase.recipe.model.name} trains on images; use --stored pictures')
    if model.is_on_pixels:
        raise UserError(f'--stored {encoding}: the model is on pixels; use --stored pictures')
    if trains_on_pairs(phase.recipe):
        raise UserError(f'--stored {encoding}: diffusion_dpo trains on pairs of images; use --stored pictures')


def _batches(duration: Any, batch: int, epoch: int | None) -> int:
    """Return the number of batches in a duration such as 550000ba; `epoch` is the images per epoch, if known."""
    where = 'trainer.max_duration'
    if duration is None or duration == MISSING:
        raise UserError(f'{where} is missing; set the length of training, such as 550000ba')
    match = re.fullmatch(r'(\d+(?:\.\d+)?)(ba|ep|sp)', str(duration))
    if match is None:
        raise UserError(f'{where}: {duration!r} has no known number of batches; use ba (550000ba), ep or sp')
    amount, unit = float(match[1]), match[2]
    if unit == 'ep':
        if epoch is None:
            raise UserError(
                f'{where}: {duration} is in epochs, and the number of images per epoch is unknown; '
                'pass --samples 790e6, set loader.epoch_size, or use batches (ba)'
            )
        amount *= epoch // batch
    batches = int(amount if unit != 'sp' else amount / batch)
    if batches <= 0:
        raise UserError(f'{where}: {duration} is less than one batch of {batch} samples; increase it')
    return batches


def _encoding(recipe: Recipe, model: ModelCosts) -> Encoding:
    if recipe.dataset.name != 'latents':
        return 'pictures'
    stores_text = recipe.precompute.latents == 'image+text' and not model.trains_text
    return 'latents+text' if stores_text else 'latents'


def _data(streams: Mapping[str, StreamConfig], notes: list[str]) -> tuple[dict[Shape, float], int | None, float | None]:
    """Return the fraction of images of each shape, the number of images, and the bytes per sample.

    The last two are None unless all shards are local. Assumptions are appended to `notes`.
    """
    counts: dict[str, dict[Shape, int] | None] = {}
    sizes: list[float | None] = []
    for name, stream in streams.items():
        if not isinstance(stream.resolution, int):
            raise UserError(f'streams.{name}.resolution is not set (???); set the side in pixels, such as 256')
        counts[name], size = _local_samples(stream)
        sizes.append(size)
        if counts[name] is None and stream.aspects:
            notes.append(f'streams.{name}: shapes unknown (shards not local); assumed {stream.resolution} px squares')
    total = sum(sum(found.values()) for found in counts.values() if found)
    known = bool(total) and None not in counts.values()
    shares: dict[Shape, float] = {}
    for name, weight in _weights(streams, counts, notes).items():
        stream_counts = counts[name] or {streams[name].image_shape: 1}
        for shape, count in stream_counts.items():
            shares[shape] = shares.get(shape, 0.0) + weight * count / sum(stream_counts.values())
    stored = sum(size for size in sizes if size is not None) / total if known and None not in sizes else None
    return shares, total if known else None, stored


def _weights(
    streams: Mapping[str, StreamConfig], counts: Mapping[str, Mapping[Shape, int] | None], notes: list[str]
) -> dict[str, float]:
    """Return each stream's fraction of images: by `proportion` or `choose`, else by number of samples, else equal."""
    configured = {name: stream.proportion or stream.choose for name, stream in streams.items()}
    sizes = {name: sum(found.values()) for name, found in counts.items() if found}
    if all(configured.values()):
        weights = {name: float(value) for name, value in configured.items() if value}
    elif len(sizes) == len(counts):
        weights = {name: float(size) for name, size in sizes.items()}
    else:
        if len(counts) > 1:
            notes.append('streams: sizes unknown (shards not local); assumed equal proportions')
        weights = dict.fromkeys(counts, 1.0)
    total = sum(weights.values())
    return {name: value / total for name, value in weights.items()}


def _local_samples(stream: StreamConfig) -> tuple[dict[Shape, int] | None, float | None]:
    """Return the number of samples per shape and the total bytes of a stream with local shards, else (None, None)."""
    location = stream.remote if stream.remote is not None else stream.local
    if location is None or '://' in location or location == MISSING:
        return None, None
    folder = Path(location)
    try:
        if stream.aspects:
            found = {shape: _index(folder / str(shape)) for shape in read_buckets(folder)}
        else:
            found = {stream.image_shape: _index(folder)}
    except (OSError, ValueError, KeyError, TypeError):
        return None, None  # `diffusion check` and the run itself report missing or damaged shards
    return {shape: count for shape, (count, _) in found.items() if count}, sum(size for _, size in found.values())


def _index(folder: Path) -> tuple[int, float]:
    """Return the number of samples and the total bytes of the shards in a folder, from its index.json."""
    shards = json.loads((folder / 'index.json').read_text(encoding='utf-8'))['shards']
    size = sum((shard.get('zip_data') or shard['raw_data'])['bytes'] for shard in shards)
    return sum(shard['samples'] for shard in shards), float(size)
