"""TFRecord files of an independent writer: every record is kept, rejected or skipped, however a file is damaged."""

import gzip
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
from object_store import Store
from prepare.dataset_hub import HubDataset, serving
from prepare.drawn import draw, encode, entries, report_of, samples, write_files
from prepare.tfrecords import Feature, crc32c, example, field, record, varint

from diffusion.errors import UserError
from diffusion.prepare import tfrecord
from diffusion.prepare.huggingface_source import HuggingFaceSource
from diffusion.prepare.settings import settings_of
from diffusion.prepare.tfrecord import NotAnExample, masked_crc32c, parse_example, read_records

PLAIN: dict[str, Any] = {'image/shape': [16, 20, 3], 'range': [-(2**63), 128, 2**63 - 1], 'scale': [1.5, 2.5]}
PLAIN['longest'] = [*range(100)]
IMAGES = [encode(draw(number, width=20, height=16), 'PNG') for number in range(16)]


def features(number: int, **others: Feature) -> dict[str, Feature]:
    captions = [f'image {number}', f'the same, {number}']
    dropped = {'embedding': [*range(101)], 'mask': IMAGES[:1]}
    return PLAIN | {'score': [0.5], 'image': [IMAGES[number % 16]], 'caption': captions, **dropped, **others}


def records(numbers: Sequence[int], **others: Feature) -> list[bytes]:
    return [record(example(features(number, **others))) for number in numbers]


def with_third(change: Callable[[int], bytes]) -> Callable[[list[bytes], range], bytes]:
    return lambda found, numbers: b''.join([*found[:3], change(numbers[3]), *found[4:]])


def flipped(content: bytes, at: int) -> bytes:
    return content[:at] + bytes([content[at] ^ 16]) + content[at:][1:]


def without(number: int, name: str) -> bytes:
    return record(example({key: value for key, value in features(number).items() if key != name}))


DAMAGE: dict[str, tuple[Callable[[list[bytes], range], bytes], str, int]] = {
    'wrong length': (lambda found, _: b''.join([*found[:3], flipped(found[3], 0), *found[4:]]), 'part_damaged', 3),
    'wrong first length': (lambda found, _: b'\0' + b''.join(found), 'part_unreadable', 0),
    'cut in a length': (lambda found, _: b''.join(found[:3]) + found[3][:7], 'part_cut_off', 3),
    'cut in a payload': (lambda found, _: b''.join(found[:3]) + found[3][:50], 'part_cut_off', 3),
    'cut in a checksum': (lambda found, _: b''.join(found[:4])[:-1], 'part_cut_off', 3),
    'cut between records': (lambda found, _: b''.join(found[:3]), 'part_cut_off', 3),
    'gzip cut': (lambda found, _: gzip.compress(b''.join(found), mtime=0)[:-200], 'part_cut_off', -1),
    'wrong payload': (with_third(lambda number: flipped(records([number])[0], 60)), 'record_damaged', -1),
    'not an Example': (with_third(lambda number: record(b'\xff' * 9)), 'not_an_example', -1),
    'cut Example': (with_third(lambda number: record(example(features(number))[:-1])), 'not_an_example', -1),
    'no image': (with_third(lambda number: without(number, 'image')), 'no_image', -1),
    'two images': (with_third(lambda number: records([number], image=IMAGES[:2])[0]), 'several_images', -1),
    'no caption': (with_third(lambda number: without(number, 'caption')), 'no_caption', -1),
    'other encoding': (with_third(lambda number: records([number], caption=[b'caf\xe9'])[0]), 'caption_not_utf8', -1),
    'broken image': (with_third(lambda number: records([number], image=[IMAGES[0][:99]])[0]), 'truncated', -1),
}
"""Function of the records of a file and their numbers that returns a damaged file, the reason in the report, and the
number of records before the damage (-1: the others are read too)."""


def dataset(count: int, damage: Sequence[str] = tuple(DAMAGE)) -> dict[str, bytes]:
    """Return the files of a dataset: a damaged file each, two whole ones (one by gzip), and another split."""
    names = [*damage, 'gzip', 'whole']
    each = count // len(names)
    files: dict[str, bytes] = {'features.json': b'{}'}
    for at, name in enumerate(names):
        numbers = range(at * each, (at + 1) * each)
        found = records(numbers)
        content = DAMAGE[name][0](found, numbers) if name in damage else b''.join(found)
        files[f'flowers-train.tfrecord-{at:05}-of-{len(names):05}'] = (
            gzip.compress(content, mtime=0) if name == 'gzip' else content
        )
    files['flowers-test.tfrecord-00000-of-00001'] = b''.join(records(range(5)))
    splits = [{'name': 'train', 'shardLengths': [str(each)] * len(names)}, {'name': 'test', 'shardLengths': ['5']}]
    files['dataset_info.json'] = json.dumps({'name': 'flowers', 'splits': splits}).encode()
    return files


def settings(location: str, out: Path, **values: Any) -> dict[str, Any]:
    source = {'kind': 'tfrecord', 'location': location, **values.pop('source', {})}
    return {'source': source, 'out': str(out), 'sizes': [16], 'max_rejected': 1.0, 'workers': 1} | values


@pytest.mark.parametrize('count', [200, pytest.param(5000, marks=pytest.mark.slow)])
def test_every_record_is_kept_or_named_with_its_reason(tmp_path: Path, count: int) -> None:
    folder = write_files(tmp_path / 'in', dataset(count))
    report = report_of(settings(str(folder), tmp_path / 'out'))
    each, kept, expected = count // (len(DAMAGE) + 2), 0, dict[str, list[str]]()
    names = sorted(path.name for path in folder.glob('*train*'))
    for name, (_, reason, before) in zip(names, DAMAGE.values(), strict=False):
        place = f'{name} at record {before}' if before >= 0 else f'{name}/row-3'
        expected.setdefault(reason, []).append(place)
        kept += before if before >= 0 else each - 1
    cut = next(name for name in report.rejected['part_cut_off'].names if name.startswith(names[6]))
    expected['part_cut_off'][-1] = cut
    kept += int(cut.rpartition(' ')[2]) - (each - 1) + 2 * each
    assert {reason: found.names for reason, found in report.rejected.items()} == expected
    assert report.pictures == kept
    skipped = {kind: found.count for kind, found in report.passed_over.items()}
    assert skipped == {'split test': 1, '.json': 2}
    assert report.inputs == kept + len(DAMAGE) + 3
    stored = {sample['key']: sample for sample in samples(tmp_path / 'out/16px')}
    whole = stored[f'{names[-1]}/row-0']
    number = each * (len(names) - 1)
    assert whole['captions'] == [f'image {number}', f'the same, {number}']
    measured = {'caption_length', 'perceptual_hash', 'source_height', 'source_width'}
    assert {name: value for name, value in whole['metadata'].items() if name not in measured} == PLAIN | {'score': 0.5}


def test_checksums_equal_the_published_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tfrecord, 'MAX_CONTENT', 559_903)
    assert crc32c(b'123456789') == 0xE3069283  # RFC 3720
    content = [b'', b'x' * 559_903, bytes(range(256))]
    (tmp_path / 'a').write_bytes(b''.join(map(record, content)))
    assert [*read_records(tmp_path / 'a')] == content
    # The second record alone begins like a gzip file.
    (tmp_path / 'a').write_bytes(record(content[1]))
    assert [*read_records(tmp_path / 'a')] == content[1:2] and (tmp_path / 'a').read_bytes()[:3] == b'\x1f\x8b\x08'
    monkeypatch.setattr(tfrecord, 'MAX_CONTENT', 559_902)
    with pytest.raises(tfrecord.DamagedRecords, match='too_large'):
        next(read_records(tmp_path / 'a'))
    assert masked_crc32c(b'123456789') == ((0xE3069283 >> 15 | 0xE3069283 << 17) + 0xA282EAD8) & 0xFFFFFFFF


@pytest.mark.parametrize('place', ['plain', 'pattern', 'store', 'hub'])
def test_records_are_the_same_from_every_place(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch, place: str
) -> None:
    files = {'a.tfrecord': b''.join(records(range(3), key=['k'])), 'b.tfrecords.gz': gzip.compress(records([7])[0])}
    folder, columns = str(write_files(tmp_path, files)), {'key_column': 'key', 'caption_column': ['caption', 'long']}
    with serving({'org/flowers': HubDataset(files)}, monkeypatch):
        location = {
            'plain': folder,
            'pattern': f'{folder}/{{a.tfrecord,b.tfrecords.gz}}',
            'store': store.bucket('flowers', **files),
            'hub': 'hf://datasets/org/flowers',
        }[place]
        found = entries(settings_of(settings(location, tmp_path / 'out', source=columns)).open_source())
    keys = [('a/k', None), ('a/k', 'duplicate_key'), ('a/k', 'duplicate_key'), ('b.tfrecords.gz/row-0', None)]
    assert [(entry.key, entry.problem) for entry in found] == keys
    assert found[3].captions == ['image 7', 'the same, 7'] and found[3].image == IMAGES[7]
    assert found[3].caption_columns == ['caption'] * 2


VERSIONS = {
    f'{v}/{name}': [b'{"name": "a", "splits": []}'] for v in '12' for name in ('dataset_info.json', 'a.tfrecord')
}


@pytest.mark.parametrize(
    ('files', 'source', 'message'),
    [
        ({'a.tfrecord': records(range(10))}, {'image_column': 'img'}, 'no feature img, only caption, .*; set --im'),
        ({'a.tfrecord': records(range(10))}, {'caption_column': ['long']}, 'no feature long, only .*--caption-column'),
        ({'a.tfrecord': [without(n, 'image') for n in range(10)]}, {}, 'no feature image, jpg, .*, img, only caption,'),
        ({'a.tfrecord': [without(n, 'caption') for n in range(10)]}, {}, 'no feature captions, caption, .*--caption-c'),
        ({'a.tfrecord': records(range(12), image=[])}, {'split': 'test'}, "has no split 'test'"),
        (VERSIONS, {}, "is one of several datasets or versions: '1/', '2/'; give the folder of one"),
        ({'dataset_info.json': [b'[]'], 'a.tfrecord': []}, {}, 'dataset_info.json: is not a file of TensorFlow'),
    ],
)
def test_mistake_is_reported(tmp_path: Path, files: dict[str, list[bytes]], source: Any, message: str) -> None:
    folder = write_files(tmp_path / 'in', {name: b''.join(content) for name, content in files.items()})
    with pytest.raises(UserError, match=message):
        entries(settings_of(settings(str(folder), tmp_path / 'out', source=source)).open_source())
    if len(files.get('a.tfrecord', ())) == 10:  # so few records may all be damaged
        (folder / 'a.tfrecord').write_bytes(b''.join(files['a.tfrecord'][1:]))
        assert len(entries(settings_of(settings(str(folder), tmp_path / 'out', source=source)).open_source())) == 9


def test_other_fields_are_passed_over_and_wrong_ones_refused() -> None:
    others = (
        varint(9 * 8) + b'\xff' * 9 + b'\1' + varint(20 * 8 + 1) + bytes(8) + varint(29) + bytes(4) + field(16, b'x')
    )
    assert parse_example(others + example({'a': [7, -5], 'b': [b'']}) + others) == {'a': [7, -5], 'b': [b'']}
    for wrong in (varint(11), varint(9) + bytes(7), varint(29) + bytes(3), field(2, b'x')[:-1], b'\x08' + b'\xff' * 11):
        with pytest.raises(NotAnExample):
            parse_example(others + wrong)


def test_keys_that_are_not_text_and_damaged_starts_of_files_are_read(tmp_path: Path) -> None:
    found = (
        [flipped(each, 60) for each in records(range(12))]
        + records([12], key=[b'caf\xe9'])
        + records([13], key=[7])
        + records([14], key=[])
        + records([15], image=[7])
    )
    write_files(tmp_path / 'in', {'a.tfrecord': b''.join(found)})
    report = report_of(settings(str(tmp_path / 'in'), tmp_path / 'out'))
    counts = {reason: found.count for reason, found in report.rejected.items()}
    assert counts == {'record_damaged': 12, 'no_image': 1}
    assert [sample['key'] for sample in samples(tmp_path / 'out/16px')] == ['a/caf\\xe9', 'a/7', 'a/row-14']


def test_missing_files_are_in_the_report(tmp_path: Path) -> None:
    files = {f'a-train.tfrecord-{number:05}-of-00004': records([number])[0] for number in (0, 3)}
    parts = HuggingFaceSource(str(write_files(tmp_path, files)), layouts=('tfrecord',)).parts()
    assert parts[0].notes[-1] == 'a-train: has 2 of 4 TFRecord files; number 1 is missing'


@pytest.mark.slow
def test_preparation_to_a_store_killed_again_and_again_ends_with_the_same_bytes(tmp_path: Path, store: Store) -> None:
    location = store.bucket('flowers', **dataset(2000, ['no image', 'wrong length', 'cut in a payload']))
    store.bucket('mds')

    def start(name: str, kill_after: int | None = None) -> int:
        """Prepare in another process, which is killed after a number of uploads; return its exit status."""
        words = ['--out', f's3://mds/{name}', '--parts', 's3://mds/parts', '--work', str(tmp_path / name)]
        words += ['--sizes', '16', '--max-rejected', '1', '--shard-mb', '0.05', '--workers', '2']
        command = [sys.executable, '-m', 'diffusion', 'prepare', 'tfrecord', location, *words]
        store.requests.clear()
        process = subprocess.Popen(command, env=os.environ | store.environment, start_new_session=True)
        while process.poll() is None:
            if kill_after is not None and sum(each.startswith('PUT') for each in store.requests) >= kill_after:
                os.killpg(process.pid, signal.SIGKILL)
                break
            time.sleep(0.01)
        return process.wait()

    assert start('whole') == 0
    assert [start('killed', after) for after in (1, 3, 2)] == [-signal.SIGKILL] * 3
    assert start('killed') == 0
    found = store.objects('mds')
    files = [name.removeprefix('whole/') for name in found if name.startswith('whole/')]
    assert not any(name.startswith('parts/') for name in found)
    assert sum(name.endswith('.mds') for name in files) > 10
    differing = {name for name in files if found[f'whole/{name}'] != found[f'killed/{name}']}
    assert all('report' in name for name in differing), differing
