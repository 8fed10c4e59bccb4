"""Preparing a folder of images: buckets, captions, rejections and exit codes."""

import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from shards import open_shards
from streaming.base.format import reader_from_json

from diffusion.cli import CommandParser
from diffusion.prepare import cli
from diffusion.prepare.counts_report import PrepareReport
from diffusion.prepare.pipeline import prepare
from diffusion.prepare.settings import settings_of


def draw(
    path: Path, width: int = 40, height: int = 32, *, caption: str | None = 'a gradient', mode: str = 'RGB'
) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    row = np.linspace(0, 255, width, dtype=np.uint8)
    Image.fromarray(np.stack([np.tile(row, (height, 1))] * 3, axis=2)).convert(mode).save(path)
    if caption is not None:
        path.with_suffix('.txt').write_text(caption)
    return path


def samples(bucket: Path) -> list[dict]:
    shards = json.loads((bucket / 'index.json').read_text())['shards']
    readers = [reader_from_json(str(bucket.parent), bucket.name, shard) for shard in shards]
    return [reader[at] for reader in readers for at in range(len(reader))]


def stored_image(sample: dict) -> Image.Image:
    return Image.open(io.BytesIO(sample['image']))


def prepare_folder(
    source: Path, out: Path, sizes: list[int], *, captions: Path | None = None, **values: Any
) -> PrepareReport:
    where = {'kind': 'folder', 'location': str(source), 'captions': None if captions is None else str(captions)}
    report = prepare(settings_of({'source': where, 'out': str(out), 'sizes': sizes, 'workers': 1} | values))
    assert report is not None
    return report


@pytest.fixture
def source(tmp_path: Path) -> Path:
    return tmp_path / 'images'


@pytest.fixture
def out(tmp_path: Path) -> Path:
    return tmp_path / 'out'


def test_images_go_to_their_buckets(source: Path, out: Path) -> None:
    draw(source / 'a.jpg', 40, 32)
    draw(source / 'sub/b.png', 32, 70, caption='one\n\n two \n')
    draw(source / 'c.webp', 20, 25)
    draw(source / 'd.BMP', 17, 16)
    report = prepare_folder(source, out, [32, 16])
    small, large = samples(out / '16px'), samples(out / '32px')
    assert (report.pictures, report.buckets) == (4, {'16px': 4, '32px': 2})
    assert [sample['key'] for sample in small] == ['a.jpg', 'c.webp', 'd.BMP', 'sub/b.png']
    assert [sample['key'] for sample in large] == ['a.jpg', 'sub/b.png']
    assert [sample['captions'] for sample in large] == [['a gradient'], ['one two']]
    formats = [stored_image(sample).format for sample in [*small, *large]]
    assert formats == ['JPEG', 'JPEG', 'JPEG', 'PNG', 'JPEG', 'PNG']
    for sample in [*small, *large]:
        assert stored_image(sample).size == (sample['width'], sample['height'])
    assert [(sample['width'], sample['height']) for sample in small] == [(20, 16), (16, 20), (17, 16), (16, 35)]


def test_streaming_reads_a_prepared_folder(source: Path, out: Path) -> None:
    for number in range(3):
        draw(source / f'{number}.jpg')
    prepare_folder(source, out, [16])
    dataset = open_shards(out / '16px', validate_hash='xxh64')
    assert sorted(sample['key'] for sample in dataset) == ['0.jpg', '1.jpg', '2.jpg']


def test_preparing_twice_gives_the_same_bytes(source: Path, tmp_path: Path) -> None:
    for number in range(4):
        draw(source / f'{number}.jpg', 30 + number, 20)
    for name in ('one', 'two'):
        prepare_folder(source, tmp_path / name, [16], shard_mb=0.002)
    one, two = (sorted((tmp_path / name / '16px').iterdir()) for name in ('one', 'two'))
    assert len(one) > 2
    assert [path.read_bytes() for path in one] == [path.read_bytes() for path in two]


def test_orientation_is_applied_and_transparency_filled(source: Path, out: Path) -> None:
    path = draw(source / 'a.jpg', 40, 20)
    exif = Image.Exif()
    exif[0x0112] = 6  # rotated by 90 degrees
    Image.open(path).save(path, exif=exif)
    Image.new('RGBA', (16, 16), (255, 0, 0, 0)).save(source / 'b.png')
    (source / 'b.txt').write_text('nothing')
    prepare_folder(source, out, [16])
    turned, clear = samples(out / '16px')
    assert (turned['width'], turned['height']) == (16, 32)
    assert not stored_image(turned).getexif()
    assert stored_image(clear).getpixel((8, 8)) == (255, 255, 255)


def test_rejections_are_counted_by_reason(source: Path, out: Path) -> None:
    good = draw(source / 'good.jpg', 64, 64)
    (source / 'cut.jpg').write_bytes(good.read_bytes()[:-200])
    (source / 'cut.txt').write_text('cut short')
    (source / 'text.png').write_text('not an image')
    (source / 'text.txt').write_text('not an image')
    draw(source / 'small.jpg', 40, 15)
    draw(source / 'silent.jpg', caption=None)
    draw(source / 'blank.jpg', caption=' \n')
    draw(source / 'deep.png', mode='I;16')
    draw(source / 'latin.jpg').with_suffix('.txt').write_bytes(b'caf\xe9')
    report = prepare_folder(source, out, [16])
    assert [sample['key'] for sample in samples(out / '16px')] == ['deep.png', 'good.jpg']
    assert {reason: rejected.names for reason, rejected in report.rejected.items()} == {
        'truncated': ['cut.jpg'],
        'unknown_format': ['text.png'],
        'too_small': ['small.jpg'],
        'no_caption': ['blank.jpg', 'silent.jpg'],
        'caption_not_utf8': ['latin.jpg'],
    }
    saved = json.loads((out / 'report.json').read_text())
    assert saved['rejected']['no_caption'] == {'count': 2, 'names': ['blank.jpg', 'silent.jpg']}
    assert (saved['inputs'], saved['rejected_share'], saved['passed']) == (8, 6 / 8, False)


@pytest.mark.parametrize('suffix', ['.csv', '.jsonl'])
def test_captions_file_gives_captions_and_reports_bad_rows(
    source: Path, out: Path, tmp_path: Path, suffix: str
) -> None:
    for name in ('a.jpg', 'sub/b.jpg', 'unnamed.jpg'):
        draw(source / name, caption='not used')
    rows = [('sub/b.jpg', 'second, first'), ('./a.jpg', 'first'), ('gone.jpg', 'gone'), ('a.jpg', 'again')]
    file = tmp_path / f'captions{suffix}'
    if suffix == '.csv':
        file.write_text('file,caption\n' + ''.join(f'{name},"{caption}"\n' for name, caption in rows))
    else:
        file.write_text(''.join(json.dumps({'file': name, 'caption': caption}) + '\n' for name, caption in rows))
    report = prepare_folder(source, out, [16], captions=file)
    found = {sample['key']: sample['captions'] for sample in samples(out / '16px')}
    assert found == {'sub/b.jpg': ['second, first'], 'a.jpg': ['first']}
    line = 5 if suffix == '.csv' else 4
    assert {reason: rejected.names for reason, rejected in report.rejected.items()} == {
        'missing_file': [f'gone.jpg ({file.name} line {line - 1})'],
        'duplicate_row': [f'a.jpg ({file.name} line {line})'],
        'no_caption': ['unnamed.jpg'],
    }


def test_jsonl_with_several_captions_is_read(source: Path, out: Path, tmp_path: Path) -> None:
    draw(source / 'a.jpg')
    (tmp_path / 'c.jsonl').write_text('{"file": "a.jpg", "captions": ["one", "two"]}\n')
    prepare_folder(source, out, [16], captions=tmp_path / 'c.jsonl')
    assert samples(out / '16px')[0]['captions'] == ['one', 'two']


@pytest.mark.parametrize(
    ('name', 'content', 'message'),
    [
        ('c.csv', b'path,caption\na.jpg,x\n', r"c\.csv line 1: has no column 'file'"),
        (
            'c.csv',
            b'file,description\na.jpg,x\n',
            r"c\.csv line 1: has no column 'captions' or 'caption' or 'text'",
        ),
        ('c.csv', b'file,caption\na.jpg,a dog, brown\n', r'c\.csv line 2: has 3 cells, more than the 2 columns'),
        ('c.csv', b'file,text,text\na.jpg,x,y\n', r"c\.csv line 1: has two columns 'text'"),
        ('c.csv', 'file,caption\na.jpg,x\n'.encode('utf-16-le'), r'c\.csv line 1: is not UTF-8 text, but UTF-16'),
        ('c.jsonl', b'{"name": "a.jpg", "text": "x"}\n', r"c\.jsonl: has no column 'file' or 'file_name', only"),
        ('c.jsonl', b'{"file": "a.jpg", "note": "x"}\n', r"c\.jsonl: has no column 'captions' or .* only"),
        ('c.csv', b'', r"c\.csv line 1: has no column 'file'"),
        ('c.csv', b'file,caption\na.jpg,"x\n', r'c\.csv line 2: is not valid CSV'),
        ('c.jsonl', b'{"file": \n', r'line 1: is not JSON'),
        ('c.jsonl', b'{"file": "a.jpg", "caption": ' + b'[' * 100_000 + b'\n', r'line 1: is not JSON'),
        ('c.jsonl', b'{"file": "a.jpg", "caption": ' + b'1' * 5000 + b'}\n', r'line 1: is not JSON'),
        ('c.jsonl', b'["a.jpg"]\n', r'line 1: is list; write one object with `file` and `caption` per line'),
        ('c.csv', b'file;caption\na.jpg;x\n', r"only \['file;caption'\]; separate its cells with commas, not with ';'"),
        ('c.txt', b'', 'neither .csv nor .jsonl'),
    ],
)
def test_invalid_captions_file_is_an_error(
    source: Path, out: Path, tmp_path: Path, name: str, content: bytes, message: str
) -> None:
    draw(source / 'a.jpg')
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        prepare_folder(source, out, [16], captions=tmp_path / name)
    assert not out.exists()


def test_empty_result_is_an_error(source: Path, out: Path) -> None:
    source.mkdir()
    with pytest.raises(ValueError, match='contains no images'):
        prepare_folder(source, out, [16])
    draw(source / 'a.jpg', 8, 8)
    with pytest.raises(ValueError, match=r'every image was rejected(.|\n)*too_small: 1 \(a.jpg\)'):
        prepare_folder(source, out, [16])
    assert [path.name for path in out.parent.iterdir()] == ['images']


def test_invalid_arguments_are_errors(source: Path, out: Path, tmp_path: Path) -> None:
    draw(source / 'a.jpg')
    with pytest.raises(ValueError, match='there is no such folder'):
        prepare_folder(tmp_path / 'none', out, [16])
    with pytest.raises(ValueError, match=r'--captions: .* does not exist'):
        prepare_folder(source, out, [16], captions=tmp_path / 'none.csv')
    with pytest.raises(ValueError, match='jpeg_quality: 0 is out of range'):
        prepare_folder(source, out, [16], jpeg_quality=0)
    with pytest.raises(ValueError, match='max_rejected: 5.0 is out of range'):
        prepare_folder(source, out, [16], max_rejected=5)
    with pytest.raises(ValueError, match='contains the input'):
        prepare_folder(source, tmp_path, [16], overwrite=True)


def run(*arguments: object) -> int:
    parser = CommandParser()
    cli.add_arguments(parser)
    return cli.run_prepare(parser.parse_args([str(argument) for argument in arguments]))


def test_exit_code_is_3_when_too_many_images_are_rejected(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    draw(source / 'a.jpg')
    draw(source / 'b.jpg', 8, 8)
    assert run('folder', source, '--out', tmp_path / 'strict', '--sizes', 16) == 3
    assert '50.0% is above --max-rejected 1.0%' in capsys.readouterr().out
    assert len(samples(tmp_path / 'strict/16px')) == 1
    assert run('folder', source, '--out', tmp_path / 'lax', '--sizes', 16, '--max-rejected', 0.5) == 0
    assert 'rejected, too_small: 1 (b.jpg)' in capsys.readouterr().out


def test_hostile_names_and_captions_are_escaped(
    source: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Control sequences would change the title or the keys of a terminal, and markup would run in the report."""
    draw(source / 'a.jpg')
    captions = [
        '\x1b]0;title\x07\x1b[2J<script>alert(1)</script>',
        'half of a pair \ud800',
        'line\rone\x00two\u202ethree',
    ]
    rows = [{'file': 'a.jpg', 'captions': captions}, {'file': '\x1b[2J.jpg', 'caption': 'x'}]
    (tmp_path / 'c.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    arguments = ('--out', tmp_path / 'out', '--sizes', 16, '--max-rejected', 1, '--captions', tmp_path / 'c.jsonl')
    assert run('folder', source, *arguments) == 0
    printed = capsys.readouterr().out
    assert r'missing_file: 1 (\x1b[2J.jpg (c.jsonl line 2))' in printed
    assert all(character.isprintable() or character == '\n' for character in printed)
    assert '<script>alert' not in (tmp_path / 'out/report.html').read_text()
    assert '\x1b' not in (tmp_path / 'out/captions.txt').read_text()
