"""A dataset is written again with captions of tables in its shards: whole, resumed, and compared with hashes."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from commands import output_of
from drawn import keys, samples, snapshot
from object_store import Store
from test_append import sliced, start
from test_remove import caption_shards, check_bucket_list

from diffusion.errors import DataError, UserError
from diffusion.prepare.caption_packing import pack
from diffusion.storage.atomic import new_unfinished
from diffusion.storage.mds import write_dataset


@pytest.fixture(scope='module')
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset in two shapes with the columns `long`, complete, and `short`, with a caption of image-3 alone."""
    path = tmp_path_factory.mktemp('captioned') / 'data'
    start(path, sliced(0, 20))
    caption_shards(path)
    caption_shards(
        path, 'short', {key: 'three' if key == 'image-3' else None for of in keys(path).values() for key in of}
    )
    return path


def without_captions(sample: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in sample.items() if 'caption' not in name}


def test_shards_get_captions_and_keep_everything_else(data: Path, tmp_path: Path, capsys: Any) -> None:
    out = tmp_path / 'out'
    output_of(capsys, 'data', 'pack', data, '--captions', 'short', 'original', 'long', '--out', out)
    assert keys(out) == keys(data)
    for bucket in keys(data):
        for old, new in zip(samples(data / bucket), samples(out / bucket), strict=True):
            assert without_captions(new) == without_captions(old)
            added = {'long': f'picture of {old["key"]}'} | ({'short': 'three'} if old['key'] == 'image-3' else {})
            assert new['captions'] == [*old['captions'], *added.values()]
            assert new['caption_columns'] == [*['original'] * len(old['captions']), *added]
    check_bucket_list(out)
    assert not [path for path in out.rglob('*') if 'unfinished' in path.name or path.suffixes[-2:] == ['.mds', '.json']]


def test_shares_write_shards_and_images_without_captions_are_left_out_and_named(
    data: Path, tmp_path: Path, capsys: Any
) -> None:
    out = tmp_path / 'out'
    words = ('data', 'pack', data, '--captions', 'short', '--out', out)
    for share in ('1/2', '0/2'):
        assert f'share {share} is done' in output_of(capsys, *words, '--share', share)
    assert not [*out.rglob('index.json')]
    written = {path: path.stat().st_mtime_ns for path in out.rglob('*.mds')}
    left = new_unfinished(out / 'index.json')
    left.touch()
    printed = output_of(capsys, *words)
    assert not left.exists() and written and {path: path.stat().st_mtime_ns for path in out.rglob('*.mds')} == written
    of_image = [bucket for bucket, of in keys(data).items() if 'image-3' in of]
    left_out = sum(map(len, keys(data).values())) - len(of_image)
    assert f'left out {left_out} samples' in printed and 'image-0, ' in printed
    assert keys(out) == {bucket: ['image-3'] if bucket in of_image else [] for bucket in keys(data)}
    check_bucket_list(out)


def test_a_single_caption_becomes_the_first_of_a_list(tmp_path: Path) -> None:
    rows = [{'key': f'image-{number}', 'caption': f'own {number}'} for number in range(2)]
    write_dataset(tmp_path / 'data/32px', rows, {'key': 'str', 'caption': 'str'})
    caption_shards(tmp_path / 'data')
    assert pack(str(tmp_path / 'data'), str(tmp_path / 'out'), ['long', 'original']) == (2, [])
    columns = {'caption_columns': ['original', 'long']}
    expected = [{'key': row['key'], 'captions': [row['caption'], f'picture of {row["key"]}']} | columns for row in rows]
    assert samples(tmp_path / 'out/32px') == expected


def test_a_stopped_packing_resumes_and_damage_is_found(data: Path, tmp_path: Path, store: Store) -> None:
    pack(str(data), str(tmp_path / 'whole'), ['long'])
    expected = snapshot(tmp_path / 'whole')
    url, out = store.upload(data), 's3://data/out'
    shard = max(path.relative_to(data).as_posix() for path in data.rglob('*.mds'))
    content = (data / shard).read_bytes()
    store.put(url, shard, content[:-1] + b'!')
    with pytest.raises(DataError, match=f'{shard}: .*restore the shard'):
        pack(url, out, ['long'])
    store.put(url, shard, content)
    listed = [f'/data/{name}' for name in store.objects('data') if name.startswith('out/')]
    done = {name for name in listed if name.endswith('.mds')}
    assert done and not [name for name in listed if name.endswith('index.json')]
    store.requests.clear()
    pack(url, out, ['long'])
    written = set(store.paths('PUT'))
    assert written and not written & done
    found = store.objects('data')
    assert {name.removeprefix('out/'): found[name] for name in found if name.startswith('out/')} == expected
    with pytest.raises(UserError, match=r"captions: \['long'\] at the start, \['long', 'original'\] now"):
        pack(url, out, ['long', 'original'])


@pytest.mark.parametrize(
    ('columns', 'out', 'message'),
    [
        (['lnog'], 'out', 'index.json: no complete column lnog; run diffusion caption'),
        (['original'], 'out', 'no complete column besides original'),
        (['long'], 'data/32px/out', 'is in the dataset or not empty'),
        (['long'], '.', 'is in the dataset or not empty'),
    ],
)
def test_mistakes_are_refused_before_the_work(data: Path, columns: list[str], out: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        pack(str(data), str(data.parent / out), columns)
    assert [path.name for path in data.parent.iterdir()] == ['data']


def test_damaged_and_outdated_tables_stop_the_packing(data: Path, tmp_path: Path) -> None:
    copy = shutil.copytree(data, tmp_path / 'copy')
    captions = next(copy.rglob('captions.json'))
    listed = json.loads(captions.read_text())['columns']['long']['tables']
    table = captions.parent / 'captions/long' / next(iter(listed.values()))
    table.write_bytes(table.read_bytes()[:-1])
    with pytest.raises(DataError, match='is damaged; delete it and run diffusion caption again'):
        pack(str(copy), str(tmp_path / 'out'), ['long'])
    captions.write_text(captions.read_text().replace('shard.00000.mds.', 'shard.00000.mds.0'))
    with pytest.raises(UserError, match='captions long are of an older version of shard.00000.mds; run'):
        pack(str(copy), str(tmp_path / 'out'), ['long'])
