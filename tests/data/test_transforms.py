"""Decoding, cropping and resizing of images into the memory of their batch, and the choice of captions."""

import io
import struct
import tracemalloc
import zlib
from pathlib import Path

import matplotlib
import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from PIL import Image
from prepare.drawn import encode

from diffusion.config.image_shapes import Shape, square
from diffusion.data.bad_samples import BadSample
from diffusion.data.caption_choice import captions_of, choose_caption_index
from diffusion.data.image_reading import MIN_OVERSAMPLING, UnreadableImage, jpeg_reduction
from diffusion.data.transforms import (
    MAX_FREE,
    Crop,
    CropBox,
    ImageBlock,
    as_batch,
    crop_box,
    decode_for_model,
    reduce_box,
)
from diffusion.models import batch_keys

SHAPES = [Shape(640, 384), Shape(384, 640), Shape(512, 512), Shape(1024, 256)]
shares = st.floats(0, 1, exclude_max=True)
SHAPE = (3, 4, 5)


def encoded(image, format='PNG', **options):
    return encode(image, format, **options)


def noise(width, height):
    return Image.fromarray(np.random.default_rng(0).integers(0, 256, (height, width, 3), dtype=np.uint8))


def planes(image):
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def bicubic(image, box, shape):
    """Return the crop of an image, resized by Pillow, whose version 13 may choose another order of the two steps."""
    inside = image.crop((box.left, box.top, box.left + box.width, box.top + box.height))
    wide = inside.resize((shape.width, box.height), Image.Resampling.BICUBIC)
    return wide.resize((shape.width, shape.height), Image.Resampling.BICUBIC)


def psnr_db(actual, expected):
    return float(-10 * ((actual.double() - expected.double()) / 255).square().mean().log10())


@pytest.fixture(scope='module')
def photograph():
    """Return the portrait of Grace Hopper at 1024 x 1200 pixels."""
    image = Image.open(Path(matplotlib.get_data_path()) / 'sample_data' / 'grace_hopper.jpg')
    return image.convert('RGB').resize((1024, 1200), Image.Resampling.LANCZOS)


@given(
    st.integers(8, 900),
    st.integers(8, 900),
    st.sampled_from([*SHAPES, square(64)]),
    st.tuples(shares, shares, shares),
    st.floats(0.1, 1),
)
def test_crop_has_aspect_of_shape_and_is_inside_image(width, height, shape, draw, min_scale):
    largest, box = (crop_box(width, height, shape, Crop('random', scale, draw)) for scale in (1.0, min_scale))
    assert largest.width == width or largest.height == height
    assert 0 <= box.left <= width - box.width and 0 <= box.top <= height - box.height
    assert abs(box.width - box.height * shape.aspect) <= 1 + shape.aspect
    shorter = min(largest.width, largest.height)
    assert round(min_scale * shorter) <= min(box.width, box.height) <= shorter


def test_center_crop_is_centered_and_random_crops_reach_both_edges():
    assert crop_box(300, 100, square(8), Crop()) == CropBox(100, 0, 100, 100)
    assert crop_box(100, 301, square(8), Crop()) == CropBox(0, 100, 100, 100)
    assert {crop_box(12, 10, square(8), Crop('random', draw=(0, d / 10, 0))).left for d in range(10)} == {0, 1, 2}


@pytest.mark.parametrize('format', ['PNG', 'JPEG', 'WEBP'])
@pytest.mark.parametrize('flip', [False, True])
def test_crop_of_target_size_keeps_decoded_pixels(format, flip):
    source = encoded(noise(64, 40), format)
    seen = decode_for_model(source, Shape(40, 40), Crop(flip=flip))
    expected = planes(Image.open(io.BytesIO(source)).convert('RGB').crop((12, 0, 52, 40)))
    assert seen.dtype == torch.uint8 and seen.is_contiguous()
    assert torch.equal(seen, expected.flip(2) if flip else expected)


@settings(max_examples=20, deadline=None)
@given(
    st.tuples(st.integers(1, 200), st.integers(1, 200)),
    st.sampled_from([Shape(64, 64), Shape(32, 96), Shape(8, 8), Shape(256, 128)]),
    st.tuples(shares, shares, shares),
)
def test_resizing_matches_pillow_bicubic_within_two_gray_levels(size, shape, draw):
    image, crop = noise(*size), Crop('random', 0.5, draw)
    expected = bicubic(image, crop_box(size[0], size[1], shape, crop), shape)
    difference = decode_for_model(encoded(image), shape, crop).int() - planes(expected).int()
    assert difference.abs().max() <= 2


def extended(image, multiple):
    """Pad an image with its last row and column; a reduced JPEG also has a pixel for a partial cell at its edge."""
    pixels = np.asarray(image.convert('RGB'))
    return Image.fromarray(np.pad(pixels, [(0, -side % multiple) for side in pixels.shape[:2]] + [(0, 0)], 'edge'))


@settings(max_examples=8, deadline=None)
@example((908, 900), Shape(32, 32), '4:2:0', (0.0, 0.998046875, 0.0))
@given(
    st.tuples(st.integers(900, 1024), st.integers(900, 1200)),
    st.sampled_from([Shape(128, 128), Shape(64, 96), Shape(32, 32)]),
    st.sampled_from(['4:2:0', '4:4:4']),
    st.tuples(shares, shares, shares),
)
def test_reduced_decoding_is_close_to_full_decoding(photograph, size, shape, subsampling, draw):
    source = encoded(photograph.crop((0, 0, *size)), 'JPEG', quality=92, subsampling=subsampling)
    crop = Crop('random', 0.6, draw)
    box = crop_box(size[0], size[1], shape, crop)
    reduction = jpeg_reduction((box.width, box.height), (shape.width, shape.height))
    assert reduction > 1
    grid = reduce_box(box, reduction)
    on_grid = CropBox(*(reduction * value for value in (grid.left, grid.top, grid.width, grid.height)))
    expected = bicubic(extended(Image.open(io.BytesIO(source)), reduction), on_grid, shape)
    assert psnr_db(decode_for_model(source, shape, crop), planes(expected)) > 42


@settings(max_examples=100, deadline=None)
@given(st.integers(8, 3000), st.integers(8, 3000), st.sampled_from([*SHAPES, square(64)]), st.tuples(shares, shares))
def test_rounding_moves_crop_edges_by_at_most_quarter_pixel(width, height, shape, at):
    box = crop_box(width, height, shape, Crop('random', 0.5, (0.5, *at)))
    reduction = jpeg_reduction((box.width, box.height), (shape.width, shape.height))
    grid = reduce_box(box, reduction)
    for edge, reduced_edge, scale in (
        (box.left, grid.left, shape.width / box.width),
        (box.left + box.width, grid.left + grid.width, shape.width / box.width),
        (box.top, grid.top, shape.height / box.height),
        (box.top + box.height, grid.top + grid.height, shape.height / box.height),
    ):
        assert abs(edge - reduction * reduced_edge) * scale <= (0.25 if reduction > 1 else 0)


@given(st.integers(8, 5000), st.integers(8, 5000), st.sampled_from([*SHAPES, square(64)]))
def test_reduced_crop_keeps_minimum_oversampling(width, height, shape):
    box = crop_box(width, height, shape, Crop())
    reduction = jpeg_reduction((box.width, box.height), (shape.width, shape.height))
    assert reduction in (1, 2, 4, 8)
    if reduction > 1:
        assert min(box.width / reduction / shape.width, box.height / reduction / shape.height) >= MIN_OVERSAMPLING
    if reduction < 8:
        larger = 2 * reduction
        assert min(box.width / larger / shape.width, box.height / larger / shape.height) < MIN_OVERSAMPLING


def test_zone_plate_does_not_alias():
    """Rings too fine for the result must become gray, at whatever size the JPEG is decoded."""
    y, x = np.mgrid[:1024, :1024] - 511.5
    rings = 127.5 + 127.5 * np.cos(np.pi * (x**2 + y**2) / 1024)
    source = encoded(Image.fromarray(rings.astype(np.uint8)).convert('RGB'), 'JPEG', quality=95)
    for side in (96, 200, 256, 384):
        seen = decode_for_model(source, square(side))[1].double()
        v, u = (np.mgrid[:side, :side] - (side - 1) / 2) * 1024 / side
        too_fine = torch.from_numpy(np.maximum(abs(u), abs(v)) / 1024 > 1.3 * side / 2048)
        assert seen[too_fine].std() < 7, side  # 12 with OpenCV's INTER_AREA, more than 38 without antialiasing


def huge_png():
    chunk = b'IHDR' + struct.pack('>IIBBBBB', 40_000, 40_000, 8, 2, 0, 0, 0)
    header = b'\x89PNG\r\n\x1a\n' + struct.pack('>I', 13) + chunk + struct.pack('>I', zlib.crc32(chunk))
    return header + encoded(noise(8, 8))[33:]


def huge_jpeg():
    source = bytearray(encoded(noise(32, 32), 'JPEG'))
    frame = source.index(b'\xff\xc0')
    source[frame + 5 : frame + 9] = struct.pack('>HH', 40_000, 40_000)
    return bytes(source)


@pytest.mark.parametrize(
    ('broken', 'message'),
    [
        *((b'', 'no bytes'), (b'not an image', 'format is none of'), (b'\xff\xd8\xff', 'header cannot be read')),
        *((encoded(noise(64, 64), 'JPEG')[:-700], 'Premature end'), (encoded(noise(64, 64), 'JPEG')[:300], '.')),
        *((encoded(noise(64, 64))[:-700], '.'), (encoded(noise(64, 64), 'WEBP')[:-700], '.')),
        *((huge_png(), 'decompression bomb'), (huge_jpeg(), 'decompression bomb')),
    ],
)
def test_invalid_images_are_unreadable(broken, message):
    with pytest.raises(UnreadableImage, match=message):
        decode_for_model(broken, square(32))


def test_valid_jpeg_with_too_many_pixels_is_rejected():
    with pytest.raises(UnreadableImage, match='13400 x 13400 pixels exceed the limit'):
        decode_for_model(encoded(Image.new('L', (13_400, 13_400)), 'JPEG'), square(32))


@settings(max_examples=30, deadline=None)
@given(st.sampled_from(['PNG', 'JPEG', 'WEBP', 'GIF', 'BMP', 'TIFF']), st.data())
@pytest.mark.filterwarnings('ignore')
def test_damaged_bytes_decode_or_are_unreadable(format, data):
    source = bytearray(encoded(noise(24, 24), format))
    for _ in range(data.draw(st.integers(1, 8))):
        source[data.draw(st.integers(0, len(source) - 1))] = data.draw(st.integers(0, 255))
    try:
        seen = decode_for_model(bytes(source), square(16))
    except UnreadableImage:
        return
    assert seen.shape == (3, 16, 16)


def test_caption_choice_rules():
    captions = ['one', 'the longest', 'two']
    assert choose_caption_index(captions, 'first', 0.9) == 0
    assert choose_caption_index(captions, 'longest', 0.0) == 1
    assert [choose_caption_index(captions, 'random', d) for d in (0.0, 0.5, 0.99)] == [0, 1, 2]
    assert captions_of({'caption': 'a'}, '') == ['a']


@pytest.mark.parametrize(
    'sample', [{}, {'captions': []}, {'captions': [1]}, {'caption': None}, {'captions': {'a': 'b'}}]
)
def test_invalid_captions_are_rejected(sample):
    with pytest.raises(BadSample, match='streams.a: sample 3: its caption is .* a non-empty list of strings'):
        captions_of(sample, 'streams.a: sample 3')


def filled(block, value, shape=SHAPE):
    return {batch_keys.IMAGE: block.place(shape).fill_(value), batch_keys.SAMPLE_ID: value}


def test_batch_is_a_view_of_the_decoded_images():
    block = ImageBlock(3)
    items = [filled(block, value) for value in range(3)]
    batch = block.collate(items)
    assert batch[batch_keys.IMAGE].shape == (3, *SHAPE) and batch[batch_keys.IMAGE].is_contiguous()
    assert batch[batch_keys.IMAGE][:, 0, 0, 0].tolist() == batch[batch_keys.SAMPLE_ID].tolist() == [0, 1, 2]
    assert batch[batch_keys.IMAGE].data_ptr() == items[0][batch_keys.IMAGE].data_ptr()


def test_nonadjacent_images_are_copied():
    block = ImageBlock(2)
    first, skipped, second = (filled(block, value) for value in range(3))
    assert block.collate([first, second])[batch_keys.IMAGE][:, 0, 0, 0].tolist() == [0, 2]
    assert block.collate([second, first])[batch_keys.IMAGE][:, 0, 0, 0].tolist() == [2, 0]
    assert skipped[batch_keys.IMAGE].unique().tolist() == [1]
    separate = [torch.zeros(SHAPE, dtype=torch.uint8), torch.ones(SHAPE, dtype=torch.uint8)]
    assert torch.equal(as_batch(separate), torch.stack(separate))


def batches(block, shape=SHAPE):
    """Yield twelve batches of two images, filled with the number of the batch."""
    for number in range(12):
        yield block.collate([filled(block, number, shape), filled(block, number, shape)])[batch_keys.IMAGE]


@pytest.mark.parametrize('part', [lambda batch: batch, lambda batch: batch[1, 2, 3], lambda batch: batch.numpy()[0]])
def test_memory_in_use_is_never_overwritten(part):
    block = ImageBlock(2)
    kept = [part(batch) for batch in batches(block)]
    for number, values in enumerate(kept):
        assert (values == number).all()


def test_free_memory_is_reused_and_bounded():
    shape = (3, 256, 256)
    tracemalloc.start()
    try:
        block = ImageBlock(2)
        held = list(batches(block, shape))
        assert tracemalloc.get_traced_memory()[0] > len(held) * held[0].numel()
        size = held[0].numel()
        held.clear()
        free = tracemalloc.get_traced_memory()[0]
        assert size < free < (MAX_FREE + 1) * size
        batch = next(batches(block, shape))
        assert tracemalloc.get_traced_memory()[0] < free + size / 10
        del batch
    finally:
        tracemalloc.stop()


def test_partial_batch_and_new_shape_start_new_block():
    block = ImageBlock(3)
    assert block.collate([filled(block, 1)])[batch_keys.IMAGE].shape == (1, *SHAPE)
    other = block.collate([filled(block, value, (3, 8, 2)) for value in range(3)])[batch_keys.IMAGE]
    assert other.shape == (3, 3, 8, 2) and other[:, 0, 0, 0].tolist() == [0, 1, 2]
