"""Text embeddings stored without padding, and image features for REPA, against encoding in training."""

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import read_losses
from recipe_files import write_yaml
from shards import open_shards
from transformers import Dinov2Config, Dinov2Model

from diffusion.config.image_shapes import Shape
from diffusion.config.load import check_paths, load
from diffusion.data.latents import LatentManifest
from diffusion.data.transforms import decode_for_model
from diffusion.errors import UserError
from diffusion.models import batch_keys
from diffusion.tasks.precompute import precompute
from diffusion.training.components import build_loader, build_model
from diffusion.training.train import train

PRX = {'name': 'tiny_prx', 'hidden_size': 32, 'num_heads': 2, 'depth': 2, 'patch_size': 2, 'text_width': 32}
PRX |= {'text_layers': 1, 'train_text_encoder': False, 'caption_dropout': 0.5, 'resolution': 32}
IN_ORDER = {'num_workers': 0, 'shuffle': False}  # shuffling depends on the shards, which differ


@pytest.fixture(scope='module')
def stored(tmp_path_factory, tiny_recipe, pictures, small_vae):
    """Root folder and model of a finished job that encoded images, their features and captions in float32."""
    root = tmp_path_factory.mktemp('text')
    save_image_encoder(root / 'dino', seed=0)
    alignment = {'encoder': str(root / 'dino'), 'block': 1, 'hidden_size': 48}
    model = PRX | {'vae': str(small_vae), 'representation_alignment': alignment}
    streams = {'small': {'local': str(pictures[32]), 'resolution': 32}}
    job = {'streams': streams, 'out': str(root / 'latents'), 'latents': 'image+text', 'dtype': 'float32'}
    path = write_yaml(root / 'job.yaml', tiny_recipe(root / 'runs', model=model, precompute=job))
    precompute(load(path, ['task=precompute']))
    return root, model


def save_image_encoder(folder: Path, *, seed: int) -> None:
    """Write a miniature DINOv2 with random weights."""
    torch.manual_seed(seed)
    sizes: dict[str, Any] = {'hidden_size': 32, 'num_attention_heads': 2, 'num_hidden_layers': 1}
    Dinov2Model(Dinov2Config(**sizes, image_size=28, patch_size=14)).save_pretrained(folder)


def losses(root: Path, tiny_recipe, name: str, **sections) -> list[float]:
    path = write_yaml(root / f'{name}.yaml', tiny_recipe(root / 'runs', name=name, loader=IN_ORDER, **sections))
    train(load(path, ['trainer.max_duration=3ba'])).close()
    found = read_losses(root / 'runs' / name)
    return [found[batch] for batch in sorted(found)]


@pytest.mark.slow
@pytest.mark.parametrize('mode', ['empty', 'zeros'])
def test_losses_equal_those_of_encoding_in_training(stored, tiny_recipe, mode):
    root, model = stored
    model = model | {'caption_dropout_mode': mode}
    online = losses(root, tiny_recipe, f'online-{mode}', model=model)
    streams = {'small': {'local': str(root / 'latents' / 'small'), 'resolution': 32}}
    offline = losses(root, tiny_recipe, f'stored-{mode}', model=model, dataset={'name': 'latents'}, streams=streams)
    assert len(online) == 3
    assert offline == pytest.approx(online, rel=1e-5)


def test_stored_items_are_those_of_the_encoders_which_the_manifest_names(stored, tiny_recipe, pictures):
    root, model = stored
    manifest = LatentManifest.read(root / 'latents' / 'small', '')
    assert manifest.image_encoder_source == str(root / 'dino')
    assert manifest.features_shape == [2, 2, 32] and manifest.text_padding == 'removed'
    sections = {'streams': {'small': {'local': str(root / 'latents' / 'small'), 'resolution': 32}}}
    sections |= {'dataset': {'name': 'latents'}, 'loader': IN_ORDER}
    recipe = load(write_yaml(root / 'read.yaml', tiny_recipe(root / 'runs', model=model, **sections)))
    dataset, images = build_loader(recipe).dataset, open_shards(pictures[32])
    built: Any = build_model(recipe)
    captions = set()
    for index in range(12):
        item, stored_image = dataset[index], images[index]
        ids = item[batch_keys.INPUT_IDS][None]
        (caption,) = [text for text in stored_image['captions'] if torch.equal(built._tokens([text]), ids)]
        captions.add(stored_image['captions'].index(caption))
        mask = built.text.padding_mask(ids)[0]
        assert torch.equal(item[batch_keys.TEXT_MASK], mask)
        assert not item[batch_keys.TEXT_EMBEDS][~mask].any()
        pixels = decode_for_model(stored_image['image'], Shape(32, 32))[None]
        for found, expected in (
            (item[batch_keys.TEXT_EMBEDS][mask], built.embed(ids).embeds[0][mask]),
            (item[batch_keys.LATENT_MOMENTS][:4], built.encode(pixels)[0, :4]),
            (item[batch_keys.IMAGE_FEATURES], built.image_features(pixels)[0]),
        ):
            torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    assert captions == {0, 1}


def test_features_of_another_encoder_or_grid_and_missing_ones_are_refused(stored, tiny_recipe, tmp_path):
    root, model = stored
    save_image_encoder(tmp_path / 'other', seed=1)
    other = model['representation_alignment'] | {'encoder': str(tmp_path / 'other')}
    shutil.copytree(root / 'latents' / 'small', tmp_path / 'without')
    manifest = replace(LatentManifest.read(tmp_path / 'without', ''), image_encoder=None)
    (tmp_path / 'without' / 'manifest.json').write_text(manifest.text())
    small = root / 'latents' / 'small'
    cases = [
        (small, {'representation_alignment': other}, 'its image features were made by .*dino .*precompute them again'),
        (small, {'patch_size': 1}, r'features are 2 x 2 x 32 .* the model needs 4 x 4 x 32'),
        (tmp_path / 'without', {}, r'the latents of streams\.small have none; precompute them again with this recipe'),
    ]
    for number, (folder, changes, message) in enumerate(cases):
        streams = {'small': {'local': str(folder), 'resolution': 32}}
        sections = {'model': model | changes, 'dataset': {'name': 'latents'}, 'streams': streams}
        with pytest.raises(UserError, match=message):
            losses(tmp_path, tiny_recipe, f'wrong{number}', **sections)

    settings = {'model': model, 'dataset': {'name': 'latents'}, 'loader': IN_ORDER}
    for folder, wrong in ((tmp_path / 'without', True), (small, False)):
        streams = {'small': {'local': str(folder), 'resolution': 32}}
        path = write_yaml(tmp_path / f'{folder.name}.yaml', tiny_recipe(tmp_path, streams=streams, **settings))
        problems = check_paths(load(path))
        assert [each.where for each in problems] == ['model.representation_alignment'] * wrong


def test_mask_of_stored_text_replaces_that_of_token_ids(small_vae):
    from diffusion.models.families.prx.builder import tiny_prx

    settings = {key: value for key, value in PRX.items() if key != 'name'}
    model = tiny_prx(**settings | {'vae': str(small_vae), 'caption_dropout': 0.0})  # type: ignore[arg-type]
    ids = model._tokens(['two cats', ''])
    mask, embeds = model.text.padding_mask(ids), model.embed(ids).embeds
    # Stored embeddings may have another order than token ids, as of tokenizers that pad on the left.
    batch = {batch_keys.INPUT_IDS: ids, batch_keys.TEXT_EMBEDS: embeds.flip(1), batch_keys.TEXT_MASK: mask.flip(1)}
    condition = model._condition_of(batch)
    assert condition.mask is not None and torch.equal(condition.mask, mask.flip(1))
    noisy, times = torch.randn(2, 4, 4, 4), torch.tensor([100.0, 900.0])
    expected = model._predict(noisy, times, model._condition(ids))
    torch.testing.assert_close(model._predict(noisy, times, condition), expected, rtol=1e-4, atol=1e-5)
    model.mask_padding = False
    with pytest.raises(UserError, match='text_embeds are stored without padding, but this model attends to padding'):
        model._condition_of(batch)


@pytest.mark.slow
def test_text_stored_without_padding_is_refused_by_a_model_that_attends_to_it(tmp_path, tiny_recipe, pictures):
    model = tiny_recipe(tmp_path)['model'] | {'train_text_encoder': False}
    streams = {'small': {'local': str(pictures[32]), 'resolution': 32}}
    job = {'streams': streams, 'out': str(tmp_path / 'latents'), 'latents': 'image+text'}
    sections = {'model': model | {'mask_padding': True}, 'precompute': job}
    path = write_yaml(tmp_path / 'job.yaml', tiny_recipe(tmp_path, **sections))
    precompute(load(path, ['task=precompute']))
    streams = {'small': {'local': str(tmp_path / 'latents' / 'small'), 'resolution': 32}}
    # The same text encoder: its initial weights follow from the seed.
    with pytest.raises(UserError, match='stored without padding, but the model attends to it; set model.mask_padding'):
        losses(tmp_path, tiny_recipe, 'unmasked', model=model, dataset={'name': 'latents'}, streams=streams)
