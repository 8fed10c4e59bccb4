"""`--fast-jpeg`: large JPEGs are decoded smaller, and the dataset is nearly the one of whole images."""

import io
import shutil
from pathlib import Path
from typing import Any

import numpy as np
from drawn import draw, samples
from PIL import Image

from diffusion.cli import main

LARGE, SMALL = 9, 3


def write(folder: Path, numbers: range, **size: int) -> None:
    folder.mkdir(exist_ok=True)
    for number in numbers:
        draw(number, **size).save(folder / f'{number}.jpg', quality=92)
        (folder / f'{number}.txt').write_text(f'number {number}')


def add_copy(photograph: Path, folder: Path, name: str) -> None:
    for suffix in ('.jpg', '.txt'):
        shutil.copy(photograph.with_suffix(suffix), folder / f'{name}{suffix}')


def prepared(capsys: Any, folder: Path, out: Path, *options: str) -> str:
    assert main(['prepare', 'folder', str(folder), '--out', str(out), *options]) == 0
    captured = capsys.readouterr()
    return captured.out + captured.err


def stored(out: Path) -> dict[str, dict[str, Any]]:
    return {f'{path.name}/{each["key"]}': each for path in out.glob('*px') for each in samples(path)}


def test_samples_are_nearly_those_of_whole_images(tmp_path: Path, capsys: Any) -> None:
    """Nine images are 8 times as large as the largest bucket, and three as large as it."""
    photographs = tmp_path / 'in'
    write(photographs, range(LARGE), width=640, height=520)
    write(photographs, range(LARGE, LARGE + SMALL), width=80, height=64)
    options, out = ('--sizes', '32', '64', '--duplicates', 'exact', '--max-rejected', '1'), tmp_path / 'fast'
    prepared(capsys, photographs, tmp_path / 'whole', *options)
    add_copy(photographs / '3.jpg', photographs, 'copy')
    assert 'copy.jpg (duplicate of 3.jpg)' in prepared(capsys, photographs, out, *options, '--fast-jpeg')
    whole, fast = stored(tmp_path / 'whole'), stored(out)
    assert len(whole) == 2 * (LARGE + SMALL) and whole.keys() == fast.keys()
    differing = 0
    for name, sample in fast.items():
        expected = whole[name]
        for column in ('captions', 'width', 'height'):
            assert sample[column] == expected[column]
        for column in ('source_width', 'source_height', 'caption_length'):
            assert sample['metadata'][column] == expected['metadata'][column]
        changed = int(sample['metadata']['perceptual_hash'], 16) ^ int(expected['metadata']['perceptual_hash'], 16)
        assert changed.bit_count() <= 8
        pixels, others = (np.asarray(Image.open(io.BytesIO(each['image'])), float) for each in (sample, expected))
        assert np.sqrt(np.square(pixels - others).mean()) < 2
        differing += sample['image'] != expected['image']
    assert 0 < differing <= 2 * LARGE, 'the small images are decoded whole'
    # A delivery of one copy and one new image, with the settings of the dataset.
    delivery = tmp_path / 'delivery'
    write(delivery, range(30, 31), width=640, height=520)
    add_copy(photographs / '5.jpg', delivery, 'again')
    assert 'inputs 2, kept 1, ' in prepared(capsys, delivery, out, '--append', '--max-rejected', '1')
    assert stored(out).keys() - fast.keys() == {'32px/30.jpg', '64px/30.jpg'}
    assert main(['data', 'remove', str(out), '--image', str(delivery / '30.jpg')]) == 0
    assert stored(out).keys() == fast.keys()
