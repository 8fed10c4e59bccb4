"""Configuration of Stable Diffusion XL base 1.0 (Podell et al. 2023), for building it from scratch without a download.

It is published as `PRETRAINED` under the CreativeML Open RAIL++-M license.
"""

from typing import Any

from diffusion.models import sd2_config

PRETRAINED = 'stabilityai/stable-diffusion-xl-base-1.0'
REVISION = '462165984030d82259a11f4367a4eed129e94a7b'
TEXT_LENGTH = 77

UNET: dict[str, Any] = {
    'sample_size': 128,
    'in_channels': 4,
    'out_channels': 4,
    'down_block_types': ['DownBlock2D', 'CrossAttnDownBlock2D', 'CrossAttnDownBlock2D'],
    'up_block_types': ['CrossAttnUpBlock2D', 'CrossAttnUpBlock2D', 'UpBlock2D'],
    'block_out_channels': [320, 640, 1280],
    'layers_per_block': 2,
    'transformer_layers_per_block': [1, 2, 10],
    'attention_head_dim': [5, 10, 20],  # misnamed in diffusers: numbers of heads, each of width 64
    'cross_attention_dim': 2048,
    'use_linear_projection': True,
    'addition_embed_type': 'text_time',
    'addition_time_embed_dim': 256,
    'projection_class_embeddings_input_dim': 2816,  # 1280 of the pooled text, and 256 for each of six sizes
}
"""The published U-Net, 2,567,463,684 parameters."""

VAE: dict[str, Any] = sd2_config.VAE | {
    'sample_size': 1024,
    'scaling_factor': 0.13025,
}

TEXT_ENCODER: dict[str, Any] = {
    'vocab_size': 49408,
    'hidden_size': 768,
    'intermediate_size': 3072,
    'num_hidden_layers': 12,
    'num_attention_heads': 12,
    'max_position_embeddings': TEXT_LENGTH,
    'hidden_act': 'quick_gelu',
    'layer_norm_eps': 1e-5,
    'projection_dim': 768,
    'bos_token_id': 0,
    'eos_token_id': 2,
    'pad_token_id': 1,
}
"""CLIP ViT-L/14."""

TEXT_ENCODER_2: dict[str, Any] = TEXT_ENCODER | {
    'hidden_size': 1280,
    'intermediate_size': 5120,
    'num_hidden_layers': 32,
    'num_attention_heads': 20,
    'hidden_act': 'gelu',
    'projection_dim': 1280,
}
"""OpenCLIP ViT-bigG/14, with its projection."""
