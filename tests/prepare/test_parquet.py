"""Parquet files written by img2dataset and Hugging Face, and damaged ones."""

import datetime
import decimal
import itertools
import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from object_store import Store
from prepare.drawn import entries

from diffusion.prepare import parquet
from diffusion.prepare.parquet import ParquetSource
from diffusion.prepare.source import Entry

IMG2DATASET: dict[str, Any] = {
    **{'key': ['000000000', '000000001', '000000002'], 'jpg': [b'zero', None, b'two'], 'txt': ['a', None, 'c']},
    **{'caption': ['a cat', 'a dog', None], 'url': ['u0', 'u1', 'u2'], 'error_message': [None, 'HTTP Error 404', None]},
    **{'status': ['success', 'failed_to_download', 'success'], 'width': [512, None, 256]},
    'AESTHETIC_SCORE': [5.5, float('nan'), 4.0],
}


def write(path: Path, columns: dict[str, Any] | pa.Table, **options: Any) -> Path:
    table = columns if isinstance(columns, pa.Table) else pa.table(columns)
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(table, path, **options)
    return path


def read(path: Path, columns: dict[str, Any] | pa.Table, **options: Any) -> list[Entry]:
    return entries(ParquetSource(str(write(path, columns)), **options))


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


def test_hugging_face_structs_are_read(tmp_path: Path) -> None:
    images = [{'bytes': b'a', 'path': 'a.jpg'}, {'bytes': None, 'path': 'b.jpg'}, None]
    found = read(tmp_path / 'a.parquet', {'image': images, 'text': ['x', 'y', 'z']})
    assert [(entry.key, entry.image, entry.problem) for entry in found] == [
        ('a/row-0', b'a', None),
        ('a/row-1', None, 'missing_file'),
        ('a/row-2', None, 'no_image'),
    ]


def test_common_column_names_are_detected(tmp_path: Path) -> None:
    names = ('image', 'jpg', 'jpeg', 'png', 'webp', 'image_bytes', 'img', 'JPG')
    for name, caption in itertools.product(names, ('caption', 'text', 'TEXT', 'txt', 'Caption')):
        found = read(tmp_path / f'{name}-{caption}.parquet', {'id': [1], name: [b'x'], caption: ['y']})
        assert (found[0].image, found[0].captions, found[0].metadata) == (b'x', ['y'], {'id': 1}), (name, caption)


def test_columns_can_be_named_and_lists_are_several_captions(tmp_path: Path) -> None:
    columns = {'image': [b'thumbnail'], 'full.size': [b'x'], 'caption': ['short'], 'dense': [['long', 'longer']]}
    found = read(tmp_path / 'a.parquet', columns, image_column='full.size', caption_column='dense')
    assert (found[0].image, found[0].captions, found[0].metadata) == (b'x', ['long', 'longer'], {})
    found = read(tmp_path / 'a.parquet', {'jpg': [b'x'], 'caption': ['one'], 'captions': [['two', None, 'three']]})
    assert found[0].captions == ['two', None, 'three'], 'a column with lists takes precedence'
    (entry,) = read(tmp_path / 'a.parquet', {'jpg': [b'x'], 'text': ['["a dog", "a hound"]']})
    assert entry.captions == ['a dog', 'a hound'], 'a JSON list in a cell is several captions'


def test_captions_are_not_validated_by_the_source(tmp_path: Path) -> None:
    columns = {'jpg': [b'x', b'x'], 'caption': pa.array([1.5, float('nan')])}
    assert [str(entry.captions) for entry in read(tmp_path / 'a.parquet', columns)] == ['[1.5]', '[nan]']


def test_metadata_is_converted_to_json_types(tmp_path: Path) -> None:
    when = datetime.datetime(2024, 2, 29, 12, 30, tzinfo=datetime.timezone.utc)
    columns: dict[str, Any] = {'jpg': [b'x'], 'caption': ['y'], 'thumbnail': [b'left out']}
    columns |= {'price': [decimal.Decimal('1.25')], 'bad': [float('inf')], 'nested': [{'a': [1, float('nan')]}]}
    columns |= {'when': pa.array([when], pa.timestamp('ns', 'UTC')), 'day': [datetime.date(2024, 2, 29)]}
    columns |= {'exact': pa.array([1_700_000_000_000_000_001], pa.timestamp('ns'))}
    columns |= {'took': [datetime.timedelta(seconds=90)], 'score': pa.array([np.float16(0.5)], pa.float16())}
    columns['kind'] = pa.array(['photo']).dictionary_encode()
    metadata = read(tmp_path / 'a.parquet', columns)[0].metadata
    json.dumps(metadata, allow_nan=False)
    assert metadata['when'].startswith('2024-02-29 12:30:00') and metadata['exact'].endswith('.000000001')
    expected = {'price': 1.25, 'day': '2024-02-29', 'took': 90.0, 'score': 0.5, 'bad': None, 'kind': 'photo'}
    del metadata['when'], metadata['exact']
    assert metadata == expected | {'nested': {'a': [1, None]}}


def test_repeated_keys_are_reported(tmp_path: Path) -> None:
    found = read(tmp_path / 'a.parquet', {'key': [7, 8, 7, None], 'jpg': [b'x'] * 4, 'caption': ['y'] * 4})
    assert [(entry.key, entry.problem) for entry in found] == [
        ('a/7', None),
        ('a/8', None),
        ('a/7', 'duplicate_key'),
        ('a/row-3', None),
    ]


@pytest.mark.parametrize(
    ('columns', 'options', 'message'),
    [
        ({'title': ['u'], 'text': ['c']}, {}, r"no column image, .*, only \['title', 'text'\]; set --image-column"),
        ({'jpg': [b'x'], 'title': ['c']}, {}, r"no column captions, .*, only \['jpg', 'title'\]; set --caption-column"),
        ({'jpg': [b'x'], 'text': ['c']}, {'image_column': 'jpgs'}, r"correct --image-column: did you mean 'jpg'"),
        ({'jpg': [1], 'text': ['c']}, {}, "column 'jpg' has type int64; set --image-column to a column of encoded"),
        ({'url': ['u'], 'text': ['c']}, {}, r'img2dataset --url_list .*a\.parquet .*--url_col url --caption_col text'),
    ],
)
def test_bad_column_is_named(tmp_path: Path, columns: dict[str, Any], options: dict[str, Any], message: str) -> None:
    path = write(tmp_path / 'a.parquet', columns)
    with pytest.raises(ValueError, match=message) as raised:
        ParquetSource(str(tmp_path), **options).parts()
    assert str(raised.value).startswith(str(path))


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
    assert len({part.name for part in parts}) == 3 and len({part.stamp for part in parts}) == 1
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


def test_text_that_is_not_utf8_does_not_end_the_file(tmp_path: Path) -> None:
    cells = pa.array([b'a cat', b'caf\xe9', None], pa.binary())
    text = pa.Array.from_buffers(pa.string(), 3, cells.buffers())
    lists = pa.ListArray.from_arrays(pa.array([0, 1, 2, 2], pa.int32()), text)
    day = [datetime.date(2026, 1, 2)] * 3
    pairs = pa.array([[('a', 1)]] * 3, pa.map_(pa.string(), pa.int64()))
    kind = pa.array(['photo'] * 3).dictionary_encode()
    others = {'nested': [{'a': 1}] * 3, 'kind': kind, 'pairs': pairs, 'day': day, 'note': text}
    for column in (text, lists):
        found = read(tmp_path / 'a.parquet', {'jpg': [b'0', b'1', b'2'], 'text': column, **others})
        assert [entry.captions for entry in found] == [['a cat'], ['caf\udce9'], [] if column is lists else [None]]
        assert [entry.metadata['note'] for entry in found] == ['a cat', 'caf?', None]
        assert [found[1].metadata[name] for name in others] == [{'a': 1}, 'photo', [['a', 1]], '2026-01-02', 'caf?']


def test_paths_with_backslashes_are_read(tmp_path: Path) -> None:
    (tmp_path / 'sub').mkdir()
    (tmp_path / 'sub/0.jpg').write_bytes(b'0')
    rows = ['sub\\0.jpg', '..\\..\\0.jpg', 'long' * 100]
    found = read(tmp_path / 'a.parquet', {'image': rows, 'text': ['a', 'b', 'c']})
    assert [(entry.image, entry.problem) for entry in found] == [(b'0', None), *[(None, 'missing_file')] * 2]
