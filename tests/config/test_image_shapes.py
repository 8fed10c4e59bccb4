"""Image shapes, aspect buckets, recipes that train on them, and division into integer parts."""

import json
import logging
from pathlib import Path

import pytest
from golden import check_transcripts
from hypothesis import given
from hypothesis import strategies as st
from recipe_files import write_yaml
from shards import write_buckets, write_image_shards

from diffusion.config.image_shapes import (
    SDXL_SHAPES,
    Shape,
    apportion,
    read_buckets,
    sdxl_shapes,
    shape_for,
    square,
)
from diffusion.config.load import RecipeError, load
from diffusion.config.recipe import StreamConfig
from diffusion.errors import UserError
from diffusion.tasks.run_recipe import checked
from diffusion.training.expand_streams import by_shape


def test_sdxl_has_41_shapes_of_about_1024_squared_pixels():
    shapes = sdxl_shapes(1024)
    assert len(shapes) == 41 and len(SDXL_SHAPES) == 21
    assert {shape.aspect for shape in shapes} >= {0.25, 1.0, 4.0}
    assert all(shape.width % 64 == 0 and shape.height % 64 == 0 for shape in shapes)
    assert all(0.9 < shape.pixels / 1024**2 <= 1.01 for shape in shapes)
    assert set(shapes) == {Shape(shape.height, shape.width) for shape in shapes}


@pytest.mark.parametrize('resolution', [256, 512, 768, 2048])
def test_other_resolutions_have_the_same_aspects(resolution):
    shapes = sdxl_shapes(resolution)
    assert len(shapes) == 41 and square(resolution) in shapes
    assert all(shape.width % 8 == 0 and shape.height % 8 == 0 for shape in shapes)
    for shape, base in zip(shapes, sdxl_shapes(1024), strict=True):
        assert shape.aspect == pytest.approx(base.aspect, rel=1e-9)


@given(st.integers(256, 4000), st.integers(256, 4000))
def test_images_are_never_upscaled(width, height):
    resolution = max(side for side in (256, 512, 1024) if side <= min(width, height))
    shape = shape_for(width, height, sdxl_shapes(resolution))
    assert max(shape.width / width, shape.height / height) <= 1


def test_nearest_aspect_is_measured_by_ratio_and_ties_go_to_the_more_square_shape():
    shapes = [Shape(512, 512), Shape(1024, 512), Shape(512, 1024)]
    assert shape_for(1500, 1000, shapes) == Shape(1024, 512)
    assert shape_for(1400, 1000, shapes) == Shape(512, 512)
    assert shape_for(1000, 1500, shapes) == Shape(512, 1024)
    assert shape_for(100, 25, [Shape(512, 128), Shape(2048, 512), Shape(512, 512)]) == Shape(512, 128)


def test_shapes_in_an_object_store_are_read_on_every_start_and_cached_for_when_that_fails(store, tmp_path):
    def found(local: str) -> list[tuple[str, str | None]]:
        stream = StreamConfig(remote=url, local=str(tmp_path / local), resolution=512, aspects=True, download_retry=0)
        return [(name, each.remote) for name, each in by_shape({'photos': stream}).items()]

    def put(*shapes: Shape) -> None:
        write_buckets(tmp_path / 'source', 512, {shape: {'samples': 40} for shape in shapes})
        store.put(url, 'buckets.json', (tmp_path / 'source/buckets.json').read_bytes())

    url = store.bucket('data') + '/mds'
    put(Shape(512, 512))
    assert found('local') == [('photos/512x512', f'{url}/512x512')]
    put(Shape(512, 512), Shape(640, 384))
    names = [name for name, _ in found('local')]
    assert names == ['photos/512x512', 'photos/640x384']
    store.delete(url, 'buckets.json')
    assert [name for name, _ in found('local')] == names
    with pytest.raises(ValueError, match=rf'^streams.photos: {url}/buckets.json: there is no such bucket or object'):
        found('elsewhere')


@given(st.integers(0, 10_000), st.lists(st.floats(1e-3, 1e3), min_size=1, max_size=30))
def test_apportioned_parts_add_up_and_are_off_by_less_than_one(total, weights):
    shares = apportion(total, weights)
    assert sum(shares) == total
    for share, weight in zip(shares, weights, strict=True):
        assert abs(share - total * weight / sum(weights)) < 1 + 1e-6


def test_buckets_file_round_trips(tmp_path):
    counts = {Shape(64, 32): {'samples': 5, 'bytes': 100}, Shape(32, 32): {'samples': 7}}
    write_buckets(tmp_path, 32, counts)
    assert read_buckets(tmp_path) == {Shape(32, 32): 7, Shape(64, 32): 5}
    buckets = {'32x32': {'samples': 7}, '64x32': {'samples': 5, 'bytes': 100}}
    content = json.loads((tmp_path / 'buckets.json').read_text())
    assert content == {'version': 1, 'resolution': 32, 'buckets': buckets} and [*content['buckets']] == [*buckets]
    assert [path.name for path in tmp_path.iterdir()] == ['buckets.json']


def test_invalid_buckets_file_is_an_error(tmp_path, monkeypatch):
    """The lines of the file are contents of buckets.json as JSON."""
    monkeypatch.chdir(tmp_path)

    def outcome(line):
        Path('buckets.json').write_text(json.loads(line))
        with pytest.raises(UserError) as raised:
            read_buckets(Path())
        return [raised.value]

    check_transcripts(Path(__file__).parent / 'golden' / 'buckets', outcome)
    Path('buckets.json').write_text('{"a": ' * 10_000)
    with pytest.raises(UserError, match='is not a valid list of buckets'):
        read_buckets(Path())


def test_stream_of_several_shapes_becomes_one_stream_per_shape_that_fills_a_batch(tmp_path, caplog):
    write_buckets(tmp_path, 32, {Shape(64, 32): {'samples': 30}, Shape(32, 32): {'samples': 10}})
    streams = by_shape(
        {'a': StreamConfig(32, local=str(tmp_path), aspects=True, proportion=0.8), 'b': StreamConfig(64)}
    )
    assert list(streams) == ['a/32x32', 'a/64x32', 'b']
    wide = streams['a/64x32']
    assert (wide.local, wide.shape, wide.aspects) == (f'{tmp_path}/64x32', '64x32', False)
    assert wide.proportion == pytest.approx(0.6)
    stream = StreamConfig(32, local=str(tmp_path), aspects=True)
    with caplog.at_level(logging.WARNING):
        assert len(by_shape({'a': stream}, smallest=10)) == 2 and not caplog.text
        assert list(by_shape({'a': stream}, smallest=16)) == ['a/64x32']
    assert 'streams.a: skipped shapes that do not fill a batch of 16: 32x32 (10)' in caplog.text
    with pytest.raises(ValueError, match=r'streams\.a: none of its 2 shapes has the 31 samples'):
        by_shape({'a': stream}, smallest=31)
    (tmp_path / 'buckets.json').unlink()
    with pytest.raises(ValueError, match=r'streams\.a: .* has no buckets\.json, .* remove aspects'):
        by_shape({'a': stream})


def test_check_finds_mistakes_about_folders_of_several_shapes(tmp_path, tiny_recipe):
    data = tmp_path / '32px'
    counts = {Shape(32, 32): 10, Shape(40, 24): 8}
    for shape, count in counts.items():
        write_image_shards(data / str(shape), count=count, side=48)
    write_buckets(data, 32, {shape: {'samples': count} for shape, count in counts.items()})
    streams = {'px32': {'local': str(data), 'resolution': 32, 'aspects': True, 'proportion': 1.0}}
    path = write_yaml(tmp_path / 'recipe.yaml', tiny_recipe(tmp_path / 'runs', streams=streams, global_batch=4))
    assert checked(str(path), []).streams['px32'].aspects
    with pytest.raises(RecipeError, match=r'streams\.px32\.local: .*it has buckets\.json; set aspects: true'):
        checked(str(path), ['streams.px32.aspects=false'])
    with pytest.raises(
        UserError, match=r'streams\.px32\.resolution: 48, but .* buckets of 32 px: its images would be en'
    ):
        by_shape(load(str(path), ['streams.px32.resolution=48']).streams)
