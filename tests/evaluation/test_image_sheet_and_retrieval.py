"""Image sheets as PNG and HTML, and the nearest-image lookup."""

import html
import io
import json
import re

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

from diffusion.data.image_sheet import (
    FIGURES,
    GAP,
    MARGIN,
    Figure,
    Section,
    draw_sheet,
    html_figures,
    html_page,
    png_bytes,
    save_image,
    size_on_sheet,
    to_images,
    wrap_caption,
)
from diffusion.evaluation.retrieval import nearest_images


def test_nearest_image_has_the_smallest_squared_difference():
    generator = torch.Generator().manual_seed(0)
    references = torch.rand(20, 3, 8, 8, generator=generator)
    order = torch.randperm(20, generator=generator)
    noisy = references[order] + 0.1 * torch.randn(20, 3, 8, 8, generator=generator)
    assert torch.equal(nearest_images(noisy, references), order)
    loop = [min(range(20), key=lambda i: (noisy[n] - references[i]).square().mean()) for n in range(20)]
    assert nearest_images(noisy, references).tolist() == loop


@pytest.mark.parametrize('kind', ['float', 'bytes'])
def test_converted_images_keep_their_values(kind):
    values = torch.randint(0, 256, (2, 3, 4, 5), dtype=torch.uint8)
    images = to_images(values if kind == 'bytes' else values / 255)
    assert images[0].size == (5, 4)
    assert np.array_equal(np.asarray(images[1]), values[1].permute(1, 2, 0).numpy())


@pytest.mark.parametrize(('size', 'side', 'factor'), [(64, 128, 2), (64, 96, 2), (32, 96, 3), (90, 96, 1), (20, 64, 3)])
def test_small_images_are_enlarged_by_an_integer_factor_with_a_gap_between_them(size, side, factor):
    generator = np.random.default_rng(0)
    pixels = [generator.integers(0, 200, (size, size, 3), dtype=np.uint8) for _ in range(2)]
    sheet = np.asarray(
        draw_sheet([Section('', [Figure([Image.fromarray(each) for each in pixels], '')])], columns=8, side=side)
    )
    large = [each.repeat(factor, axis=0).repeat(factor, axis=1) for each in pixels]
    white = np.full((size * factor, GAP, 3), 255, np.uint8)
    figure = np.concatenate([large[0], white, large[1]], axis=1)
    height, width, _ = figure.shape
    assert GAP > 1
    assert np.array_equal(sheet[MARGIN : MARGIN + height, MARGIN : MARGIN + width], figure)
    assert sheet.shape[1] == width + 2 * MARGIN, 'as wide as its only figure'


@pytest.mark.parametrize('size', [(512, 512), (1024, 256), (256, 1024), (320, 192)])
def test_images_keep_their_aspect_ratio_and_have_equal_areas(size):
    assert size_on_sheet(Image.new('RGB', (20_000, 10)), 176) == (1484, 1), 'no wider than a sheet'
    width, height = size_on_sheet(Image.new('RGB', size), 176)
    assert width / height == pytest.approx(size[0] / size[1], rel=0.02)
    assert width * height == pytest.approx(176**2, rel=0.02)


def test_captions_are_wrapped_and_truncated():
    font = ImageFont.load_default(size=11)
    line = 'many words many words'
    assert wrap_caption('many words ' * 30, 150, font) == [line, line, f'{line} ...']
    assert wrap_caption('', 150, font) == ['']
    assert font.getlength('x' * 28 + ' ...') == 151 and wrap_caption('x' * 500, 151, font) == ['x' * 28 + ' ...']


def test_html_embeds_images_and_escapes_captions():
    jpeg = io.BytesIO()
    Image.new('RGB', (30, 20), 'red').save(jpeg, 'JPEG')
    hostile = '<script>alert("x")</script>'
    figure = Figure([jpeg.getvalue(), Image.new('RGB', (20, 20))], hostile)
    page = html_page(hostile, html_figures([figure]))
    assert '<script>' not in page and html.escape(hostile) in page
    assert re.findall('src="(data:image/[a-z]*)', page) == ['data:image/jpeg', 'data:image/png']
    assert re.findall(r' width="(\d+)"', html_figures([figure], side=40)) == ['49', '40']


def test_images_can_be_cut_out_of_a_saved_sheet(tmp_path):
    images = [Image.effect_noise((24, 16), 60 + 20 * index).convert('RGB') for index in range(8)]
    figures = [Figure([images[2 * index], png_bytes(images[2 * index + 1])], f'caption {index}') for index in range(4)]
    save_image(
        draw_sheet([Section('one', figures[:3]), Section('two', figures[3:])], columns=2), tmp_path / 'sheet.png'
    )
    with Image.open(tmp_path / 'sheet.png') as sheet:
        found = json.loads(getattr(sheet, 'text', {})[FIGURES])
        cut = [
            sheet.crop((left, top, left + width, top + height)).resize(size, Image.Resampling.NEAREST)
            for figure in found
            for (left, top, width, height), size in zip(figure['boxes'], figure['sizes'], strict=True)
        ]
        size, font, text = sheet.size, ImageFont.load_default(size=11), Image.new('RGB', (244, 26), 'white')
        ImageDraw.Draw(text).text((0, 0), 'caption 3', fill=(110, 110, 110), font=font)
        assert sheet.crop((8, 404, 252, 430)).tobytes() == text.tobytes()
        frame = [sheet.getpixel(place) for place in ((7, 340), (100, 321), (252, 340), (100, 402))]
    assert [figure['caption'] for figure in found] == [f'caption {index}' for index in range(4)]
    assert size == (512, 457) and {*frame} == {(220, 220, 220)}, 'five times as large'
    places = ((8, 34), (260, 34), (8, 161), (8, 288 + 34))
    assert [each['boxes'] for each in found] == [[[x, y, 120, 80], [x + 124, y, 120, 80]] for x, y in places]
    assert [each.tobytes() for each in cut] == [each.tobytes() for each in images]
