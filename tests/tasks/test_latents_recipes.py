"""The shipped recipes on precomputed latents: the values that they need, and their differences from those on images."""

from pathlib import Path

import pytest

from diffusion.config.load import load

YAMLS = Path(__file__).parents[2] / 'yamls'
IMAGES = ['precompute.streams.laion.remote=s3://bucket/images', 'precompute.out=s3://bucket/latents', 'task=precompute']
LATENTS = ['streams.laion.remote=s3://bucket/latents/laion', 'eval_streams.coco.remote=s3://bucket/coco']


@pytest.mark.parametrize('number', [1, 2])
def test_precomputed_and_online_training_differ_only_in_the_data(number):
    latents = load(YAMLS / f'phase{number}-latents.yaml', LATENTS)
    overrides = ['streams.laion.remote=s3://bucket/images', LATENTS[1]]
    online = load(YAMLS / f'phase{number}.yaml', overrides)
    assert online.dataset.kwargs['crop'] == latents.precompute.crop == 'center'
    for section in ('model', 'optimizer', 'scheduler', 'algorithms', 'callbacks', 'parallelism', 'speed', 'trainer'):
        assert getattr(latents, section) == getattr(online, section)
    assert (latents.seed, latents.global_batch, latents.loader) == (online.seed, online.global_batch, online.loader)
