"""Checks of a recipe whose streams are folders of several image shapes."""

import pytest
import yaml
from shards import write_buckets, write_image_shards

from diffusion.config.image_shapes import Shape
from diffusion.config.load import RecipeError, load
from diffusion.errors import UserError
from diffusion.tasks.run_recipe import checked
from diffusion.training.expand_streams import by_shape


def test_check_finds_mistakes_about_folders_of_several_shapes(tmp_path, tiny_recipe):
    data = tmp_path / '32px'
    counts = {Shape(32, 32): 10, Shape(40, 24): 8}
    for shape, count in counts.items():
        write_image_shards(data / str(shape), count=count, side=48)
    write_buckets(data, 32, {shape: {'samples': count} for shape, count in counts.items()})
    streams = {'px32': {'local': str(data), 'resolution': 32, 'aspects': True, 'proportion': 1.0}}
    path = tmp_path / 'recipe.yaml'
    path.write_text(yaml.safe_dump(tiny_recipe(tmp_path / 'runs', streams=streams, global_batch=4)))
    assert checked(str(path), []).streams['px32'].aspects
    for override, message in (
        (f'local={tmp_path}', r'local: .* has no buckets\.json'),
        ('aspects=false', r'local: .*it has buckets\.json; set aspects: true'),
    ):
        with pytest.raises(RecipeError, match=rf'streams\.px32\.{message}'):
            checked(str(path), [f'streams.px32.{override}'])
    for resolution, reason in ((48, 'its images would be enlarged'), (24, 'its images would stay at 32 px')):
        message = rf'streams\.px32\.resolution: {resolution}, but .* buckets of 32 px: {reason}; set resolution: 32'
        with pytest.raises(RecipeError, match=message):
            checked(str(path), [f'streams.px32.resolution={resolution}'])
        with pytest.raises(UserError, match=message):
            by_shape(load(str(path), [f'streams.px32.resolution={resolution}']).streams)
    with pytest.raises(RecipeError, match=r'streams\.px32\.choose: cannot be divided over image shapes'):
        load(str(path), ['streams.px32.choose=8', 'streams.px32.proportion=null'])
