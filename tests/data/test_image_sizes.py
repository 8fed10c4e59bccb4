"""Image sizes of the datasets: the original size, the crop that was applied, and the target."""

import io

import numpy as np
import pytest
import yaml
from PIL import Image
from streaming import MDSWriter

from diffusion.config import registry
from diffusion.config.image_shapes import Shape
from diffusion.config.load import load
from diffusion.config.recipe import Component
from diffusion.data.image_text import ImageTextDataset, image_sizes, original_size
from diffusion.data.transforms import CropBox
from diffusion.errors import UserError
from diffusion.models import batch_keys
from diffusion.training.components import build_loader


def write_ramps(folder, sizes, *, metadata, image_format='PNG'):
    """Write images whose red value is the column in percent of the width, and whose green value is that of the row."""
    columns = {'image': 'bytes', 'captions': 'json', 'key': 'str', 'metadata': 'json'}
    with MDSWriter(out=str(folder), columns=columns, hashes=['sha1']) as writer:
        for index, (width, height) in enumerate(sizes):
            pixels = np.zeros((height, width, 3), np.uint8)
            pixels[..., 0] = (np.arange(width) + 0.5)[None] / width * 250
            pixels[..., 1] = (np.arange(height) + 0.5)[:, None] / height * 250
            encoded = io.BytesIO()
            Image.fromarray(pixels).save(encoded, image_format, quality=98)
            stored = metadata(width, height)
            writer.write({'image': encoded.getvalue(), 'captions': ['a'], 'key': str(index), 'metadata': stored})
    return folder


@pytest.mark.parametrize('image_format', ['PNG', 'JPEG'])
@pytest.mark.parametrize('crop', ['center', 'random'])
def test_crop_coordinates_locate_the_pixels(tmp_path, tiny_recipe, many_datasets, crop, image_format):
    """The position of each crop, read from its colors, is the one that the sizes state, mirrored or not."""
    encoded = [(160, 96), (96, 200), (400, 200), (64, 64)] * 2
    data = write_ramps(
        tmp_path / 'data',
        encoded,
        metadata=lambda width, height: {'source_width': 3 * width, 'source_height': 3 * height},
        image_format=image_format,
    )
    content = tiny_recipe(tmp_path / 'runs')
    content['model'] |= {'name': 'tiny_sdxl', 'text_layers': 2}
    content['dataset'] |= {'crop': crop, 'flip': True} | ({'min_crop_scale': 0.5} if crop == 'random' else {})
    content['streams'] = {'ramps': {'local': str(data), 'resolution': 40, 'shape': '48x32'}}
    content['loader']['shuffle'] = False
    content['seed'] = 0  # mirrors some of the images
    path = tmp_path / 'recipe.yaml'
    path.write_text(yaml.safe_dump(content))
    (batch,) = build_loader(load(path))
    mirrored = 0
    images = zip(encoded, batch[batch_keys.IMAGE], batch[batch_keys.IMAGE_SIZES], strict=True)
    for (width, height), image, sizes in images:
        pixels = image.numpy().astype(float)
        flipped = pixels[0, :, -1].mean() < pixels[0, :, 0].mean()
        mirrored += flipped
        # The color is linear in the column or row of the original, so that its zero is where the original begins.
        red, green = pixels[0].mean(0), pixels[1].mean(1)
        (slope, start), (down, above) = (np.polyfit(np.arange(len(each)) + 0.5, each, 1) for each in (red, green))
        # In the mirrored image, the column 0 has the color 250.
        left, top = ((start - 250) / slope if flipped else start / slope), above / down
        assert sizes[:2].tolist() == [3 * height, 3 * width]
        assert sizes[4:].tolist() == [32, 48]
        assert sizes[2:4].tolist() == pytest.approx([top, left], abs=1.5)
    assert 0 < mirrored < len(encoded)


def test_mirrored_crop_is_that_of_the_mirrored_image():
    box, shape = CropBox(left=10, top=4, width=60, height=40), Shape(30, 20)
    assert image_sizes(box, shape, image=(100, 50)).tolist() == [50, 100, 2, 5, 20, 30]
    assert image_sizes(box, shape, image=(100, 50), flipped=True).tolist() == [50, 100, 2, 15, 20, 30]
    assert image_sizes(box, shape, image=(100, 50), original=(1000, 500)).tolist() == [500, 1000, 2, 5, 20, 30]


def test_original_size_is_that_of_prepare_if_it_is_recorded():
    assert original_size({'metadata': {'source_width': 640, 'source_height': 480}}) == (640, 480)
    for sample in ({}, {'metadata': None}, {'metadata': {'source_width': 640}}, {'metadata': {'source_width': '640'}}):
        assert original_size(sample) is None


def test_data_without_recorded_sizes_takes_those_of_the_encoded_image(write_recipe, tiny_recipe, tmp_path):
    content = tiny_recipe(tmp_path)
    model = content['model'] | {'name': 'tiny_sdxl', 'text_layers': 2}
    batch = next(iter(build_loader(load(write_recipe(model=model)))))
    assert batch[batch_keys.IMAGE_SIZES].tolist() == [[32, 32, 0, 0, 32, 32]] * 8


def test_model_without_sizes_gets_none(write_recipe):
    assert batch_keys.IMAGE_SIZES not in next(iter(build_loader(load(write_recipe()))))


class WithoutSizes(ImageTextDataset):
    """A user's dataset whose constructor takes no `image_sizes`."""

    def __init__(self, buckets, *, batch_size, tokenizers=(), seed=17, elastic=False, **streaming):
        super().__init__(buckets, batch_size=batch_size, tokenizers=tokenizers, seed=seed, elastic=elastic)


def test_dataset_that_takes_no_sizes_is_refused_for_a_model_that_needs_them(
    write_recipe, tiny_recipe, tmp_path, monkeypatch
):
    content = tiny_recipe(tmp_path)
    model = content['model'] | {'name': 'tiny_sdxl', 'text_layers': 2}
    recipe = load(write_recipe(model=model))
    recipe.dataset = Component('without_sizes', {})
    monkeypatch.setitem(registry.TARGETS['dataset'], 'without_sizes', WithoutSizes)
    with pytest.raises(UserError, match='without_sizes takes no keyword image_sizes, but the model tiny_sdxl'):
        build_loader(recipe)
