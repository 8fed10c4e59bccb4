"""Frozen encoders that run on several microbatches at a time."""

from typing import Any

import model_batches
import pytest
import torch
from callbacks.guarded_run import At
from composer.core import Event
from ranks import largest_difference, read_losses
from transformers import Dinov2Config, Dinov2Model

from diffusion.config.load import load
from diffusion.models import batch_keys
from diffusion.models.families.prx.builder import tiny_prx
from diffusion.models.families.sdxl.builder import tiny_sdxl
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.representation_alignment import RepresentationAlignment
from diffusion.training.train import build_trainer

SIDE = 64


def batch_of(model: LatentDiffusion) -> dict[str, torch.Tensor]:
    sizes = torch.tensor([[SIDE, SIDE, 0, 0, SIDE, SIDE]]).expand(5, -1)
    return model_batches.batch_of(model, [f'image number {i}' for i in range(5)]) | {batch_keys.IMAGE_SIZES: sizes}


@pytest.fixture
def make(make_model, small_vae, tmp_path):
    """Function that builds a model by name, which drops half of the captions."""

    def build(name: str, **settings: Any) -> LatentDiffusion:
        torch.manual_seed(0)
        settings = {'train_text_encoder': False} | settings
        small: dict[str, Any] = {'vae': str(small_vae), 'text_width': 32, 'text_layers': 1, 'caption_dropout': 0.5}
        if name == 'sdxl':
            return tiny_sdxl(**(small | {'block_out_channels': (64, 64), 'text_layers': 2} | settings))
        if name == 'prx':
            config = Dinov2Config(hidden_size=32, num_hidden_layers=1, num_attention_heads=2, patch_size=14)
            Dinov2Model(config).save_pretrained(tmp_path / 'dino')
            alignment = RepresentationAlignment(str(tmp_path / 'dino'), block=1, hidden_size=32)
            shape = {'hidden_size': 32, 'num_heads': 2, 'depth': 2, 'representation_alignment': alignment}
            return tiny_prx(**(small | shape | settings))
        return make_model(caption_dropout=0.5, **settings)

    return build


@pytest.mark.parametrize(
    ('name', 'settings', 'encoded'),
    [
        ('unet', {'caption_dropout_mode': 'zeros', 'mask_padding': True}, {'latent_moments', 'text_embeds'}),
        ('unet', {'train_text_encoder': True}, {'latent_moments'}),
        pytest.param('unet', {'vae': 'pixels'}, {'image', 'text_embeds'}, marks=pytest.mark.slow),
        ('sdxl', {}, {'latent_moments', 'text_embeds', 'text_pooled'}),
        ('prx', {}, {'latent_moments', 'text_embeds', 'image_features'}),
    ],
)
def test_loss_is_that_of_encoding_each_microbatch(make, name, settings, encoded):
    model = make(name, **settings)
    model.encoders_in_inference_mode = True
    given = batch_of(model)
    together = model.encode_batch(given, 2)
    assert together.keys() - (given.keys() - {batch_keys.IMAGE}) == encoded
    assert batch_keys.IMAGE in given, 'the batch itself is not changed'
    parts = ({key: value[1:4] for key, value in batch.items()} for batch in (given, together))
    expected, found = (model.loss(model(part), part) for part in parts)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=0)
    found.backward()


def test_outputs_that_a_batch_has_are_kept(make):
    model = make('unet')
    given = batch_of(model)
    stored = model.encode_batch(given, 8)
    assert all(stored[key] is value for key, value in model.encode_batch(stored, 2).items())


def test_run_encodes_in_batches_of_another_size_and_has_the_same_losses(write_recipe, tmp_path, monkeypatch):
    calls: list[int] = []
    encode = LatentDiffusion.encode
    noted = lambda model, images: (calls.append(len(images)), encode(model, images))[1]  # noqa: E731
    monkeypatch.setattr(LatentDiffusion, 'encode', noted)

    def fit(name: str, **speed: int) -> dict[int, float]:
        path = write_recipe(name, device_train_microbatch_size=2, speed=speed)
        calls.clear()
        trainer = build_trainer(load(path, ['trainer.max_duration=1ba', 'trainer.save_interval=1ba']))
        keys: set[str] = set()  # of the batch at its end, when SpeedMonitor asks for its FLOPs
        trainer.state.callbacks.append(At(Event.BATCH_END, 1, lambda: keys.update(trainer.state.batch)))
        trainer.fit()
        assert keys >= {batch_keys.IMAGE} and batch_keys.LATENT_MOMENTS not in keys
        trainer.close()
        return read_losses(tmp_path / 'runs' / name)

    apart = fit('apart')
    assert calls == [2] * 4
    together = fit('together', encode_batch_size=6)
    assert calls == [6, 2]
    assert largest_difference(apart, together) < 1e-5
