"""Parquet files written by img2dataset and Hugging Face, and damaged ones."""

import datetime
import decimal
import errno
import itertools
import json
import re
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from golden import check_golden
from object_store import Store
from prepare.drawn import entries

from diffusion.errors import UserError
from diffusion.prepare import parquet
from diffusion.prepare.parquet import ParquetSource, arrow_entries, images_of
from diffusion.prepare.source import Part

IMG2DATASET: dict[str, Any] = {
    **{'key': ['000000000', '000000001', '000000002'], 'jpg': [b'zero', None, b'two'], 'txt': ['a', None, 'c']},
    **{'caption': ['a cat', 'a dog', None], 'url': ['u0', 'u1', 'u2'], 'error_message': [None, 'HTTP Error 404', None]},
    **{'status': ['success', 'failed_to_download', 'success'], 'width': [512, None, 256]},
    'AESTHETIC_SCORE': [5.5, float('nan'), 4.0],
}


def write(path: Path, columns: dict[str, Any], **options: Any) -> Path:
    pq.write_table(pa.table(columns), path, **options)
    return path


def test_img2dataset_parquet_is_read(tmp_path: Path) -> None:
    write(tmp_path / '00000.parquet', IMG2DATASET, row_group_size=2)
    write(tmp_path / '00001.parquet', IMG2DATASET)
    source = ParquetSource(str(tmp_path))
    assert [part.name for part in source.parts()] == ['00000', '00001']
    found = entries(source)
    assert [entry.key for entry in found[:4]] == [f'00000/00000000{n}' for n in range(3)] + ['00001/000000000']
    assert [entry.problem for entry in found[:3]] == [None, 'no_image', None]
    assert [entry.image for entry in found[:3]] == [b'zero', None, b'two']
    assert [entry.captions for entry in found[:3]] == [['a cat'], ['a dog'], [None]]
    given = {'url': 'u1', 'status': 'failed_to_download', 'error_message': 'HTTP Error 404'}
    assert found[1].metadata == given | {'width': None, 'AESTHETIC_SCORE': None}


def test_common_column_names_are_detected(tmp_path: Path) -> None:
    names = ('image', 'jpg', 'jpeg', 'png', 'webp', 'image_bytes', 'img', 'JPG')
    for name, caption in itertools.product(names, ('caption', 'text', 'TEXT', 'txt', 'Caption')):
        path = write(tmp_path / f'{name}-{caption}.parquet', {'id': [1], name: [b'x'], caption: ['y']})
        found = entries(ParquetSource(str(path)))
        assert (found[0].image, found[0].captions, found[0].metadata) == (b'x', ['y'], {'id': 1}), (name, caption)


ONE: dict[str, Any] = {'jpg': [b'x'], 'caption': ['y']}
NOT_UTF8 = pa.Array.from_buffers(pa.string(), 3, pa.array([b'a cat', b'caf\xe9', None], pa.binary()).buffers())
TYPES: dict[str, Any] = {
    **{'thumbnail': [b'left out'], 'price': [decimal.Decimal('1.25')], 'bad': [float('inf')]},
    **{
        'nested': [{'a': [1, float('nan')]}],
        'day': [datetime.date(2024, 2, 29)],
        'took': [datetime.timedelta(seconds=90)],
    },
    'when': pa.array([datetime.datetime(2024, 2, 29, 12, tzinfo=datetime.timezone.utc)], pa.timestamp('ns', 'UTC')),
    'exact': pa.array([1_700_000_000_000_000_001], pa.timestamp('ns')),
    'score': pa.array([np.float16(0.5)], pa.float16()),
    'kind': pa.array(['photo']).dictionary_encode(),
    'pairs': pa.array([[('a', 1)]], pa.map_(pa.string(), pa.int64())),
}
REPEATED = {name: pa.concat_arrays([pa.array(TYPES[name])] * 3) for name in ('nested', 'kind', 'pairs', 'day', 'took')}
THREE = {'jpg': [b'0', b'1', b'2'], 'note': NOT_UTF8} | REPEATED
SEVERAL = {'image': [b'thumbnail'], 'full.size': [b'x'], 'caption': ['short'], 'dense': [['long', 'longer']]}
TABLES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    'images of Hugging Face': (
        {'image': [{'bytes': b'a', 'path': 'a.jpg'}, {'bytes': None, 'path': 'b.jpg'}, None], 'text': [*'xyz']},
        {},
    ),
    'paths with backslashes': ({'image': ['sub\\0.jpg', '..\\..\\0.jpg', 'long' * 100], 'text': [*'abc']}, {}),
    'named columns': (SEVERAL, {'image_column': 'full.size', 'caption_column': 'dense'}),
    'several named columns': (SEVERAL, {'image_column': 'full.size', 'caption_column': ['dense', 'caption']}),
    'a column with lists takes precedence': (ONE | {'captions': [['two', None, 'three']]}, {}),
    'a list as JSON': ({'jpg': [b'x'], 'text': ['["a dog", "a hound"]']}, {}),
    'captions that are numbers': ({'jpg': [b'x'] * 2, 'caption': pa.array([1.5, float('nan')])}, {}),
    'types': (ONE | TYPES, {}),
    'repeated keys': ({'key': [7, 8, 7, None], 'jpg': [b'x'] * 4, 'caption': ['y'] * 4}, {}),
    'not UTF-8': (THREE | {'text': NOT_UTF8}, {}),
    'lists that are not UTF-8': (
        THREE | {'text': pa.ListArray.from_arrays(pa.array([0, 1, 2, 2], pa.int32()), NOT_UTF8)},
        {},
    ),
    'no image': ({'title': ['u'], 'text': ['c']}, {}),
    'no caption': ({'jpg': [b'x'], 'title': ['c']}, {}),
    'wrong image': ({'jpg': [b'x'], 'text': ['c']}, {'image_column': 'jpgs'}),
    'wrong captions': ({'jpg': [b'x'], 'text': ['c']}, {'caption_column': ['text', 'txt']}),
    'wrong key': ({'jpg': [b'x'], 'text': ['c']}, {'key_column': 'name'}),
    'images that are numbers': ({'jpg': [1], 'text': ['c']}, {}),
    'paths that are numbers': ({'image': [{'path': 5}], 'text': ['c']}, {}),
    'links': ({'url': ['u'], 'text': ['c']}, {}),
    'links without captions': ({'url': ['u'], 'title': ['c']}, {}),
    'links that are bytes': ({'url': [b'u'], 'text': ['c']}, {}),
}


PART = Part('a', {'stem': 'a', 'url': 'a.arrow'}, 0, '')


def test_rows_and_mistakes_of_tables(tmp_path: Path) -> None:
    (tmp_path / 'sub').mkdir()
    (tmp_path / 'sub/0.jpg').write_bytes(b'0')
    text = ''
    for name, (columns, options) in TABLES.items():
        path, arrow = write(tmp_path / 'a.parquet', columns), tmp_path / 'a.arrow'
        source, images = ParquetSource(str(path), **options), images_of(str(path), str(path))
        try:
            source.parts()
        except UserError as error:
            text += f'{name}\n  {error}\n'
            continue
        text += f'{name}\n'
        for each in (found := entries(source)):
            others = f'{each.caption_columns} {json.dumps(each.metadata, allow_nan=False)}'
            text += f'  {each.key}: {each.problem or each.image} {each.captions} {others}\n'
        for new in pa.ipc.new_file, pa.ipc.new_stream:
            with new(arrow, pq.read_schema(path)) as writer:
                writer.write_table(pq.read_table(path), max_chunksize=2)
            assert str([*arrow_entries(arrow, PART, source._columns, images=images)]) == str(found)
    text = re.sub('(?<=12:00:00)[^"]+', '', text.replace(f'{tmp_path}/', ''))
    check_golden(Path(__file__).parent / 'golden/tables', {'rows.txt': text})


def test_column_missing_in_a_later_file_is_reported(tmp_path: Path) -> None:
    write(tmp_path / 'a.parquet', IMG2DATASET)
    write(tmp_path / 'b.parquet', {'jpg': [b'x']})
    with pytest.raises(ValueError, match=r'b\.parquet: has no column captions'):
        entries(ParquetSource(str(tmp_path)))


@pytest.mark.parametrize('content', [b'', b'PAR1', b'no parquet at all', 'cut', 'footer'])
def test_unreadable_file_is_reported(tmp_path: Path, content: bytes | str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet, 'PART_BYTES', 1)
    path = write(tmp_path / 'a.parquet', IMG2DATASET)
    whole = path.read_bytes()
    broken = {'cut': whole[:-30], 'footer': whole[:-100] + bytes(90) + whole[-10:]}
    path.write_bytes(content if isinstance(content, bytes) else broken[content])
    found = entries(ParquetSource(str(path)))
    assert [(entry.key, entry.problem) for entry in found] == [('a', 'part_unreadable')]


def test_rows_before_a_damaged_page_are_read(tmp_path: Path) -> None:
    columns = {'jpg': [bytes([n]) * 5000 for n in range(200)], 'caption': ['y'] * 200}
    path = write(tmp_path / 'a.parquet', columns, row_group_size=100, use_dictionary=False, compression='zstd')
    content = bytearray(path.read_bytes())
    start = pq.read_metadata(path).row_group(1).column(0).data_page_offset
    content[start : start + 60] = bytes(60)
    path.write_bytes(content)
    *served, last = entries(ParquetSource(str(path)))
    assert last.problem == 'part_damaged' and last.key == f'a at row {len(served)}'
    assert 64 <= len(served) <= 100
    assert [entry.image for entry in served] == columns['jpg'][: len(served)]


def test_faults_of_the_disk_are_no_damage_of_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = ParquetSource(str(write(tmp_path / 'a.parquet', ONE)))
    (part,), fault = source.parts(), Mock(side_effect=OSError(errno.EIO, 'Input/output error'))
    unread = (pq.ParquetFile, 'iter_batches', lambda *_, **__: iter(fault, 0))
    for owner, name, patched in (pq, 'ParquetFile', fault), unread, (pa, 'memory_map', fault):
        rows = arrow_entries(tmp_path, PART, source._columns, images=None) if owner is pa else source.read(part)
        with monkeypatch.context() as patch:
            patch.setattr(owner, name, patched)
            with pytest.raises(OSError, match='Input/output'):
                next(rows)


def test_large_file_is_split_into_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(0)
    columns = {'jpg': [rng.bytes(1000) for _ in range(50)], 'caption': [f'{n:02}' for n in range(50)]}
    path = write(tmp_path / 'a.parquet', columns, row_group_size=10)
    whole = entries(ParquetSource(str(path)))
    source = ParquetSource(str(path))
    monkeypatch.setattr(parquet, 'PART_BYTES', path.stat().st_size)
    assert [part.where.get('groups') for part in source.parts()] == [None]
    monkeypatch.setattr(parquet, 'PART_BYTES', 2 * pq.read_metadata(path).row_group(0).total_byte_size)
    parts = source.parts()
    assert [part.where['groups'] for part in parts] == [[0, 2], [2, 4], [4, 5]]
    sizes = [pq.read_metadata(path).row_group(number).total_byte_size for number in range(5)]
    expected = {f'a-groups-{first:05}': sum(sizes[first : first + 2]) for first in (0, 2, 4)}
    assert {part.name: part.size for part in parts} == expected and len({part.stamp for part in parts}) == 1
    assert json.loads(json.dumps(parts[1].where)) == parts[1].where
    assert entries(source) == whole
    assert [entry.key for entry in source.read(parts[1])] == [f'a/row-{n}' for n in range(20, 40)]


def test_images_that_rows_name_by_path_are_read_in_an_object_store(store: Store, tmp_path: Path) -> None:
    images = [*(f'{n}.jpg' for n in range(4)), 'shared/x.jpg', 'gone.jpg', '../../secret.jpg', '/etc/passwd', None]
    content = write(tmp_path / 'a.parquet', {'image': images, 'caption': ['a cat'] * len(images)}).read_bytes()
    structs = [{'bytes': None, 'path': '3.jpg'}, {'bytes': b'inside', 'path': '4.jpg'}]
    other = write(tmp_path / 'b.parquet', {'image': structs, 'caption': ['a', 'b']}).read_bytes()
    objects = {f'set/tables/{n}.jpg': b'image %d' % n for n in range(5)} | {'set/shared/x.jpg': b'shared'}
    tables = {'set/tables/a.parquet': content, 'set/tables/b.parquet': other}
    bucket = store.bucket('pictures', **objects, **tables, **{'secret.jpg': b'secret'})
    found = entries(ParquetSource(f'{bucket}/set/'))
    assert [entry.image for entry in found[:5]] == [*(b'image %d' % n for n in range(4)), b'shared']
    problems = ['missing_file', 'image_outside_dataset', 'image_outside_dataset', 'no_image']
    assert [(entry.image, entry.problem) for entry in found[5:9]] == [(None, problem) for problem in problems]
    assert [entry.image for entry in found[9:]] == [b'image 3', b'inside']
    (alone, *_) = entries(ParquetSource(f'{bucket}/set/tables/a.parquet'))
    assert alone.image == b'image 0'
