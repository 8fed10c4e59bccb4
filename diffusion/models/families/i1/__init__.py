"""i1: a transformer without timestep input, with long skips and a learned null caption (Zeng et al. 2026)."""

from diffusion.config.families import Family, Miniature, Pipeline

FAMILY = Family(
    models={
        'i1': 'diffusion.models.families.i1.builder:i1',
        'tiny_i1': 'diffusion.models.families.i1.builder:tiny_i1',
    },
    denoiser_class='I1Transformer2DModel',
    adapter='diffusion.models.families.i1.denoiser:I1',
    single_file=False,
    layouts=('i1',),
    pipelines={
        'I1Pipeline': Pipeline(
            loads_lora=False,
            module='diffusion.models.families.i1.pipeline_i1',
            part_modules={'transformer': 'diffusion.models.families.i1.transformer_i1'},
            takes_guidance_rescale=True,
        )
    },
    licenses={
        'google/t5gemma-2b-2b-ul2-it': {
            'license': 'other',
            'license_name': 'gemma',
            'license_link': 'https://ai.google.dev/gemma/terms',
        }
    },
    miniature=Miniature('tiny_i1', {'hidden_size': 32, 'num_heads': 2, 'depth': 3}),
    parameters={'latents': 1_034_264_432},
    sides=(256,),
    mirrored_depth=29,
    side_step=16,
)
