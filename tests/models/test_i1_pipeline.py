"""The exported pipeline of i1: the images of the model, with each autoencoder, and checks of the code in the export."""

from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.pipelines.pipeline_utils import DiffusionPipeline

from diffusion.errors import UserError
from diffusion.models.families.i1.builder import tiny_i1
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.objective import Objective
from diffusion.tasks.argument_checks import check_pipeline
from diffusion.tasks.export import write_folder
from tests.models.test_i1 import TINY

SHIFTED = Objective(path='flow', prediction_type='velocity', timesteps='logit_normal', snr_shift=1 / 0.3)
SAMPLING: dict[str, Any] = {'num_inference_steps': 4, 'guidance_scale': 12.0, 'guidance_rescale': 1.0}


def export_of(model: LatentDiffusion, folder: Path) -> Any:
    assert write_folder(model, None, folder, torch.float32, lora=False) == 'I1Pipeline'  # type: ignore[arg-type]
    settings = {'trust_remote_code': True, 'local_files_only': True, 'low_cpu_mem_usage': False}
    pipeline = DiffusionPipeline.from_pretrained(folder, **settings)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def assert_draws_the_same(pipeline: Any, model: LatentDiffusion, prompts: list[str], **more: Any) -> None:
    latents = torch.randn(len(prompts), *model.latent_grid.shape(None), generator=torch.Generator().manual_seed(1))
    theirs = pipeline(prompts, latents=latents, output_type='pt', **SAMPLING | more).images
    ours = model.generate(prompts, latents=latents, noise_scheduler='euler', **SAMPLING | more)
    assert ours.std() > 0.01
    torch.testing.assert_close(theirs, ours, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ('kind', 'settings'),
    [
        ('kl', {}),
        ('channels', {'caption_dropout_mode': 'empty'}),
        ('grouped', {'patch_size': 1}),
        ('rae', {'patch_size': 1}),
    ],
)
def test_pipeline_draws_the_images_of_the_model(kind, settings, tmp_path, small_vae, small_flux2, small_rae):
    torch.manual_seed(0)
    vae = {'kl': small_vae, 'rae': small_rae}.get(kind, small_flux2)
    layout: Any = 'grouped' if kind == 'grouped' else 'channels'
    model = tiny_i1(32, vae=str(vae), vae_layout=layout, objective=SHIFTED, **TINY | settings)
    pipeline = export_of(model, tmp_path / 'i1')
    assert type(pipeline.transformer).__module__.startswith('diffusers_modules'), 'the code of the export'
    assert pipeline.scheduler.config.shift == pytest.approx(1 / 0.3)
    prompts = ['two cats', 'a red square on a table']
    assert_draws_the_same(pipeline, model, prompts)
    assert_draws_the_same(pipeline, model, prompts, negative_prompt='blur', guidance_rescale=0.5)
    assert_draws_the_same(pipeline, model, prompts, guidance_scale=1.0)


def test_pipeline_draws_other_sizes_also_in_16_bits(tmp_path, small_vae):
    pipeline = export_of(tiny_i1(32, vae=str(small_vae), **TINY), tmp_path / 'i1').to(torch.bfloat16)
    assert pipeline.transformer.dtype == torch.bfloat16
    image = pipeline('two cats', height=32, width=64, num_inference_steps=2).images[0]
    assert image.size == (64, 32)
    with pytest.raises(ValueError, match='height 32 and width 40 must be multiples of 16'):
        pipeline('two cats', width=40)


@pytest.mark.parametrize('part', ['', 'transformer'])
def test_code_that_is_not_of_this_package_is_refused(tmp_path, small_vae, part):
    write_folder(tiny_i1(32, vae=str(small_vae), **TINY), None, tmp_path, torch.float32, lora=False)  # type: ignore[arg-type]
    assert check_pipeline(tmp_path) == 'I1Pipeline'
    file = tmp_path / part / ('transformer_i1.py' if part else 'pipeline_i1.py')
    assert 'diffusion.' not in file.read_text(), 'it runs without this package'
    file.write_text(file.read_text() + 'print("other")\n')
    with pytest.raises(UserError, match=f'its code in {file.name} is not that of this version of the package'):
        check_pipeline(tmp_path)
    file.unlink()
    with pytest.raises(UserError, match=f'its code in {file.name} is not that of this version of the package'):
        check_pipeline(tmp_path)
