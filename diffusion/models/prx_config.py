"""Configuration of PRX (Photoroom 2025, Apache-2.0), for building it from scratch without a download."""

from typing import Any

from diffusion.models import sd2_config

PRETRAINED = 'Photoroom/prx-256-t2i'
TEXT_LENGTH = 256

TRANSFORMER: dict[str, Any] = {
    'in_channels': 16,
    'patch_size': 2,
    'context_in_dim': 2304,
    'hidden_size': 1792,
    'mlp_ratio': 3.5,
    'num_heads': 28,
    'depth': 16,
    'axes_dim': [32, 32],
}
"""The published 1.2 B model in latents, 1,170,691,648 parameters."""

VAE: dict[str, Any] = sd2_config.VAE | {
    'sample_size': 1024,
    'latent_channels': 16,
    'scaling_factor': 0.3611,
    'shift_factor': 0.1159,
    'use_quant_conv': False,
    'use_post_quant_conv': False,
}
"""The autoencoder of FLUX.1, with 16 channels."""
