"""Sizes of the image encoders of representation alignment and perceptual losses, by repository or from a folder."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusion.errors import UserError

ARCHITECTURE = (
    *('model_type', 'hidden_size', 'num_hidden_layers', 'num_attention_heads', 'mlp_ratio', 'intermediate_size'),
    *('image_size', 'patch_size', 'use_swiglu_ffn', 'use_gated_mlp', 'num_register_tokens'),
)
"""Keys of a config.json that determine an encoder's costs."""
TYPES = ('dinov2', 'dinov2_with_registers', 'dinov3_vit')
"""Values of `model_type` in the config.json of an encoder that can be used."""
DEFAULT = 'facebook/dinov2-base'
"""Encoder whose sizes are assumed if those of a repository are not known."""


def _dinov2(width: int, layers: int, heads: int, *, registers: int = 0, swiglu: bool = False) -> dict[str, Any]:
    """Return the sizes of a DINOv2 ViT with patches of 14 px, with or without registers."""
    kind = {'model_type': 'dinov2_with_registers', 'num_register_tokens': registers} if registers else {}
    sizes = {'hidden_size': width, 'num_hidden_layers': layers, 'num_attention_heads': heads, 'mlp_ratio': 4}
    return {'model_type': 'dinov2', 'image_size': 518, 'patch_size': 14, 'use_swiglu_ffn': swiglu, **sizes, **kind}


def _dinov3(width: int, layers: int, heads: int) -> dict[str, Any]:
    """Return the sizes of a DINOv3 ViT with patches of 16 px."""
    sizes = {'hidden_size': width, 'num_hidden_layers': layers, 'num_attention_heads': heads}
    sizes |= {'intermediate_size': 4 * width, 'num_register_tokens': 4, 'image_size': 224, 'patch_size': 16}
    return {'model_type': 'dinov3_vit', 'use_gated_mlp': False, **sizes}


_VITS = {'small': (384, 12, 6), 'base': (768, 12, 12), 'large': (1024, 24, 16)}
"""Width, layers and heads of the ViTs in three sizes."""
PUBLISHED: dict[str, dict[str, Any]] = {
    **{f'facebook/dinov2-{name}': _dinov2(*sizes) for name, sizes in _VITS.items()},
    'facebook/dinov2-giant': _dinov2(1536, 40, 24, swiglu=True),
    **{f'facebook/dinov2-with-registers-{name}': _dinov2(*sizes, registers=4) for name, sizes in _VITS.items()},
    **{f'facebook/dinov3-vit{name[0]}16-pretrain-lvd1689m': _dinov3(*sizes) for name, sizes in _VITS.items()},
}
"""Sizes of published encoders, by repository on the Hub: the planner works offline."""


def encoder_sizes(source: str, notes: list[str], *, where: str) -> Mapping[str, Any]:
    """Return the sizes of an image encoder, from a folder's config.json or those known of a repository.

    Args:
        source: Folder or repository.
        notes: List to which the assumption is appended if the sizes are not known.
        where: Key of the setting.

    Raises:
        UserError: A folder's config.json cannot be read, or is that of another model.
    """
    path = Path(source, 'config.json')
    if path.is_file():
        try:
            config = json.loads(path.read_text(encoding='utf-8'))
        except ValueError as error:
            raise UserError(f'{path}: not JSON ({error}); write the folder with save_pretrained') from error
        if not isinstance(config, dict) or config.get('model_type') not in TYPES:
            raise UserError(f'{where}: {source} is not a {", ".join(TYPES)}; use a folder of one of them')
        return {key: config[key] for key in ARCHITECTURE if key in config}
    if source not in PUBLISHED:
        notes.append(f'{where}: the sizes of {source} are not known without the network; assumed those of {DEFAULT}')
    return PUBLISHED.get(source, PUBLISHED[DEFAULT])
