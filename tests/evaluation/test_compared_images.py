"""Folders of images as one side of a comparison: matched with prompts by number, and read as browsers show them."""

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from composer.utils import dist
from golden import check_golden, readable_json
from PIL import Image, ImageCms, PngImagePlugin

from diffusion.errors import UserError
from diffusion.evaluation.compared_images import has_images, numbered_images, read_image
from diffusion.evaluation.generated_images import MANIFEST, GeneratedImages, Sampling
from diffusion.evaluation.reference_images import FolderImages

PROMPTS = ['a cat', 'a dog', 'a fox']


@pytest.fixture
def write(tmp_path):
    def write_files(*names, **text):
        info = PngImagePlugin.PngInfo()
        for key, value in text.items():
            info.add_itxt(key, value)
        for name in names:
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            options: dict[str, Any] = {'pnginfo': info} if path.suffix == '.png' else {}
            Image.new('RGB', (8, 8)).save(path, **options)
        return tmp_path

    return write_files


@pytest.mark.parametrize(
    'names',
    [
        ['00017-a-cat.png', '00018-a-dog.png', '00019-a-fox-9.png'],  # of `diffusion generate`, by their seeds
        ['1.jpg', '2.webp', '3.jpeg'],
        ['image_9.png', 'image_10.png', 'image_11.png'],
        ['sd2-0.PNG', 'sd2-1.PNG', 'sd2-2.PNG'],
    ],
)
def test_images_are_in_the_order_of_their_numbers(write, names):
    folder = write(*names)
    (folder / 'prompts.txt').touch()
    assert has_images(folder)
    assert [path.name for path in numbered_images(folder, PROMPTS)] == names


@pytest.mark.parametrize(
    ('names', 'message'),
    [
        (['0.png', '1.png', 'cover.png'], 'cover.png: has no prompt number in its name'),
        (['0.png', '1.png', '01.jpg', '2.png'], '01.jpg and .*1.png: have the same number; remove one'),
        (['0.png', '1.png'], 'has 2 images for 3 prompts; give one image per prompt'),
        (['0.png', '1.png', '2.png', '3.png'], 'has 4 images for 3 prompts'),
        (['0.png', '1.png', '3.png'], 'has no image number 2; number the images'),
    ],
)
def test_images_that_do_not_match_the_prompts_are_refused(write, names, message):
    with pytest.raises(UserError, match=message):
        numbered_images(write(*names), PROMPTS)


def test_images_of_other_prompts_are_refused_by_their_text(write):
    folder = write('0.png', '1.png', '2.png', prompt='{"3": "a workflow of another program"}')
    assert len(numbered_images(folder, PROMPTS)) == 3
    write('1.png', prompt='two dogs', guidance_scale='7.5')
    with pytest.raises(UserError, match="1.png: was generated for 'two dogs', but prompt 2 is 'a dog'; give the"):
        numbered_images(folder, PROMPTS)


def test_images_of_an_evaluation_are_found_below_their_batches(write, tmp_path):
    folder = tmp_path / 'guidance-7.5-0123abcd'
    generated = GeneratedImages(folder, PROMPTS, Sampling(batch_size=2), 'ba1, ema weights')
    assert not has_images(folder)
    write(*(str(generated.path(index).relative_to(tmp_path)) for index in range(3)))
    assert numbered_images(folder, PROMPTS) == [generated.path(index) for index in range(3)]
    with pytest.raises(UserError, match='its images were generated for other prompts; give the same prompts'):
        numbered_images(folder, PROMPTS[::-1])
    (folder / MANIFEST).write_text('{')
    with pytest.raises(UserError, match='images.json: is not JSON'):
        numbered_images(folder, PROMPTS)


def test_damaged_image_is_generated_again_and_ranks_of_a_sharded_model_take_part(tmp_path, monkeypatch, caplog):
    asked: list[list[int]] = []

    def generate(prompts: list[str], *, seeds: list[int], **_: object) -> torch.Tensor:
        asked.append(seeds)
        return torch.stack([torch.full((3, 4, 4), seed, dtype=torch.uint8) for seed in seeds])

    images = GeneratedImages(tmp_path, PROMPTS, Sampling(batch_size=1, seed=7), 'ba2')
    model, expected = Mock(generate=generate), [(range(i, i + 1), [[[7 + i] * 4] * 4] * 3) for i in range(3)]
    assert [(own, each[0].tolist()) for own, each in images.own_batches(model)] == expected and asked == [[7], [8], [9]]
    below = GeneratedImages.below(tmp_path, PROMPTS, Sampling(guidance_scale=3, snr_shift=2.0), 'ba2').folder
    files = {'images.json': (tmp_path / MANIFEST).read_text(), 'folder.txt': str(below.relative_to(tmp_path))}
    with Image.open(images.path(1)) as image:
        files['image.txt'] = readable_json(image.info)
    check_golden(Path(__file__).parent / 'golden' / 'generated', files)
    content = bytearray(images.path(1).read_bytes())
    content[-20] ^= 255
    images.path(1).write_bytes(content)
    assert [(own, each[0].tolist()) for own, each in images.own_batches(model)] == expected and asked[3:] == [[8]]
    assert f'{images.path(1)} is damaged' in caplog.text
    monkeypatch.setattr(dist, 'get_world_size', lambda: 2)
    monkeypatch.setattr(dist, 'get_global_rank', lambda: 1)
    for missing, passes in ((False, []), (True, [[8], [9]])):  # the other rank lacks its images, or has them
        monkeypatch.setattr(dist, 'all_gather_object', lambda own, other=missing: [own, (other, False)])
        assert [own for own, _ in images.own_batches(model, together=True)] == [range(1, 2)]
        assert asked[4:] == passes
    with pytest.raises(UserError, match="has images with checkpoint 'ba2' instead of 'ba1'; remove the folder"):
        GeneratedImages(tmp_path, PROMPTS, Sampling(batch_size=1, seed=7), 'ba1')


def test_images_and_references_are_read_upright_in_srgb_over_white(tmp_path):
    turned = Image.linear_gradient('L').resize((8, 4)).convert('RGB')
    exif = turned.getexif()
    exif[0x0112] = 6
    turned.save(tmp_path / 'turned.jpg', exif=exif)
    assert read_image(tmp_path / 'turned.jpg').size == (4, 8)

    Image.new('RGBA', (4, 4), (0, 0, 0, 0)).save(tmp_path / 'clear.png')
    assert np.asarray(read_image(tmp_path / 'clear.png')).min() == 255
    Image.fromarray(np.full((4, 4), 0x8000, np.uint16)).save(tmp_path / 'deep.png')

    profile = ImageCms.ImageCmsProfile(ImageCms.createProfile('XYZ')).tobytes()
    Image.new('RGB', (4, 4), (128, 128, 128)).save(tmp_path / 'xyz.png', icc_profile=profile)
    Image.new('RGB', (4, 4), (128, 128, 128)).save(tmp_path / 'damaged.png', icc_profile=b'no profile')
    for name in ('xyz.png', 'damaged.png'):
        image = read_image(tmp_path / name)
        assert image.mode == 'RGB' and not image.info

    (tmp_path / 'cut.png').write_bytes((tmp_path / 'clear.png').read_bytes()[:40])
    with pytest.raises(UserError, match='cut.png: cannot be read as an image .*; replace it'):
        read_image(tmp_path / 'cut.png')

    (tmp_path / 'notes.png').write_text('not an image')
    images = FolderImages(tmp_path, len([*tmp_path.iterdir()]))
    assert len(images) == 7 and images.description() != FolderImages(tmp_path, 3).description() | {'count': 7}
    clear, deep, turned = images[0], images[3], images[5]
    assert clear.unique().tolist() == [255]
    assert deep.unique().tolist() == [128]
    assert np.array_equal(turned.permute(1, 2, 0), np.asarray(read_image(tmp_path / 'turned.jpg')))
    with pytest.raises(UserError, match='notes.png: cannot be read as an image .*; replace it'):
        images[4]
