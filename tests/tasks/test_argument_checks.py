"""Checks of `diffusion generate` and `diffusion export` that need no run."""

import json
from pathlib import Path

import pytest
from commands import refusal

from diffusion.errors import UserError
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


@pytest.mark.parametrize(
    ('name', 'scheduler', 'wanted', 'message'),
    [
        ('StableDiffusionXLPipeline', SAMPLE, 'euler', "'euler' does not fit into an exported pipeline; use dpm++"),
        ('PRXPipeline', SAMPLE, 'heun', "'heun' does not fit into an exported pipeline; use dpm++ or unipc"),
        ('PRXPipeline', DIFFUSION, 'euler', "'euler' does not fit into a PRXPipeline; use ddim, ddpm, dpm++, pndm"),
        ('PRXPixelPipeline', FLOW, 'dpm++', "'dpm++' does not fit into a PRXPixelPipeline; use euler, or generate"),
        ('StableDiffusion3Pipeline', FLOW, 'pndm', "'pndm' cannot sample a flow; use ddim, dpm++, euler"),
    ],
)
def test_scheduler_that_a_pipeline_cannot_use_is_refused(name, scheduler, wanted, message, tmp_path, capsys):
    folder = pipeline(tmp_path / 'export', name, scheduler)
    error = refusal(capsys, 'generate', folder, 'a', '--out', tmp_path / 'out', '--scheduler', wanted)
    assert f'--scheduler: {message}' in error


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


def test_only_pipelines_with_guidance_rescaling_take_it(tmp_path, capsys):
    given = ['--rescale', '1'], ['--rescale', '1', '--shift', '3'], ['--guide', 'apg']
    for name, words in zip(('PRXPipeline', 'I1Pipeline', 'I1Pipeline'), given, strict=True):
        folder = pipeline(tmp_path / words[-2], name, FLOW)
        error = refusal(capsys, 'generate', folder, 'a', '--out', tmp_path / 'out', *words)
        assert f'{words[-2]}: a {name} has no such argument; generate from the run' in error


def test_sources_without_a_pipeline_are_refused_with_the_way_out(tmp_path, capsys):
    def problem(source: Path, *options: str) -> str:
        return refusal(capsys, 'generate', source, 'a', '--out', tmp_path / 'out', *options)

    other = pipeline(tmp_path / 'other', '', FLOW)
    assert f'{other}/model_index.json: does not name a pipeline; export the run again' in problem(other)
    other = pipeline(tmp_path / 'flux', 'FluxPipeline', FLOW)
    message = problem(other)
    assert f'{other}: is a FluxPipeline; use a folder of ' in message and 'StableDiffusionPipeline, ' in message
    lora = tmp_path / 'lora'
    lora.mkdir()
    assert f'--lora: {lora} is not an exported pipeline' in problem(lora, '--lora', str(lora))
    sd3 = pipeline(tmp_path / 'sd3', 'StableDiffusion3Pipeline', FLOW)
    assert f'--weights: {sd3} is an export, which holds one set' in problem(sd3, '--weights', 'ema')
    assert f'--lora: {lora}/pytorch_lora_weights.safetensors does not exist' in problem(sd3, '--lora', str(lora))
    (lora / 'pytorch_lora_weights.safetensors').touch()
    assert f'use the exported base model with --lora {lora}, or the folder of the run' in problem(lora)
    prx = pipeline(tmp_path / 'prx', 'PRXPipeline', FLOW)
    assert '--lora: diffusers cannot load a LoRA into a PRXPipeline; export' in problem(prx, '--lora', str(lora))
    (pickled := tmp_path / 'lora.bin').touch()
    assert f'--lora: {pickled} is not a .safetensors file, and pickled' in problem(sd3, '--lora', str(pickled))
    file = tmp_path / 'model.safetensors'
    file.touch()
    assert f'{file}: is a single file, which does not record how to sample; give the run' in problem(file)


def test_export_is_refused_before_anything_is_loaded(tmp_path, capsys):
    def problem(*options: str) -> str:
        return refusal(capsys, 'export', tmp_path / 'run', *options)

    recipe = {'name': 'run', 'global_batch': 8, 'model': {'name': 'tiny_prx'}, 'trainer': {'max_duration': '1ba'}}
    recipe['streams'] = {'small': {'local': 'shards', 'resolution': 32}}
    (tmp_path / 'run' / 'ba1').mkdir(parents=True)
    (tmp_path / 'run' / 'ba1' / 'state.pt').touch()
    (tmp_path / 'run' / 'recipe.yaml').write_text(json.dumps(recipe))
    folder, file = str(tmp_path / 'out'), str(tmp_path / 'out.safetensors')
    assert '--out: no program reads the model tiny_prx from a single file; give a folder' in problem('--out', file)
    for options, message in (
        (['--out', folder, '--at', '3'], '--at: batch 3 needs --ema-width; without it, give the checkpoint'),
        (['--out', folder, '--merge'], '--merge: {}/run/ba1 has no LoRA, so there is nothing to merge; remove --merge'),
        (['--out', '{}/run'], '--out: {}/run is not empty; remove it or give another folder'),
        (['--out', f'{folder}.pt'], '--out: {}/out.pt is a .pt file, which needs --layout i1; or give a folder'),
        (['--out', folder, '--layout', 'x'], "--layout: 'x' is not a layout of the model tiny_prx; remove --layout"),
    ):
        assert message.format(tmp_path) in problem(*(word.format(tmp_path) for word in options))
    assert "--push: 'painter' is not the name of a repository; write org/name" in (
        problem('--out', folder, '--push', 'painter')
    )
    assert '--public: makes a repository on the Hub public; add --push org/name' in problem('--out', folder, '--public')
    assert '--push: HF_HUB_OFFLINE is set; unset it, or export without' in problem('--out', folder, '--push', 'a/b')
    assert [each.name for each in tmp_path.iterdir()] == ['run']
