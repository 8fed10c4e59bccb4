"""Contact sheets and the nearest picture."""

import numpy as np
import pytest
import torch
from PIL import Image

from diffusion.evaluation.image_sheet import contact_sheet, save_image, to_images
from diffusion.evaluation.retrieval import nearest_images


def test_the_nearest_is_the_one_with_the_smallest_squared_difference():
    generator = torch.Generator().manual_seed(0)
    references = torch.rand(20, 3, 8, 8, generator=generator)
    order = torch.randperm(20, generator=generator)
    noisy = references[order] + 0.1 * torch.randn(20, 3, 8, 8, generator=generator)
    assert torch.equal(nearest_images(noisy, references), order)
    loop = [min(range(20), key=lambda i: (noisy[n] - references[i]).square().mean()) for n in range(20)]
    assert nearest_images(noisy, references).tolist() == loop


@pytest.mark.parametrize('kind', ['float', 'bytes'])
def test_pictures_keep_their_values(kind):
    values = torch.randint(0, 256, (2, 3, 4, 5), dtype=torch.uint8)
    images = to_images(values if kind == 'bytes' else values / 255)
    assert images[0].size == (5, 4)
    assert np.array_equal(np.asarray(images[1]), values[1].permute(1, 2, 0).numpy())


def test_a_sheet_shows_every_picture():
    colours = ['red', 'green', 'blue']
    cells = [(colour, [Image.new('RGB', (8, 8), colour)]) for colour in colours]
    sheet = contact_sheet(cells, columns=2, side=16)
    shown = {pixel for _, pixel in sheet.getcolors(maxcolors=10**6) or []}
    assert {(255, 0, 0), (0, 128, 0), (0, 0, 255)} <= shown


def test_saving_leaves_nothing_half_written(tmp_path, monkeypatch):
    image = Image.new('RGB', (4, 4))
    save_image(image, tmp_path / 'a' / 'b.png')
    assert [file.name for file in (tmp_path / 'a').iterdir()] == ['b.png']

    def full(*_args: object, **_kwargs: object) -> None:
        raise OSError(28, 'No space left on device')

    monkeypatch.setattr('diffusion.storage.atomic.Path.replace', full)
    with pytest.raises(OSError, match='No space left'):
        save_image(image, tmp_path / 'a' / 'c.png')
    assert not (tmp_path / 'a' / 'c.png').exists()
