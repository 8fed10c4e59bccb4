"""Preparing into an object store: indexes are uploaded last, sizes are checked, and failures can be resumed."""

from pathlib import Path
from typing import Any

import pytest
from drawn import DrawnSource, settings, snapshot
from object_store import Store

from diffusion.prepare.counts_report import PrepareReport
from diffusion.prepare.engines import run_job
from diffusion.prepare.pipeline import prepare
from diffusion.storage import folders, mds
from diffusion.storage.bucket_interface import Location
from diffusion.storage.retry import RetryPolicy
from diffusion.storage.s3_client import S3Client

SOURCE = DrawnSource(4, 10)


def run(tmp_path: Path, out: str) -> PrepareReport:
    where = {'out': out, 'work': str(tmp_path / 'work')} if '://' in out else {'out': str(tmp_path / out)}
    report = prepare(
        settings(shard_mb=0.01, aspects='sdxl', **where), source=SOURCE, run=lambda jobs: map(run_job, jobs)
    )
    assert report is not None
    return report


def puts(store: Store) -> list[str]:
    return [request.split()[1].partition('?')[0] for request in store.requests if request.startswith('PUT')]


def test_object_store_gets_the_same_dataset_as_a_folder(tmp_path: Path, store: Store) -> None:
    store.bucket('mds')
    store.requests.clear()
    run(tmp_path, 's3://mds/out')
    run(tmp_path, 'local')
    expected = {f'out/{name}': content for name, content in snapshot(tmp_path / 'local').items()}
    found = store.objects('mds')
    assert found.keys() == expected.keys()
    data = {name for name in found if name.endswith(('.mds', mds.INDEX, 'buckets.json'))}
    assert all(found[name] == expected[name] for name in data)
    order = puts(store)
    assert all(name.endswith('.json') for name in order[-sum(map(is_index, found)) :])
    assert sum(map(is_index, order[-sum(map(is_index, found)) :])) == sum(map(is_index, found))
    assert [path.name for path in tmp_path.iterdir()] == ['local']


def is_index(name: str) -> bool:
    return name.endswith((mds.INDEX, 'buckets.json'))


def test_failed_upload_is_reported_and_the_next_start_uploads_the_rest(tmp_path: Path, store: Store) -> None:
    store.bucket('mds')
    store.fail('PUT /mds/out/16px/24x16/shard.00000', 500)
    failed = r's3://mds/out/16px/24x16/shard.00000.mds: cannot be written, tried 4 times .*InternalError.*work is kept'
    with pytest.raises(OSError, match=failed):
        run(tmp_path, 's3://mds/out')
    assert sum('24x16/shard.00000' in name for name in puts(store)) == RetryPolicy().tries
    assert not (tmp_path / 'work/complete').exists()
    there = store.objects('mds')
    assert there and not any(is_index(name) for name in there)
    store.faults.clear()
    store.requests.clear()
    run(tmp_path, 's3://mds/out')
    run(tmp_path, 'local')
    assert not {f'/mds/{name}' for name in there} & set(puts(store))
    found = store.objects('mds')
    for name, content in snapshot(tmp_path / 'local').items():
        assert 'report' in name or found[f'out/{name}'] == content
    assert not (tmp_path / 'work').exists()


def test_denied_upload_is_not_retried_and_names_the_permissions(tmp_path: Path, store: Store) -> None:
    store.bucket('mds')
    store.fail('PUT /mds/out/16px/24x16/shard.00000', 403)
    refused = r's3://mds/out/16px/24x16/shard.00000.mds: the store refuses access \(403\).*check the permissions'
    with pytest.raises(ValueError, match=refused):
        run(tmp_path, 's3://mds/out')
    assert sum('24x16/shard.00000' in name for name in puts(store)) == 1


def test_truncated_upload_is_retried(tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    shorten(monkeypatch, store, 'report.html', times=1)
    store.bucket('mds')
    run(tmp_path, 's3://mds/out')
    assert len(store.objects('mds')['out/report.html']) > len(b'short')


def test_upload_that_is_always_truncated_is_an_error(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    shorten(monkeypatch, store, 'report.html', times=RetryPolicy().tries)
    store.bucket('mds')
    short = r's3://mds/out/report.html: cannot be written, tried 4 times .*the uploaded object has 5 of \d+ bytes'
    with pytest.raises(OSError, match=short):
        run(tmp_path, 's3://mds/out')
    assert (tmp_path / 'work/complete').exists()


def test_shard_damaged_during_other_uploads_is_written_again(
    tmp_path: Path, store: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    victim = '16px/24x16/shard.00000.mds'
    upload = folders.upload

    def spoil(path: Path, folder: str) -> None:
        upload(path, folder)
        if path.name == 'report.html':
            store.put('s3://mds/out', victim, b'short')

    store.bucket('mds')
    with monkeypatch.context() as patch:
        patch.setattr(folders, 'upload', spoil)
        with pytest.raises(
            OSError, match=rf's3://mds/out/{victim}: has 5 of \d+ bytes after all uploads; run the same command'
        ):
            run(tmp_path, 's3://mds/out')
    run(tmp_path, 's3://mds/out')
    run(tmp_path, 'local')
    assert store.objects('mds')[f'out/{victim}'] == (tmp_path / 'local' / victim).read_bytes()


def shorten(monkeypatch: pytest.MonkeyPatch, store: Store, name: str, *, times: int) -> None:
    """Truncate the first `times` uploads of a file."""
    write, remaining = S3Client.write, [name] * times

    def cut(self: S3Client, at: Location, content: bytes | Path, **settings: Any) -> None:
        write(self, at, content, **settings)
        if at.key.rpartition('/')[2] in remaining:
            remaining.remove(name)
            store.client.put_object(Bucket=at.bucket, Key=at.key, Body=b'short')

    monkeypatch.setattr(S3Client, 'write', cut)


def test_nonempty_output_in_a_store_is_not_touched(tmp_path: Path, store: Store) -> None:
    store.bucket('mds', **{'out/something': b'x', 'outside': b'y'})
    with pytest.raises(ValueError, match='s3://mds/out: is not empty'):
        run(tmp_path, 's3://mds/out')
    assert not (tmp_path / 'work').exists()


def test_missing_output_bucket_is_reported_before_any_work(tmp_path: Path, store: Store) -> None:
    with pytest.raises(ValueError, match=r's3://nowhere/out/: there is no such bucket'):
        run(tmp_path, 's3://nowhere/out')
