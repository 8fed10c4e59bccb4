"""Timestep quantiles stratified over the global batch: one per stratum, the same on any number of ranks."""

import pytest
import torch
from shards import streams_of

from diffusion.config.load import load
from diffusion.data.loader import timestep_quantiles
from diffusion.models import batch_keys
from diffusion.training import components
from diffusion.training.components import build_loader


def copies_of(batch: dict[str, torch.Tensor]) -> torch.Tensor:
    return torch.stack([batch[batch_keys.SAMPLE_ID], batch[batch_keys.OCCURRENCE]])


@pytest.mark.parametrize('ranks', [1, 2, 16])
def test_quantiles_depend_on_samples_not_ranks(ranks):
    ids = torch.randperm(480, generator=torch.Generator().manual_seed(3))[:48]
    batch = {batch_keys.SAMPLE_ID: ids, batch_keys.OCCURRENCE: torch.zeros_like(ids)}
    batch |= {batch_keys.EPOCH: torch.ones_like(ids), batch_keys.BATCH_INDEX: torch.full_like(ids, 3)}
    on_one_rank = timestep_quantiles(17, batch, copies_of(batch), 0)
    expected = dict(zip(batch[batch_keys.SAMPLE_ID].tolist(), on_one_rank.tolist(), strict=True))
    # Streaming assigns sample i to rank i % ranks.
    parts = [{name: tensor[rank::ranks] for name, tensor in batch.items()} for rank in range(ranks)]
    copies = torch.cat([copies_of(part) for part in parts], dim=1)
    for rank, part in enumerate(parts):
        quantiles = timestep_quantiles(17, part, copies, rank)
        assert quantiles.dtype == torch.float64
        assert quantiles.tolist() == [expected[index] for index in part[batch_keys.SAMPLE_ID].tolist()]
    assert sorted((on_one_rank * 48).long().tolist()) == list(range(48))


def test_each_global_batch_covers_all_strata(write_recipe, pictures):
    stratified = load(write_recipe(streams=streams_of(pictures)), ['model.objective.timesteps=stratified'])
    batches = list(build_loader(stratified))
    quantiles = [batch[batch_keys.TIMESTEP_QUANTILE] for batch in batches]
    assert len(quantiles) == 8
    assert all(sorted((q * 8).long().tolist()) == list(range(8)) for q in quantiles)
    assert len({tuple((q * 8).long().tolist()) for q in quantiles}) == 8, 'they must differ between batches'
    model = components.build_model(stratified)
    assert torch.isfinite(model.loss(model(batches[0]), batches[0]))  # type: ignore[arg-type]


def test_other_loaders_provide_no_quantiles(write_recipe, pictures):
    streams = {'eval': {'local': str(pictures[32]), 'resolution': 32}}
    plain = load(write_recipe())
    evaluating = load(write_recipe(eval_streams=streams), ['model.objective.timesteps=stratified'])
    for loader in (build_loader(plain), build_loader(evaluating, 'eval')):
        assert batch_keys.TIMESTEP_QUANTILE not in next(iter(loader))
