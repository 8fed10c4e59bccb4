"""Every file of the input is in the report, and captions in text files follow one rule in all sources."""

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from prepare.drawn import draw, encode, report_of, samples, tar_of, write_files

from diffusion.prepare.counts_report import PrepareReport
from diffusion.prepare.settings import PrepareSettings, settings_of
from diffusion.prepare.source import NamedCount, summed_counts, summed_details

IMAGE = encode(draw(1, width=40, height=40), 'PNG')
FILES = {
    **{f'cats/{number}.png': encode(draw(number, width=40, height=40), 'PNG') for number in range(3)},
    **{f'cats/{number}.txt': b'a cat' for number in range(3)},
    **{'cats/drawn.svg': b'<svg/>', 'cats/drawn.txt': b'the caption of a format that is not read'},
    **{'broken.webp': b'not an image', 'broken.json': b'{"caption": "broken"}'},
    **{'old.jfif': encode(draw(9, width=40, height=40), 'JPEG'), 'old.txt': b'an old photograph'},
    **{'.cache/thumbnail.png': IMAGE, 'no-caption.jpg': IMAGE, 'empty': b''},
    **dict.fromkeys(('cats/phone.HEIC', '.DS_Store', 'notes.pdf'), b'?'),
}
PASSED_OVER = {
    '.heic': ['cats/phone.HEIC'],
    '.pdf': ['notes.pdf'],
    '.svg': ['cats/drawn.svg'],
    '.txt': ['cats/drawn.txt'],
    'hidden': ['.DS_Store', '.cache/thumbnail.png'],
    'without suffix': ['empty'],
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_files(tmp_path / 'in', FILES)


def settings(kind: str, folder: Path, **others: str) -> PrepareSettings:
    source = {'kind': kind, 'location': str(folder), **others}
    values = {'source': source, 'out': str(folder.parent / 'out'), 'sizes': [32], 'max_rejected': 1.0, 'workers': 1}
    return settings_of(values)


def prepared(kind: str, folder: Path, **others: str) -> PrepareReport:
    report = report_of(settings(kind, folder, **others))
    counts = [*report.rejected.values(), *report.passed_over.values()]
    assert report.inputs == report.pictures + sum(each.count for each in counts)
    saved = PrepareReport.read(folder.parent / 'out' / 'report.json')
    assert (saved.passed_over, saved.inputs) == (report.passed_over, report.inputs)
    return report


def test_folder(folder: Path) -> None:
    report = prepared('folder', folder)
    captions = sum(name.endswith('.txt') for name in FILES) - 1 + 1  # and broken.json; without that of the SVG
    assert report.inputs == len(FILES) - captions
    assert report.pictures == 4, 'three cats and the JFIF'
    expected = {'no_caption': ['no-caption.jpg'], 'unknown_format': ['broken.webp']}
    assert {reason: each.names for reason, each in report.rejected.items()} == expected
    assert {kind: each.names for kind, each in report.passed_over.items()} == PASSED_OVER
    assert 'skipped, hidden: 2 (.DS_Store, .cache/thumbnail.png)' in report.text('out')
    page = (folder.parent / 'out' / 'report.html').read_text()
    assert '<h2>Skipped</h2>' in page and 'cats/phone.HEIC' in page


def test_captions_file_leaves_text_files_unread(folder: Path) -> None:
    rows = [{'file': f'cats/{number}.png', 'caption': 'a cat'} for number in range(3)]
    (folder / 'captions.jsonl').write_text(''.join(json.dumps(row) + '\n' for row in rows))
    report = prepared('folder', folder, captions=str(folder / 'captions.jsonl'))
    assert report.passed_over['.txt'].count == 5 and report.passed_over['.json'].count == 1
    assert '.jsonl' not in report.passed_over, 'the captions file itself'


def test_tars_and_files_beside_them(folder: Path) -> None:
    for name in ('a.tar', 'b.tar'):
        (folder / name).write_bytes(tar_of(sorted(FILES.items())))
    report = prepared('webdataset', folder)
    assert report.pictures == 8
    # In a tar the caption of a format that is not read is a sample without image, and hidden folders are read.
    counts = {reason: each.count for reason, each in report.rejected.items()}
    assert counts == {'no_caption': 4, 'no_image': 2, 'unknown_format': 2}
    inside = {kind: 2 * len(names) for kind, names in PASSED_OVER.items() if kind != '.txt'} | {'hidden': 2}
    beside = [name for name in FILES if not name.startswith('.')]
    assert report.passed_over['.svg'].count == inside['.svg'] + 1
    assert report.passed_over['hidden'].count == inside['hidden'] + 2
    assert sum(each.count for each in report.passed_over.values()) == sum(inside.values()) + len(beside) + 2


def test_files_beside_parquet(folder: Path) -> None:
    pq.write_table(pa.table({'image': [IMAGE], 'caption': ['a cat']}), folder / 'cats.parquet')
    report = prepared('parquet', folder)
    assert report.pictures == 1
    assert sum(each.count for each in report.passed_over.values()) == len(FILES)


def test_counts_of_parts_are_summed_with_the_first_20_names_and_messages() -> None:
    found = summed_counts({'.svg': NamedCount(count, [*map(str, range(count))])} for count in (7, 15, 2))
    assert found == {'.svg': NamedCount(24, [*map(str, range(7)), *map(str, range(13))])}
    messages = [
        {'undecodable': {f'm{number}': number + 1 for number in numbers}} for numbers in (range(15), range(9, 30))
    ]
    expected = {f'm{number}': (number + 1) * (2 if 9 <= number < 15 else 1) for number in range(20)}
    assert summed_details(messages) == {'undecodable': expected}
    assert [NamedCount(count, [*'abcd'][:count]).shown for count in (3, 4)] == ['a, b, c', 'a, b, c, ...']


TEXT = '\ufeffA red apple on a table.\n\nThe apple is shiny.\nStyle: photo, 35mm\n'
CAPTIONS = {
    'whole': [['A red apple on a table. The apple is shiny. Style: photo, 35mm']],
    'lines': [['A red apple on a table.', 'The apple is shiny.', 'Style: photo, 35mm']],
    'first': [['A red apple on a table.']],
}


@pytest.mark.parametrize(('kind', 'rule'), [('webdataset', 'lines'), *(('folder', rule) for rule in (None, *CAPTIONS))])
def test_text_files_hold_captions_by_one_rule(tmp_path: Path, kind: str, rule: str | None) -> None:
    files = {'a.png': IMAGE, 'a.txt': TEXT.encode()}
    write_files(tmp_path / 'in', files if kind == 'folder' else {'0.tar': tar_of(files.items())})
    report = prepared(kind, tmp_path / 'in', **({} if rule is None else {'caption_text': rule}))
    assert [sample['captions'] for sample in samples(tmp_path / 'out/32px')] == CAPTIONS[rule or 'whole']
    quantiles = report.statistics['captions per image']['quantiles']
    assert quantiles['50%'] == len(CAPTIONS[rule or 'whole'][0])
