"""Runs with two resolutions and three aspect ratios each, on one rank and on two."""

from collections import Counter
from pathlib import Path

import pytest
import yaml
from ranks import largest_difference, read_losses
from served import read_served
from shards import write_image_shards

from diffusion.config.image_shapes import Shape, write_buckets

SHAPES = {
    32: {Shape(32, 32): 30, Shape(40, 24): 20, Shape(24, 40): 14},
    48: {Shape(48, 48): 25, Shape(64, 32): 12, Shape(32, 64): 10},
}
PROPORTIONS = {32: 0.6, 48: 0.4}
BATCHES = 100


@pytest.fixture(scope='module')
def content(tmp_path_factory, tiny_recipe):
    root = tmp_path_factory.mktemp('aspects')
    streams = {}
    for resolution, counts in SHAPES.items():
        for index, (shape, count) in enumerate(counts.items()):
            side = max(shape.width, shape.height) + 8
            write_image_shards(
                root / f'{resolution}px' / str(shape), count=count, side=side, offset=100 * index + resolution
            )
        write_buckets(root / f'{resolution}px', resolution, {s: {'samples': n} for s, n in counts.items()})
        streams[f'px{resolution}'] = {
            'local': str(root / f'{resolution}px'),
            'resolution': resolution,
            'aspects': True,
            'proportion': PROPORTIONS[resolution],
        }
    recipe = tiny_recipe(root / 'runs', streams=streams, global_batch=4, callbacks={'served': None})
    recipe['imports'] = ['served']
    recipe['dataset'] = {'name': 'image_text', 'crop': 'random', 'min_crop_scale': 0.8}
    recipe['loader'] = {'num_workers': 0, 'epoch_size': 4 * BATCHES}
    recipe['optimizer'] = {'name': 'adamw', 'lr': 1.0e-4}
    recipe['trainer'] |= {'max_duration': '1ep', 'save_interval': '1000ba'}
    return root, recipe


@pytest.mark.slow
def test_batches_never_mix_shapes_and_keep_proportions_on_any_number_of_ranks(content, ranks):
    root, recipe = content
    for count in (1, 2):
        path = root / f'on{count}.yaml'
        path.write_text(yaml.safe_dump(recipe | {'name': f'on{count}'}))
        ranks.run(count, path)
    one, two = (read_served(root / 'runs' / f'on{count}') for count in (1, 2))
    assert one == two and len(one) == BATCHES
    assert all(len(shapes) == 1 for _, shapes in one)
    shares = Counter(next(iter(shapes)) for _, shapes in one)
    assert len(shares) == 6
    for resolution, counts in SHAPES.items():
        for shape, samples in counts.items():
            expected = PROPORTIONS[resolution] * samples / sum(counts.values())
            assert shares[shape.height, shape.width] / BATCHES == pytest.approx(expected, abs=0.01)
    losses = [read_losses(root / 'runs' / name) for name in ('on1', 'on2')]
    assert largest_difference(*losses) < 1e-4


def test_check_finds_mistakes_about_folders_of_several_shapes(content, tmp_path):
    from diffusion.config.load import RecipeError, load
    from diffusion.errors import UserError
    from diffusion.tasks.run_recipe import checked
    from diffusion.training.expand_streams import by_shape

    root, recipe = content
    path = Path(tmp_path, 'recipe.yaml')
    path.write_text(yaml.safe_dump(recipe))
    assert checked(str(path), []).streams['px32'].aspects
    with pytest.raises(RecipeError, match=r'streams\.px32\.local: .* has no buckets\.json'):
        checked(str(path), [f'streams.px32.local={root}'])
    with pytest.raises(RecipeError, match=r'streams\.px32\.local: .*it has buckets\.json; set aspects: true'):
        checked(str(path), ['streams.px32.aspects=false'])
    for resolution, reason in ((48, 'its images would be enlarged'), (24, 'its images would stay at 32 px')):
        message = (
            rf'streams\.px32\.resolution: {resolution}, but .* buckets of 32 px: {reason}; set resolution: 32, or use'
        )
        with pytest.raises(RecipeError, match=message):
            checked(str(path), [f'streams.px32.resolution={resolution}'])
        stream = load(str(path), [f'streams.px32.resolution={resolution}']).streams['px32']
        with pytest.raises(UserError, match=message):
            by_shape({'px32': stream})
    with pytest.raises(RecipeError, match=r'streams\.px32\.choose: cannot be divided over image shapes'):
        load(str(path), ['streams.px32.choose=8', 'streams.px32.proportion=null'])
