"""Parameters, FLOPs per image and activation memory per sample of a recipe's model, counted on the model itself.

The networks that only training losses use (representation alignment and perceptual losses) are counted in the same way.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from diffusion.config import registry
from diffusion.config.image_shapes import Shape
from diffusion.config.model_checks import PIXELS, SPRINT, SPRINT_DENSE_BLOCKS, UNROUTED_BLOCKS
from diffusion.config.recipe import Component, LoraConfig
from diffusion.config.weight_sources import FLUX2_REPOSITORIES, with_own_config
from diffusion.errors import UserError
from diffusion.planning.count_cache import ModelKey, count, known_counts, merged

Precision = Literal['float32', 'float32+compile', 'half', 'half+low_precision_norms', 'half+compile']
"""Settings of a run on GPUs that change the activations kept for the backward pass; see models/activation_memory.py."""
PRECISIONS: tuple[Precision, ...] = get_args(Precision)


@dataclass(frozen=True)
class ActivationCounts:
    """Counts of activation memory; `Activations` in models/activation_memory.py explains all but the last field."""

    kept: int
    kept_between: int
    kept_inside: int
    copies: int
    copies_between: int
    copies_inside: int
    largest: int
    largest_encoder_elements: int
    """Number of elements in the frozen image encoder's largest tensor, per sample."""

    @property
    def kept_recomputing(self) -> int:
        """Peak bytes of activations per sample with activation checkpointing."""
        return self.kept_between + self.kept_inside

    @property
    def copies_recomputing(self) -> int:
        """Peak bytes of 16-bit weight copies with activation checkpointing: only one block at a time holds copies."""
        return self.copies_between + self.copies_inside


class CountedCosts:
    """Parameters, FLOPs and activation memory of a model or network; unknown ones are counted in another process."""

    def __init__(self, key: ModelKey) -> None:
        self.key = key
        self._counts = known_counts(key)

    def require(self, flops: Sequence[str] = (), activations: Sequence[tuple[Shape, Precision]] = ()) -> None:
        """Count all requested values that are still unknown, in one process."""
        pairs = dict.fromkeys((str(shape), precision) for shape, precision in activations)
        names = [name for name in dict.fromkeys(flops) if name not in self._counts['flops']]
        unknown = [pair for pair in pairs if ' '.join(pair) not in self._counts['activations']]
        if names or unknown or not self.is_counted:
            self._counts = merged(self._counts, count(self.key, flops=names, activations=unknown))

    @property
    def is_counted(self) -> bool:
        return bool(self._counts['facts'])

    @property
    def facts(self) -> Mapping[str, int]:
        """Counts that do not depend on the image shape, such as the number of parameters, by name."""
        # The names are defined in models/cost_counting.py.
        self.require()
        return self._counts['facts']

    def flops(self, name: str) -> Mapping[str, int]:
        """Return FLOPs per image by part, such as `trained`; `name` is a shape, with a token route if any."""
        self.require(flops=[name])
        return self._counts['flops'][name]

    def activations(self, shape: Shape, precision: Precision) -> ActivationCounts:
        """Return the bytes kept for the backward pass, for one sample of this image shape in this precision."""
        self.require(activations=[(shape, precision)])
        counts: Mapping[str, Any] = self._counts['activations'][f'{shape} {precision}']
        return ActivationCounts(**counts)


@dataclass(frozen=True)
class TokenRoute:
    """Token routing (TREAD): in training, a `fraction` of the image tokens skips blocks `start` to `end` - 1."""

    start: int
    end: int
    fraction: float
    fuses: bool = False
    """True for SPRINT, which adds a linear layer that fuses the tokens before and after the blocks."""

    def __str__(self) -> str:
        return f'tread={self.start}:{self.end}:{self.fraction}'

    def fraction_after(self, block: int) -> float:
        """Return the fraction of the image tokens that are in a block's output."""
        return 1 - self.fraction if self.start <= block < self.end else 1.0


def route_of(model: Component, algorithms: Mapping[str, Component], blocks: int) -> TokenRoute | None:
    """Return the TREAD or SPRINT route of a recipe whose denoiser has `blocks` blocks, or None if it uses neither."""
    if model.kwargs.get(SPRINT) is not None:
        settings = registry.settings_of('model', model, SPRINT)
        end = blocks - SPRINT_DENSE_BLOCKS if settings['end'] is None else settings['end']
        return TokenRoute(settings['start'], end, settings['fraction'], fuses=True)
    for algorithm in algorithms.values():
        if algorithm.name == 'tread':
            settings = registry.settings_of('algorithm', algorithm)
            end = blocks - UNROUTED_BLOCKS if settings['end'] is None else settings['end']
            return TokenRoute(settings['start'], end, settings['fraction'])
    return None


FLOAT32 = 4
HALF = 2


class ModelCosts(CountedCosts):
    """Parameters, FLOPs and activation memory of a recipe's model, counted in a separate process on first use."""

    def __init__(self, model: Component, imports: Sequence[str] = (), lora: LoraConfig | None = None) -> None:
        self.notes: list[str] = []
        """Assumptions that the plan prints."""
        self.posterior: str = model.kwargs.get('posterior', 'sample')
        key = _key_of(model, imports, self.notes)
        if lora is not None:
            # Leave out alpha, which only scales the updates and does not affect the counts.
            key = replace(key, lora={'rank': lora.rank, 'targets': sorted(lora.targets)})
        super().__init__(key)

    def count(
        self,
        shapes: Sequence[Shape] = (),
        activations: Sequence[tuple[Shape, Precision]] = (),
        route: TokenRoute | None = None,
    ) -> None:
        """Count the model's FLOPs and activations that are still unknown, all in one separate process.

        Raises:
            UserError: A side of a shape is not a multiple of the denoiser's patch, or the model cannot be built.
            CountingFailed: The forward pass failed.
        """
        if self.is_counted:
            self._check_shapes(shapes)
        names = [_flops_name(shape, each) for shape in shapes for each in dict.fromkeys((None, route))]
        self.require(names, activations)
        self._check_shapes(shapes)

    def _check_shapes(self, shapes: Sequence[Shape]) -> None:
        """Raise UserError if the sides of an image shape are not multiples of the denoiser's patch in pixels."""
        step = self._counts['facts']['pixels_per_patch']
        for shape in shapes:
            if shape.width % step or shape.height % step:
                what = 'latent cell' if step == self._counts['facts']['pixels_per_cell'] else 'patch of the denoiser'
                raise UserError(f'streams: {shape} px is not a multiple of {step} px, the size of a {what}')

    @property
    def is_latent_diffusion(self) -> bool:
        """True if the model trains a denoiser, on latents (which can be precomputed) or on pixels."""
        return bool(self.facts['latent_diffusion'])

    @property
    def is_on_pixels(self) -> bool:
        """True if the model trains a denoiser on pixels, without an autoencoder."""
        return self.is_latent_diffusion and self.facts['pixels_per_cell'] == 1

    @property
    def is_transformer(self) -> bool:
        """True if the denoiser is a transformer, False if it is a U-Net or the model has no denoiser."""
        return bool(self.facts['token_width'])

    @property
    def trains_text(self) -> bool:
        return bool(self.facts['trains_text_encoder'])

    @property
    def trained_parameters(self) -> int:
        return self.facts['trained_parameters']

    @property
    def frozen_parameters(self) -> int:
        """Number of parameters of the frozen VAE and text encoder."""
        return self.facts['frozen_parameters']

    @property
    def frozen_denoiser_parameters(self) -> int:
        """Number of the denoiser's frozen parameters: all of them if a LoRA is trained, else 0."""
        return self.facts['frozen_denoiser_parameters']

    @property
    def published_parameters(self) -> int:
        """Parameter count for looking up published runs: the trained modules' or, with a LoRA, the denoiser's."""
        return self.frozen_denoiser_parameters or self.trained_parameters

    @property
    def text_embedding_elements(self) -> int:
        """Number of elements in the text embedding of one caption."""
        return self.facts['text_length'] * self.facts['text_width']

    @property
    def text_encoder_flops(self) -> int:
        """FLOPs per caption of the text encoder's forward pass."""
        return self.facts['text_encoder_flops']

    def trained_flops(self, shape: Shape, route: TokenRoute | None = None) -> int:
        """Return the trained modules' forward FLOPs for an image of this shape; on a `route`, tokens skip blocks."""
        return self.flops(_flops_name(shape, route))['trained']

    @property
    def fusion_parameters(self) -> int:
        """Number of parameters of SPRINT's fusion layer and mask token, which are not part of `trained_parameters`."""
        return 2 * self.facts['token_width'] * (self.facts['token_width'] + 1)

    def fusion_flops(self, shape: Shape) -> int:
        """Return the forward FLOPs of SPRINT's fusion layer for one image of this shape."""
        tokens = shape.pixels // self.facts['pixels_per_patch'] ** 2
        return 4 * self.facts['token_width'] ** 2 * tokens

    def image_encoder_flops(self, shape: Shape) -> int:
        """Return the FLOPs of the frozen image encoder for one image of this shape."""
        return self.flops(str(shape))['image_encoder']

    def latent_elements(self, shape: Shape) -> int:
        """Return the number of latent elements of one image of this shape, without variances."""
        cell = self.facts['pixels_per_cell']
        return self.facts['latent_channels'] * (shape.height // cell) * (shape.width // cell)


def _flops_name(shape: Shape, route: TokenRoute | None) -> str:
    """Return the key of cached FLOPs, such as `512x512` or `512x512 tread=2:13:0.5`."""
    return str(shape) if route is None else f'{shape} {route}'


def _key_of(model: Component, imports: Sequence[str], notes: list[str]) -> ModelKey:
    """Return the cache key of a model: the settings and configuration files that determine its counts."""
    # The architecture of a third-party model may depend on any setting and on the code of the imported modules.
    if not registry.is_own('model', model.name):
        return ModelKey(model.name, model.kwargs, tuple(imports))
    # Include defaults in the key, so that a recipe that states a default uses the same counts as one that omits it.
    signature = registry.signature('model', model.name)
    settings, contents = signature.defaults() | dict(model.kwargs), []
    for keyword in (each for each in signature.parameters if each.weights_of):
        location, parts = settings.get(keyword.name), keyword.weights_of
        if isinstance(location, str) and location.startswith(FLUX2_REPOSITORIES):
            location = FLUX2_REPOSITORIES
        if location in (None, keyword.default):
            configs = None
        elif location == PIXELS:  # not a folder
            configs = []
        elif (configs := [_config_of(with_own_config(location), part) for part in parts]) and None in configs:
            # The planner works offline, so it cannot download the configuration of a Hub repository.
            part = parts[configs.index(None)]
            notes.append(f"{location} is not a local folder with a {part}; assumed this model's default architecture")
            configs = None
        settings[keyword.name] = None if configs is None else str(location)
        contents += configs or []
    same = {each.name for each in signature.parameters if not each.changes_architecture}
    kept = {key: value for key, value in settings.items() if key not in same}
    return ModelKey(model.name, kept, (), tuple(contents))


def _config_of(folder: str, part: str) -> str | None:
    """Return a component's config.json with sorted keys; `folder` is a pipeline's or its own. None if missing."""
    for path in (Path(folder, part, 'config.json'), Path(folder, 'config.json')):
        if path.is_file():
            try:
                return json.dumps(json.loads(path.read_text(encoding='utf-8')), sort_keys=True)
            except ValueError as error:
                raise UserError(f'{path}: not JSON ({error}); write the folder with save_pretrained') from error
    return None


def newton_schulz_flops(optimizer: Component, model: ModelCosts) -> int:
    """Return the FLOPs of Muon's orthogonalization per optimizer step, over all devices; 0 for other optimizers.

    Each device orthogonalizes a part of the matrices, and the devices exchange the results.
    """
    if optimizer.name != 'muon':
        return 0
    settings = registry.settings_of('optimizer', optimizer)
    layers = 'all' if settings['convolutions'] else 'linears'
    projections = 'split' if settings['split_projections'] else 'whole'
    return settings['newton_schulz_steps'] * model.facts.get(f'newton_schulz_flops_{layers}_{projections}', 0)


ENCODER_KEYS = (
    *('model_type', 'hidden_size', 'num_hidden_layers', 'num_attention_heads', 'mlp_ratio', 'intermediate_size'),
    *('image_size', 'patch_size', 'use_swiglu_ffn', 'use_gated_mlp', 'num_register_tokens'),
)
ENCODER_TYPES = ('dinov2', 'dinov2_with_registers', 'dinov3_vit')
"""Supported values of `model_type` in an encoder's config.json."""
DINOV2_BASE = 'facebook/dinov2-base'
"""Encoder whose sizes are assumed for repositories with unknown sizes."""


def _dinov2(width: int, layers: int, heads: int, *, registers: int = 0, swiglu: bool = False) -> dict[str, Any]:
    """Return the config.json values of a DINOv2 ViT with patches of 14 px, with or without registers."""
    kind = {'model_type': 'dinov2_with_registers', 'num_register_tokens': registers} if registers else {}
    sizes = {'hidden_size': width, 'num_hidden_layers': layers, 'num_attention_heads': heads, 'mlp_ratio': 4}
    return {'model_type': 'dinov2', 'image_size': 518, 'patch_size': 14, 'use_swiglu_ffn': swiglu, **sizes, **kind}


def _dinov3(width: int, layers: int, heads: int) -> dict[str, Any]:
    sizes = {'hidden_size': width, 'num_hidden_layers': layers, 'num_attention_heads': heads}
    sizes |= {'intermediate_size': 4 * width, 'num_register_tokens': 4, 'image_size': 224, 'patch_size': 16}
    return {'model_type': 'dinov3_vit', 'use_gated_mlp': False, **sizes}


_VITS = {'small': (384, 12, 6), 'base': (768, 12, 12), 'large': (1024, 24, 16)}
PUBLISHED_ENCODERS: dict[str, dict[str, Any]] = {
    **{f'facebook/dinov2-{name}': _dinov2(*sizes) for name, sizes in _VITS.items()},
    'facebook/dinov2-giant': _dinov2(1536, 40, 24, swiglu=True),
    **{f'facebook/dinov2-with-registers-{name}': _dinov2(*sizes, registers=4) for name, sizes in _VITS.items()},
    **{f'facebook/dinov3-vit{name[0]}16-pretrain-lvd1689m': _dinov3(*sizes) for name, sizes in _VITS.items()},
}
"""Configurations of published encoders by Hub repository, listed here because the planner works offline."""


def encoder_sizes(source: str, notes: list[str], *, where: str) -> Mapping[str, Any]:
    """Return an image encoder's sizes (`ENCODER_KEYS`) from a folder's config.json or from `PUBLISHED_ENCODERS`.

    Args:
        notes: If the sizes are unknown, a note about the assumed sizes is appended to this list.

    Raises:
        UserError: A folder's config.json cannot be read, or belongs to a different kind of model.
    """
    path = Path(source, 'config.json')
    if path.is_file():
        try:
            config = json.loads(path.read_text(encoding='utf-8'))
        except ValueError as error:
            raise UserError(f'{path}: not JSON ({error}); write the folder with save_pretrained') from error
        if not isinstance(config, dict) or config.get('model_type') not in ENCODER_TYPES:
            raise UserError(f'{where}: {source} is not a {", ".join(ENCODER_TYPES)}; use a folder of one of them')
        return {key: config[key] for key in ENCODER_KEYS if key in config}
    if source not in PUBLISHED_ENCODERS:
        message = f'{where}: the sizes of {source} are not known without the network; assumed those of {DINOV2_BASE}'
        notes.append(message)
    return PUBLISHED_ENCODERS.get(source, PUBLISHED_ENCODERS[DINOV2_BASE])


class AlignmentCosts(CountedCosts):
    """Costs of representation alignment: one forward pass of a frozen image encoder, and the training of an MLP."""

    def __init__(self, settings: Mapping[str, Any], model: ModelCosts, notes: list[str]) -> None:
        kwargs = {
            'encoder': encoder_sizes(settings['encoder'], notes, where='representation_alignment.encoder'),
            'hidden_size': settings['hidden_size'],
            'token_width': model.facts['token_width'],
            'pixels_per_token': model.facts['pixels_per_patch'],
        }
        if settings['projection'] != 'mlp':
            kwargs['projection'] = settings['projection']
        super().__init__(ModelKey('representation_alignment', kwargs))
        self.block: int = settings['block']

    def training_flops(self, shape: Shape, route: TokenRoute | None, *, encodes: bool) -> float:
        """Return the FLOPs per image: of the MLP on the aligned block's tokens and, if `encodes`, of the encoder."""
        flops = self.flops(str(shape))
        return encodes * flops['encoder'] + self.seen(route) * flops['projector']

    def seen(self, route: TokenRoute | None) -> float:
        return 1.0 if route is None else route.fraction_after(self.block)


class PerceptualCosts(CountedCosts):
    """Costs of the networks of perceptual losses: forward passes on prediction and image, and one backward pass."""

    def __init__(self, settings: Mapping[str, Any], notes: list[str]) -> None:
        lpips = features = None
        if settings['lpips_weight']:
            lpips = {'network': settings['lpips_network'], 'scale': settings['lpips_scale']}
        if settings['features_weight']:
            sizes = encoder_sizes(settings['encoder'], notes, where='perceptual_losses.encoder')
            features = {'encoder': sizes, 'side': settings['features_side']}
        super().__init__(ModelKey('perceptual_losses', {'lpips': lpips, 'features': features}))

    def training_flops(self, shape: Shape) -> int:
        return self.flops(str(shape))['all']


def alignment_of(component: Component, model: ModelCosts, notes: list[str]) -> AlignmentCosts | None:
    settings = _settings(component, 'representation_alignment')
    return None if settings is None else AlignmentCosts(settings, model, notes)


def perceptual_of(component: Component, notes: list[str]) -> PerceptualCosts | None:
    settings = _settings(component, 'perceptual_losses')
    return None if settings is None else PerceptualCosts(settings, notes)


def _settings(component: Component, keyword: str) -> dict[str, Any] | None:
    """Return a model setting that is a mapping, such as `sprint`, completed with defaults; None if it is not set."""
    is_set = isinstance(component.kwargs.get(keyword), Mapping)
    return registry.settings_of('model', component, keyword) or None if is_set else None
