"""From encoded pictures to squares."""

import io

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from diffusion.data.buckets import Shape, square
from diffusion.data.captions import captions_of, choose
from diffusion.data.transforms import CropBox, crop_box, decode, to_shape

SHAPES = [Shape(640, 384), Shape(384, 640), Shape(512, 512), Shape(1024, 256)]
shares = st.floats(0, 1, exclude_max=True)


def encoded(image, **options):
    buffer = io.BytesIO()
    image.save(buffer, **options)
    return buffer.getvalue()


@given(
    st.integers(1, 900),
    st.integers(1, 900),
    st.sampled_from(['center', 'random']),
    st.tuples(shares, shares, shares),
    st.floats(0.1, 1),
)
def test_a_crop_is_a_square_inside_the_picture(width, height, crop, draw, min_scale):
    box = crop_box(width, height, shape=square(64), crop=crop, draw=draw, min_scale=min_scale)
    assert box.left >= 0
    assert box.top >= 0
    assert box.left + box.width <= width
    assert box.top + box.height <= height
    assert box.width == box.height
    assert round(min_scale * min(width, height)) <= box.width <= min(width, height) or box.width == 1


@given(st.integers(8, 900), st.integers(8, 900), st.sampled_from(SHAPES), st.tuples(shares, shares, shares))
def test_a_crop_has_the_aspect_of_its_shape_and_touches_two_edges(width, height, shape, draw):
    box = crop_box(width, height, shape=shape, crop='random', draw=draw)
    assert 0 <= box.left <= width - box.width and 0 <= box.top <= height - box.height
    assert box.width == width or box.height == height
    assert abs(box.width - box.height * shape.aspect) <= 1 + shape.aspect


def test_the_centre_is_the_centre():
    assert crop_box(300, 100, shape=square(8), crop='center', draw=(0, 0, 0)) == CropBox(100, 0, 100, 100)
    assert crop_box(100, 301, shape=square(8), crop='center', draw=(0, 0, 0)) == CropBox(0, 100, 100, 100)


def test_random_crops_reach_both_ends():
    lefts = {crop_box(12, 10, shape=square(8), crop='random', draw=(0, d / 10, 0)).left for d in range(10)}
    assert lefts == {0, 1, 2}


def test_transparency_lies_over_white_and_rotation_is_applied():
    clear = Image.new('RGBA', (4, 4), (255, 0, 0, 0))
    assert decode(encoded(clear, format='PNG')).getpixel((0, 0)) == (255, 255, 255)
    image = Image.fromarray(np.arange(2 * 3 * 3, dtype=np.uint8).reshape(2, 3, 3) * 10)
    exif = Image.Exif()
    exif[0x0112] = 6  # the camera was turned by 90 degrees
    assert decode(encoded(image, format='PNG', exif=exif)).size == (2, 3)


def test_a_crop_of_the_right_size_keeps_its_pixels_and_flips():
    array = np.random.default_rng(0).integers(0, 256, (8, 8, 3), dtype=np.uint8)
    image = Image.fromarray(array)
    seen = to_shape(image, CropBox(0, 0, 8, 8), shape=square(8))
    assert seen.dtype == torch.uint8
    assert torch.equal(seen, torch.from_numpy(array).permute(2, 0, 1))
    assert torch.equal(to_shape(image, CropBox(0, 0, 8, 8), shape=square(8), flip=True), seen.flip(2))


def test_resizing_keeps_flat_colour():
    seen = to_shape(Image.new('RGB', (100, 60), (10, 200, 30)), CropBox(5, 5, 50, 25), shape=Shape(32, 16))
    assert seen.shape == (3, 16, 32)
    assert seen.flatten(1).unique(dim=1).squeeze().tolist() == [10, 200, 30]


def test_caption_rules():
    captions = ['one', 'the longest', 'two']
    assert choose(captions, 'first', 0.9) == 'one'
    assert choose(captions, 'longest', 0.0) == 'the longest'
    assert [choose(captions, 'random', d) for d in (0.0, 0.5, 0.99)] == captions
    assert captions_of({'caption': 'a'}, '') == ['a']


@pytest.mark.parametrize(
    'sample', [{}, {'captions': []}, {'captions': [1]}, {'caption': None}, {'captions': {'a': 'b'}}]
)
def test_captions_that_are_none_are_refused(sample):
    with pytest.raises(ValueError, match='streams.a: sample 3: its caption is .* a non-empty list of strings'):
        captions_of(sample, 'streams.a: sample 3')
