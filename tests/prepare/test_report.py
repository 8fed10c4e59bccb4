"""The report: consistent counts, a page that is self-contained and small, captions.txt and numbers of CLIP tokens."""

import base64
import html
import html.parser
import io
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn import DrawnSource, draw, encode, run, samples
from golden import check_golden
from hypothesis import example, given
from hypothesis import strategies as st
from PIL import Image

from diffusion.data.image_sheet import Figure
from diffusion.models.pretrained import clip_tokenizer
from diffusion.prepare import report_content
from diffusion.prepare.counts_report import PrepareReport, report_page
from diffusion.prepare.dataset_reports import merged_report, without_names
from diffusion.prepare.report_content import CLIP_TOKENS, clip_token_counts
from diffusion.prepare.source import Entry, NamedCount

HOSTILE = '<script>alert("x")</script> & "quotes" \'too\''


class Various(DrawnSource):
    """Source with images for every outcome: good, too small, broken, without caption, repeated, with a hostile name."""

    def entry(self, key: str, number: int) -> Entry:
        image = encode(draw(number, width=64, height=48), 'PNG')
        kinds = [
            Entry(key, image, [f'good {number}'], {'language': 'en', 'exif': 'secret'}),
            Entry(key, encode(draw(number, width=20, height=9)), ['small']),
            Entry(key, image[: len(image) // 2], ['broken']),
            Entry(key, image, [None]),
            Entry(key, encode(draw(-number % 7 + 900, width=64, height=48), 'PNG'), ['again']),
            Entry(f'{key}{HOSTILE}', image, [HOSTILE, 'x']),
            Entry(key, image, problem='no_image'),
        ]
        return kinds[number % len(kinds)]


def test_page_is_self_contained_and_shows_images_of_every_bucket_and_reason(tmp_path: Path) -> None:
    values = {'aspects': 'sdxl', 'duplicates': 'exact', 'license': f'CC0 {HOSTILE}', 'max_rejected': 0.1}
    report = run(tmp_path / 'out', Various(7, 14), sizes=[16, 32], **values)
    text = (tmp_path / 'out/report.html').read_text(encoding='utf-8')
    assert not re.search(r'<(?:script|link|iframe)|(?:src|href)="(?!data:)', text)
    assert f'CC0 {HOSTILE}' in html.unescape(text) and 'secret' not in text
    headings, images = (re.findall(each, text) for each in ('<h3>(.*?)</h3>', 'src="data:image/jpeg;base64,([^"]+)'))
    assert set(headings) == {*report.buckets, 'too_small', 'no_caption', 'no_image', 'duplicate'}
    sizes = {Image.open(io.BytesIO(base64.b64decode(image))).size for image in images}
    assert all(max(size) <= 96 for size in sizes) and (20, 9) in sizes
    shown = [part.count('<img') for part in text.partition('<h2>Skipped')[0].split('<h3>')[1:]]
    assert shown[-4:] == [6] * 4, 'of each reason'
    assert max(shown[:-4]) == min(8, 300 // len([*report.buckets, *report.empty_buckets]))
    assert len(text) < 5e6


GOLDEN = Path(__file__).parent / 'golden/report'


def test_text_page_and_file_of_a_report_and_of_several_deliveries(tmp_path: Path) -> None:
    report = replace(PrepareReport.read(GOLDEN / 'report.json'), seconds=12.34)
    captions = report.statistics['captions'] | {'quantiles': {'0%': 0.0, '100%': 3.0}}
    other = replace(report, source='more', license='MIT', date='2026-11-26T09:00:00Z', inputs=1383, details={})
    other.arguments = {'out': 'other', 'hold_out': 0, 'sizes': [16, 32]}
    other.rejected, other.statistics = {'truncated': NamedCount(150, ['m'])}, {'captions': captions}
    shards = [{'samples': 500, 'raw_data': {'bytes': 700_000}}] * 2
    merged = merged_report([report, other], {'16px': shards, '32px': []}, removed=3, removed_held_out=10)
    short, long = Figure([b'\xff\xd8'], f'{200 * "<"}'), Figure([b'png'], f'{201 * "."}')
    page = report_page(merged, 'a&b', buckets={'16px': [short]}, held_out=[long], rejected={'too_small': [long, short]})
    found = {'merged.html': re.sub('(?s)<style>.*</style>', '', page).replace('<tr>', '\n<tr>')}
    for name, each in {'report': report, 'merged': merged}.items():
        each.save(tmp_path / 'saved.json')
        assert vars(PrepareReport.read(tmp_path / 'saved.json')) == vars(replace(each, seconds=12.3))
        found[f'{name}.json'] = re.sub(r'\n {4,}', ' ', (tmp_path / 'saved.json').read_text())
        found[f'{name}.txt'] = each.text('o')
    check_golden(GOLDEN, found)
    five = replace(report, empty_buckets=report.empty_buckets[:5], max_rejected=report.unusable_share)
    assert '5 of 7 buckets have no images (0px, 1px, 2px, 3px, 4px)\n' in five.text('o') and five.passed
    assert '<h2>Deliveries</h2>' not in report_page(five, 'o', buckets={}, held_out=[], rejected={})
    for licenses, expected in ((None, ''), None), (('', ''), ''), (('MIT', None), 'MIT'):
        reports = [replace(report, license=license) for license in licenses]
        assert merged_report(reports, {}, removed=0, removed_held_out=0).license == expected
    report.held_out = None
    alone = [merged_report([report], {}, removed=count, removed_held_out=0) for count in (0, 1)]
    assert [each.fingerprint for each in alone] == ['f', None] and alone[0].statistics == report.statistics
    assert (alone[0].unusable_share, alone[0].deliveries[0]['kept']) == (109 / 2512, 1200)
    assert PrepareReport('one', {}, rejected={'no_caption': NamedCount(1)}).unusable_share == 1
    kept = without_names(report, frozenset({'a', 'c', 'photo (1)', 's', '.x'}))
    names = {'too_small': ['b'], 'truncated': ['d'], 'no_caption': [*'fghi'], 'duplicate': ['e']}
    assert {reason: each.names for reason, each in kept.rejected.items()} == names
    assert (kept.repaired, kept.passed_over['hidden']) == (NamedCount(2, ['r']), NamedCount(1))


def damaged(number: int) -> bytes:
    """Return an intact image, a JPEG with stray bytes, or a PNG with a changed byte."""
    jpeg, png = (encode(draw(number, width=64, height=48), kind) for kind in ('JPEG', 'PNG'))
    at = len(png) // 2
    changed = png[:at] + bytes([png[at] ^ 1]) + png[at + 1 :]
    return [png, jpeg[:-2] + bytes(100) + jpeg[-2:], changed][number % 3]


def test_report_has_the_messages_of_the_decoder_and_repaired_images(tmp_path: Path) -> None:
    report = run(tmp_path / 'out', DrawnSource(3, 3, image=damaged), sizes=[16])
    assert report.pictures == 6
    assert report.rejected['undecodable'].count == 3
    (message,) = report.details['undecodable']
    assert report.details == {'undecodable': {message: 3}} and 'broken PNG file' in message
    assert report.repaired.count == 3


class Labeled(DrawnSource):
    """Pairs of equal images with the captions `label 3`, `label 2`, ..., again and again, and a broken image."""

    def entry(self, key: str, number: int) -> Entry:
        captions = [f'label {3 - number % 4}', f'image {number}', '  häufig\n', 'broken' if number == 5 else 'ok']
        image = encode(draw(number // 2, width=40, height=40))
        return Entry(key, image[:50] if number == 5 else image, captions)


def captions(out: Path, **values: Any) -> list[str]:
    run(out, Labeled(3, 8), **values)
    text = (out / 'captions.txt').read_text(encoding='utf-8')
    assert text.endswith('\n')
    return text.splitlines()


def test_captions_are_those_of_the_training_images_sorted_and_distinct(tmp_path: Path) -> None:
    found = captions(tmp_path / 'out', hold_out=4, duplicates='exact')
    stored = [sample['captions'] for sample in samples(tmp_path / 'out/16px')]
    assert found == sorted({caption for each in stored for caption in each})
    assert {'label 1', 'label 3', 'häufig', 'ok'} < set(found) and 'broken' not in found
    assert sum(caption.startswith('image') for caption in found) == 24 // 2 - 4
    assert not (tmp_path / 'out-held-out/captions.txt').exists()


def test_the_first_distinct_captions_are_listed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(report_content, 'MAX_CAPTIONS', 5)
    found = captions(tmp_path / 'out')
    in_order = dict.fromkeys(caption for sample in samples(tmp_path / 'out/16px') for caption in sample['captions'])
    assert found == sorted(list(in_order)[:5])


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


@example(CAPTIONS)
@given(st.lists(st.text(st.characters(max_codepoint=0x7E, min_codepoint=0x20, exclude_characters='&<!')), max_size=3))
def test_counts_are_those_of_transformers(captions: list[str]) -> None:
    assert clip_token_counts(captions).tolist() == counts(captions)


class Long(DrawnSource):
    """Four images, the last with one word more than CLIP reads."""

    def entry(self, key: str, number: int) -> Entry:
        return Entry(key, encode(draw(number, width=40, height=40)), ['cat ' * (CLIP_TOKENS - 2 + (number == 3))])


def test_report_has_the_share_of_captions_that_are_cut(tmp_path: Path) -> None:
    report = run(tmp_path / 'out', Long(1, 4))
    assert np.sum(report.statistics['captions, CLIP tokens']['counts']) == 4
    assert [note for note in report.notes if note.startswith('25.0% of the captions have more than the 77 tokens')]
