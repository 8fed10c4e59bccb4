"""Multipart uploads that a killed process has left are aborted."""

import os
from pathlib import Path
from typing import Any

import pytest
from object_store import Store
from waiting import wait_until

from diffusion.errors import UserError
from diffusion.storage import object_store, s3_client
from diffusion.storage.retry import RetryPolicy
from tests.data.processes import Forked

OLD, IN_THE_FUTURE = 3600.0, 1e9
"""Ages in seconds: moto says that every upload began in 2010, which is less than 1e9 seconds ago."""


def uploads(store: Store) -> list[str]:
    found: dict[str, Any] = store.client.list_multipart_uploads(Bucket='data')
    return sorted(upload['Key'] for upload in found.get('Uploads', ()))


@pytest.fixture
def large(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """File that is uploaded in three parts."""
    monkeypatch.setattr(s3_client, 'PART_BYTES', 5 * 2**20)
    path = tmp_path / 'large'
    path.write_bytes(bytes(11 * 2**20))
    return path


@pytest.fixture
def begun(store: Store) -> str:
    """URL of a folder with two unfinished uploads, beside one that is not in the folder."""
    url = store.bucket('data') + '/run'
    for key in ('run/a', 'run/b/c', 'running/a'):
        store.client.create_multipart_upload(Bucket='data', Key=key)
    return url


def test_upload_of_a_killed_process_is_aborted(store: Store, large: Path) -> None:
    url = store.bucket('data')
    store.fail('PUT partNumber=2', 30.0)
    process = Forked(lambda: object_store.write(f'{url}/run/large', large))
    wait_until(lambda: any('partNumber=2' in request for request in store.requests))
    process.kill()
    assert uploads(store) == ['run/large'] and not store.objects('data')
    assert object_store.abort_uploads(f'{url}/run/large', older_than_seconds=OLD) == 1
    assert uploads(store) == []


def test_upload_that_is_ended_by_its_wait_or_fails_aborts_itself(store: Store, large: Path) -> None:
    os.truncate(large, 150 * 2**20)
    url = store.bucket('data')

    def wait() -> None:
        if any('partNumber=1' in request for request in store.requests):
            raise KeyError('ended')

    with pytest.raises(KeyError, match='ended'):
        object_store.write(f'{url}/large', large, retry=RetryPolicy(wait=wait))
    assert uploads(store) == [] and not store.objects('data')
    # boto3 sends ten parts at a time.
    assert sum('partNumber=' in request for request in store.requests) < 30, 'the other parts are not sent'
    os.truncate(large, 11 * 2**20)
    store.fail('PUT partNumber=2', 403)
    with pytest.raises(UserError, match='the store refuses access'):
        object_store.write(f'{url}/large', large)
    assert uploads(store) == []


def test_only_old_uploads_below_the_url_are_aborted(store: Store, begun: str) -> None:
    assert object_store.abort_uploads(begun, older_than_seconds=IN_THE_FUTURE) == 0
    assert uploads(store) == ['run/a', 'run/b/c', 'running/a']
    store.fail('DELETE run/a', 'NoSuchUpload', times=1)
    assert object_store.abort_uploads(begun, older_than_seconds=OLD) == 1
    assert uploads(store) == ['run/a', 'running/a'], 'one that ends meanwhile is skipped'
    store.fail('DELETE uploadId', 500, times=1)
    assert object_store.abort_uploads(begun, older_than_seconds=OLD) == 1
    assert uploads(store) == ['running/a']
    assert object_store.abort_uploads('s3://data', older_than_seconds=OLD) == 1


@pytest.mark.parametrize(('fault', 'request_words'), [(403, 'GET uploads'), (500, 'DELETE run/b')])
def test_store_that_refuses_is_a_warning(store, begun, fault, request_words, caplog):
    store.fail(request_words, fault)
    count = object_store.abort_uploads(begun, older_than_seconds=OLD, retry=RetryPolicy(tries=2))
    assert count == (1 if request_words.startswith('DELETE') else 0)
    assert 'unfinished uploads are not aborted' in caplog.text and 's3:AbortMultipartUpload' in caplog.text
