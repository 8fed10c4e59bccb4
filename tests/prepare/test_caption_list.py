"""captions.txt: captions of the training images, which tell a user what to ask a model of the dataset for."""

from pathlib import Path
from typing import Any

import pytest
from drawn import DrawnSource, draw, encode, samples, settings

from diffusion.prepare import report_content
from diffusion.prepare.pipeline import prepare
from diffusion.prepare.source import Entry
from diffusion.prepare.worker_pool import run_job


class Labeled(DrawnSource):
    """Images with the captions `label 3`, `label 2`, ..., again and again, and one that is different."""

    def entry(self, key: str, number: int) -> Entry:
        captions = [f'label {3 - number % 4}', f'image {number}', '  häufig\n', 'broken' if number == 5 else 'ok']
        image = encode(draw(number, width=40, height=40))
        return Entry(key, image[:50] if number == 5 else image, captions)


def captions(out: Path, **values: Any) -> list[str]:
    prepare(settings(out, **values), source=Labeled(3, 8), run=lambda jobs: map(run_job, jobs))
    text = (out / 'captions.txt').read_text(encoding='utf-8')
    assert text.endswith('\n')
    return text.splitlines()


def test_captions_are_those_of_the_training_images_sorted_and_distinct(tmp_path: Path) -> None:
    found = captions(tmp_path / 'out', hold_out=8)
    stored = [sample['captions'] for sample in samples(tmp_path / 'out/16px')]
    assert found == sorted({caption for each in stored for caption in each})
    assert {'label 0', 'häufig', 'ok'} < set(found) and 'broken' not in found
    assert sum(caption.startswith('image') for caption in found) == 23 - 8
    assert not (tmp_path / 'out-held-out/captions.txt').exists()


def test_captions_of_duplicates_are_left_out(tmp_path: Path) -> None:
    class Same(Labeled):
        def entry(self, key: str, number: int) -> Entry:
            return Entry(key, encode(draw(number // 2, width=40, height=40), 'PNG'), [f'{number:02}'])

    values = settings(tmp_path / 'out', duplicates='exact')
    prepare(values, source=Same(2, 4), run=lambda jobs: map(run_job, jobs))
    assert (tmp_path / 'out/captions.txt').read_text() == '00\n02\n04\n06\n'


@pytest.mark.parametrize('limit', [1, 5, 9, 10_000])
def test_the_first_distinct_captions_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(report_content, 'MAX_CAPTIONS', limit)
    found = captions(tmp_path / 'out')
    in_order = dict.fromkeys(caption for sample in samples(tmp_path / 'out/16px') for caption in sample['captions'])
    assert found == sorted(list(in_order)[:limit])
