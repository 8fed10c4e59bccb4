"""Tokens of captions are counted as CLIP's own tokenizer counts them."""

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from prepare.drawn import draw, encode

from diffusion.models.pretrained import clip_tokenizer
from diffusion.prepare.pipeline import prepare
from diffusion.prepare.report_content import CLIP_TOKENS, clip_token_counts
from diffusion.prepare.settings import settings_of

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


def test_report_has_the_share_of_captions_that_are_cut(tmp_path: Path) -> None:
    (tmp_path / 'in').mkdir()
    for number in range(4):
        (tmp_path / 'in' / f'{number}.png').write_bytes(encode(draw(number, width=40, height=40), 'PNG'))
        words = CLIP_TOKENS - 2 + (number == 3)
        (tmp_path / 'in' / f'{number}.txt').write_text('cat ' * words)
    source = {'kind': 'folder', 'location': str(tmp_path / 'in')}
    report = prepare(settings_of({'source': source, 'sizes': [32], 'workers': 1, 'out': str(tmp_path / 'out')}))
    assert report is not None
    assert np.sum(report.statistics['captions, CLIP tokens']['counts']) == 4
    assert [note for note in report.notes if note.startswith('25.0% of the captions have more than the 77 tokens')]
