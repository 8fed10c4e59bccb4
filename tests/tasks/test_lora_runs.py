"""Real runs of a LoRA: resuming, evaluating, and exporting for the stock pipeline."""

import copy
import shutil

import numpy as np
import pytest
import torch
import yaml
from diffusers.loaders.lora_base import LORA_WEIGHT_NAME_SAFE
from diffusers.pipelines.stable_diffusion.pipeline_stable_diffusion import StableDiffusionPipeline
from PIL import Image
from ranks import largest_difference, read_losses
from recipe_files import write_yaml
from safetensors.torch import load_file

from diffusion.checkpointing.checkpoint_lookup import find_checkpoint
from diffusion.checkpointing.checkpoint_weights import Weights, weights_of
from diffusion.cli import main
from diffusion.config.load import load
from diffusion.errors import UserError
from diffusion.tasks.argument_checks import lora_file
from diffusion.tasks.evaluate import evaluate
from diffusion.tasks.export import export
from diffusion.training.train import build_trainer, train


@pytest.fixture(scope='module')
def base(tmp_path_factory, tiny_recipe, pictures):
    """Recipe of a model with a frozen text encoder, and the exported pipeline of its run of one batch."""
    root = tmp_path_factory.mktemp('base')
    content = tiny_recipe(root / 'runs', name='base')
    content['model']['train_text_encoder'] = False
    content['eval_streams'] = {'other': {'local': str(pictures[32]), 'resolution': 32}}
    content['trainer'] |= {'max_duration': '1ba', 'save_interval': '1ba'}
    (root / 'base.yaml').write_text(yaml.safe_dump(content))
    train(load(root / 'base.yaml')).close()
    export(root / 'runs' / 'base', root / 'pipeline')
    return content, root / 'pipeline'


@pytest.fixture
def write(base, tmp_path):
    """Function that writes a recipe of four batches of a LoRA from the exported pipeline."""

    def write(name='lora', **sections):
        content = copy.deepcopy(base[0]) | {
            'name': name,
            'runs_dir': str(tmp_path / 'runs'),
            'init_from': str(base[1]),
            'lora': {'rank': 4, 'alpha': 8.0},
            'optimizer': {'name': 'adamw', 'lr': 3.0e-2},
            'algorithms': {'ema': {'ema_start': '1ba', 'smoothing': 0.5}},
        }
        content['trainer'] |= {'max_duration': '4ba', 'save_interval': '2ba'}
        return write_yaml(tmp_path / f'{name}.yaml', content | sections)

    return write


def weights(run, which: Weights = 'training'):
    return weights_of(find_checkpoint(run), which)[0]


def interrupted(whole, run):
    """Copy a run of two batches as it was after one, without its losses."""
    shutil.copytree(whole, run, symlinks=True)
    shutil.rmtree(run / 'ba2')
    (run / 'latest').unlink()
    (run / 'latest').symlink_to('ba1')
    lines = (run / 'metrics.jsonl').read_text().splitlines(keepends=True)
    (run / 'metrics.jsonl').write_text(''.join(line for line in lines if '"loss/train/total"' not in line))


def drawn(source, out, *options):
    """Draw an image with the command and return its levels."""
    words = ['--out', str(out), '--steps', '4', '--scheduler', 'ddim', *options]
    assert main(['generate', str(source), 'a red square', *words]) == 0
    (file,) = out.iterdir()
    return np.asarray(Image.open(file)).astype(int)


@pytest.mark.slow
def test_stock_pipeline_draws_the_same_images_with_the_exported_lora(base, write, tmp_path, capsys):
    run = tmp_path / 'runs' / 'lora'
    train(load(write())).close()
    assert main(['export', str(run), '--out', str(tmp_path / 'lora')]) == 0
    file = "weight_name='pytorch_lora_weights.safetensors'"
    assert f"ema weights of the LoRA; load with pipeline.load_lora_weights('{tmp_path}/lora', {file})" in (
        capsys.readouterr().out
    )
    assert sorted(file.name for file in (tmp_path / 'lora').iterdir()) == ['README.md', LORA_WEIGHT_NAME_SAFE]
    export(run, tmp_path / 'lora.safetensors')
    assert not load_file(tmp_path / 'lora.safetensors').keys() & load_file(lora_file(tmp_path / 'lora')).keys()
    assert main(['export', str(run), '--out', str(tmp_path / 'merged'), '--merge']) == 0
    for stock, folder, name in (
        ('stock', tmp_path / 'lora', LORA_WEIGHT_NAME_SAFE),
        ('stock-file', tmp_path, 'lora.safetensors'),
    ):
        pipeline = StableDiffusionPipeline.from_pretrained(base[1], local_files_only=True)
        pipeline.load_lora_weights(folder, weight_name=name)
        pipeline.fuse_lora()
        pipeline.unload_lora_weights()
        pipeline.save_pretrained(tmp_path / stock)
    ours = drawn(run, tmp_path / 'ours')
    for source in ('merged', 'stock', 'stock-file'):
        assert abs(ours - drawn(tmp_path / source, tmp_path / f'drawn-{source}')).max() <= 2, source
    for lora in ('lora', 'lora.safetensors'):
        assert abs(ours - drawn(base[1], tmp_path / f'drawn-{lora}', '--lora', str(tmp_path / lora))).max() <= 2
    assert abs(ours - drawn(base[1], tmp_path / 'drawn-base')).max() > 20, 'the LoRA has an effect'
    assert evaluate(load(run / 'recipe.yaml', ['task=evaluate']))['loss'] > 0
    merged, *stock = (
        load_file(tmp_path / each / 'unet/diffusion_pytorch_model.safetensors')
        for each in ('merged', 'stock', 'stock-file')
    )
    for each in stock:
        torch.testing.assert_close(each, merged)


@pytest.mark.slow
@pytest.mark.cpu_seconds(20)
def test_resumed_lora_equals_uninterrupted_and_its_base_does_not_change(base, write, tmp_path):
    runs = tmp_path / 'runs'
    short = ['trainer.max_duration=2ba', 'trainer.save_interval=1ba']
    train(load(write('whole'), short)).close()
    path = write('parts')
    interrupted(runs / 'whole', runs / 'parts')
    with pytest.raises(UserError, match=r'lora\.rank: 4 in the checkpoint, 8 now'):
        build_trainer(load(path, [*short, 'lora.rank=8']))
    train(load(path, short)).close()
    losses = read_losses(runs / 'whole')
    assert read_losses(runs / 'parts') == {1: losses[1]}
    kinds: tuple[Weights, ...] = ('training', 'ema')
    for which in kinds:
        whole, parts = (weights(runs / name, which) for name in ('whole', 'parts'))
        assert whole.keys() == parts.keys() and all(torch.equal(whole[name], parts[name]) for name in whole)
    whole = weights(runs / 'whole')
    published = load_file(base[1] / 'unet' / 'diffusion_pytorch_model.safetensors')
    frozen = {name.replace('.base_layer', ''): each for name, each in whole.items() if '.lora_' not in name}
    assert frozen.keys() == {f'denoiser.{name}' for name in published}
    assert all(torch.equal(frozen[f'denoiser.{name}'], each) for name, each in published.items())
    assert all(each.any() for name, each in whole.items() if '.lora_B.' in name), 'all updates are trained'
    with pytest.raises(UserError, match=r'it is the checkpoint of a LoRA: start from .* export --merge writes'):
        build_trainer(load(write('next', init_from=str(runs / 'whole'))))
    with pytest.raises(UserError, match=r'--merge: .*/base/ba1 has no LoRA'):
        export(base[1].parent / 'runs' / 'base', tmp_path / 'out', merge=True)


@pytest.mark.slow
def test_two_ranks_with_sharded_weights_equal_one_device(write, ranks, tmp_path):
    """Rank 0 reads the published weights for both ranks; the checkpoint of two ranks resumes on one."""
    runs = tmp_path / 'runs'
    sharded = {'strategy': 'fsdp2', 'checkpoints': 'sharded', 'reshard_after_forward': False}
    sections = {'optimizer': {'name': 'adamw', 'lr': 1.0e-3}}
    train(load(write('one', **sections))).close()
    two = write('two', parallelism=sharded, **sections)
    ranks.run(2, two, 'trainer.max_duration=2ba')
    train(load(two, ['parallelism.strategy=ddp', 'parallelism.checkpoints=whole'])).close()
    assert largest_difference(read_losses(runs / 'one'), read_losses(runs / 'two')) < 1e-4
    one, other = weights(runs / 'one'), weights(runs / 'two')
    assert one.keys() == other.keys()
    assert max(float((one[each] - other[each]).abs().max()) for each in one) < 4 * 1e-3
