"""Timestep quantiles over the global batch: the loader's are the same on any number of ranks, one in each part."""

import pytest
import torch

from diffusion.config.load import load
from diffusion.data.loader import timestep_quantiles
from diffusion.models import batch_keys
from diffusion.training import components
from diffusion.training.components import build_loader


@pytest.fixture
def stratified(write_recipe, pictures):
    """The recipe of a loader that gives quantiles."""
    streams = {f'px{side}': {'local': str(folder), 'resolution': side} for side, folder in pictures.items()}
    return load(write_recipe(streams=streams), ['model.objective.timesteps=stratified'])


def global_batch(size: int, *, index: int = 3) -> dict[str, torch.Tensor]:
    ids = torch.randperm(10 * size, generator=torch.Generator().manual_seed(index))[:size]
    return {
        batch_keys.SAMPLE_ID: ids,
        batch_keys.EPOCH: torch.full_like(ids, 1),
        batch_keys.BATCH_INDEX: torch.full_like(ids, index),
    }


@pytest.mark.parametrize('ranks', [1, 2, 4, 8, 16])
def test_quantiles_belong_to_samples_and_not_to_ranks(ranks):
    whole = global_batch(48)
    alone = timestep_quantiles(17, whole, whole[batch_keys.SAMPLE_ID], 0)
    expected = dict(zip(whole[batch_keys.SAMPLE_ID].tolist(), alone.tolist(), strict=True))
    # As Streaming deals them out: sample i to rank i % ranks.
    shares = [{name: tensor[rank::ranks] for name, tensor in whole.items()} for rank in range(ranks)]
    everyone = torch.cat([share[batch_keys.SAMPLE_ID] for share in shares])
    for rank, share in enumerate(shares):
        quantiles = timestep_quantiles(17, share, everyone, rank)
        assert quantiles.dtype == torch.float64
        assert quantiles.tolist() == [expected[index] for index in share[batch_keys.SAMPLE_ID].tolist()]
    assert sorted((alone * 48).long().tolist()) == list(range(48))


def test_every_global_batch_of_a_loader_covers_the_schedule(stratified):
    loader = build_loader(stratified)
    quantiles = [batch[batch_keys.TIMESTEP_QUANTILE] for batch in loader]
    assert len(quantiles) == 8
    assert all(sorted((q * 8).long().tolist()) == list(range(8)) for q in quantiles)
    assert len({tuple((q * 8).long().tolist()) for q in quantiles}) == 8, 'which sample gets which differs'


def test_other_loaders_give_none(write_recipe, pictures):
    streams = {'eval': {'local': str(pictures[32]), 'resolution': 32}}
    plain = load(write_recipe())
    evaluating = load(write_recipe(eval_streams=streams), ['model.objective.timesteps=stratified'])
    for loader in (build_loader(plain), build_loader(evaluating, 'eval')):
        assert batch_keys.TIMESTEP_QUANTILE not in next(iter(loader))


def test_model_and_loader_of_a_recipe_agree(stratified):
    model = components.build_model(stratified)
    batch = next(iter(build_loader(stratified)))
    loss = model.loss(model(batch), batch)
    assert torch.isfinite(loss)  # type: ignore[arg-type]
