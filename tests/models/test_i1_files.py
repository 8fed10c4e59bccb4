"""Files of i1's own code: read, written, trained from, and refused."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from commands import output_of
from hub_server import COMMIT, serving
from huggingface_hub import constants
from model_batches import CAPTIONS
from torch import Tensor

from diffusion.cli import main
from diffusion.config.load import load
from diffusion.errors import UserError
from diffusion.models.families.i1.builder import tiny_i1
from diffusion.training.initial_weights import read_weights, start_from
from diffusion.training.train import train
from tests.models.test_i1 import BLOCKS, HEADS, PATCH, TINY, WIDTH, Plain, texts_of

TEXT, LENGTH = 32, 16
LAYOUT = [
    line.split()
    for file in sorted((Path(__file__).parent / 'golden' / 'i1_layout').iterdir())
    for line in file.read_text().splitlines()
]
"""Tensors of their files: the name in the plain implementation (- if it has none), their name, and the shape."""
THEIRS = {ours: theirs for ours, theirs, *_ in LAYOUT}
SHAPES = {theirs: tuple(map(int, shape)) for _, theirs, *shape in LAYOUT}


@pytest.fixture(scope='module')
def weights():
    draw = torch.Generator().manual_seed(3)
    return {name: torch.randn(shape, generator=draw) * 0.2 for name, shape in SHAPES.items()}


@pytest.fixture
def write(weights, tmp_path):
    """Function that writes a file of theirs; keywords replace the content."""

    def written(name='256_resolution_checkpoint_torch.pt', **content):
        content = {'config': {'hidden_size': WIDTH}, 'model': weights} | content
        torch.save(content, tmp_path / name)
        return tmp_path / name

    return written


@pytest.fixture
def recipe_from(small_vae, write_recipe):
    def recipe(start, **sections):
        model = {'name': 'tiny_i1', 'resolution': 32, 'vae': str(small_vae), 'train_text_encoder': False, **TINY}
        path = write_recipe(init_from=start, model=model, **sections)
        return load(path, ['trainer.max_duration=1ba', 'trainer.save_interval=1ba'])

    return recipe


@pytest.fixture
def model(small_vae):
    return tiny_i1(32, vae=str(small_vae), train_text_encoder=False, **TINY)


class PlainOfFile(Plain):
    def __init__(self, stored: dict[str, Tensor], names: Any) -> None:
        self.weights = {name: stored[THEIRS[name]] for name in names}


def test_file_predicts_as_the_plain_implementation(write, weights, model, recipe_from, caplog):
    raw = {name: each + 1 for name, each in weights.items()}
    file = write(train_state={'model_raw': raw, 'step': 7})
    names = [*model.denoiser.state_dict()]
    assert {THEIRS[name] for name in names} == {name for name in weights if not name.startswith(('t_', 'pos_', 'rope'))}
    for which, stored in (('ema', weights), ('training', raw)):
        with caplog.at_level(logging.INFO):
            start_from(model, recipe_from({'from': str(file), 'weights': which}).initial_weights)
        embeds, lengths = texts_of(model, model._tokens(CAPTIONS))
        noisy = torch.randn(len(CAPTIONS), 4, 4, 4, generator=torch.Generator().manual_seed(1))
        mask = torch.arange(LENGTH) < torch.tensor(lengths)[:, None]
        with torch.no_grad():
            found = model.denoiser(noisy, embeds, mask).sample
            plain = PlainOfFile(stored, names)
            expected = torch.stack([plain(*each) for each in zip(noisy, embeds, lengths, strict=True)])
        scale = float(expected.abs().max())
        torch.testing.assert_close(-found / scale, expected / scale, rtol=1e-5, atol=1e-5)
    with caplog.at_level(logging.INFO):
        start_from(model, recipe_from(str(write('published.pt'))).initial_weights)
    expected_lines = ['t_embedder.* is not read', f'the training weights of the denoiser of {file}']
    for line in [*expected_lines, 'published.pt: has only averaged weights, which are read']:
        assert line in caplog.text
    torch.testing.assert_close(model.denoiser.output.bias, -weights['final_layer.linear.bias'], rtol=0, atol=0)


@pytest.mark.parametrize('lora', [False, True])
def test_fine_tune_and_lora_start_from_a_file_and_export_to_one(write, weights, recipe_from, tmp_path, lora, capsys):
    settings = {'lora': {'rank': 2, 'targets': ['image_qkv']}} if lora else {'optimizer': {'name': 'adamw', 'lr': 0.0}}
    recipe = recipe_from(str(write()), **settings)
    train(recipe).close()
    out = tmp_path / 'exported.pt'
    words = ['export', str(recipe.run_dir), '--out', str(out), '--layout', 'i1']
    if lora:
        assert main(words) == 2 and 'i1 has no place for a LoRA; add --merge' in capsys.readouterr().err
        words.append('--merge')
    assert 'in the layout that i1 reads' in output_of(capsys, *words)
    content = torch.load(out, weights_only=True)
    exported = content['model']
    assert {name: tuple(each.shape) for name, each in exported.items()} == SHAPES
    config = {'input_size': 4, 'image_resolution': 32, 'hidden_size': WIDTH, 'depth': BLOCKS, 'num_heads': HEADS}
    config |= {'in_channels': 4, 'patch_size': PATCH, 'text_embed_dim': TEXT, 'text_num_tokens': LENGTH}
    assert content['config'] == config | {'mlp_ratio': 4.0, 'rope_theta': 10000.0}
    changed = [name for name, each in exported.items() if not torch.equal(each, weights[name])]
    rebuilt = [name for name in changed if name.startswith(('t_embedder', 'pos_embed', 'rope_embedder'))]
    assert all(not exported[name].any() for name in rebuilt if name.startswith('t_'))
    trained = {*changed} - {*rebuilt}
    if lora:
        assert trained and all(name.endswith('attn.qkv_image.weight') for name in trained)
        return
    assert not trained, 'without a learning rate, every bit comes back'
    for axis, (positions, channels) in enumerate([(torch.arange(LENGTH + 1), 12), *[(torch.tensor([0, 8]), 6)] * 2]):
        angles = positions[:, None] / 10000 ** (torch.arange(0, channels, 2) / channels)
        torch.testing.assert_close(exported[f'rope_embedder.sin_tables.{axis}'], angles.sin())
        torch.testing.assert_close(exported[f'rope_embedder.cos_tables.{axis}'], angles.cos())


@pytest.mark.parametrize(
    ('change', 'problem'),
    [
        ({'in_blocks.0.norm1.scale': None}, r'1 missing \(in_blocks\.0\.norm1\.scale\)'),
        ({'in_blocks.0.adaln.weight': torch.zeros(1)}, r'1 unknown \(in_blocks\.0\.adaln\.weight\)'),
        ({'in_blocks.2.norm1.scale': torch.zeros(1)}, r'depth 7 instead of 5; use model settings that fit'),
        ({'x_embedder.proj.weight': None}, r'has no tensor x_embedder\.proj\.weight; is it a file of i1\?'),
        ({'pos_embed': torch.zeros(1, 5, WIDTH)}, r'5 positions, which is not a square'),
        ({'rope_embedder.cos_tables.0': torch.zeros(9, 6)}, r'1 of another shape \(rope_embedder\.cos_tables\.0\)'),
        (
            {'x_embedder.proj.weight': torch.zeros(2016, 4, 2, 2), 'mid_block.attn.q_norm.scale': torch.zeros(72)},
            r'is the size 3b, unlike the recipe: hidden_size 2016 instead of 48, num_heads 28 .*; set model\.size: 3b',
        ),
    ],
)
def test_other_tensors_are_refused(write, weights, model, recipe_from, change, problem):
    changed = {name: each for name, each in (weights | change).items() if each is not None}
    start = recipe_from(str(write(model=changed))).initial_weights
    with pytest.raises(UserError, match=rf'^init_from: .*checkpoint_torch\.pt: .*{problem}'):
        read_weights(model, start)


class Code:
    def __reduce__(self):
        return print, ('run',)


def test_code_and_half_a_download_are_refused(write, model, recipe_from, capsys):
    start = recipe_from(str(write(config=Code()))).initial_weights
    with pytest.raises(UserError, match=r'^init_from: .*not loaded, because it wants to run code .*use a check'):
        read_weights(model, start)
    file = write()
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    with pytest.raises(UserError, match=r'init_from: .*it is truncated, use an earlier checkpoint, or copy it again'):
        read_weights(model, start)
    assert 'run' not in capsys.readouterr().out
    with pytest.raises(UserError, match='has no weights in `model` or `train_state.model_raw`; use a file of i1'):
        read_weights(model, recipe_from(str(write(model=None))).initial_weights)


def test_repository_of_files_is_read(write, weights, model, recipe_from, tmp_path, monkeypatch):
    (tmp_path / 'hub').mkdir()
    for side in (32, 64):
        changed = weights | {'final_layer.linear.bias': torch.full((16,), float(side))}
        write(f'hub/{side}_resolution_checkpoint_torch.pt', model=changed)
    with serving(tmp_path / 'hub', tmp_path, monkeypatch):
        found = {
            source: read_weights(model, recipe_from(source).initial_weights).tensors['denoiser.output.bias'][0]
            for source in (f'someone/model@{COMMIT}', f'hf://someone/model/64_resolution_checkpoint_torch.pt@{COMMIT}')
        }
        assert [*found.values()] == [-32, -64], 'the file for the size of the images, or the one that is named'
        large = tiny_i1(128, train_text_encoder=False, **TINY)
        with pytest.raises(UserError, match=r'has 32_res\S+, 64_res\S+; name one of them, hf://someone/model/32_res'):
            read_weights(large, recipe_from(f'someone/model@{COMMIT}').initial_weights)
        monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
        read_weights(model, recipe_from(f'someone/model@{COMMIT}').initial_weights)
