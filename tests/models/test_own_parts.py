"""A family, a tokenizer and a dataset of somebody else, as docs/extending.md shows them."""

import sys
from pathlib import Path

import pytest
import torch
from docs_shell import blocks_of

from diffusion.config import families, registry
from diffusion.config.families import family_of_model
from diffusion.config.load import load
from diffusion.models import batch_keys
from diffusion.models.block_matrices import fused_projections
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.text_conditioner import tokenize
from diffusion.training.components import build_loader, build_model, build_tokenizers


@pytest.fixture
def sana(tmp_path, monkeypatch) -> Path:
    """The example's recipe, with the page's files importable."""
    (tmp_path / 'my_sana').mkdir()
    for block in blocks_of(Path(__file__).parents[2] / 'docs' / 'extending.md'):
        if block.file_name is not None:
            (tmp_path / block.file_name).write_text(block.text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(families, '_registered', [])
    for module in [name for name in sys.modules if name.startswith('my_')]:  # imported by an earlier test
        monkeypatch.delitem(sys.modules, module)
    for kind in ('model', 'callback', 'dataset'):
        monkeypatch.setitem(registry.TARGETS, kind, dict(registry.TARGETS[kind]))
    return tmp_path / 'my_sana.yaml'


def test_own_family_trains_and_draws(sana):
    recipe = load(sana)
    model = build_model(recipe)
    assert isinstance(model, LatentDiffusion)
    assert type(model.adapter).__name__ == 'Sana' and family_of_model('tiny_sana').denoiser_class
    images = torch.randint(256, (2, 3, 64, 64), dtype=torch.uint8)
    (tokenizer,) = build_tokenizers(recipe)
    ids = torch.tensor(tokenizer(['a', 'b'], padding='max_length', max_length=16)['input_ids'])[:, None]
    batch = {batch_keys.IMAGE: images, batch_keys.INPUT_IDS: ids, batch_keys.SAMPLE_ID: torch.arange(2)}
    model.loss(model(batch), batch).backward()
    assert model.flops_per_batch(batch) > 0 and fused_projections(model) == {}
    assert all(weight.grad is not None for weight in model.denoiser.parameters() if weight.requires_grad)
    assert model.generate(['a'], num_inference_steps=1, noise_scheduler='euler').shape == (1, 3, 64, 64)


def test_own_tokenizer_is_built_without_the_model_and_trains(sana):
    recipe = load(sana.with_name('my_words.yaml'))
    ids = tokenize(build_tokenizers(recipe), ['red house', 'a cat'])
    assert ids.tolist() == [[[3, 7, 1, 0, 0, 0, 0, 0]], [[2, 2, 1, 0, 0, 0, 0, 0]]]
    model = build_model(recipe)
    assert isinstance(model, LatentDiffusion)
    batch = {batch_keys.IMAGE: torch.zeros(2, 3, 64, 64, dtype=torch.uint8), batch_keys.INPUT_IDS: ids}
    model.loss(model(batch), batch).backward()
    assert any(weight.grad is not None and weight.grad.any() for weight in model.text_encoder.parameters())


def test_own_dataset_resumes_in_mid_epoch(sana, write_recipe):
    recipe = load(write_recipe(imports=['my_data'], dataset={'name': 'mirrored', 'prefix': 'a drawing of '}))
    whole, loader = [*build_loader(recipe)], build_loader(recipe)
    assert whole[0][batch_keys.IMAGE].shape == (8, 3, 32, 32) and whole[0][batch_keys.INPUT_IDS].shape == (8, 1, 16)
    start = tokenize(build_tokenizers(recipe), ['a drawing of'])[0, 0, :4]
    assert (whole[0][batch_keys.INPUT_IDS][:, 0, :4] == start).all()
    next(iter(loader))
    state, resumed = loader.state_dict(), build_loader(recipe)
    assert state is not None
    resumed.load_state_dict(state)
    assert torch.equal(next(iter(resumed))[batch_keys.IMAGE], whole[1][batch_keys.IMAGE])
