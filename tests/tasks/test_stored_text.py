"""Text embeddings that are stored without padding, against encoding captions in training."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from ranks import read_losses
from streaming import StreamingDataset

from diffusion.config.load import load
from diffusion.errors import UserError
from diffusion.tasks.precompute import precompute
from diffusion.training.train import train

PRX = {'name': 'tiny_prx', 'hidden_size': 32, 'num_heads': 2, 'depth': 2, 'patch_size': 2, 'text_width': 32}
PRX |= {'text_layers': 1, 'train_text_encoder': False, 'caption_dropout': 0.5, 'resolution': 32}
IN_ORDER = {'num_workers': 0, 'shuffle': False}  # shuffling depends on the shards, which differ


@pytest.fixture(scope='module')
def stored(tmp_path_factory, tiny_recipe, pictures, small_vae):
    """Root folder, model and recipe of a finished job that encoded images and captions in float32."""
    root = tmp_path_factory.mktemp('text')
    model = PRX | {'vae': str(small_vae)}
    streams = {'small': {'local': str(pictures[32]), 'resolution': 32}}
    job = {'streams': streams, 'out': str(root / 'latents'), 'latents': 'image+text', 'dtype': 'float32'}
    path = root / 'job.yaml'
    path.write_text(yaml.safe_dump(tiny_recipe(root / 'runs', model=model, precompute=job)))
    precompute(load(path, ['task=precompute']))
    return root, model


def losses(root: Path, tiny_recipe, name: str, **sections) -> list[float]:
    path = root / f'{name}.yaml'
    path.write_text(yaml.safe_dump(tiny_recipe(root / 'runs', name=name, loader=IN_ORDER, **sections)))
    train(load(path)).close()
    found = read_losses(root / 'runs' / name)
    return [found[batch] for batch in sorted(found)]


@pytest.mark.parametrize('mode', ['empty', 'zeros'])
def test_losses_equal_those_of_encoding_in_training(stored, tiny_recipe, mode):
    root, model = stored
    model = model | {'caption_dropout_mode': mode}
    online = losses(root, tiny_recipe, f'online-{mode}', model=model)
    streams = {'small': {'local': str(root / 'latents' / 'small'), 'resolution': 32}}
    offline = losses(root, tiny_recipe, f'stored-{mode}', model=model, dataset={'name': 'latents'}, streams=streams)
    assert len(online) == 8
    assert offline == pytest.approx(online, rel=1e-5)


def test_only_embeddings_of_tokens_are_stored(stored):
    root, _ = stored
    assert json.loads((root / 'latents' / 'small' / 'manifest.json').read_text())['text_padding'] == 'removed'
    dataset = StreamingDataset(local=str(root / 'latents' / 'small'), batch_size=1)
    for index in range(len(dataset)):
        sample = dataset[index]
        assert len(sample['text_lengths']) == len(sample['captions'])
        assert sample['text_embeds'].shape == (sample['text_lengths'].sum(), 32)
        assert sample['text_lengths'].max() < 16


def test_a_model_that_attends_to_padding_is_refused(tmp_path, tiny_recipe, pictures):
    model = tiny_recipe(tmp_path)['model'] | {'train_text_encoder': False}
    streams = {'small': {'local': str(pictures[32]), 'resolution': 32}}
    job = {'streams': streams, 'out': str(tmp_path / 'latents'), 'latents': 'image+text'}
    path = tmp_path / 'job.yaml'
    path.write_text(yaml.safe_dump(tiny_recipe(tmp_path, model=model | {'mask_padding': True}, precompute=job)))
    precompute(load(path, ['task=precompute']))
    streams = {'small': {'local': str(tmp_path / 'latents' / 'small'), 'resolution': 32}}
    sections = {'dataset': {'name': 'latents'}, 'streams': streams}
    # The same text encoder: its initial weights follow from the seed.
    with pytest.raises(UserError, match='stored without padding, to which the model attends; set model.mask_padding'):
        losses(tmp_path, tiny_recipe, 'unmasked', model=model, **sections)


def test_mask_of_stored_text_replaces_that_of_token_ids(small_vae):
    from diffusion.models import batch_keys
    from diffusion.models.prx_builders import tiny_prx

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
    with pytest.raises(UserError, match='text_embeds are stored without padding, to which this model attends'):
        model._condition_of(batch)
