"""Captions of tables joined to images of other sources by key: each image and each row is used or named."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from object_store import Store
from prepare.dataset_hub import HubDataset, serving
from prepare.drawn import draw, encode, here, report_of, samples, tar_of, write_files
from prepare.hub_datasets import parquet_of
from prepare.tfrecords import example, record

from diffusion.errors import UserError
from diffusion.prepare import caption_table
from diffusion.prepare.append import append
from diffusion.prepare.huggingface_source import HuggingFaceSource
from diffusion.prepare.pipeline import prepare
from diffusion.prepare.settings import settings_of

IMAGES = [encode(draw(number, width=20, height=16), 'PNG') for number in range(4)]
MEMBERS = [
    (f'{number}.{kind}', IMAGES[number] if kind == 'png' else b'\xff') for number in range(4) for kind in ('png', 'txt')
]
SOURCES: dict[str, dict[str, bytes]] = {
    'webdataset': {'a.tar': tar_of(MEMBERS)},
    'parquet': {'a.parquet': parquet_of({'image': IMAGES, 'key': [*'0123']})},
    'tfrecord': {'a.tfrecord': b''.join(record(example({'image': [IMAGES[n]], 'key': [str(n)]})) for n in range(4))},
    'huggingface': {f'{number}.png': image for number, image in enumerate(IMAGES)},
}
ROWS = [
    *({'key': key, 'short': 'zero', 'long': ['a long zero', 'another']} for key in ('0', '0.png')),
    *({'key': key, 'short': 'one', 'long': None} for key in ('a/1', '1.png')),
    *({'key': key, 'short': '', 'long': []} for key in ('2', '2.png')),
    {'key': None, 'short': 'of no image', 'long': None},
    {'key': '9', 'short': 'nine', 'long': None},
    {'key': '9', 'short': 'nine again', 'long': None},
]


def settings(kind: str, location: Path, captions: str, out: Path, **values: Any) -> dict[str, Any]:
    source = {'kind': kind, 'location': str(location), 'captions': captions, 'caption_column': ['short', 'long']}
    return {'source': source, 'out': str(out), 'sizes': [16], 'max_rejected': 1.0, 'workers': 1} | values


@pytest.mark.parametrize('kind', SOURCES)
def test_rows_and_images_are_joined_by_key_or_named(tmp_path: Path, kind: str) -> None:
    folder = write_files(tmp_path / 'in', SOURCES[kind])
    table = write_files(tmp_path / 'captions', {'0.jsonl': '\n'.join(map(json.dumps, [*ROWS, 7])), 'README.md': ''})
    report = report_of(settings(kind, folder, str(table), tmp_path / 'out', key_prefix='monday/'))
    stored = samples(tmp_path / 'out/16px')
    assert [sample['captions'] for sample in stored] == [['zero', 'a long zero', 'another'], ['one']]
    assert [sample['caption_columns'] for sample in stored] == [['short', 'long', 'long'], ['short']]
    keys = ['2.png', '3.png'] if kind == 'huggingface' else ['a/2', 'a/3']
    expected = {'no_caption': [f'monday/{keys[0]}'], 'not_in_captions': [f'monday/{keys[1]}']}
    assert {reason: found.names for reason, found in report.rejected.items()} == expected
    unused = report.passed_over['captions without image']
    others = [str(row['key']) for row in ROWS if row['key'] and ('png' in str(row['key'])) != (kind == 'huggingface')]
    assert unused.names == sorted({*others, '9'}) and unused.count == len(unused.names)
    assert report.passed_over['captions without key'].names == ['0.jsonl line 7', '0.jsonl line 10']
    assert report.inputs == 2 + 2 + unused.count + 2
    assert f'captions by key from {table}' in report.notes
    assert caption_table._opened.cache_info().currsize == 0, 'the index is closed'


@pytest.mark.parametrize('place', ['store', 'hub'])
def test_tables_are_read_from_a_store_and_the_hub(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    folder = write_files(tmp_path / 'in', SOURCES['webdataset'])
    files = {
        't/0.csv': b'image_id,caption\n0,zero\n1,one\n',
        't/1.parquet': parquet_of({'id': [2], 'caption': ['two']}),
    }
    with serving({'org/captions': HubDataset(files)}, monkeypatch):
        table = store.bucket('captions', **files) if place == 'store' else 'hf://datasets/org/captions/t/*'
        content = settings('webdataset', folder, table, tmp_path / 'out')
        del content['source']['caption_column']
        report = report_of(content)
    assert [sample['captions'] for sample in samples(tmp_path / 'out/16px')] == [['zero'], ['one'], ['two']]
    assert report.rejected['not_in_captions'].names == ['a/3']


def test_answers_in_tables_filter_images(tmp_path: Path) -> None:
    rows = {'image': [*IMAGES, IMAGES[0]], 'key': [*'01234'], 'caption': [f'own {key}' for key in range(5)]}
    folder = write_files(tmp_path / 'in', {'a.parquet': parquet_of(rows)})
    answers = {'0': ('no', None), '1': ('Yes.', None), '2': (None, 'not_yes_or_no')} | dict.fromkeys('34', ('no', None))
    short: list[str | None] = [*(f'short {key}' for key in range(4)), None]
    tables = {
        'captions/short/shard.00000.parquet': {'caption': short, 'rejected': [*[None] * 4, 'loop']},
        'captions/other/shard.00000.parquet': {'caption': ['of another column'] * 5, 'rejected': [None] * 5},
        'captions/watermark/shard.00000.parquet': {
            'caption': [answer for answer, _ in answers.values()],
            'rejected': [rule for _, rule in answers.values()],
        },
    }
    files: dict[str, bytes | str] = {
        name: parquet_of({'key': [*answers]} | columns) for name, columns in tables.items()
    }
    files['scores.csv'] = 'key,short,score\n0,,7\n1,,7\n3,,3.5\n'
    filters = {'columns': {'watermark': {'max': 0}, 'score': {'min': 5}}, 'missing': 'keep'}
    content = settings(
        'parquet', folder, str(write_files(tmp_path / 'tables', files)), tmp_path / 'out', filters=filters
    )
    content['source']['caption_column'] = 'short'
    report = report_of(content)
    assert [(each['captions'], each['metadata']['watermark']) for each in samples(tmp_path / 'out/16px')] == [
        (['short 0'], 'no')
    ]
    assert {reason: found.names for reason, found in report.rejected.items()} == {
        'watermark_above_0': ['a/1'],
        'watermark_not_yes_or_no': ['a/2'],
        'score_below_5': ['a/3'],
        'loop': ['a/4'],
    }
    content['source']['caption_column'] = ['short', 'original']
    (tmp_path / 'tables/scores.csv').unlink()
    report_of(content | {'filters': {}, 'out': str(tmp_path / 'own')})
    expected = [[f'own {key}', *([f'short {key}'] if key < 4 else [])] for key in range(5)]
    assert [each['captions'] for each in samples(tmp_path / 'own/16px')] == expected
    columns = [['original', 'short']] * 4 + [['original']]
    assert [each['caption_columns'] for each in samples(tmp_path / 'own/16px')] == columns
    # A column `original` of another table has nothing to do with captions beside the images.
    write_files(tmp_path / 'tables', {'others.csv': 'key,short,original\n0,,other\n'})
    report_of(content | {'filters': {}, 'out': str(tmp_path / 'other')})
    assert samples(tmp_path / 'other/16px')[0]['captions'] == ['short 0', 'other']


def test_captioned_source_is_pinned_to_the_planned_commit(tmp_path: Path) -> None:
    table = caption_table.CaptionTable('t', (), None, None, tmp_path)
    source = caption_table.CaptionedSource(HuggingFaceSource('org/a'), table)
    planned = [{'where': {'url': f'hf://datasets/org/a@{"c" * 40}/train.parquet'}}]
    assert source.pinned_to(planned) == replace(source, source=HuggingFaceSource('org/a', commit='c' * 40))


def test_changed_table_is_another_input(tmp_path: Path) -> None:
    folder = write_files(tmp_path / 'in', SOURCES['webdataset'])
    table = write_files(tmp_path, {'t.csv': 'key,short,long\n0,zero,\n'}) / 't.csv'
    content = settings('webdataset', folder, str(table), tmp_path / 'out')
    report_of(content)
    assert 'already prepared' in report_of(content).notes[-1]
    table.write_text('key,short,long\n0,zero,\n1,one,\n')
    with pytest.raises(UserError, match='out: exists and is not empty'):
        prepare(settings_of(content), run=here)
    write_files(folder, {'b.tar': SOURCES['webdataset']['a.tar']})
    added = append(settings_of(content), run=here)
    assert added is not None and added.pictures == 3, 'the delivery has its captions from the changed table'


@pytest.mark.parametrize(
    ('table', 'message'),
    [
        ('caption\na cat\n', "t.csv line 1: has no column 'key' or '__key__'.*rename the right one"),
        ('key,caption\n1,a cat\n', "t.csv line 1: has no column 'short', only"),
        (None, 'captions: .* has no .parquet, .csv, .jsonl files; give tables with short, long'),
        ('', 'captions: .*/t does not exist; write it with diffusion caption'),
    ],
)
def test_mistakes_in_a_table_are_reported_before_the_work(tmp_path: Path, table: str | None, message: str) -> None:
    folder = write_files(tmp_path / 'in', SOURCES['webdataset'])
    if table != '':
        write_files(tmp_path / 't', {'README.md': ''} if table is None else {'t.csv': table})
    with pytest.raises(UserError, match=message):
        prepare(settings_of(settings('webdataset', folder, str(tmp_path / 't'), tmp_path / 'out')), run=here)
    assert not (tmp_path / 'out.work').exists()
