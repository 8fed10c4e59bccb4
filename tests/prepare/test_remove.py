"""Images are removed from a dataset by key or hash; only the shards that hold them change, and they stay removed."""

import itertools
import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import yaml
from drawn import draw, encode, keys, samples, snapshot
from golden import check_transcripts
from object_store import Store
from test_append import add, add_before_commit, all_keys, contents, hashes, indexed, sliced, start

from diffusion.cli import main
from diffusion.errors import UserError
from diffusion.prepare.counts_report import PrepareReport
from diffusion.prepare.dataset_record import RecordedDataset
from diffusion.prepare.image_record import read_images
from diffusion.prepare.remove import remove, runs_with
from diffusion.prepare.shard_rewriting import check_shard
from diffusion.storage.caption_tables import (
    ROWS,
    complete_tables,
    plan_hash,
    publish,
    read_table,
    table_key,
    write_table,
)
from diffusion.storage.mds import write_dataset
from diffusion.storage.places import LocalPlace


def run(capsys: Any, *arguments: object, status: int = 0) -> str:
    found = main(['data', 'remove', *map(str, arguments)])
    captured = capsys.readouterr()
    printed = captured.out + captured.err
    assert found == status, printed
    return printed


def holding(out: Path, key: str) -> set[str]:
    found = set()
    for bucket in keys(out):
        shards = [shard for folder, shard in indexed(out) if folder == bucket for _ in range(shard['samples'])]
        for shard, sample in zip(shards, samples(out / bucket), strict=True):
            if sample['key'] == key:
                found.add(f'{bucket}/{shard["raw_data"]["basename"]}')
    return found


def check_bucket_list(out: Path) -> None:
    counted = json.loads((out / '32px/buckets.json').read_text())['buckets']
    expected = {name.partition('/')[2]: len(of) for name, of in keys(out).items() if name.startswith('32px/')}
    assert {shape: each['samples'] for shape, each in counted.items()} == expected


@pytest.fixture(scope='module')
def grown(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dataset of two deliveries, which no test changes."""
    path = tmp_path_factory.mktemp('grown') / 'out'
    start(path, sliced(0, 20))
    add(path, sliced(20, 40))
    return path


@pytest.fixture
def out(tmp_path: Path, grown: Path) -> Path:
    shutil.copytree(grown, tmp_path / 'out')
    return tmp_path / 'out'


def test_removal_rewrites_only_the_shards_with_the_images_and_keeps_all_other_samples(out: Path, capsys: Any) -> None:
    before, content = hashes(out), contents(out)
    (out.parent / 'keys.txt').write_text('image-3\nimage-26\n')
    touched = holding(out, 'image-3') | holding(out, 'image-26')
    assert 0 < len(touched) < len(before)
    order = keys(out)
    run(capsys, out, '--keys', out.parent / 'keys.txt')
    after = hashes(out)
    assert set(before) - set(after) == touched
    assert all(after[name] == before[name] for name in set(before) - touched)
    gone = ('image-3', 'image-26')
    for of in content.values():
        for key in gone:
            of.pop(key, None)
    assert contents(out) == content
    assert keys(out) == {bucket: [key for key in of if key not in gone] for bucket, of in order.items()}
    report = PrepareReport.read(out / 'report.json')
    assert report.removed == 2
    assert report.buckets == {bucket: len(of) for bucket, of in keys(out).items()}
    check_bucket_list(out)
    assert not [path for path in out.parent.iterdir() if path.name not in ('out', 'keys.txt')]


def test_removed_keys_are_nowhere_in_the_dataset(out: Path, capsys: Any) -> None:
    # Key, caption, the name in a report as the original of a duplicate: the bytes are in no file any more.
    run(capsys, out, '--key', 'image-4')
    files = {path: path.read_bytes() for path in out.rglob('*') if path.is_file()}
    assert not [path for path, body in files.items() if b'image-4"' in body or b'image-4)' in body or b'of 4\n' in body]
    for path in out.rglob('images*.parquet'):
        assert 'image-4' not in read_images(path)['key'].to_pylist()


def caption_shards(out: Path, column: str = 'long', answers: dict[str, str | None] | None = None) -> None:
    """Write tables of captions or, if given, of `answers` by key: None is rejected, and others are no."""
    plan = {'model': 'tiny-vlm', 'prompt': {'name': column, 'version': 1}}
    for bucket in keys(out):
        shards = [shard for folder, shard in indexed(out) if folder == bucket]
        of_bucket = iter(samples(out / bucket))
        for shard in shards:
            stored = itertools.islice(of_bucket, shard['samples'])
            rows: list[dict[str, Any]] = []
            for key in (sample['key'] for sample in stored):
                caption = f'picture of {key}' if answers is None else answers.get(key, 'no')
                rows.append({'key': key, 'caption': caption, 'rejected': None if caption else 'loop'})
            table = pa.Table.from_pylist(rows, schema=ROWS)
            write_table(LocalPlace(out), bucket, column, table_key(plan_hash(plan), shard['raw_data']), table)
        assert publish(LocalPlace(out), bucket, column, plan, shards)


def test_caption_tables_lose_the_removed_images_and_stay_listed(out: Path, capsys: Any) -> None:
    caption_shards(out)
    kept = {path: path.read_bytes() for path in out.rglob('captions/long/*.parquet')}
    for bucket, shard in indexed(out):  # captions of other versions of the shards are not copied
        raw = shard['raw_data'] | {'bytes': 1}
        write_table(LocalPlace(out), bucket, 'long', table_key('0' * 16, raw), ROWS.empty_table())
    outdated = set(out.rglob('captions/long/*.parquet')) - kept.keys()
    run(capsys, out, '--key', 'image-3', 'image-26')
    for bucket in keys(out):
        shards = [shard for folder, shard in indexed(out) if folder == bucket]
        tables = complete_tables(LocalPlace(out), bucket, 'long', shards)
        assert tables is not None
        names = [tables[shard['raw_data']['basename']] for shard in shards]
        of_shards = [read_table(LocalPlace(out), name)['key'].to_pylist() for name in names]
        assert [len(of_shard) for of_shard in of_shards] == [shard['samples'] for shard in shards]
        assert [*itertools.chain(*of_shards)] == keys(out)[bucket]
    left = set(out.rglob('captions/long/*.parquet')) - outdated
    assert len(left) == len(list(indexed(out)))
    assert 0 < len(left & kept.keys()) < len(left), 'only tables of rewritten shards are new'


def test_images_are_removed_by_their_answers(out: Path, capsys: Any) -> None:
    caption_shards(out, 'watermark', {'image-3': 'Yes.'})
    caption_shards(out, 'score', {'image-26': '2', 'image-27': '8.5', 'image-28': '10'})
    every = all_keys(out)
    run(capsys, out, '--where', 'watermark=yes', 'score>8.5')
    assert every - all_keys(out) == {'image-3', 'image-28'}
    add(out, sliced(40, 45))
    assert 'run diffusion caption again' in run(capsys, out, '--where', 'watermark=yes', status=2)


def test_removed_images_do_not_come_back_with_a_later_delivery(out: Path, capsys: Any) -> None:
    run(capsys, out, '--key', 'image-3', 'image-26')
    # The same keys again, and the same pixels under other keys.
    again = add(out, sliced(0, 30, each=10))
    assert again.rejected['removed'].names == ['image-3', 'image-26']
    copies = add(out, sliced(0, 30, each=10, prefix='copy-'))
    assert 'copy-image-3' in copies.rejected['removed'].names
    others = add(out, sliced(0, 30, each=15, shift=1000, shifted_below=30))
    assert others.rejected['removed'].names == ['image-3', 'image-26'], 'other pixels under a removed key'
    assert not all_keys(out) & {'image-3', 'image-26', 'copy-image-3'}


def test_without_a_search_for_duplicates_removed_pixels_are_found_too(tmp_path: Path, capsys: Any) -> None:
    start(tmp_path / 'out', sliced(0, 10), duplicates='none')
    run(capsys, tmp_path / 'out', '--key', 'image-4')
    report = add(tmp_path / 'out', sliced(0, 10, prefix='copy-'), duplicates='none')
    assert report.rejected['removed'].names == ['copy-image-4', 'copy-image-5']
    assert report.pictures == 8


def test_unknown_removed_and_all_keys_change_nothing(out: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    before = snapshot(out)
    others = [f'none-{number}' for number in range(20)]
    printed = run(capsys, out, '--key', 'image-3', 'imag-26', *others, status=2)
    assert "'imag-26': did you mean 'image-26'?" in printed and "'none-19'" not in printed
    assert printed.endswith('\n  and 1 more\ncorrect them, or add --missing-ok to remove the others\n')
    assert ' more' not in run(capsys, out, '--key', *others, status=2)
    monkeypatch.setattr('diffusion.prepare.remove.MAX_COMPARED_KEYS', 5)  # only keys of the same start or end
    printed = run(capsys, out, '--key', 'image-x', 'imXage-26', 'imaXe-26', status=2)
    assert "'image-x': did you mean 'image-" in printed and "'imXage-26': did you mean 'image-26'?" in printed
    assert "  'imaXe-26'\n" in printed and snapshot(out) == before
    printed = run(capsys, out, '--key', *all_keys(out), status=2)
    assert 'no image would be left; delete the folder instead' in printed
    assert snapshot(out) == before
    run(capsys, out, '--key', 'image-3', 'nothing', '--missing-ok')
    assert not holding(out, 'image-3')
    before = snapshot(out)
    run(capsys, out, '--key', 'image-3')
    assert snapshot(out) == before


def test_removal_by_hash_and_by_image(out: Path, tmp_path: Path, capsys: Any) -> None:
    table = read_images(next(out.glob('deliveries/00001-*/images.parquet')))
    hash_of = dict(zip(table['key'].to_pylist(), table['exact_hash'].to_pylist(), strict=True))
    (tmp_path / 'notice.png').write_bytes(encode(draw(32), 'PNG'))
    run(capsys, out, '--hash', f'{hash_of["image-27"]:016x}', '--image', tmp_path / 'notice.png')
    assert not holding(out, 'image-27') | holding(out, 'image-32') and holding(out, 'image-28')


def test_old_shards_can_be_kept_for_running_jobs_until_purge(out: Path, capsys: Any) -> None:
    before = hashes(out)
    assert 'running jobs go on' in run(capsys, out, '--key', 'image-3', '--keep-old-shards')
    assert before.items() <= hashes(out).items()
    current = {f'{folder}/{shard["raw_data"]["basename"]}' for folder, shard in indexed(out)}
    for count in (len(set(before) - current), 0):
        assert run(capsys, out, '--purge') == f'{out}: deleted {count} old shards that were kept\n'
    assert current == set(hashes(out))


def test_held_out_image_is_removed_from_both_datasets(tmp_path: Path, capsys: Any) -> None:
    start(tmp_path / 'out', sliced(0, 20), hold_out=4)
    held_out = tmp_path / 'out-held-out'
    key = next(key for of in keys(held_out).values() for key in of)
    before = hashes(tmp_path / 'out')
    run(capsys, tmp_path / 'out', '--key', key)
    assert not holding(held_out, key)
    assert hashes(tmp_path / 'out') == before
    report = PrepareReport.read(tmp_path / 'out/report.json')
    assert report.held_out is not None and (report.held_out.pictures, report.removed) == (3, 0)
    assert PrepareReport.read(held_out / 'report.json').pictures == 3


def test_damaged_and_missing_files_of_the_dataset_are_named_and_nothing_is_removed(out: Path, capsys: Any) -> None:
    name = min(holding(out, 'image-3'))
    body = bytearray((out / name).read_bytes())
    body[-1] ^= 1
    (out / name).write_bytes(body)
    printed = run(capsys, out, '--key', 'image-3', status=1)
    assert f'{name}: xxh64' in printed and 'restore the shard' in printed
    assert holding(out, 'image-3')
    (_, entry), *_ = indexed(out)
    types = ', '.join(entry['column_encodings'])
    for changed, problem in (
        ({'zip_data': {'bytes': 1}}, 'a: is compressed, which this command cannot read; prepare the data again'),
        ({'column_names': ['image']}, "a: its samples have no column 'key'; prepare the data again"),
        ({'column_sizes': [7]}, f'a: has columns of types that this command cannot read ({types})'),
    ):
        with pytest.raises(UserError) as error:
            check_shard(out / name, entry | changed, 'a')
        assert str(error.value) == problem
    (out / name).unlink()
    printed = run(capsys, out, '--key', 'image-3', status=1)
    assert f'{name}: the file does not exist; restore the shard' in printed
    (table,) = out.glob('deliveries/00001-*/images.parquet')
    table.unlink()
    assert f'{table.relative_to(out)}: is missing; restore it' in run(capsys, out, '--key', 'image-3', status=2)


def test_what_removals_print(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    out = Path('out')
    start(out, sliced(0, 15), hold_out=3, duplicates='none', shard_mb=0.001)  # one sample per shard
    answers: dict[str, str | None] = {f'image-{number}': 'many' for number in range(9)}
    answers |= {'image-9': None, 'image-12': '10', 'image-13': 'perhaps', 'image-14': 'Yes.'}
    caption_shards(out, 'score', answers | {'image-10': '2', 'image-11': '8.5'})
    source = RecordedDataset(str(out), Path('scratch')).record.indexes['32px/32x32'][0]
    for name, digest in {'photos': source, 'other': 'f' * 64}.items():
        write_dataset(Path('latents', name), [{'key': 'image-3'}], {'key': 'str'})
        Path('latents', name, 'manifest.json').write_text(json.dumps({'source': digest}))
    for name, recipe in {
        'images': {'streams': {'a': {'local': 'out/32px'}}},
        'latents': {'eval_streams': {'b': {'remote': None, 'local': str(tmp_path / 'latents/photos')}}},
        'others': {'streams': {'a': {'local': 'out2/32px'}, 'c': {'remote': 's3://bucket/out'}, 'd': None}},
    }.items():
        Path('runs', name).mkdir(parents=True)
        Path('runs', name, 'recipe.yaml').write_text(yaml.safe_dump(recipe))
    assert [*runs_with(['s3://bucket/out'], Path('runs'))] == [('others', ['streams.c'])]

    def outcome(line: str) -> list[str]:
        before = snapshot(tmp_path)
        status = main(['data', 'remove', *line.split()])
        assert (snapshot(tmp_path) == before) == (status == 2 or 'dry-run' in line)
        printed = ''.join(capsys.readouterr()).replace(f'{tmp_path}/', '')
        return re.sub('(?=.*[1-9a-f])[0-9a-f]{16}', 'HASH', printed).splitlines()

    check_transcripts(Path(__file__).parent / 'golden/remove', outcome)


def test_shards_without_a_record_are_searched_for_the_keys(out: Path, capsys: Any) -> None:
    (out / 'dataset.json').unlink()  # as of latents
    caption_shards(out)
    content = contents(out)
    before = hashes(out)
    touched = holding(out, 'image-3')
    others = [f'x{number:02}' for number in range(11)]
    printed = run(capsys, out, '--key', 'image-3', *others, status=2)
    assert f'{", ".join(others[:10])} and 1 more; correct' in printed and hashes(out) == before
    assert ' more' not in run(capsys, out, '--key', *others[:10], status=2)
    assert 'would remove 1 samples from 1 shards' in run(capsys, out, '--key', 'image-3', '--dry-run')
    printed = run(capsys, out, '--key', 'image-3', 'image-x', '--missing-ok')
    assert printed.count(': removing 1 samples from 1 shards\n') == len(touched) and 'would' not in printed
    assert printed.endswith(f'{out}: rewrote {len(touched)} shards; running jobs stop when they need an old one\n')
    assert contents(out) == {b: {k: s for k, s in of.items() if k != 'image-3'} for b, of in content.items()}
    assert set(before) - set(hashes(out)) == touched
    check_bucket_list(out)
    assert len([*out.rglob('captions/long/*.parquet')]) == len([*indexed(out)])
    (out / min(touched)).write_bytes(b'left by a removal that was killed')
    (out / min(touched)).with_name('shard.00777.mds').touch()
    run(capsys, out, '--key', 'image-4', '--dry-run')
    assert set(hashes(out)) & touched == {min(touched)}
    run(capsys, out, '--key', 'image-x', '--missing-ok')
    assert not set(hashes(out)) & touched and set(before) - set(hashes(out)) == touched
    assert len([*out.rglob('shard.00777.mds')]) == 1
    assert 'has no record of its images' in run(capsys, out, '--key', 'image-4', '--purge', status=2)


def test_samples_are_removed_from_latents_of_arrays(tmp_path: Path, capsys: Any) -> None:
    rng = np.random.default_rng(0)
    columns = {'key': 'str', 'moments': 'ndarray:float16:8,4,4', 'features': 'ndarray:float32', 'captions': 'json'}
    rows: list[dict[str, Any]] = [{'key': f'k{n}', 'captions': [f'caption {n}']} for n in range(6)]
    for number, row in enumerate(rows):
        row['moments'] = rng.normal(size=(8, 4, 4)).astype(np.float16)
        row['features'] = rng.normal(size=(number + 1, 3)).astype(np.float32)
    folder = tmp_path / 'latents' / 'photos'
    write_dataset(folder, rows, columns)
    run(capsys, tmp_path / 'latents', '--key', 'k2', 'k5')
    left = [row for row in rows if row['key'] not in ('k2', 'k5')]
    for found, row in zip(samples(folder), left, strict=True):
        assert all(np.array_equal(found[name], row[name]) for name in columns)
    assert len(list(folder.glob('*.mds'))) == 1


@pytest.mark.slow
def test_removal_in_a_store_gives_the_same_dataset(tmp_path: Path, store: Store, capsys: Any) -> None:
    store.bucket('mds')
    start('s3://mds/out', sliced(0, 10), work=str(tmp_path / 'work'))
    start(tmp_path / 'out', sliced(0, 10))
    for place in ('s3://mds/out', tmp_path / 'out'):
        run(capsys, place, '--key', 'image-3', 'image-9')
    found = store.objects('mds')
    expected = {f'out/{name}': (tmp_path / 'out' / name).read_bytes() for name in hashes(tmp_path / 'out', '*')}
    assert found.keys() == expected.keys()
    for name, body in expected.items():
        assert 'report' in name or found[name] == body, name


def test_removal_and_append_at_the_same_time_lose_nothing(out: Path, monkeypatch, caplog) -> None:
    add_before_commit(monkeypatch, out, sliced(40, 50))
    removal = remove(RecordedDataset(str(out), out.parent / 'scratch'), ['image-3'])
    assert removal.selection.images == 1 and 'searching the new version' in caplog.text
    found = all_keys(out)
    assert 'image-3' not in found and {'image-44', 'image-28'} <= found
    assert len(PrepareReport.read(out / 'report.json').deliveries) == 3
