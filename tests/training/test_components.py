"""Wrong arguments of the functions that a script calls: each error names the argument and the way out."""

from datetime import timedelta
from pathlib import Path

import pytest
import torch
from composer.core import Time

from diffusion import Checkpointer, build_loader, build_model, load, sd2, tiny
from diffusion.errors import UserError
from diffusion.models import batch_keys
from diffusion.models.families.i1.builder import i1
from diffusion.models.families.mmdit.builder import mmdit, tiny_mmdit
from diffusion.models.families.prx.builder import prx
from diffusion.models.families.sdxl.builder import sdxl

RECIPE = Path(__file__).parents[2] / 'yamls' / 'quickstart.yaml'


@pytest.fixture(scope='module')
def model():
    return tiny(32, block_out_channels=[32], text_layers=1)


@pytest.fixture
def batch(model):
    return {
        batch_keys.INPUT_IDS: torch.zeros(2, 1, model.text.token_length, dtype=torch.long),
        batch_keys.IMAGE: torch.zeros(2, 3, 32, 32, dtype=torch.uint8),
    }


@pytest.mark.parametrize('split', ['val', 'Train', '', None])
def test_unknown_split_is_refused(split):
    with pytest.raises(UserError, match=f"split: {split!r} is unknown; use 'train' for streams or 'eval' for eval_"):
        build_loader(load(RECIPE), split=split)


@pytest.mark.parametrize('build', [build_model, build_loader])
@pytest.mark.parametrize(
    ('value', 'message'),
    [
        ('x.yaml', r"recipe: 'x.yaml' is not a recipe; pass diffusion.load\('x.yaml'\)"),
        ({'name': 'x'}, 'recipe: a dict is not a recipe; pass the result of diffusion.load'),
    ],
)
def test_only_a_loaded_recipe_is_taken(build, value, message):
    with pytest.raises(UserError, match=message):
        build(value)


def test_overrides_in_one_string_are_refused():
    with pytest.raises(UserError, match=r"overrides: 'name=x' is one string; pass a list of them: \['name=x'\]"):
        load(RECIPE, 'name=x')


@pytest.mark.parametrize('interval', ['soon', '', '10', '0s', '0ba', -1, None, True, 2.5, timedelta(minutes=1)])
def test_checkpointer_refuses_what_is_not_an_interval(tmp_path, interval):
    with pytest.raises(UserError, match='^save_interval: .* is not an interval; use batches, such as 500ba, epochs'):
        Checkpointer(tmp_path / 'run', save_interval=interval)


@pytest.mark.parametrize('interval', ['5ba', '1ep', '0.5dur', 2, Time(3, 'ba'), '10m', '90s', 'auto'])
def test_checkpointer_takes_intervals_of_every_kind(tmp_path, interval):
    assert Checkpointer(tmp_path / 'run', save_interval=interval).storage.place == str(tmp_path / 'run')


@pytest.mark.parametrize(
    ('resume', 'advice'),
    [(True, "use 'auto'"), (False, '.*, or None'), ('runs/x/ba4', r".*, Path\('runs/x/ba4'\), or None")],
)
def test_checkpointer_resumes_from_a_path_or_auto(tmp_path, resume, advice):
    with pytest.raises(UserError, match=f'resume: {resume!r} is not a checkpoint; {advice}'):
        Checkpointer(tmp_path / 'run', resume=resume)


@pytest.mark.parametrize('build', [sd2, sdxl, mmdit, prx, i1])
@pytest.mark.parametrize(('keyword', 'path'), [('pretrained', '/nope'), ('vae', './nope'), ('vae', 'a/b/c')])
def test_missing_folder_of_weights_is_named_with_its_keyword(build, keyword, path):
    with pytest.raises(UserError, match=f'^{keyword}: {path} is not a folder on this machine; give a folder'):
        build(**{keyword: path})


@pytest.mark.parametrize('step', ['forward', 'eval_forward', 'encode'])
def test_images_with_channels_last_are_refused(model, batch, step):
    images = batch[batch_keys.IMAGE].permute(0, 2, 3, 1)
    argument = images if step == 'encode' else batch | {batch_keys.IMAGE: images}
    with pytest.raises(UserError, match=r'image: shape \(2, 32, 32, 3\); .* use image.permute\(0, 3, 1, 2\)'):
        getattr(model, step)(argument)


def test_images_of_other_shapes_are_refused(model, batch):
    for shape in ((2, 1, 32, 32), (3, 32, 32), (2, 4, 32, 32)):
        with pytest.raises(UserError, match='image: shape .* convert them to RGB and stack them'):
            model(batch | {batch_keys.IMAGE: torch.zeros(shape, dtype=torch.uint8)})


def test_batch_without_token_ids_is_refused(model, batch):
    del batch[batch_keys.INPUT_IDS]
    for step in (model, model.eval_forward, lambda batch: model.encode_batch(batch, 2)):
        with pytest.raises(UserError, match=r"batch: has \['image'\], but must be a dict with input_ids"):
            step(batch)
    with pytest.raises(UserError, match='batch: is a tuple, but must be a dict with input_ids'):
        model((batch[batch_keys.IMAGE],))


def test_token_ids_of_another_length_are_refused_where_captions_are_dropped(model, batch):
    message = r'input_ids: shape .* of shape \[B, 1, 16\]; pad or cut captions to 16 tokens'
    for shape in ((2, 16), (2, 2, 16), (2, 1, 7)):
        batch[batch_keys.INPUT_IDS] = torch.zeros(shape, dtype=torch.long)
        with pytest.raises(UserError, match=message):
            model(batch)
    assert model.eval_forward(batch).shape == (8, 2), 'shorter ones are taken where no caption is dropped'


def test_more_token_ids_than_the_text_encoder_takes_are_refused(batch):
    model = tiny_mmdit(caption_dropout=0.0)
    encoders, length = model.empty_ids.shape
    batch[batch_keys.INPUT_IDS] = torch.zeros(2, encoders, length + 1, dtype=torch.long)
    with pytest.raises(UserError, match=f'{length + 1} tokens per caption, but the text encoder takes {length}; cut'):
        model(batch)
