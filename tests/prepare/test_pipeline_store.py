"""Preparing into an object store: indexes last, what is there is compared, and a failure costs what it costs."""

from pathlib import Path

import pytest
from drawn import DrawnSource, settings, snapshot
from faulty_s3 import Store

from diffusion.prepare import mds, outputs
from diffusion.prepare.pipeline import prepare
from diffusion.prepare.report import Report

SOURCE = DrawnSource(4, 10)


def run(tmp_path: Path, out: str) -> Report:
    where = {'out': out, 'work': str(tmp_path / 'work')} if '://' in out else {'out': str(tmp_path / out)}
    report = prepare(settings(shard_mb=0.01, aspects='sdxl', **where), source=SOURCE)
    assert report is not None
    return report


def objects(store: Store, bucket: str) -> dict[str, bytes]:
    found = store.client.list_objects_v2(Bucket=bucket).get('Contents', ())
    return {each['Key']: store.client.get_object(Bucket=bucket, Key=each['Key'])['Body'].read() for each in found}


def puts(store: Store) -> list[str]:
    return [request.split()[1].partition('?')[0] for request in store.requests if request.startswith('PUT')]


def test_the_store_gets_what_a_folder_would_have_got(tmp_path: Path, s3: Store) -> None:
    s3.bucket('mds')
    s3.requests.clear()
    run(tmp_path, 's3://mds/out')
    run(tmp_path, 'local')
    expected = {f'out/{name}': content for name, content in snapshot(tmp_path / 'local').items()}
    found = objects(s3, 'mds')
    assert found.keys() == expected.keys()
    data = {name for name in found if name.endswith(('.mds', mds.INDEX, 'buckets.json'))}
    assert all(found[name] == expected[name] for name in data)
    order = puts(s3)
    assert all(name.endswith('.json') for name in order[-sum(map(is_index, found)) :])
    assert sum(map(is_index, order[-sum(map(is_index, found)) :])) == sum(map(is_index, found))
    assert [path.name for path in tmp_path.iterdir()] == ['local']


def is_index(name: str) -> bool:
    return name.endswith((mds.INDEX, 'buckets.json'))


def test_a_failed_upload_is_named_and_the_next_start_uploads_the_rest(
    tmp_path: Path, s3: Store, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outputs, 'ATTEMPTS', 1)
    monkeypatch.setattr(outputs, 'UPLOADS', 1)  # so that the failure comes before the last shard is written
    s3.bucket('mds')
    s3.faults += [('PUT /mds/out/16px/24x16/shard.00000', 500)]
    with pytest.raises(ValueError, match=r's3://mds/out/16px/24x16/shard.00000.mds: cannot be written .*InternalError'):
        run(tmp_path, 's3://mds/out')
    assert not (tmp_path / 'work/complete').exists()
    there = objects(s3, 'mds')
    assert there and not any(is_index(name) for name in there)
    s3.faults.clear()
    s3.requests.clear()
    run(tmp_path, 's3://mds/out')
    run(tmp_path, 'local')
    assert not {f'/mds/{name}' for name in there} & set(puts(s3))
    found = objects(s3, 'mds')
    for name, content in snapshot(tmp_path / 'local').items():
        assert name.startswith('report') or found[f'out/{name}'] == content
    assert not (tmp_path / 'work').exists()


def test_an_upload_that_arrives_short_is_noticed(tmp_path: Path, s3: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    from streaming.base.storage.upload import S3Uploader

    upload = S3Uploader.upload_file

    def cut(self: S3Uploader, filename: str) -> None:
        upload(self, filename)
        if filename.endswith('report.html'):
            self.s3.put_object(Bucket='mds', Key=f'out/{filename}', Body=b'short')

    s3.bucket('mds')
    monkeypatch.setattr(S3Uploader, 'upload_file', cut)
    with pytest.raises(ValueError, match=r's3://mds/out/report.html: has 5 bytes of \d+ after its upload'):
        run(tmp_path, 's3://mds/out')
    assert (tmp_path / 'work/complete').exists()
    monkeypatch.undo()


def test_a_store_that_holds_something_is_left_alone(tmp_path: Path, s3: Store) -> None:
    s3.bucket('mds', **{'out/something': b'x', 'outside': b'y'})
    with pytest.raises(ValueError, match='s3://mds/out: holds objects already'):
        run(tmp_path, 's3://mds/out')
    assert not (tmp_path / 'work').exists()


def test_a_store_that_refuses_is_named_before_any_work(tmp_path: Path, s3: Store) -> None:
    with pytest.raises(ValueError, match=r's3://nowhere/out/report.json: there is no such bucket'):
        run(tmp_path, 's3://nowhere/out')
