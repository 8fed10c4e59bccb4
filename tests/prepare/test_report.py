"""The report: consistent counts, and an HTML page that is self-contained and small."""

import base64
import html
import html.parser
import io
import json
import re
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from drawn import DrawnSource, draw, encode, settings
from PIL import Image

from diffusion.data.image_sheet import Figure
from diffusion.prepare import counts_report, report_content
from diffusion.prepare.counts_report import PrepareReport, report_page
from diffusion.prepare.dataset_reports import merged_report, without_names
from diffusion.prepare.pipeline import prepare
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


@pytest.fixture(scope='module')
def prepared(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, PrepareReport]:
    out = tmp_path_factory.mktemp('report') / 'out'
    report = prepare(
        settings(out, sizes=[16, 32], aspects='sdxl', duplicates='exact', license=f'CC0 {HOSTILE}', max_rejected=0.1),
        source=Various(7, 14),
    )
    assert report is not None
    return out, report


class Page(html.parser.HTMLParser):
    """Parser that collects tags, texts and images of a page, and fails on unbalanced tags."""

    VOID = frozenset({'meta', 'img', 'br'})

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: Counter[str] = Counter()
        self.images: list[bytes] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()
        assert not self.open

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags[tag] += 1
        if tag not in self.VOID:
            self.open.append(tag)
        for name, value in attrs:
            assert name not in ('href', 'onload', 'onclick')
            if name == 'src':
                assert value is not None and value.startswith('data:image/jpeg;base64,')
                self.images.append(base64.b64decode(value.partition(',')[2]))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def test_report_accounts_for_every_input(prepared: tuple[Path, PrepareReport]) -> None:
    out, report = prepared
    counts = {reason: entry.count for reason, entry in report.rejected.items()}
    assert report.inputs == 98 == report.pictures + sum(counts.values())
    assert {reason: counts[reason] for reason in ('too_small', 'no_caption', 'no_image')} == {
        'too_small': 14,
        'no_caption': 14,
        'no_image': 14,
    }
    assert counts['truncated'] + counts.get('undecodable', 0) == 14
    assert counts['duplicate'] == 13
    saved = json.loads((out / 'report.json').read_text())
    assert saved['pictures'] == report.pictures == sum(n for name, n in saved['buckets'].items() if '16px' in name)
    assert saved['bytes'] == {
        name: sum(path.stat().st_size for path in (out / name).glob('*.mds')) for name in report.buckets
    }
    assert saved['passed'] is False and 'is above --max-rejected 10.0%' in report.text(out)


def test_statistics_are_of_kept_images(prepared: tuple[Path, PrepareReport]) -> None:
    report = prepared[1]
    *of_images, tokens = report.statistics.values()
    assert [sum(each['counts']) for each in of_images] == [report.pictures] * 4
    assert sum(tokens['counts']) > report.pictures, 'one for each caption'
    sides, aspects, numbers, lengths = of_images
    assert (numbers['quantiles']['0%'], numbers['quantiles']['100%']) == (1.0, 2.0)
    assert set(sides['quantiles'].values()) == {48.0}
    assert set(aspects['quantiles'].values()) == {round(64 / 48, 3)}
    assert (lengths['quantiles']['0%'], lengths['quantiles']['100%']) == (5.0, float(len(HOSTILE)))


def test_report_is_read_as_it_was_written(prepared: tuple[Path, PrepareReport]) -> None:
    read = PrepareReport.read(prepared[0] / 'report.json')
    assert vars(read) == vars(prepared[1])


def test_page_is_self_contained_and_escapes_text(prepared: tuple[Path, PrepareReport]) -> None:
    text = (prepared[0] / 'report.html').read_text(encoding='utf-8')
    found = Page(text)
    assert not found.tags.keys() & {'script', 'link', 'iframe'}
    assert not re.search(r'(?:src|href)="(?!data:)', text)
    shown = ''.join(found.texts)
    assert HOSTILE in shown and f'CC0 {HOSTILE}' in shown
    assert 'secret' not in text


def test_page_names_single_numbers_and_ranges() -> None:
    counts = {'edges': [1, 2, 3, 10], 'counts': [5, 0, 4, 3], 'quantiles': {'50%': 1.0}}
    shares = {'edges': [0.0, 1.0, 2.0], 'counts': [1, 1, 0], 'quantiles': {}}
    assert re.findall('<th>(.*?)</th>', counts_report._histogram('captions', counts)) == ['1', '3 to 10', '10 or more']
    assert re.findall('<th>(.*?)</th>', counts_report._histogram('aspect', shares)) == ['0.0 to 1.0', '1.0 to 2.0']


def test_page_shows_images_of_every_bucket_and_reason(
    prepared: tuple[Path, PrepareReport],
) -> None:
    _, report = prepared
    text = (prepared[0] / 'report.html').read_text(encoding='utf-8')
    found = Page(text)
    headings = re.findall('<h3>(.*?)</h3>', text)
    assert set(headings) == {*report.buckets, 'too_small', 'no_caption', 'no_image', 'duplicate'}
    sizes = {Image.open(io.BytesIO(image)).size for image in found.images}
    assert all(max(size) <= 96 for size in sizes) and (20, 9) in sizes
    assert len(text) < 5e6


def test_page_of_three_resolutions_with_all_shapes_is_small() -> None:
    rng = np.random.default_rng(0)
    file = io.BytesIO()
    Image.fromarray(rng.integers(0, 256, (96, 96, 3), np.uint8)).save(file, 'JPEG', quality=70)
    noise = Figure([file.getvalue()], 'x' * 10_000)
    buckets = {f'bucket {number}': [noise] * (report_content.MAX_BUCKET_THUMBNAILS // 123) for number in range(123)}
    report = PrepareReport(source='s', arguments={}, inputs=1)
    report.rejected = {f'reason {number}': NamedCount(1, ['x']) for number in range(report_content.MAX_REASONS)}
    text = report_page(
        report,
        'out',
        buckets=buckets,
        held_out=[],
        rejected={name: [noise] * report_content.THUMBNAILS_PER_REASON for name in report.rejected},
    )
    assert len(text) < 5e6


def test_report_has_license_and_settings(prepared: tuple[Path, PrepareReport]) -> None:
    saved: dict[str, Any] = json.loads((prepared[0] / 'report.json').read_text())
    assert saved['license'] == f'CC0 {HOSTILE}'
    assert saved['arguments']['duplicates'] == 'exact' and saved['arguments']['sizes'] == [16, 32]
    assert saved['versions'].keys() >= {'pillow', 'simplejpeg', 'numpy'}


class Damaged(DrawnSource):
    """Source with intact images, JPEGs with stray bytes, and PNGs with a changed byte."""

    def entry(self, key: str, number: int) -> Entry:
        jpeg, png = (encode(draw(number, width=64, height=48), kind) for kind in ('JPEG', 'PNG'))
        at = len(png) // 2
        changed = png[:at] + bytes([png[at] ^ 1]) + png[at + 1 :]
        return Entry(key, [png, jpeg[:-2] + bytes(100) + jpeg[-2:], changed][number % 3], [f'image {number}'])


def test_report_has_the_messages_of_the_decoder_and_repaired_images(tmp_path: Path) -> None:
    report = prepare(settings(tmp_path / 'out', sizes=[16]), source=Damaged(3, 3))
    assert report is not None and report.pictures == 6
    assert report.rejected['undecodable'].count == 3
    (message,) = report.details['undecodable']
    assert report.details == {'undecodable': {message: 3}} and 'broken PNG file' in message
    assert report.repaired.count == 3
    saved = json.loads((tmp_path / 'out/report.json').read_text())
    assert saved['details'] == report.details and saved['repaired'] == vars(report.repaired)
    page = html.unescape((tmp_path / 'out/report.html').read_text())
    assert message in page and report.repaired.shown in page
    assert message in report.text('out')
    again = merged_report([report, report], {}, removed=0)
    assert again.details == {'undecodable': {message: 6}} and again.repaired.count == 6
    kept = without_names(report, frozenset(report.repaired.names))
    assert kept.repaired == NamedCount(3, [])
