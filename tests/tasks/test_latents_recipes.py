"""The shipped recipes on precomputed latents: the values that they need, and their differences from those on images."""

from pathlib import Path

import pytest

from diffusion.config.load import RecipeError, load

YAMLS = Path(__file__).parents[2] / 'yamls'
IMAGES = ['precompute.streams.laion.remote=s3://bucket/images', 'precompute.out=s3://bucket/latents', 'task=precompute']
LATENTS = ['streams.laion.remote=s3://bucket/latents/laion', 'eval_streams.coco.remote=s3://bucket/coco']


@pytest.mark.parametrize('number', [1, 2])
def test_recipes_name_what_each_task_needs_and_nothing_else(number):
    path = YAMLS / f'phase{number}-latents.yaml'
    assert load(path, IMAGES).precompute.streams['laion'].resolution == 256 * number
    recipe = load(path, LATENTS)
    assert recipe.streams['laion'].resolution == recipe.model.kwargs['resolution'] == 256 * number
    with pytest.raises(RecipeError) as error:
        load(path, ['task=precompute'])
    assert {each.where for each in error.value.problems} == {'precompute.out', 'precompute.streams.laion.remote'}
    with pytest.raises(RecipeError) as error:
        load(path)
    assert {each.where for each in error.value.problems} == {'streams.laion.remote', 'eval_streams.coco.remote'}


@pytest.mark.parametrize('number', [1, 2])
def test_precomputed_and_online_training_differ_only_in_the_data(number):
    latents = load(YAMLS / f'phase{number}-latents.yaml', LATENTS)
    overrides = ['streams.laion.remote=s3://bucket/images', LATENTS[1]]
    online = load(YAMLS / f'phase{number}.yaml', overrides)
    assert online.dataset.kwargs['crop'] == latents.precompute.crop == 'center'
    for section in ('model', 'optimizer', 'scheduler', 'algorithms', 'callbacks', 'parallelism', 'speed', 'trainer'):
        assert getattr(latents, section) == getattr(online, section)
    assert (latents.seed, latents.global_batch, latents.loader) == (online.seed, online.global_batch, online.loader)
