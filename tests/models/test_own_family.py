"""A family of somebody else, as docs/extending.md shows it: the files of its folder are all that it needs."""

from pathlib import Path

import torch
from docs_shell import blocks_of

from diffusion.config import families, registry
from diffusion.config.families import family_of_model
from diffusion.config.load import load
from diffusion.models import batch_keys
from diffusion.models.block_matrices import fused_projections
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.training.components import build_model, build_tokenizers

ROOT = Path(__file__).parents[2]


def test_own_family_trains_and_draws(tmp_path, monkeypatch):
    (tmp_path / 'my_sana').mkdir()
    (tmp_path / 'yamls').symlink_to(ROOT / 'yamls')
    for block in blocks_of(ROOT / 'docs' / 'extending.md'):
        if block.file_name is not None and block.file_name.startswith('my_sana'):
            (tmp_path / block.file_name).write_text(block.text)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setattr(families, '_registered', [])
    monkeypatch.setitem(registry.TARGETS, 'model', dict(registry.TARGETS['model']))
    recipe = load(tmp_path / 'my_sana.yaml')
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
