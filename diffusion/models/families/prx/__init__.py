"""PRX: a transformer in which image tokens attend to themselves and to text tokens (Photoroom 2025)."""

from diffusion.config.families import Family, Miniature, Pipeline

FAMILY = Family(
    models={
        'prx': 'diffusion.models.families.prx.builder:prx',
        'tiny_prx': 'diffusion.models.families.prx.builder:tiny_prx',
    },
    denoiser_class='PRXTransformer2DModel',
    adapter='diffusion.models.families.prx.denoiser:PRX',
    single_file=False,
    pipelines={
        'PRXPipeline': Pipeline(
            call=lambda _: {'skip_text_cleaning': True, 'use_resolution_binning': False}, loads_lora=False
        ),
        'NormalizedPRXPipeline': Pipeline(
            call=lambda _: {'skip_text_cleaning': True},
            loads_lora=False,
            module='diffusion.models.normalized_pipelines',
        ),
        # The pipeline itself converts image predictions to velocities, for the scheduler it was saved with.
        'PRXPixelPipeline': Pipeline(
            call=lambda _: {'use_resolution_binning': False}, loads_lora=False, takes_other_schedulers=False
        ),
    },
    licenses={
        'Photoroom/prx-256-t2i': {
            'license': 'other',
            'license_name': 'apache-2.0-and-gemma',
            'license_link': 'https://ai.google.dev/gemma/terms',
        }
    },
    # It has 16 blocks like the full model, since recipes refer to blocks by number.
    miniature=Miniature('tiny_prx', {'hidden_size': 32, 'num_heads': 2, 'depth': 16}),
    parameters={'latents': 1_170_691_648, 'pixels': 1_177_215_744},
    sides=(256, 512, 1024),
    side_step=16,
)
