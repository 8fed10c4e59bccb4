"""Real runs of tiny models: resuming, starting from another run's weights, evaluating, generating and exporting."""

import json
import os
import re
import shutil
import zipfile
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
import yaml
from commands import output_of, refusal
from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import StableDiffusionPipeline
from hub_server import logged_in
from PIL import Image
from ranks import read_losses
from recipe_files import all_values, write_yaml
from shards import open_shards
from stock_pipeline import draw

from diffusion.checkpointing.checkpoint_lookup import find_checkpoint
from diffusion.checkpointing.checkpoint_weights import read_checkpoint, weights_of
from diffusion.cli import main
from diffusion.config.image_shapes import square
from diffusion.config.load import load, to_yaml
from diffusion.data.transforms import decode_for_model
from diffusion.loggers import metrics_file
from diffusion.loggers.metrics_file import read_metrics
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.original_layout import read_original
from diffusion.tasks.evaluate import evaluate, trained_model
from diffusion.tasks.export import export
from diffusion.tasks.generate import generate
from diffusion.tasks.precompute import precompute
from diffusion.training.components import build_model
from diffusion.training.train import build_trainer, train

EMA = {'ema': {'ema_start': '3ba', 'smoothing': 0.5}}


@pytest.fixture(scope='module')
def finished(tmp_path_factory, tiny_recipe, pictures, draw_loss_curve):
    """Recipe and folder of a finished run of 8 batches with EMA, evaluation, image grids and prompts."""
    root = tmp_path_factory.mktemp('finished')
    path = root / 'recipe.yaml'
    content = tiny_recipe(root / 'runs', name='finished', algorithms=EMA)
    content['model']['objective'] = {'prediction_type': 'v_prediction'}
    content['eval_streams'] = {'other': {'local': str(pictures[64]), 'resolution': 32}}
    prompts = ['a red square', 'green']
    content['callbacks'] = {'image_grid': {'prompts': prompts, 'every': '4ba', 'num_inference_steps': 2}}
    content['evaluators'] = {'retrieval': {'num_captions': 4, 'num_inference_steps': 2, 'num_shown': 4}}
    content['generate'] = {'num_inference_steps': 2, 'prompts': ['a', 'b']}
    content['trainer']['eval_interval'] = '4ba'
    path.write_text(yaml.safe_dump(content))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(metrics_file, 'draw_loss_curve', draw_loss_curve)
        trainer = train(load(path))
    trainer.close()
    return path, root / 'runs' / 'finished'


@pytest.fixture(scope='module')
def not_averaged(tmp_path_factory, tiny_recipe):
    """Folder of a run that ended before its EMA began."""
    root = tmp_path_factory.mktemp('not_averaged')
    path = write_yaml(root / 'recipe.yaml', tiny_recipe(root / 'runs', algorithms={'ema': {'ema_start': '100ba'}}))
    train(load(path, ['trainer.max_duration=1ba'])).close()
    return root / 'runs' / 'run'


def test_run_writes_recipe_metrics_checkpoints_and_images(finished):
    _, run = finished
    files = {file.name for file in run.iterdir()}
    assert {'recipe.yaml', 'metrics.jsonl', 'loss.png', 'ba4', 'ba8', 'latest'} <= files
    assert sorted(file.name for file in (run / 'images').iterdir()) == ['ba000004.png', 'ba000008.png']
    with Image.open(run / 'images' / 'ba000008.png') as sheet:
        assert sheet.width > 96
    metrics = read_metrics(run / 'metrics.jsonl')
    assert list(metrics['loss/train/total']) == list(range(8)), 'a loss for every batch'
    assert set(metrics['metrics/eval/loss']) == {4, 8}
    assert 'metrics/eval/loss_t937' in metrics


def test_checkpoints_contain_training_and_averaged_weights_without_frozen_parts(finished):
    _, run = finished
    state = read_checkpoint(find_checkpoint(run))
    assert {name.split('.')[0] for name in state['model']} == {'denoiser', 'text_encoder'}
    trained, which = weights_of(find_checkpoint(run), 'training')
    assert which == 'training'
    averaged, which = weights_of(find_checkpoint(run))
    assert which == 'ema'
    assert any(not torch.equal(trained[name], averaged[name]) for name in trained)
    assert trained.keys() == averaged.keys()


def test_init_from_takes_averaged_weights(write_recipe, finished, tmp_path):
    _, run = finished
    path = write_recipe('averaged', init_from={'from': str(run / 'ba4'), 'weights': 'ema'})
    recipe = load(path, ['model.objective={prediction_type: v_prediction}'])
    trainer = build_trainer(recipe)
    weights, loaded = weights_of(run / 'ba4', 'ema')[0], trainer.state.model.state_dict()
    assert all(torch.equal(weights[name], loaded[name]) for name in loaded)
    trainer.close()
    saved = tmp_path / 'saved.yaml'
    saved.write_text(to_yaml(recipe))
    assert all_values(load(saved)) == all_values(recipe)


@pytest.mark.slow
def test_phase_two_starts_from_the_weights_of_phase_one(write_recipe, pictures, not_averaged):
    streams = {'large': {'local': str(pictures[64]), 'resolution': 64}}
    recipe = load(write_recipe('two', streams=streams, init_from=str(not_averaged)), ['model.resolution=64'])
    trainer = build_trainer(recipe)
    assert trainer.state.timestamp.batch.value == 0
    assert trainer.state.optimizers[0].state == {}
    weights = weights_of(find_checkpoint(not_averaged), 'training')[0]
    loaded = trainer.state.model.state_dict()
    assert weights.keys() == loaded.keys()
    assert all(torch.equal(weights[name], loaded[name]) for name in loaded)
    trainer.fit(duration='1ba')
    trainer.save_checkpoint_to_save_folder()
    trainer.close()
    resumed = build_trainer(recipe)
    assert resumed.state.timestamp.batch.value == 1, "the run's own checkpoint takes precedence over init_from"
    resumed.close()


@pytest.mark.parametrize(
    ('damage', 'start', 'message'),
    [
        (lambda bad: os.truncate(bad / 'state.pt', 1000), {}, r': .*/bad/state\.pt: 1000 bytes, expected \d+; copy'),
        (shutil.rmtree, {}, r': .*/bad is not a checkpoint or a run .*; check the path'),
        (
            lambda bad: None,
            {'weights': 'ema'},
            r'\.weights: ema, but .*/bad: it has no averaged .* 100ba\); use training',
        ),
        (lambda bad: None, {}, r': .*: the architecture differs from the recipe: \d+ tensors|is \('),
    ],
    ids=['damaged', 'missing', 'not averaged', 'other architecture'],
)
def test_init_from_names_key_and_way_out(write_recipe, tmp_path, finished, not_averaged, damage, start, message):
    bad = tmp_path / 'bad'
    shutil.copytree((not_averaged if start else finished[1]) / 'latest', bad)
    damage(bad)
    path = write_recipe('other', init_from={'from': str(bad)} | start)
    with pytest.raises(ValueError, match=f'init_from{message}'):
        build_trainer(load(path, ['model.block_out_channels=[32, 64]']))


def test_evaluation_uses_the_averaged_weights(finished):
    path, run = finished
    metrics = evaluate(load(path, ['task=evaluate']))
    saved = json.loads((run / 'evaluation.json').read_text())
    assert saved.pop('weights') == 'ema'
    assert saved == metrics
    last = read_metrics(run / 'metrics.jsonl')['metrics/eval/loss'][8]
    assert metrics['loss'] == pytest.approx(last, rel=1e-5), 'equals the evaluation at the end of training'
    assert 0 <= metrics['retrieval_top1'] <= 1
    assert (run / 'samples.png').exists()


def test_generated_images_depend_on_prompt_and_seed_only(finished, tmp_path):
    path, _ = finished
    files = generate(load(path, ['task=generate', f'generate.out={tmp_path}/a']))
    changes = [f'generate.out={tmp_path}/b', 'generate.prompts=[b]', 'generate.seed=1']
    again = generate(load(path, ['task=generate', *changes]))
    assert [file.name for file in files] == ['00000-a.png', '00001-b.png']
    with Image.open(again[0]) as single, Image.open(files[1]) as batched:
        one, other = (np.asarray(image).astype(int) for image in (single, batched))
    assert abs(one - other).max() <= 1, 'sums in batches of one and two are rounded differently'


STOCK = ('stable_diffusion.pipeline_stable_diffusion', 'StableDiffusionPipeline')


@pytest.mark.parametrize('weights', ['ema', pytest.param('training', marks=pytest.mark.slow)])
def test_diffusers_pipeline_generates_the_same_images(finished, tmp_path, weights):
    path, run = finished
    (tmp_path / 'sd').mkdir()  # an empty folder may be the output
    assert export(run / 'latest', tmp_path / 'sd', weights=weights) == weights
    recipe = load(path)
    model = trained_model(recipe, weights).model
    assert isinstance(model, LatentDiffusion)
    latents = torch.randn(1, 4, 4, 4)
    sampling: dict[str, Any] = {'num_inference_steps': 5, 'guidance_scale': 3.0}
    theirs, _ = draw(STOCK, tmp_path / 'sd', latents, {'prompt': 'a red square', **sampling}, tmp_path)
    ours = model.generate(['a red square'], latents=latents, **sampling)
    torch.testing.assert_close(theirs, ours, rtol=1e-3, atol=1e-3)


def test_single_file_has_the_averaged_weights_in_the_layout_of_the_original_code(finished, tmp_path, capsys):
    path, run = finished
    file = tmp_path / 'sd.safetensors'
    words = ['export', run, '--out', file, '--dtype', 'float16']
    assert f'{file}: ema weights in the layout that ComfyUI reads' in output_of(capsys, *words)
    model = build_model(load(path))
    assert isinstance(model, LatentDiffusion)
    saved = read_original(model.denoiser, file, 'training')
    averaged = weights_of(find_checkpoint(run), 'ema')[0]
    assert all(torch.equal(each, averaged[f'denoiser.{name}'].half()) for name, each in saved.items())
    before = file.read_bytes()
    assert f'--out: {file} is a file; give a file that does not exist yet' in refusal(capsys, *words)
    assert [*tmp_path.iterdir()] == [file] and file.read_bytes() == before


def test_export_is_uploaded_with_a_model_card_of_the_run(finished, tmp_path, monkeypatch, capsys):
    path, run = finished
    (tmp_path / 'hub').mkdir()
    with logged_in(tmp_path / 'hub', monkeypatch) as hub:
        words = ['export', str(run), '--out', str(tmp_path / 'sd'), '--push', 'someone/painter']
        assert f'someone/painter: uploaded to {hub.url}/someone/painter' in output_of(capsys, *words)
        assert main([*words, '--out', str(tmp_path / 'again'), '--public']) == 2
        assert not (tmp_path / 'again').exists(), 'refused before the export'
    files = {file.relative_to(tmp_path / 'sd').as_posix(): file.read_bytes() for file in (tmp_path / 'sd').rglob('*.*')}
    assert hub.uploaded['someone/painter'].files == files
    assert hub.uploaded['someone/painter'].private
    card = files['README.md'].decode()
    assert card.startswith('---\nlibrary_name: diffusers\npipeline_tag: text-to-image\n---\n\n# finished\n')
    assert "StableDiffusionPipeline.from_pretrained('someone/painter')" in card
    assert "pipeline('a', num_inference_steps=2, guidance_scale=7.5)" in card
    assert '| batches | 8 of 8 images, 64 images in total |' in card
    assert '| objective | diffusion, prediction type v_prediction |' in card
    assert '| optimizer | adamw, lr 0.001, betas' in card and '| weights | ema |' in card
    assert str(path.parent) not in card and str(tmp_path) not in card, 'no paths'


def test_failed_export_leaves_no_files(finished, tmp_path, monkeypatch):
    _, run = finished
    full = Mock(side_effect=OSError(28, 'No space left on device'))
    monkeypatch.setattr(StableDiffusionPipeline, 'save_pretrained', full)
    with pytest.raises(OSError, match='No space left'):
        export(run, tmp_path / 'sd')
    assert list(tmp_path.iterdir()) == []


@pytest.fixture(scope='module')
def latents(finished, pictures, tmp_path_factory):
    """Recipe and output folder of a finished job that encoded both buckets in float32."""
    path, _ = finished
    out = tmp_path_factory.mktemp('latents')
    streams = ', '.join(f'px{side}: {{local: {folder}, resolution: {side}}}' for side, folder in pictures.items())
    section = f'precompute={{out: {out}, streams: {{{streams}}}, dtype: float32, batch_size: 7}}'
    precompute(load(path, ['task=precompute', section]))
    return path, out


def test_precomputed_latents_equal_encoder_output(latents, pictures):
    path, out = latents
    model = build_model(load(path))
    assert isinstance(model, LatentDiffusion)
    for side, folder in pictures.items():
        stored, source = open_shards(out / f'px{side}'), open_shards(folder)
        assert len(stored) == len(source)
        for index in (0, len(source) - 1):
            encoded = model.encode(decode_for_model(source[index]['image'], square(side))[None])[0]
            found = torch.from_numpy(stored[index]['latent_moments'].copy())
            torch.testing.assert_close(found, encoded, rtol=1e-4, atol=1e-5)
            assert all(stored[index][name] == source[index][name] for name in ('captions', 'key'))


def test_latents_of_another_vae_or_size_or_images_are_an_error(latents, write_recipe, small_vae, small_flux2, tmp_path):
    from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL

    path, out = latents
    vae = AutoencoderKL.from_pretrained(small_vae, low_cpu_mem_usage=False)
    vae.encoder.conv_in.weight.data += 0.1
    vae.save_pretrained(tmp_path / 'vae')
    streams = {'small': {'local': str(out / 'px32'), 'resolution': 32}}
    names = r'autoencoder is AutoencoderKL with 4 channels per 8x8 px, but the model has AutoencoderKLFlux2 with 4 '
    for other, difference in ((tmp_path / 'vae', 'vae is [0-9a-f]{16}, but'), (small_flux2, names)):
        model = yaml.safe_load(path.read_text())['model'] | {'vae': str(other)}
        recipe = load(write_recipe('other', model=model, dataset={'name': 'latents'}, streams=streams))
        message = rf'streams.small: its latents were made by another VAE \({difference}.* precompute them'
        with pytest.raises(ValueError, match=message):
            build_trainer(recipe)
    of_32px = [f'streams.small.local={out}/px32', 'streams.small.resolution=64']
    for changes, message in (
        (of_32px, '64x64 px, but its latents were made from images of 32x32 px'),
        ([], 'its samples have .*, but latent_moments is required'),
    ):
        path = write_recipe('wrong', dataset={'name': 'latents'})
        with pytest.raises(ValueError, match=f'streams.small: {message}'):
            build_trainer(load(path, changes))


def test_checkpoint_that_is_damaged_or_would_fill_the_memory_is_an_error(finished, tmp_path):
    file = tmp_path / 'ba8.pt'
    file.write_bytes((finished[1] / 'ba8' / 'state.pt').read_bytes()[:5000])
    with pytest.raises(ValueError, match='ba8.pt: .*not readable'):
        read_checkpoint(file)
    torch.save({'weights': 1}, file)
    with pytest.raises(ValueError, match='ba8.pt: .*contains no state'):
        read_checkpoint(file)
    torch.save({'state': {'model': {}}}, file)
    assert read_checkpoint(file) == {'model': {}}
    with zipfile.ZipFile(tmp_path / 'bomb.pt', 'w', zipfile.ZIP_DEFLATED) as bomb:
        bomb.writestr('bomb/data.pkl', bytes(2**24))
    with pytest.raises(ValueError, match='data.pkl is compressed, but torch.save never compresses'):
        read_checkpoint(tmp_path / 'bomb.pt')


def test_status_of_a_run_that_launch_did_not_start(finished, capsys):
    _, run = finished
    text, last = output_of(capsys, 'status', run), read_losses(run)[7]
    assert text.startswith(f'{run}: ended, completed\n')
    assert re.search(r'(?m)^  batch +8 of 8', text) and f'{last:.4f}' in text and str(run / 'ba8') in text
    assert re.search(r'(?m)^  process +none, the run has ended$', text)
    assert re.search(r'(?m)^  last activity +\d{4}-.* ago$', text)
