"""Calls of exported pipelines, and replacements of their noise schedulers."""

import json
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from safetensors.torch import load_file
from stock_pipeline import assert_command_draws_the_same

from diffusion.cli import main
from diffusion.config.recipe import LoraConfig
from diffusion.models.clip_vocabulary import vocabulary_files
from diffusion.models.families.adapter import adapter_of
from diffusion.models.families.mmdit.builder import tiny_mmdit
from diffusion.models.families.prx.builder import tiny_prx
from diffusion.models.families.prx.denoiser import PRX
from diffusion.models.families.sdxl.denoiser import SDXLUNet
from diffusion.models.objective import Objective
from diffusion.models.sampler import inference_scheduler
from diffusion.tasks.argument_checks import lora_file
from diffusion.tasks.export import write_file, write_folder
from diffusion.tasks.exported_pipeline import scheduler_like
from diffusion.tasks.model_card import LORA, loading
from diffusion.training import components


@pytest.mark.parametrize('name', ['PRXPipeline', 'PRXPixelPipeline'])
def test_prompts_and_sizes_reach_prx_as_they_are(name):
    settings = PRX().call_arguments(type(name, (), {})(), negative='blur', guidance=0.5)
    cleaning = {'skip_text_cleaning': True} if name == 'PRXPipeline' else {}
    expected = {'guidance_scale': 1.0, 'use_resolution_binning': False, 'negative_prompt': 'blur'}
    assert settings == expected | cleaning
    for negative, passed in (('blur', 'blur'), ('', None)):
        settings = SDXLUNet().call_arguments(None, negative=negative, guidance=0.5)
        assert settings == {'guidance_scale': 0.5, 'negative_prompt': passed}


def test_prx_on_pixels_gets_scaled_noise_of_one_image_at_a_time_and_returns_values_around_zero():
    class PRXPixelPipeline:
        config = Mock(noise_scale=3.0)

        def __call__(self, prompts, *, latents, generator, **settings):
            assert (prompts, len(generator), settings) == (['a'], 1, {'output_type': 'pt', 'return_dict': False})
            return (latents,)

    noise = torch.tensor([-0.6, -0.1, 0.2, 0.5]).view(2, 1, 1, 2)
    found = PRX().draw(PRXPixelPipeline(), ['a', 'a'], noise=noise, generators=[torch.Generator()] * 2)
    torch.testing.assert_close(found.flatten(), torch.tensor([0.0, 0.35, 0.8, 1.0]))


@pytest.mark.parametrize(('first', 'second'), [('euler', 'dpm++'), ('dpm++', 'euler'), ('euler', 'unipc')])
def test_other_scheduler_of_a_flow_has_the_noise_levels_of_training(first, second):
    objective = Objective(path='flow', prediction_type='velocity', snr_shift=3.0)
    replaced, wanted = (
        scheduler_like(inference_scheduler(first, objective), second),
        inference_scheduler(second, objective),
    )
    for scheduler in (replaced, wanted):
        scheduler.set_timesteps(7)
    assert type(replaced) is type(wanted)
    assert replaced.sigmas.tolist() == wanted.sigmas.tolist()
    assert replaced.config.get('prediction_type') == wanted.config.get('prediction_type')


def test_other_scheduler_of_a_diffusion_has_the_noise_levels_of_training():
    trained: Any = inference_scheduler('ddim', Objective(prediction_type='v_prediction', snr_shift=2.0))
    replaced = scheduler_like(trained, 'dpm++')
    assert type(replaced).__name__ == 'DPMSolverMultistepScheduler'
    assert replaced.config.prediction_type == 'v_prediction'
    assert torch.equal(replaced.alphas_cumprod, trained.alphas_cumprod)


@pytest.mark.slow
@pytest.mark.parametrize(
    'prediction',
    [
        {'zero_terminal_snr': True, 'prediction_type': 'v_prediction'},
        {'snr_shift': 2.0},
        {'path': 'flow', 'prediction_type': 'velocity', 'snr_shift': 2.0},
        {'path': 'flow', 'prediction_type': 'sample'},
    ],
)
def test_export_keeps_the_noise_schedule_of_other_objectives(make_model, prediction, tmp_path):
    model = make_model(objective=Objective(**prediction))
    pipeline = model.adapter.pipeline(model)
    pipeline.save_pretrained(tmp_path / 'sd')
    pipeline = type(pipeline).from_pretrained(tmp_path / 'sd', low_cpu_mem_usage=False)
    pipeline.set_progress_bar_config(disable=True)
    latents = torch.randn(1, 4, 8, 8)
    sampling = {'num_inference_steps': 3, 'guidance_scale': 2.0}
    theirs = pipeline('a', latents=latents, output_type='pt', return_dict=False, **sampling)[0]
    scheduler = 'dpm++' if model.objective.is_flow else 'ddim'
    ours = model.generate(['a'], latents=latents, noise_scheduler=scheduler, **sampling)
    torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize('kind', ['grouped', 'channels', 'rae'])
def test_export_decodes_with_its_own_autoencoder(tmp_path, small_flux2, small_rae, kind, capsys):
    vae, layout = str(small_rae if kind == 'rae' else small_flux2), 'grouped' if kind == 'grouped' else 'channels'
    sizes: dict[str, Any] = {'vae': vae, 'vae_layout': layout, 'text_width': 32, 'text_layers': 1}
    if kind == 'channels':
        model = tiny_mmdit(32, depth=1, dual_attention_blocks=0, patch_size=2, **sizes)
    else:
        model = tiny_prx(32, hidden_size=32, num_heads=2, depth=1, **sizes)
    folder = tmp_path / 'exported'
    pipeline = write_folder(model, None, folder, torch.float32, lora=False)  # type: ignore[arg-type]
    stored = json.loads((folder / 'vae/config.json').read_text())['_class_name']
    assert stored == json.loads((Path(vae) / 'config.json').read_text())['_class_name']
    vocabulary, merges = vocabulary_files()
    assert json.loads((folder / 'tokenizer/vocab.json').read_text()) == json.loads(vocabulary)
    assert (folder / 'tokenizer/merges.txt').read_text() == merges
    settings = json.loads((folder / 'tokenizer/tokenizer_config.json').read_text())
    assert settings['tokenizer_class'] == 'CLIPTokenizer' and settings.get('extra_special_tokens') != []
    code = folder / 'normalized_pipelines.py'
    assert 'diffusion.' not in code.read_text().replace('diffusers.', ''), 'it runs without this package'
    assert loading(pipeline, 'sd', []) == "DiffusionPipeline.from_pretrained('sd', trust_remote_code=True)"
    assert_command_draws_the_same(model, folder, noise_scheduler='euler')
    code.write_text(code.read_text() + '\nprint("other")\n')
    assert main(['generate', str(folder), 'a']) == 2
    assert f'{pipeline}, but its code in normalized_pipelines.py is not that of this version' in capsys.readouterr().err


def test_lora_is_exported_alone(tmp_path, make_model):
    model, recipe = make_model(train_text_encoder=False), Mock(seed=0, lora=LoraConfig(rank=2, alpha=2.0))
    components.add_lora(recipe, model)
    (folder := tmp_path / 'lora').mkdir()
    assert write_folder(model, recipe, folder, torch.float32, lora=True) == LORA
    assert write_file(model, recipe, tmp_path / 'a.safetensors', torch.float32, lora=True) == LORA
    stock, single = (load_file(lora_file(place)) for place in (folder, tmp_path / 'a.safetensors'))
    assert {name.partition('.')[0] for name in stock} == {'unet'}
    assert all(name.startswith('lora_unet_') for name in single), 'the names of ComfyUI'


def test_export_without_t5_draws_with_as_many_zeros_as_in_training(tmp_path, small_vae):
    small: dict[str, Any] = {'depth': 1, 'dual_attention_blocks': 0, 'patch_size': 2}
    small |= {'text_width': 32, 'text_layers': 1}
    model = tiny_mmdit(32, vae=str(small_vae), t5=False, t5_length=1, **small)
    torch.manual_seed(0)
    for weight in model.denoiser.parameters():  # at initialization, text hardly changes the image
        torch.nn.init.normal_(weight, std=0.1)
    adapter_of(model.denoiser).pipeline(model).save_pretrained(tmp_path / 'exported')
    assert_command_draws_the_same(model, tmp_path / 'exported', noise_scheduler='euler')
