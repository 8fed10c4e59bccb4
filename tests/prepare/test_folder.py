"""Preparing a folder of images: buckets, captions, rejections and exit codes."""

import io
import json
import re
from pathlib import Path

import numpy as np
import pytest
from drawn import report_of, samples
from hub_datasets import parquet_of
from PIL import Image

from diffusion.cli import CommandParser
from diffusion.prepare import cli
from diffusion.prepare.counts_report import PrepareReport


def draw(path: Path, width: int = 40, height: int = 32, caption: str = 'a gradient') -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    row = np.linspace(0, 255, width, dtype=np.uint8)
    Image.fromarray(np.stack([np.tile(row, (height, 1))] * 3, axis=2)).save(path)
    path.with_suffix('.txt').write_text(caption)


def prepare_folder(folder: Path, sizes: list[int], captions: Path | None = None) -> PrepareReport:
    """Prepare the images in `folder/images`, and write the dataset to `folder/out`."""
    where = {'kind': 'folder', 'location': str(folder / 'images'), 'captions': captions and str(captions)}
    return report_of({'source': where, 'out': str(folder / 'out'), 'sizes': sizes})


def test_images_go_to_their_buckets(tmp_path: Path) -> None:
    source, out = tmp_path / 'images', tmp_path / 'out'
    draw(source / 'a.jpg', 40, 32)
    draw(source / 'sub/b.png', 32, 70, caption='one\n\n two \n')
    draw(source / 'c.webp', 20, 25)
    draw(source / 'd.BMP', 17, 16)
    report = prepare_folder(tmp_path, [32, 16])
    small, large = samples(out / '16px'), samples(out / '32px')
    assert (report.pictures, report.buckets) == (4, {'16px': 4, '32px': 2})
    assert [sample['key'] for sample in small] == ['a.jpg', 'c.webp', 'd.BMP', 'sub/b.png']
    assert [sample['key'] for sample in large] == ['a.jpg', 'sub/b.png']
    assert [sample['captions'] for sample in large] == [['a gradient'], ['one two']]
    images = [Image.open(io.BytesIO(sample['image'])) for sample in [*small, *large]]
    assert [image.format for image in images] == ['JPEG', 'JPEG', 'JPEG', 'PNG', 'JPEG', 'PNG']
    assert [image.size for image in images] == [(sample['width'], sample['height']) for sample in [*small, *large]]
    assert [(sample['width'], sample['height']) for sample in small] == [(20, 16), (16, 20), (17, 16), (16, 35)]


@pytest.mark.parametrize(
    ('name', 'content', 'message'),
    [
        ('c.jsonl', b'{"file": "a.jpg", "caption": ' + b'[' * 100_000 + b'\n', r'line 1: is not JSON'),
        ('c.parquet', parquet_of({'name': ['a.jpg']}), r"c\.parquet: has no column 'file' .*; rename the right one"),
        ('c.parquet', b'PAR1', r'c\.parquet: is not valid Parquet \(.*\); write it again'),
    ],
)
def test_invalid_captions_file_is_an_error(tmp_path: Path, name: str, content: bytes, message: str) -> None:
    draw(tmp_path / 'images/a.jpg')
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ValueError, match=message):
        prepare_folder(tmp_path, [16], captions=tmp_path / name)
    assert not (tmp_path / 'out').exists()


def test_empty_result_is_an_error(tmp_path: Path) -> None:
    (tmp_path / 'images').mkdir()
    with pytest.raises(ValueError, match='contains no images'):
        prepare_folder(tmp_path, [16])
    draw(tmp_path / 'images/a.jpg', 8, 8)
    with pytest.raises(ValueError, match=r'every image was rejected(.|\n)*too_small: 1 \(a.jpg\)'):
        prepare_folder(tmp_path, [16])
    assert [path.name for path in tmp_path.iterdir()] == ['images']


def run(*arguments: object) -> int:
    parser = CommandParser()
    cli.add_arguments(parser)
    return cli.run_prepare(parser.parse_args([str(argument) for argument in arguments]))


def test_exit_status_counts_unusable_images_and_not_those_filtered_out(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = tmp_path / 'images'
    draw(source / 'a.jpg')
    draw(source / 'b.jpg', 8, 8)
    assert run('folder', source, '--out', tmp_path / 'small', '--sizes', 16) == 0
    assert 'filtered, too_small: 1 (b.jpg)' in capsys.readouterr().out
    (source / 'c.jpg').write_bytes((source / 'a.jpg').read_bytes()[:-9])
    (source / 'c.txt').write_text('cut short')
    arguments = ('folder', source, '--out', tmp_path / 'strict', '--sizes', 16)
    assert run(*arguments) == 3
    printed = capsys.readouterr().out
    assert 'kept 1, filtered 1, unusable 1 (33.33%; the limit is 1.00%)' in printed
    assert len(samples(tmp_path / 'strict/16px')) == 1
    assert run(*arguments, *re.findall('--max-rejected [0-9.]+', printed)[0].split()) == 0
    capsys.readouterr()
    assert run('folder', source, '--out', tmp_path / 'strict', '--append') == 0
    assert capsys.readouterr().out == f'{tmp_path}/strict: has all parts of the input already; nothing to do\n'
    assert run('folder', source, '--out', tmp_path / 'shared', '--sizes', 16, '--share', '0/1') == 0
    share = 'share 0/1 is done; after the last share, run the command without --share'
    assert capsys.readouterr().out == f'{tmp_path}/shared.work: {share}\n'


def test_hostile_texts_are_escaped(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Control sequences would change the title or the keys of a terminal, and markup would run in the report."""
    source = tmp_path / 'images'
    draw(source / 'a.jpg')
    captions = ['\x1b]0;t\x07\x1b[2J<script>alert(1)</script>', 'half of a pair \ud800', 'line\rone\x00two\u202ethree']
    rows = [{'file': 'a.jpg', 'captions': captions}, {'file': '\x1b[2J.jpg', 'caption': 'x'}]
    (tmp_path / 'c.jsonl').write_text('\n'.join(map(json.dumps, rows)))
    arguments = ('--out', tmp_path / 'out', '--sizes', 16, '--max-rejected', 1, '--captions', tmp_path / 'c.jsonl')
    assert run('folder', source, *arguments) == 0
    printed = capsys.readouterr().out
    assert r'missing_file: 1 (\x1b[2J.jpg (c.jsonl line 2))' in printed
    assert all(character.isprintable() or character == '\n' for character in printed)
    assert '<script>alert' not in (tmp_path / 'out/report.html').read_text()
    assert '\x1b' not in (tmp_path / 'out/captions.txt').read_text()
