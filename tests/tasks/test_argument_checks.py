"""Checks of `diffusion generate` and `diffusion export` that need no run."""

import json
from pathlib import Path
from unittest.mock import Mock, call

import pytest
import torch
from commands import output_of, refusal, refusals
from golden import check_golden

from diffusion.errors import UserError
from diffusion.tasks import generate
from diffusion.tasks.argument_checks import check_pipeline
from diffusion.tasks.exported_pipeline import ExportedPipeline

FLOW = {'_class_name': 'FlowMatchEulerDiscreteScheduler', 'shift': 3.0, 'num_train_timesteps': 1000}
SAMPLE = {'_class_name': 'DPMSolverMultistepScheduler', 'use_flow_sigmas': True, 'prediction_type': 'sample'}
DIFFUSION = {'_class_name': 'DDIMScheduler', 'num_train_timesteps': 1000}


def pipeline(folder: Path, name: str, scheduler: dict[str, object]) -> Path:
    (folder / 'scheduler').mkdir(parents=True)
    (folder / 'model_index.json').write_text(json.dumps({'_class_name': name}))
    (folder / 'scheduler' / 'scheduler_config.json').write_text(json.dumps(scheduler))
    return folder


def test_what_cannot_be_drawn_is_refused_with_the_way_out(tmp_path, capsys):
    pipeline(tmp_path / 'xl', 'StableDiffusionXLPipeline', SAMPLE)
    pipeline(tmp_path / 'sd3', 'StableDiffusion3Pipeline', FLOW)
    pipeline(tmp_path / 'pixels', 'PRXPixelPipeline', FLOW)
    for name, scheduler in (('prx', FLOW), ('sample', SAMPLE), ('diffusion', DIFFUSION)):
        pipeline(tmp_path / name, 'PRXPipeline', scheduler)
    for name, kind in (('unnamed', ''), ('flux', 'FluxPipeline'), ('i1', 'I1Pipeline')):
        pipeline(tmp_path / name, kind, FLOW)
    for name in ('lora', 'none'):
        (tmp_path / name).mkdir()
    for name in ('lora/pytorch_lora_weights.safetensors', 'lora.bin', 'model.safetensors'):
        (tmp_path / name).touch()
    words = ['xl a --scheduler euler', 'sample a --scheduler heun', 'diffusion a --scheduler euler']
    words += ['pixels a --scheduler dpm++', 'sd3 a --scheduler pndm']
    words += ['prx a --rescale 1', 'i1 a --rescale 1 --shift 3', 'i1 a --guide apg', 'sd3 a --weights ema']
    words += ['unnamed a', 'flux a', 'lora a', 'model.safetensors a', 'prx a --lora TMP/lora', 'none a --lora TMP/lora']
    words += ['sd3 a --lora TMP/none', 'sd3 a --lora TMP/lora.bin', 'sd3 a --seed 4294967296', 'none a --guide {']
    found = refusals(capsys, tmp_path, [f'generate TMP/{each} --out TMP/out' for each in words])
    check_golden(Path(__file__).parent / 'golden/generate-mistakes', {'messages.txt': found})


def test_export_draws_with_its_own_defaults_and_the_given_options(tmp_path, monkeypatch, capsys):
    folder, drawn = pipeline(tmp_path / 'export', 'StableDiffusionPipeline', DIFFUSION), torch.zeros(2, 3, 8, 8)
    monkeypatch.setattr(generate, 'ExportedPipeline', made := Mock())
    made.return_value.generate.return_value, made.return_value.noise_scheduler = drawn, 'DDIMScheduler'
    output = output_of(capsys, 'generate', folder, 'A cat, red!', '???', '--out', tmp_path / 'out', '--seed', '9')
    assert output == f'2 images in {tmp_path}/out\n'
    assert sorted(path.name for path in (tmp_path / 'out').iterdir()) == ['00009-a-cat-red.png', '00010-empty.png']
    defaults = {'num_inference_steps': 50, 'guidance_scale': 7.5, 'guidance_rescale': 0.0}
    defaults |= {'negative_prompt': '', 'seeds': range(9, 11), 'noise_scheduler': 'DDIMScheduler'}
    draw = made.return_value.generate
    assert draw.call_args == call(['A cat, red!', '???'], **defaults)
    words = ['--steps', '3', '--guidance', '2', '--negative', 'x', '--scheduler', 'ddpm', '--out', tmp_path / 'out']
    output_of(capsys, 'generate', folder, 'a', 'b', *words)
    given = {'num_inference_steps': 3, 'guidance_scale': 2.0, 'negative_prompt': 'x', 'noise_scheduler': 'ddpm'}
    assert draw.call_args == call(['a', 'b'], **defaults | given | {'seeds': range(2)})


CLASSES = [['evil', 'Evil'], ['diffusers.utils', 'Evil'], ['transformers', 'AutoModel'], [None, 'Evil']]


@pytest.mark.parametrize('part', [*CLASSES, ['diffusers', 'UNet2DConditionModel', 'x']])
def test_pipeline_of_other_classes_is_refused_and_nothing_is_imported(part, tmp_path, monkeypatch, capsys):
    (tmp_path / 'evil.py').write_text(f'open({str(tmp_path / "ran")!r}, "w")\nclass Evil: pass\n')
    monkeypatch.syspath_prepend(tmp_path)
    folder = pipeline(tmp_path / 'export', 'StableDiffusionPipeline', DIFFUSION)
    content = {'_class_name': 'StableDiffusionPipeline', 'safety_checker': [None, None], 'unet': part}
    (folder / 'model_index.json').write_text(json.dumps(content))
    error = refusal(capsys, 'generate', folder, 'a', '--out', tmp_path / 'out')
    assert f'{folder}/model_index.json: unet is {".".join(map(str, part))}, which would run code' in error
    with pytest.raises(UserError, match='which would run code'):
        ExportedPipeline(folder)
    assert not (tmp_path / 'ran').exists()


def test_published_parts_of_a_pipeline_are_accepted_and_code_beside_them_is_refused(tmp_path):
    folder = pipeline(tmp_path / 'export', 'StableDiffusionPipeline', DIFFUSION)
    content = {
        '_class_name': 'StableDiffusionPipeline',
        '_diffusers_version': '0.6.0',
        'feature_extractor': ['transformers', 'CLIPImageProcessor'],
        'requires_safety_checker': True,
        'safety_checker': ['stable_diffusion', 'StableDiffusionSafetyChecker'],
        'text_encoder': ['transformers', 'CLIPTextModel'],
        'vae': ['diffusers', 'AutoencoderKL'],
    }
    (folder / 'model_index.json').write_text(json.dumps(content))
    assert check_pipeline(folder) == 'StableDiffusionPipeline'
    (folder / 'vae').mkdir()
    (folder / 'vae/diffusers.py').touch()
    with pytest.raises(UserError, match=r'vae/diffusers\.py: is code that comes with the weights'):
        check_pipeline(folder)


def test_export_is_refused_before_anything_is_loaded(tmp_path, capsys):
    recipe = {'name': 'run', 'global_batch': 8, 'model': {'name': 'tiny_prx'}, 'trainer': {'max_duration': '1ba'}}
    recipe['streams'] = {'small': {'local': 'shards', 'resolution': 32}}
    (tmp_path / 'run' / 'ba1').mkdir(parents=True)
    (tmp_path / 'run' / 'ba1' / 'state.pt').touch()
    (tmp_path / 'run' / 'recipe.yaml').write_text(json.dumps(recipe))
    words = ['out.safetensors', 'run', 'out.pt']
    words += [f'out {more}' for more in ('--at 3', '--merge', '--layout x', '--push painter', '--public', '--push a/b')]
    found = refusals(capsys, tmp_path, [f'export TMP/run --out TMP/{each}' for each in words])
    check_golden(Path(__file__).parent / 'golden/export-mistakes', {'messages.txt': found})
    assert [each.name for each in tmp_path.iterdir()] == ['run']
