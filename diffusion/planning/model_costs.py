"""Parameters, FLOPs per image and activation memory per sample of a recipe's model, counted on the model itself."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from diffusion.config import registry
from diffusion.config.autoencoders import PIXELS
from diffusion.config.image_shapes import Shape
from diffusion.config.recipe import Component
from diffusion.config.signatures import of_source
from diffusion.errors import UserError
from diffusion.planning.count_cache import ModelKey, count, known_counts, merged

FLOAT32 = 4
HALF = 2
Precision = Literal['float32', 'float32+compile', 'half', 'half+low_precision_norms', 'half+compile']
"""Settings of a GPU run that change the activations kept for the backward pass; see models/activation_memory.py."""
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
_TRAINING = {'resolution', 'objective', 'encoder_dtype', 'posterior', 'seed', 'mask_padding'}
_TRAINING |= {'caption_dropout', 'caption_dropout_mode'}
SAME_ARCHITECTURE = {
    'sd2': {'revision', *_TRAINING},
    'tiny': _TRAINING,
    'prx': {'revision', 'representation_alignment', 'perceptual_losses', *_TRAINING} - {'mask_padding'},
    'tiny_prx': {'representation_alignment', 'perceptual_losses', *_TRAINING} - {'mask_padding'},
    'sdxl': {'revision', 'vae_revision', *_TRAINING} - {'mask_padding'},
    'tiny_sdxl': _TRAINING - {'mask_padding'},
    'mmdit': {'revision', 'representation_alignment', *_TRAINING} - {'mask_padding'},
    'tiny_mmdit': {'representation_alignment', *_TRAINING} - {'mask_padding'},
    'autoencoder': {'l1_weight', 'kl_weight'},
}
"""Keywords that do not change the architecture, by built-in model; of other models, every keyword is assumed to."""
WEIGHTS = {'pretrained': ('vae', 'text_encoder'), 'vae': ('vae',)}
"""Keywords that name a folder or repository of pretrained weights, and the model parts that are loaded from it."""
MORE_ENCODERS = {'sdxl': ('text_encoder_2',), 'mmdit': ('text_encoder_2', 'text_encoder_3')}
"""Further parts that a built-in model loads from its `pretrained`."""


@dataclass(frozen=True)
class ActivationCounts:
    """Bytes kept for the backward pass: activations per sample, and autocast's copies of weights per microbatch.

    Both are counted by models/activation_memory.py.
    """

    kept: int
    """Activations per sample without activation checkpointing."""
    kept_between: int
    """Activations per sample kept between checkpointed blocks, block inputs included."""
    kept_inside: int
    """Activations per sample inside the largest checkpointed block while it is recomputed."""
    copies: int
    """Copies of weights in 16 bits without activation checkpointing; independent of the batch size."""
    copies_between: int
    """Copies of weights outside of checkpointed blocks."""
    copies_inside: int
    """Copies of weights inside the largest checkpointed block."""
    largest: int
    """Bytes of the largest intermediate tensor, per sample."""
    largest_encoder_elements: int
    """Number of elements of the largest tensor in the frozen image encoder, per sample."""

    @property
    def kept_recomputing(self) -> int:
        """Peak bytes of activations per sample with activation checkpointing."""
        return self.kept_between + self.kept_inside

    @property
    def copies_recomputing(self) -> int:
        """Peak bytes of 16-bit weight copies with activation checkpointing: only one block at a time holds copies."""
        return self.copies_between + self.copies_inside


class ModelCosts:
    """Parameters, FLOPs and activation memory of a recipe's model; counted on first use, in a separate process.

    Args:
        model: The model's name and keywords, as in a recipe.
        imports: The recipe's modules, which may register the model.
    """

    def __init__(self, model: Component, imports: Sequence[str] = ()) -> None:
        self.notes: list[str] = []
        """Assumptions that the plan prints."""
        self.posterior: str = model.kwargs.get('posterior', 'sample')
        self.key = _key_of(model, imports, self.notes)
        self._counts = known_counts(self.key)

    def count(self, shapes: Sequence[Shape] = (), activations: Sequence[tuple[Shape, Precision]] = ()) -> None:
        """Count the FLOPs and activations of the model that are not known yet, all in one separate process.

        Args:
            shapes: Shapes whose FLOPs are needed.
            activations: Pairs of shape and precision whose activations are needed.

        Raises:
            UserError: A shape is not a multiple of the latent cell, or the model cannot be built.
            CountingFailed: The forward pass failed.
        """
        if self.is_counted:
            self._check_shapes(shapes)
        pairs = dict.fromkeys((str(shape), precision) for shape, precision in activations)
        flops = [str(shape) for shape in shapes if str(shape) not in self._counts['flops']]
        unknown = [pair for pair in pairs if ' '.join(pair) not in self._counts['activations']]
        if flops or unknown or not self.is_counted:
            self._counts = merged(self._counts, count(self.key, flops=flops, activations=unknown))
            self._check_shapes(shapes)

    def _check_shapes(self, shapes: Sequence[Shape]) -> None:
        """Raise UserError if the sides of an image shape are not multiples of the latent cell."""
        step = self._counts['facts']['pixels_per_patch']
        for shape in shapes:
            if shape.width % step or shape.height % step:
                what = 'latent cell' if step == self._counts['facts']['pixels_per_cell'] else 'patch of the denoiser'
                raise UserError(f'streams: {shape} px is not a multiple of {step} px, the size of a {what}')

    @property
    def is_counted(self) -> bool:
        """True if the model has been counted, so that `facts` returns immediately."""
        return bool(self._counts['facts'])

    @property
    def facts(self) -> Mapping[str, int]:
        """Counts that do not depend on the image shape, such as the number of parameters, by name."""
        # The names are defined in models/cost_counting.py.
        self.count()
        return self._counts['facts']

    @property
    def is_latent_diffusion(self) -> bool:
        """True if the model trains a denoiser on latents, which can be precomputed."""
        return bool(self.facts['latent_diffusion'])

    @property
    def trains_text(self) -> bool:
        """True if the text encoder is trained."""
        return bool(self.facts['trains_text_encoder'])

    @property
    def trained_parameters(self) -> int:
        return self.facts['trained_parameters']

    @property
    def frozen_parameters(self) -> int:
        return self.facts['frozen_parameters']

    @property
    def text_embedding_elements(self) -> int:
        """Number of elements in the text embedding of one caption."""
        return self.facts['text_length'] * self.facts['text_width']

    @property
    def text_encoder_flops(self) -> int:
        """FLOPs per caption of the text encoder's forward pass."""
        return self.facts['text_encoder_flops']

    def trained_flops(self, shape: Shape) -> int:
        """Return the FLOPs of the forward pass of the trained modules for one image of this shape."""
        return self._flops(shape)['trained']

    def image_encoder_flops(self, shape: Shape) -> int:
        """Return the FLOPs of the frozen image encoder for one image of this shape."""
        return self._flops(shape)['image_encoder']

    def activations(self, shape: Shape, precision: Precision) -> ActivationCounts:
        """Return the bytes kept for the backward pass of one sample, for this image shape and precision."""
        self.count(activations=[(shape, precision)])
        return ActivationCounts(**self._counts['activations'][f'{shape} {precision}'])

    def latent_elements(self, shape: Shape) -> int:
        """Return the number of elements in the latent of one image of this shape, without variances."""
        cell = self.facts['pixels_per_cell']
        return self.facts['latent_channels'] * (shape.height // cell) * (shape.width // cell)

    def _flops(self, shape: Shape) -> Mapping[str, int]:
        self.count(shapes=[shape])
        return self._counts['flops'][str(shape)]


def _key_of(model: Component, imports: Sequence[str], notes: list[str]) -> ModelKey:
    """Return the cache key of a model: the settings and configuration files that determine its counts."""
    # The architecture of somebody else's model may depend on any keyword and on the code of the imported modules.
    if model.name not in SAME_ARCHITECTURE:
        return ModelKey(model.name, model.kwargs, tuple(imports))
    # Defaults are part of the key, so that a recipe that spells one out uses the same counts as one that omits it.
    defaults = of_source(*registry.TARGETS['model'][model.name].split(':')).defaults()
    settings, contents = defaults | dict(model.kwargs), []
    for keyword, parts in WEIGHTS.items():
        parts += MORE_ENCODERS.get(model.name, ()) if keyword == 'pretrained' else ()
        location = settings.get(keyword)
        if location in (None, defaults.get(keyword)):
            configs = None
        elif location == PIXELS:  # not a folder
            configs = []
        elif (configs := [_config_of(location, part) for part in parts]) and None in configs:
            # A hub repository would have to be downloaded for its configuration; the planner works offline.
            part = parts[configs.index(None)]
            notes.append(f"{location} is not a local folder with a {part}; assumed this model's default architecture")
            configs = None
        if keyword in settings:
            settings[keyword] = None if configs is None else str(location)
        contents += configs or []
    if settings.get('representation_alignment'):
        notes.append('representation_alignment: its image encoder and projection are not counted')
    if settings.get('perceptual_losses'):
        notes.append('perceptual_losses: their networks are not counted')
    kept = {key: value for key, value in settings.items() if key not in SAME_ARCHITECTURE[model.name]}
    return ModelKey(model.name, kept, (), tuple(contents))


def _config_of(folder: str, part: str) -> str | None:
    """Return config.json (keys sorted) of a model part in a pipeline folder or its own folder; None if missing."""
    for path in (Path(folder, part, 'config.json'), Path(folder, 'config.json')):
        if path.is_file():
            try:
                return json.dumps(json.loads(path.read_text(encoding='utf-8')), sort_keys=True)
            except ValueError as error:
                raise UserError(f'{path}: not JSON ({error}); write the folder with save_pretrained') from error
    return None
