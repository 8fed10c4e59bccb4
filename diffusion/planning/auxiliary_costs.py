"""Costs of the networks that only training losses use: representation alignment and perceptual losses."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusion.config import registry
from diffusion.config.image_shapes import Shape
from diffusion.config.recipe import Component
from diffusion.errors import UserError
from diffusion.planning.count_cache import ModelKey
from diffusion.planning.model_costs import CountedCosts, ModelCosts, TokenRoute

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
    """Return an image encoder's `ENCODER_KEYS`, from a folder's config.json or the table of published encoders.

    Args:
        notes: List to which a note is appended if the sizes are unknown and assumed.

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
        """Return the FLOPs per image: the MLP's for the aligned block's tokens, plus the encoder's if `encodes`."""
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
    """Return the settings under a model's `keyword`, with defaults for missing ones; None if the keyword is not set."""
    is_set = isinstance(component.kwargs.get(keyword), Mapping)
    return registry.settings_of('model', component, keyword) or None if is_set else None
