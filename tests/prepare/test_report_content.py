"""Captions in the report: captions.txt, which tells what to ask a model for, and their numbers of CLIP tokens."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn import DrawnSource, draw, encode, run, samples
from hypothesis import given
from hypothesis import strategies as st

from diffusion.models.pretrained import clip_tokenizer
from diffusion.prepare import report_content
from diffusion.prepare.report_content import CLIP_TOKENS, clip_token_counts
from diffusion.prepare.source import Entry


class Labeled(DrawnSource):
    """Images with the captions `label 3`, `label 2`, ..., again and again, and one that is different."""

    def entry(self, key: str, number: int) -> Entry:
        captions = [f'label {3 - number % 4}', f'image {number}', '  häufig\n', 'broken' if number == 5 else 'ok']
        image = encode(draw(number, width=40, height=40))
        return Entry(key, image[:50] if number == 5 else image, captions)


def captions(out: Path, **values: Any) -> list[str]:
    run(out, Labeled(3, 8), **values)
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

    run(tmp_path / 'out', Same(2, 4), duplicates='exact')
    assert (tmp_path / 'out/captions.txt').read_text() == '00\n02\n04\n06\n'


@pytest.mark.parametrize('limit', [5, 10_000])
def test_the_first_distinct_captions_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int) -> None:
    monkeypatch.setattr(report_content, 'MAX_CAPTIONS', limit)
    found = captions(tmp_path / 'out')
    in_order = dict.fromkeys(caption for sample in samples(tmp_path / 'out/16px') for caption in sample['captions'])
    assert found == sorted(list(in_order)[:limit])


TOKENIZER = clip_tokenizer()
CAPTIONS = [
    'a red apple',
    "It's a dog's life; they'll say: 1234 cats!",
    'Ein schöner Vögel-Flug über Köln, 猫と犬',
    'emoji \N{GRINNING FACE} \N{FAMILY} and\ttabs',
    'a ' * 300,
]


def counts(captions: list[str]) -> list[int]:
    return [len(TOKENIZER(caption, truncation=False).input_ids) for caption in captions]


@pytest.mark.parametrize('caption', CAPTIONS)
def test_counts_are_those_of_transformers(caption: str) -> None:
    assert clip_token_counts([caption]).tolist() == counts([caption])


@given(st.lists(st.text(st.characters(max_codepoint=0x7E, min_codepoint=0x20, exclude_characters='&<!')), max_size=3))
def test_counts_of_any_ascii(captions: list[str]) -> None:
    assert clip_token_counts(captions).tolist() == counts(captions)


class Long(DrawnSource):
    """Four images, the last with one word more than CLIP reads."""

    def entry(self, key: str, number: int) -> Entry:
        return Entry(key, encode(draw(number, width=40, height=40)), ['cat ' * (CLIP_TOKENS - 2 + (number == 3))])


def test_report_has_the_share_of_captions_that_are_cut(tmp_path: Path) -> None:
    report = run(tmp_path / 'out', Long(1, 4))
    assert np.sum(report.statistics['captions, CLIP tokens']['counts']) == 4
    assert [note for note in report.notes if note.startswith('25.0% of the captions have more than the 77 tokens')]
