"""Parameters, FLOPs per image and activations per sample of a recipe's model, as counted on the model itself."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from diffusion.config import registry
from diffusion.config.image_shapes import Shape
from diffusion.config.recipe import Component
from diffusion.config.signatures import defaults_of_source
from diffusion.errors import UserError
from diffusion.planning.count_cache import ModelKey, count, known_counts, merged

FLOAT32 = 4
HALF = 2
Precision = Literal['float32', 'float32+compile', 'half', 'half+low_precision_norms', 'half+compile']
"""Settings of a GPU run that change what is kept for the backward pass; models/activation_memory.py, which counts each,
explains them."""
PRECISIONS: tuple[Precision, ...] = get_args(Precision)
_TRAINING = {'resolution', 'objective', 'encoder_dtype', 'posterior', 'seed', 'mask_padding'}
_TRAINING |= {'caption_dropout', 'caption_dropout_mode'}
SAME_ARCHITECTURE = {'sd2': {'revision', *_TRAINING}, 'tiny': _TRAINING, 'autoencoder': {'l1_weight', 'kl_weight'}}
"""Keywords of our builders that change neither layers nor sizes; every keyword of any other model is assumed to."""
WEIGHTS = {'pretrained': ('vae', 'text_encoder'), 'vae': ('vae',)}
"""Keywords of our builders that name a folder or a repository of pretrained weights, and the parts it holds."""


@dataclass(frozen=True)
class ActivationCounts:
    """Bytes kept for the backward pass: activations per sample, and autocast's copies of weights, whatever the batch.

    models/activation_memory.py counts and explains them.
    """

    kept: int
    kept_between: int
    kept_inside: int
    copies: int
    copies_between: int
    copies_inside: int
    largest: int
    """The largest tensor on the way, per sample."""
    largest_encoder_elements: int
    """Elements of the largest tensor in the frozen image encoder, per sample."""

    @property
    def kept_recomputing(self) -> int:
        """Bytes kept between recomputed blocks, and inside of the largest."""
        return self.kept_between + self.kept_inside

    @property
    def copies_recomputing(self) -> int:
        """The same for copies of weights: a recomputed block keeps none, so those of one block at a time are there."""
        return self.copies_between + self.copies_inside


class ModelCosts:
    """The counts of a recipe's model; what has not been counted yet is counted when it is asked for.

    Args:
        model: The model's name and keywords, as in a recipe.
        imports: The recipe's modules, which may register the model.
    """

    def __init__(self, model: Component, imports: Sequence[str] = ()) -> None:
        self.notes: list[str] = []
        """Assumptions that the plan states."""
        self.posterior: str = model.kwargs.get('posterior', 'sample')
        self.key = _key_of(model, imports, self.notes)
        self._counts = known_counts(self.key)

    def count(self, shapes: Sequence[Shape] = (), activations: Sequence[tuple[Shape, Precision]] = ()) -> None:
        """Make sure that the FLOPs of shapes and the activations of shapes in precisions are known, in one go."""
        if self.is_counted:
            self._check_shapes(shapes)
        pairs = dict.fromkeys((str(shape), precision) for shape, precision in activations)
        flops = [str(shape) for shape in shapes if str(shape) not in self._counts['flops']]
        unknown = [pair for pair in pairs if ' '.join(pair) not in self._counts['activations']]
        if flops or unknown or not self.is_counted:
            self._counts = merged(self._counts, count(self.key, flops=flops, activations=unknown))
            self._check_shapes(shapes)

    def _check_shapes(self, shapes: Sequence[Shape]) -> None:
        cell = self._counts['facts']['pixels_per_cell']
        for shape in shapes:
            if shape.width % cell or shape.height % cell:
                raise UserError(f'streams: {shape} px is not a multiple of {cell} px, the size of a latent cell')

    @property
    def is_counted(self) -> bool:
        """True if the facts are known already."""
        return bool(self._counts['facts'])

    @property
    def facts(self) -> Mapping[str, int]:
        """Counts that do not depend on the images' shape, under the names of `diffusion.models.cost_counting`."""
        self.count()
        return self._counts['facts']

    @property
    def is_latent_diffusion(self) -> bool:
        """True if a denoiser is trained on latents, which may be precomputed."""
        return bool(self.facts['latent_diffusion'])

    @property
    def trains_text(self) -> bool:
        return bool(self.facts['trains_text_encoder'])

    @property
    def trained_parameters(self) -> int:
        return self.facts['trained_parameters']

    @property
    def frozen_parameters(self) -> int:
        return self.facts['frozen_parameters']

    @property
    def text_embedding_elements(self) -> int:
        """Numbers of a caption's embedding."""
        return self.facts['text_length'] * self.facts['text_width']

    @property
    def text_encoder_flops(self) -> int:
        return self.facts['text_encoder_flops']

    def trained_flops(self, shape: Shape) -> int:
        """FLOPs per image of the forward pass of all that is trained."""
        return self._flops(shape)['trained']

    def image_encoder_flops(self, shape: Shape) -> int:
        """FLOPs per image of the frozen image encoder."""
        return self._flops(shape)['image_encoder']

    def activations(self, shape: Shape, precision: Precision) -> ActivationCounts:
        """Bytes that a sample of this shape keeps for the backward pass."""
        self.count(activations=[(shape, precision)])
        return ActivationCounts(**self._counts['activations'][f'{shape} {precision}'])

    def latent_elements(self, shape: Shape) -> int:
        """Numbers of a latent, without its variances."""
        cell = self.facts['pixels_per_cell']
        return self.facts['latent_channels'] * (shape.height // cell) * (shape.width // cell)

    def _flops(self, shape: Shape) -> Mapping[str, int]:
        self.count(shapes=[shape])
        return self._counts['flops'][str(shape)]


def _key_of(model: Component, imports: Sequence[str], notes: list[str]) -> ModelKey:
    """Name, keywords and files that decide the counts."""
    if model.name not in SAME_ARCHITECTURE:
        return ModelKey(model.name, model.kwargs, tuple(imports))
    usual = defaults_of_source(*registry.TARGETS['model'][model.name].split(':'))
    settings, contents = usual | dict(model.kwargs), []
    for keyword, parts in WEIGHTS.items():
        place = settings.get(keyword)
        if place in (None, usual.get(keyword)):
            configs = None
        elif (configs := [_config_of(place, part) for part in parts]) and None in configs:
            part = parts[configs.index(None)]
            notes.append(f"{place} is not a local folder with a {part}; counted as this model's usual one")
            configs = None
        if keyword in settings:
            settings[keyword] = None if configs is None else str(place)
        contents += configs or []
    kept = {key: value for key, value in settings.items() if key not in SAME_ARCHITECTURE[model.name]}
    return ModelKey(model.name, kept, (), tuple(contents))


def _config_of(place: str, part: str) -> str | None:
    """The configuration of a part in a local folder, which is the part's own or a pipeline's."""
    for path in (Path(place, part, 'config.json'), Path(place, 'config.json')):
        if path.is_file():
            try:
                return json.dumps(json.loads(path.read_text(encoding='utf-8')), sort_keys=True)
            except ValueError as error:
                raise UserError(f'{path}: not JSON ({error}); was the folder written by save_pretrained?') from error
    return None
