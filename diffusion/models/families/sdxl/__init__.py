"""Stable Diffusion XL: a U-Net conditioned on two text encoders, pooled text and image sizes (Podell et al. 2023)."""

from diffusion.config.families import Family, Miniature, Pipeline

FAMILY = Family(
    models={
        'sdxl': 'diffusion.models.families.sdxl.builder:sdxl',
        'tiny_sdxl': 'diffusion.models.families.sdxl.builder:tiny_sdxl',
    },
    denoiser_class='UNet2DConditionModel',
    adapter='diffusion.models.families.sdxl.denoiser:SDXLUNet',
    u_net=True,
    image_sizes=True,
    pipelines={'StableDiffusionXLPipeline': Pipeline()},
    licenses={'stabilityai/stable-diffusion-xl-base-1.0': {'license': 'openrail++'}},
    miniature=Miniature('tiny_sdxl', {'block_out_channels': [32, 32]}),
    parameters={'latents': 2_567_463_684},
    sides=(256, 512, 1024),
)
