"""Fit the weights of a source to a denoiser: add latent channels of zeros, and explain weights that do not fit."""

from collections.abc import Mapping

import torch
from diffusers.models.modeling_utils import ModelMixin
from torch import Tensor

FAMILIES = {768: 'Stable Diffusion 1.x', 1024: 'Stable Diffusion 2.x', 2048: 'Stable Diffusion XL'}
"""Published U-Nets by the width of the text embeddings that their cross-attention takes."""
CHANNELS = (('denoiser.conv_in.weight', 1), ('denoiser.conv_out.weight', 0), ('denoiser.conv_out.bias', 0))
"""Tensors of a U-Net whose shapes depend on the number of latent channels, each with the dimension of the channels."""


def resized(weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> tuple[dict[str, Tensor], list[str]]:
    """Return a model's weights with zeros for additional latent channels, and descriptions of what was added.

    With zeros, the first prediction is that of the source: the additional input channels have no effect, and the
    additional output channels are zero.

    Args:
        weights: Weights of the source by name.
        own: The model's tensors by name.
    """
    result, added = dict(weights), []
    for name, dimension in CHANNELS:
        if name not in own or name not in weights:
            continue
        stored, wanted = weights[name], own[name].shape
        target = torch.Size([*stored.shape[:dimension], wanted[dimension], *stored.shape[dimension + 1 :]])
        if target == wanted and stored.shape[dimension] < wanted[dimension]:
            grown = stored.new_zeros(wanted)
            grown.narrow(dimension, 0, stored.shape[dimension]).copy_(stored)
            result[name] = grown
            added.append(f'{name} {tuple(stored.shape)} -> {tuple(wanted)}')
    return result, added


def fitting_hint(weights: Mapping[str, Tensor], own: Mapping[str, Tensor]) -> str:
    """Return a hint if a source is a LoRA or has another width of the text embeddings than a model, else ''."""
    if any('.lora_A.' in name for name in weights):
        return '; it is the checkpoint of a LoRA: start from the folder that diffusion export --merge writes'
    theirs, ours = _text_width(weights), _text_width(own)
    if theirs == ours or theirs is None or ours is None:
        return ''
    return (
        f'; its cross-attention takes text embeddings of width {theirs}{_family(theirs)}, the model has width '
        f'{ours}{_family(ours)}'
    )


def way_out(denoiser: ModelMixin) -> str:
    """Return advice for the message about weights that do not fit a denoiser."""
    width = denoiser.config.get('cross_attention_dim')
    family = FAMILIES.get(width) if isinstance(width, int) else None
    return f'use weights of {family}, or other model settings' if family else 'use other model settings'


def _text_width(weights: Mapping[str, Tensor]) -> int | None:
    """Return the width of the text embeddings that a U-Net takes, or None if it has no cross-attention."""
    return next((each.shape[1] for name, each in weights.items() if name.endswith('attn2.to_k.weight')), None)


def _family(width: int) -> str:
    return f' ({FAMILIES[width]})' if width in FAMILIES else ''
