"""Configuration of Stable Diffusion 3.5 medium (Esser et al. 2024), for building it from scratch without a download.

It is published as stabilityai/stable-diffusion-3.5-medium. Accept the Stability AI Community License on the Hub to
download its files.
"""

from typing import Any

from diffusion.models import sd2_config

PRETRAINED = 'stabilityai/stable-diffusion-3.5-medium'
T5_LENGTH = 256
T5_WIDTH = 4096
HEAD_WIDTH = 64

TRANSFORMER: dict[str, Any] = {
    'sample_size': 128,
    'patch_size': 2,
    'attention_head_dim': HEAD_WIDTH,
}
"""Settings that all sizes share. `sample_size` is the scale of the position embeddings at every resolution."""

CLIP_L: dict[str, Any] = {
    'vocab_size': 49408,
    'hidden_size': 768,
    'intermediate_size': 3072,
    'num_hidden_layers': 12,
    'num_attention_heads': 12,
    'max_position_embeddings': 77,
    'hidden_act': 'quick_gelu',
    'projection_dim': 768,
    'bos_token_id': 0,
    'eos_token_id': 2,
    'pad_token_id': 1,
}
"""CLIP ViT-L, the first text encoder."""

CLIP_BIG_G: dict[str, Any] = CLIP_L | {
    'hidden_size': 1280,
    'intermediate_size': 5120,
    'num_hidden_layers': 32,
    'num_attention_heads': 20,
    'hidden_act': 'gelu',
    'projection_dim': 1280,
}
"""OpenCLIP ViT-bigG, the second text encoder."""

T5_XXL: dict[str, Any] = {
    'vocab_size': 32128,
    'd_model': T5_WIDTH,
    'd_kv': 64,
    'd_ff': 10240,
    'num_layers': 24,
    'num_heads': 64,
    'feed_forward_proj': 'gated-gelu',
}
"""T5 v1.1 XXL, the third text encoder."""

VAE: dict[str, Any] = sd2_config.VAE | {
    'sample_size': 1024,
    'latent_channels': 16,
    'scaling_factor': 1.5305,
    'shift_factor': 0.0609,
    'use_quant_conv': False,
    'use_post_quant_conv': False,
}
