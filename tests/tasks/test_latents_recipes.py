"""The shipped recipes on precomputed latents: valid, and run in miniature from images to the end of phase 2."""

import math
from pathlib import Path

import pytest
import yaml
from ranks import read_losses

from diffusion.checkpointing.checkpoint_weights import weights_of
from diffusion.checkpointing.run_folder import find_checkpoint
from diffusion.config.load import RecipeError, load
from diffusion.tasks.precompute import precompute
from diffusion.training.train import train

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


@pytest.mark.slow
def test_miniature_runs_from_images_to_the_end_of_phase_2(pictures, tiny_recipe, tmp_path):
    tiny = tiny_recipe(tmp_path / 'runs')
    for number, side in ((1, 32), (2, 64)):
        images = {'remote': None, 'local': str(pictures[side]), 'resolution': side}
        latents = tmp_path / f'latents-{side}'
        content = {
            'extends': str(YAMLS / f'phase{number}-latents.yaml'),
            'runs_dir': str(tmp_path / 'runs'),
            'global_batch': 8,
            'device_train_microbatch_size': 4,
            'model': tiny['model'] | {'resolution': side, 'train_text_encoder': False},
            'precompute': {'out': str(latents), 'streams': {'laion': images}},
            'streams': {'laion': {'remote': None, 'local': str(latents / 'laion'), 'resolution': side}},
            'eval_streams': {'coco': images},
            'callbacks': {'memory_monitor': False, 'image_grid': False},
            'parallelism': {'strategy': 'ddp', 'checkpoints': 'whole'},
            'loader': {'num_workers': 0},
            'trainer': tiny['trainer'] | {'max_duration': '3ba', 'eval_interval': '3ba', 'precision': 'fp32'},
        }
        if number == 2:
            content |= {
                'init_from': str(tmp_path / 'runs/phase1-latents'),
                'algorithms': {'ema': {'ema_start': '1ba', 'smoothing': 0.5}},
                'optimizer': {'lr': 0.0},
            }
        path = tmp_path / f'mini{number}.yaml'
        path.write_text(yaml.safe_dump(content))
        precompute(load(path, ['task=precompute']))
        train(load(path)).close()
        losses = read_losses(tmp_path / 'runs' / f'phase{number}-latents')
        assert len(losses) == 3 and all(map(math.isfinite, losses.values()))
    first, second = (
        weights_of(find_checkpoint(tmp_path / 'runs' / f'phase{number}-latents'), 'training')[0] for number in (1, 2)
    )
    # The learning rate of 0 keeps the weights that phase 2 started from.
    assert all((first[name] == second[name]).all() for name in first)
