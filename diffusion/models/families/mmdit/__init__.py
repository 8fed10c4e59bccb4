"""MMDiT: a transformer with joint attention over image and text tokens, Stable Diffusion 3 (Esser et al. 2024)."""

from collections.abc import Mapping
from typing import Any

from diffusion.config.families import Family, Miniature, Pipeline

T5 = {'t5': ('text_encoder_3', 'tokenizer_3')}


def _call_arguments(keywords: Mapping[str, Any]) -> dict[str, Any]:
    return {'max_sequence_length': keywords['t5_length']} if 't5_length' in keywords else {}


FAMILY = Family(
    models={
        'mmdit': 'diffusion.models.families.mmdit.builder:mmdit',
        'tiny_mmdit': 'diffusion.models.families.mmdit.builder:tiny_mmdit',
    },
    denoiser_class='SD3Transformer2DModel',
    adapter='diffusion.models.families.mmdit.denoiser:MMDiT',
    pipelines={
        'StableDiffusion3Pipeline': Pipeline(optional_parts=T5, call=_call_arguments),
        'NormalizedStableDiffusion3Pipeline': Pipeline(
            optional_parts=T5, call=_call_arguments, module='diffusion.models.normalized_pipelines'
        ),
    },
    licenses={
        'stabilityai/stable-diffusion-3.5-medium': {
            'license': 'other',
            'license_name': 'stabilityai-ai-community',
            'license_link': 'https://huggingface.co/stabilityai/stable-diffusion-3.5-medium/blob/main/LICENSE.md',
        }
    },
    # Instead of a `hidden_size`, set the depth: the width is 64 times the depth.
    miniature=Miniature(
        'tiny_mmdit', {'depth': 3, 'dual_attention_blocks': 1, 'pos_embed_max_size': 16, 't5_length': 24}
    ),
    parameters={'latents': 2_243_171_520},
    sides=(256, 512),
    side_step=16,
)
