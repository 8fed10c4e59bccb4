"""Text in images: the rules against the published steps, written a second time, and a real OCR on drawn text."""

import difflib
import functools
import json
import random
import re
import socket
import sys
from collections import Counter
from dataclasses import replace
from typing import Any, NoReturn
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

from diffusion.errors import UserError
from diffusion.evaluation import rendered_text
from diffusion.evaluation.comparison_result import clustered_proportion
from diffusion.evaluation.metrics import build_network
from diffusion.evaluation.prompts import Prompt, read_prompts
from diffusion.evaluation.rendered_text import TextReader, check_text, image_scores, text_counts, text_scores

LONGTEXT = [
    {
        'category': 'sign',
        'prompt': 'A billboard that reads "FRESH BREWS, EVERY DAY".',
        'text': ['FRESH BREWS, EVERY DAY'],
    },
    {
        'category': 'sign',
        'prompt': 'A café with "Crème Brûlée" and "7 AM - 9 PM".',
        'text': ['Crème Brûlée', '7 AM - 9 PM'],
    },
    {'category': 'label', 'prompt': '一张海报，标题“雪落北平·穿越600年”', 'text': ['雪落北平·穿越600年']},
]
CVTG = [
    {
        'index': 0,
        'prompt': "A quiet bookstore with a sign that says 'READ'. A cup with the word 'MORNING'.",
        'carrier_list': ['sign'],
    },
    {'index': 1, 'prompt': "A sales sign hanging reads '50 percent'. A shirt labeled 'STYLE'."},
]
ALPHABET = 'aAbBcré,.- 7雪年'


@functools.cache
def levenshtein(text: str, other: str) -> int:
    if not text or not other:
        return len(text) + len(other)
    if text[0] == other[0]:
        return levenshtein(text[1:], other[1:])
    shorter = levenshtein(text[1:], other), levenshtein(text, other[1:]), levenshtein(text[1:], other[1:])
    return 1 + min(shorter)


def longtext(wanted: list[str], found: str, chinese: bool) -> tuple[int, int]:
    """Return the right and the wanted words or characters, in the steps of summary_scores.py."""

    def clean(text: str) -> str:
        kept = [
            c
            for c in text
            if '\u4e00' <= c <= '\u9fa5' or (c.isascii() and c.isalnum()) or c in 'àâäéèêëîïôöùûüçÀÂÄÉÈÊËÎÏÔÖÙÛÜÇ'
        ]
        if chinese:
            return ''.join(kept)
        return ' '.join(''.join(c for c in text if c in kept or c.isspace()).lower().split())

    truth, read = clean(' '.join(wanted)), clean(found)
    words, others = (list(each) if chinese else each.split() for each in (truth, read))
    return sum(min(count, Counter(others)[word]) for word, count in Counter(words).items()), len(words)


def cvtg(prompt: str, lines: list[str]) -> tuple[int, int, float]:
    """Return right words, wanted words, and the sum of their similarities, in the steps of unified_metrics_eval.py."""
    words = ' '.join(re.findall(r"'(.*?)'", prompt)).lower().split()
    read = ' '.join(lines).lower().split() or ['']
    similar = 0.0
    for word in words:
        ratios = [difflib.SequenceMatcher(None, other, word).ratio() for other in read]
        best = max(zip(ratios, read, strict=True))[1]
        similar += 1 - levenshtein(word, best) / (max(len(word), len(best)) + 1e-5)
    return sum(word in read for word in words), len(words), similar


def test_rules_equal_the_published_steps_on_random_texts():
    generator = random.Random(0)
    texts = ['READ', 'fresh Brews', 'crème', 'percent', '7 AM', '雪落北平']

    def drawn(most: int) -> list[str]:
        own = (''.join(generator.choices(ALPHABET, k=generator.randint(1, 7))) for _ in range(most))
        return [generator.choice([text, generator.choice(texts)]) for text in own][: generator.randint(0, most)]

    for _ in range(300):
        wanted, lines = drawn(4), drawn(5)
        prompt = Prompt(generator.choice(['a sign', '一张海报']), metadata={'text': wanted})
        right, words, similar, whole = text_counts(prompt, lines)
        assert (right, words) == longtext(wanted, ' '.join(lines), prompt.text != 'a sign')
        assert whole == (words > 0) and 0 <= similar <= 1

        quoted = ' and '.join(f"'{text}'" for text in wanted)
        right, words, similar, whole = text_counts(Prompt(f'a sign with {quoted}'), lines)
        assert (right, words, whole) == (*cvtg(quoted, lines)[:2], words)
        assert similar == pytest.approx(cvtg(quoted, lines)[2], abs=1e-9)


def test_published_prompts_are_scored_by_their_own_rules(tmp_path):
    file = tmp_path / 'text_prompts.jsonl'
    file.write_text('\n'.join(map(json.dumps, LONGTEXT)))
    prompts = read_prompts(file)
    check_text(prompts)
    assert text_counts(prompts[0], ['Fresh', 'brews day!'])[:2] == (3, 4)
    assert text_counts(prompts[1], ['CRÈME BRULEE 7AM'])[:2] == (1, 6)
    assert text_counts(prompts[2], ['穿越600年', '雪落'])[:2] == (8, 10)
    assert text_counts(prompts[0], ['fresh brews every day'])[2] == pytest.approx(1, abs=1e-5)

    (tmp_path / 'CVTG-2K' / 'CVTG').mkdir(parents=True)
    (tmp_path / 'CVTG-2K' / 'CVTG' / '2.json').write_text(json.dumps({'data_list': CVTG}))
    (tmp_path / 'CVTG-2K' / 'CVTG' / '2_combined.json').write_text('{}')
    prompts = read_prompts(tmp_path / 'CVTG-2K')
    assert [each.category for each in prompts] == ['CVTG/2', 'CVTG/2']
    assert read_prompts(tmp_path / 'CVTG-2K' / 'CVTG' / '2.json') == prompts
    assert text_counts(prompts[1], ['50 Percent off', 'STYL'])[:2] == (2, 3)

    apostrophes = "a cat's toy and the dog's bowl near 'Joe's Bar', 写着'打开'的牌子"
    assert text_counts(Prompt(apostrophes), ["joe's bar 打开"])[:2] == (3, 3)
    assert text_counts(replace(prompts[0], metadata={**prompts[0].metadata, 'prompt': apostrophes}), [])[1] == 8

    counts = torch.tensor([text_counts(each, ['read 50 percent']) for each in prompts], dtype=torch.float64)
    scores = text_scores(counts, prompts)
    assert scores['word_accuracy_rapidocr'].score == pytest.approx(3 / 5), 'of all words, not the mean over images'
    assert scores['ned_rapidocr'].score == pytest.approx(float(counts[:, 2].sum()) / 5)
    assert scores['word_accuracy_rapidocr'].kinds == {'CVTG/2': (3 / 5, scores['word_accuracy_rapidocr'].interval)}
    with_other = torch.cat([counts, torch.zeros(1, 4, dtype=torch.float64)])
    assert text_scores(with_other, [*prompts, Prompt('a cat', 'pets')]) == scores, 'prompts without text are left out'
    assert image_scores(with_other)['word_accuracy_rapidocr'].isnan().tolist() == [False, False, True]


def test_interval_of_words_is_that_of_the_words_in_their_prompts():
    right, words, prompts = np.array([3.0, 0, 2, 1]), np.array([5.0, 2, 2, 4]), ['a', 'b', 'a', 'c']
    each = np.concatenate([np.arange(n) < k for k, n in zip(right, words, strict=True)]).astype(float)
    expected = clustered_proportion(each, np.ones(len(each)), np.repeat(prompts, words.astype(int)).tolist())
    mean, interval = clustered_proportion(right, words, prompts)
    assert mean == pytest.approx(6 / 13)
    assert interval == pytest.approx(expected[1])


def drawn(text: str, color: str) -> torch.Tensor:
    image = Image.new('RGB', (320, 128), 'white')
    ImageDraw.Draw(image).text((16, 40), text, fill=color, font=ImageFont.load_default(40))
    return torch.from_numpy(np.array(image)).permute(2, 0, 1)


def test_ocr_reads_drawn_text_without_network_and_its_answers_are_kept(tmp_path, monkeypatch):
    pytest.importorskip('rapidocr', reason='the extra `ocr` is not installed')

    def refuse(*_: object) -> NoReturn:
        raise AssertionError('asked')

    monkeypatch.setattr(socket.socket, 'connect', refuse)
    reader = TextReader()
    assert reader.engine.startswith('rapidocr 3.') and 'PP-OCR' in reader.engine
    images = [drawn('Open Daily', 'red'), drawn('Fresh', 'blue'), torch.zeros(3, 64, 64, dtype=torch.uint8)]
    prompts = [Prompt(f"a sign that says '{text}'") for text in ('Open Daily', 'Brews', 'Cat')]
    files = [tmp_path / f'{index:06d}.png' for index in range(3)]
    counts = reader.counts(images, prompts, files)
    assert counts[:, :2].tolist() == [[2, 2], [0, 1], [0, 1]]
    assert counts[:, 2].tolist() == pytest.approx([2, 1 - levenshtein('brews', 'fresh') / 5, 0], abs=1e-4)
    assert json.loads(files[0].with_suffix('.rapidocr.json').read_text())['lines'] == ['Open', 'Daily']


def test_text_of_an_image_is_read_once_and_kept_with_its_confidences(tmp_path, monkeypatch):
    ocr = Mock(side_effect=[Mock(txts=('Open', 'Daily'), scores=(0.9123456, 0.5)), Mock(txts=None, scores=None)])
    ocr.cfg.Rec = Mock(ocr_version=Mock(value='PP-OCRv5'), model_type=Mock(value='mobile'))
    monkeypatch.setattr(rendered_text, 'import_optional', lambda *_: Mock(RapidOCR=lambda params: ocr))
    monkeypatch.setattr(rendered_text, 'version', lambda name: '3.4')
    reader: Any = build_network('rapidocr', {})
    images, files = [drawn('Open Daily', 'red'), drawn('Fresh', 'blue')], [tmp_path / '0.png', tmp_path / '1.png']
    prompts = [Prompt("a sign that says 'Open Daily'"), Prompt("the word 'Fresh'")]
    counts = reader.counts(images, prompts, files)
    assert counts[:, :2].tolist() == [[2, 2], [0, 1]] and counts.dtype == torch.float64
    assert reader.counts(images[:1], [Prompt("the word 'Daily'")], files[:1])[0, :2].tolist() == [1, 1]
    assert ocr.call_count == 2, 'kept text serves other prompts'
    bgr = images[0].numpy()[::-1].transpose(1, 2, 0)
    assert np.array_equal(ocr.call_args_list[0].args[0], bgr), 'the order that RapidOCR expects'
    kept = {'engine': 'rapidocr 3.4, PP-OCRv5 mobile', 'lines': ['Open', 'Daily'], 'confidences': [0.91235, 0.5]}
    assert json.loads(files[0].with_suffix('.rapidocr.json').read_text()) == kept
    reader.engine = 'a newer one'
    with pytest.raises(StopIteration):  # asked again
        reader.counts(images, prompts, files)


def test_missing_extra_and_prompts_without_text_are_named(monkeypatch):
    monkeypatch.setitem(sys.modules, 'onnxruntime', None)
    with pytest.raises(UserError, match=r"onnxruntime is not installed; pip install 'diffusion-recipes\[ocr\]'"):
        TextReader()
    with pytest.raises(UserError, match=r'no prompt asks for text; use text_prompts\.jsonl of LongText-Bench'):
        check_text([Prompt('a red cube'), Prompt('text', metadata={'text': ['-']})])
