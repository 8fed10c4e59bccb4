"""Listing, reading and writing objects of every cloud, in forked processes too."""

import itertools
import os
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from commands import modules_of
from hub_client import forget_sessions, set_address
from object_store import Store
from other_clouds import Cloud, serve

from diffusion.errors import GaveUp, UserError
from diffusion.storage import object_store, s3_client, transfers
from diffusion.storage.bucket_clients import AzureClient, GoogleClient, HubClient, locate
from diffusion.storage.object_store import RemoteFolder
from diffusion.storage.retry import PreconditionFailed, RetryPolicy
from tests.data.processes import Forked

# Emitted by google.api_core on import.
pytestmark = pytest.mark.filterwarnings('ignore:Please install grpcio-status:ImportWarning')

URLS = {scheme: f'{scheme}://bucket/set' for scheme in ('s3', 'gs', 'az')}
URLS['azure'] = 'azure://me.blob.core.windows.net/bucket/set'
SLOW = pytest.mark.slow
SCHEMES = ['s3', 'gs', 'azure', pytest.param('az', marks=SLOW)]
"""Every cloud, with one form of the URLs of Azure in the default tests."""
S3_AND_OTHERS = ['s3', 'gs', pytest.param('azure', marks=SLOW)]
"""Clouds for what S3 does in its own way, and the others with the same code."""
ODD = 'ü ?#;%.mds'
"""A name with characters that must be escaped in URLs and XML."""


@pytest.fixture(scope='module')
def _clouds() -> Iterator[Cloud]:
    with serve() as cloud:
        yield cloud


@pytest.fixture
def clouds(_clouds: Cloud, store: Store, monkeypatch: pytest.MonkeyPatch) -> Cloud:
    import google.auth
    from google.auth.credentials import AnonymousCredentials

    _clouds.objects.clear()
    _clouds.lost_answers = 0
    store.bucket('bucket')
    monkeypatch.setattr(google.auth, 'default', lambda: (AnonymousCredentials(), None))
    for name, value in {'ACCOUNT_NAME': 'me', 'ACCOUNT_ACCESS_KEY': 'a2V5', 'STORAGE_ENDPOINT': _clouds.url}.items():
        monkeypatch.setenv(f'AZURE_{name}', value)
    monkeypatch.setenv('STORAGE_EMULATOR_HOST', _clouds.url)
    return _clouds


@pytest.mark.parametrize('scheme', SCHEMES)
def test_every_cloud_lists_reads_and_writes_the_same_way(clouds: Cloud, tmp_path: Path, scheme: str) -> None:
    folder, path = URLS[scheme], tmp_path / ODD
    contents = {f'set/{name}': name.encode() * 1000 for name in ('a', 'b/1', 'b/2', ODD, 'empty')}
    contents['set/empty'] = b''
    bucket = folder.removesuffix('/set')
    for key, content in (contents | {'settings': b'x', 'set2/a': b'x'}).items():
        object_store.write(f'{bucket}/{key}', content)
    path.write_bytes(b'uploaded' * 1000)
    object_store.write(f'{folder}/{path.name}', path)
    contents[f'set/{ODD}'] = path.read_bytes()
    found = {found.key: found for found in object_store.list_objects(folder)}
    container = 'bucket/' if scheme == 'azure' else ''
    sizes = {container + key: len(content) for key, content in contents.items()}
    assert {key: found.size for key, found in found.items()} == sizes
    assert object_store.list_objects(f'{folder}/') == list(found.values())
    assert [found.size for found in object_store.list_objects(f'{folder}/a')] == [1000]
    assert not object_store.list_objects(f'{folder}/none')
    for key, content in contents.items():
        assert object_store.read(f'{bucket}/{key}') == content
        object_store.download(f'{bucket}/{key}', path, size=len(content))
        assert path.read_bytes() == content
        stored = object_store.head(f'{bucket}/{key}')
        assert stored == found[container + key]
        assert stored.tag
    assert object_store.read(f'{folder}/{ODD}', span=(3, 9)) == b'oadedu'
    object_store.delete(f'{folder}/a')
    for missing in (lambda: object_store.read(f'{folder}/a'), lambda: object_store.head(f'{folder}/a')):
        with pytest.raises(UserError, match='there is no such bucket or object'):
            missing()


@pytest.mark.parametrize('scheme', SCHEMES)
def test_folder_is_listed_flat(clouds: Cloud, store: Store, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = URLS[scheme]
    names = ['a', 'b', 'z']  # b is an object and a folder
    for name in (*names, f'{ODD}/1', 'b/1', 'b/c/2', 'b/3', 'd/4', 'e/5', 'f/6'):
        object_store.write(f'{folder}/{name}', b'content')
    object_store.write(f'{folder}2/a', b'content')
    object_store.write(f'{folder}/', b'')  # what some programs create for an empty folder
    calls = len(store.requests) + clouds.requests
    prefix = 'bucket/set' if scheme == 'azure' else 'set'
    for url in (folder, f'{folder}/'):
        folders, objects = object_store.list_folder(url)
        assert folders == [f'{prefix}/{name}' for name in ('b', 'd', 'e', 'f', ODD)]
        assert [(found.key, found.size) for found in objects] == [(f'{prefix}/{name}', 7) for name in names]
        assert all(found in object_store.list_objects(folder) for found in objects)
    assert object_store.list_folder(f'{folder}/b')[0] == [f'{prefix}/b/c']
    assert object_store.list_folder(f'{folder}/a') == object_store.list_folder(f'{folder}/none') == ([], [])
    bucket = folder.removesuffix('/set')
    assert object_store.list_folder(bucket)[0] == [prefix, f'{prefix}2']
    # The fakes have pages of two entries; moto has pages of 1000.
    assert len(store.requests) + clouds.requests - calls <= 60


def test_hugging_face_is_listed_and_read(clouds: Cloud, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub import HfFileSystem, constants

    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', False)
    set_address(clouds.url, monkeypatch.setattr)
    forget_sessions()
    make = partial(HfFileSystem, endpoint=clouds.url, token=False, skip_instance_cache=True)
    monkeypatch.setattr(HubClient, 'file_system', lambda self: make())
    for name in ('mds/a', 'mds/b/1', 'other'):
        clouds.put('datasets', f'org/name/{name}', name.encode())
    folder = 'hf://datasets/org/name'
    sizes = {found.key: found.size for found in object_store.list_objects(f'{folder}/mds')}
    assert sizes == {'org/name/mds/a': 5, 'org/name/mds/b/1': 7}
    assert len(object_store.list_objects(folder)) == 3
    assert [found.tag for found in object_store.list_objects(f'{folder}/mds/a')] == ['oid5']
    folders, objects = object_store.list_folder(f'{folder}/mds')
    assert folders == ['org/name/mds/b'] and [found.key for found in objects] == ['org/name/mds/a']
    clouds.put('datasets', 'org/name/mds/c', b'')
    assert [found.key for found in object_store.list_folder(f'{folder}/mds')[1]] == ['org/name/mds/a', 'org/name/mds/c']
    assert object_store.read(f'{folder}/mds/b/1') == b'mds/b/1'
    object_store.download(f'{folder}/mds/a', tmp_path / 'a', size=5)
    assert (tmp_path / 'a').read_bytes() == b'mds/a'
    with pytest.raises(UserError, match='there is no such bucket or object'):
        object_store.read(f'{folder}/mds/none')
    assert object_store.list_folder(f'{folder}/none') == ([], [])
    assert object_store.read(f'{folder}/mds/b/1', span=(1, 4)) == b'ds/'
    for content in (b'other', b'longer'):  # the client lists again
        clouds.put('datasets', 'org/name/other', content)
        object_store.download(f'{folder}/other', tmp_path / 'a')
        assert (tmp_path / 'a').read_bytes() == content and object_store.head(f'{folder}/other').size == len(content)
    with pytest.raises(UserError, match='^hf://datasets/org/name/other: deleting is not supported; use another store'):
        object_store.delete(f'{folder}/other')
    forget_sessions()


@pytest.mark.parametrize(('status', 'tries'), [(403, 1), (500, 2)])
@pytest.mark.parametrize('scheme', ['gs', 'az'])
def test_errors_of_other_clouds_are_retried_as_of_s3(clouds: Cloud, scheme: str, status: int, tries: int) -> None:
    url, policy = f'{URLS[scheme]}/a', RetryPolicy(tries=2)
    tasks: list[Callable[[], object]] = [
        lambda: object_store.read(url, retry=policy),
        lambda: object_store.list_objects(url, retry=policy),
        lambda: object_store.write(url, b'x', retry=policy),
    ]
    clouds.status = status
    try:
        for task in tasks:
            clouds.requests = 0
            with pytest.raises(UserError if tries == 1 else GaveUp, match=f'^{url}: '):
                task()
            assert clouds.requests == tries
    finally:
        clouds.status = None


@pytest.mark.parametrize('scheme', SCHEMES)
def test_conditional_writes_of_every_cloud(clouds: Cloud, tmp_path: Path, scheme: str) -> None:
    url, path = f'{URLS[scheme]}/lock', tmp_path / 'content'
    path.write_bytes(b'three')
    first = object_store.write(url, b'one', if_absent=True)
    conditions: tuple[dict[str, Any], ...] = ({'if_absent': True}, {'if_tag': 'f' * 32})
    for content, condition in itertools.product((b'two', path), conditions):
        with pytest.raises(PreconditionFailed):
            object_store.write(url, content, **condition)
    second = object_store.write(url, path, if_tag=first.tag)
    assert object_store.read(url) == b'three' and object_store.head(url) == second != first
    object_store.delete(url)
    with pytest.raises(PreconditionFailed):
        object_store.write(url, b'four', if_tag=second.tag)


@pytest.mark.parametrize('scheme', S3_AND_OTHERS)
def test_conditional_write_whose_answer_was_lost_succeeds(clouds, store, tmp_path, scheme, monkeypatch):
    monkeypatch.setattr(object_store, 'COMPARED_BYTES', 2)  # the content is compared in parts
    url, path, policy = f'{URLS[scheme]}/lock', tmp_path / 'content', RetryPolicy(tries=2)
    path.write_bytes(b'three')
    tag = None
    for content, fault in ((b'one', 'done 500'), (b'', 'done reset'), (path, 'done 500')):
        lose_answers(clouds, store, fault)
        stored = object_store.write(url, content, if_absent=tag is None, if_tag=tag, retry=policy)
        assert object_store.head(url) == stored
        assert object_store.read(url) == (content if isinstance(content, bytes) else b'three')
        tag = stored.tag


@pytest.mark.parametrize('theirs', [b'hers', None], ids=['same_size', 'deleted'])
@pytest.mark.parametrize('scheme', S3_AND_OTHERS)
def test_conflict_after_a_lost_answer_is_an_error(clouds, store, scheme, theirs, monkeypatch):
    """Another process overwrites or deletes the object between the two tries."""
    url = f'{URLS[scheme]}/lock'
    tag = object_store.write(url, b'old').tag
    lose_answers(clouds, store, 'done 500')

    def other_process(*_: object) -> None:
        object_store.delete(url) if theirs is None else object_store.write(url, theirs)

    monkeypatch.setattr(RetryPolicy, '_pause', other_process)
    with pytest.raises(PreconditionFailed):
        object_store.write(url, b'mine', if_tag=tag)


@pytest.mark.parametrize('scheme', S3_AND_OTHERS)
def test_same_content_of_another_process_is_a_conflict(clouds: Cloud, store: Store, scheme: str) -> None:
    url = f'{URLS[scheme]}/lock'
    tag = object_store.write(url, b'old').tag
    object_store.write(url, b'mine')
    with pytest.raises(PreconditionFailed):
        object_store.write(url, b'mine', if_absent=True)
    with pytest.raises(PreconditionFailed):
        object_store.write(url, b'mine', if_tag=tag)
    if scheme == 's3':  # status 409 says that the write was not carried out: no answer was lost
        store.fail('PUT lock', 409, times=1)
        with pytest.raises(PreconditionFailed):
            object_store.write(url, b'mine', if_absent=True)


def lose_answers(clouds: Cloud, store: Store, fault: str) -> None:
    """Carry out the next write to any cloud, and answer it with an error."""
    store.faults.clear()
    store.fail('PUT lock', fault, times=1)
    clouds.lost_answers = 1


@pytest.mark.parametrize('scheme', SCHEMES)
def test_missing_object_may_be_deleted(clouds: Cloud, store: Store, scheme: str) -> None:
    lock, urls = f'{URLS[scheme]}/lock', [f'{URLS[scheme]}/{number}' for number in range(20)]
    for url in (lock, *urls[::2]):
        object_store.write(url, b'content')
    store.fail('DELETE lock', 'done 500', times=1)
    clouds.lost_answers = 1
    object_store.delete(lock)  # the answer is lost, and the second try finds nothing
    object_store.delete_all(urls)
    assert not object_store.list_objects(URLS[scheme])
    object_store.delete(urls[0], missing_ok=True)
    if scheme == 's3':
        object_store.delete(urls[0])
    else:
        with pytest.raises(UserError, match='there is no such bucket or object'):
            object_store.delete(urls[0])
    with pytest.raises(UserError, match='there is no such bucket or object'):
        object_store.delete(urls[0].replace('bucket', 'missing'), missing_ok=True)


def test_delete_all_retries_and_raises_the_first_refusal(store: Store) -> None:
    bucket = store.bucket('bucket', **{str(number): b'x' for number in range(20)})
    urls = [f'{bucket}/{number}' for number in range(20)]
    store.fail('DELETE /bucket/3', 500, times=2)
    store.fail('DELETE /bucket/4', 'reset', times=2)
    object_store.delete_all(urls[:10])
    assert len(store.objects('bucket')) == 10
    store.fail('DELETE /bucket/15', 403)
    with pytest.raises(UserError, match=f'^{urls[15]}: the store refuses access'):
        object_store.delete_all(urls)
    store.requests.clear()
    time.sleep(0.1)
    assert not store.requests  # no request is sent after the return


def test_clouds_without_conditional_writes_raise_an_error(clouds: Cloud, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('GCS_KEY', 'key')
    gone, policy = locate('gs://bucket/lock'), RetryPolicy(timeout_seconds=7.0)
    assert isinstance(transfers.acquire_client(gone, policy), GoogleClient), 'the secret is missing'
    monkeypatch.setenv('GCS_SECRET', 'secret')
    for url in ('gs://bucket/lock', 'hf://datasets/org/name/lock'):
        with pytest.raises(UserError, match='conditional write|uploading'):
            object_store.write(url, b'one', if_absent=True)
    assert transfers.acquire_client(gone, object_store.DEFAULT).google  # type: ignore[reportAttributeAccessIssue]


def test_azure_takes_account_and_key_from_the_url_and_from_both_names_of_variables(monkeypatch: pytest.MonkeyPatch):
    for name in ('ACCOUNT_NAME', 'ACCOUNT_ACCESS_KEY', 'STORAGE_ACCOUNT_NAME', 'STORAGE_ACCOUNT_KEY'):
        monkeypatch.delenv(f'AZURE_{name}', raising=False)
    monkeypatch.setenv('AZURE_STORAGE_ACCOUNT_KEY', 'a2V5')
    with pytest.raises(UserError, match='^az://: the account is missing; set AZURE_ACCOUNT_NAME, or use a URL such as'):
        AzureClient('az', '', 5.0)
    found = []
    for name in ('AZURE_STORAGE_ACCOUNT_NAME', 'AZURE_ACCOUNT_NAME'):
        monkeypatch.setenv(name, name.lower().replace('_', ''))
        found += [AzureClient('az', account, 5.0).client.url for account in ('', 'me')]
    names = ('azurestorageaccountname', 'me', 'azureaccountname', 'azureaccountname')
    assert found == [f'https://{name}.blob.core.windows.net/' for name in names]
    assert AzureClient('az', 'me', 5.0).client.credential.account_key == 'a2V5'


def test_forked_process_creates_its_own_clients(clouds: Cloud) -> None:
    """DataLoader workers are forked from a process that has already used a client to fetch the index."""
    for url in URLS.values():
        object_store.write(f'{url}/a', b'content')
        assert object_store.read(f'{url}/a') == b'content'
    kept = {id(client) for clients in transfers.idle.values() for client in clients}

    def read() -> None:
        assert all(object_store.read(f'{url}/a') == b'content' for url in URLS.values())
        created = [client for key, clients in transfers.idle.items() if key[0] == os.getpid() for client in clients]
        assert len(created) == len(URLS) and not kept & set(map(id, created))

    assert Forked(read).wait() == 0
    assert object_store.read('s3://bucket/set/a') == b'content'


def test_large_file_is_uploaded_in_parts(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(s3_client, 'PART_BYTES', 6 * 2**20)
    path = tmp_path / 'large'
    path.write_bytes(os.urandom(7 * 2**20))
    object_store.write(store.bucket('bucket') + '/large', path)
    assert any('uploadId' in request for request in store.requests)
    assert object_store.read('s3://bucket/large') == path.read_bytes()


@pytest.mark.parametrize('scheme', S3_AND_OTHERS)
def test_versions_are_not_mixed(clouds: Cloud, tmp_path: Path, scheme: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(object_store, 'RANGED_BYTES', 100)
    monkeypatch.setattr(transfers, 'RANGE_BYTES', 200)
    url, old, new = f'{URLS[scheme]}/large', os.urandom(2000), os.urandom(2000)
    object_store.write(url, old)
    object_store.download(url, tmp_path / 'copy')
    assert (tmp_path / 'copy').read_bytes() == old
    started: list[int] = []
    read_watched = transfers.read_watched

    def overwrite_once(*args: Any, **settings: Any) -> None:
        started.append(1)
        if len(started) == 5:
            object_store.write(url, new)
        read_watched(*args, **settings)

    monkeypatch.setattr(transfers, 'read_watched', overwrite_once)
    object_store.download(url, tmp_path / 'copy', size=len(new))
    assert (tmp_path / 'copy').read_bytes() == new


def test_requests_to_requester_pays_buckets_name_the_payer(store: Store, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv('MOSAICML_STREAMING_AWS_REQUESTER_PAYS', 'other, bucket')
    url = store.bucket('bucket', a=b'x')
    object_store.list_objects(url)
    object_store.read(f'{url}/a')
    object_store.head(f'{url}/a')
    assert store.payers[-3:] == ['requester'] * 3
    with RemoteFolder(url).files('a') as folder:
        assert (folder / 'a').read_bytes() == b'x'


def test_credentials_come_from_a_profile(store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    url = store.bucket('bucket', a=b'x')
    for name in ('AWS_ACCESS_KEY_ID', 'AWS_SECRET_ACCESS_KEY'):
        monkeypatch.delenv(name)
    (tmp_path / 'credentials').write_text('[mine]\naws_access_key_id = FROMFILE\naws_secret_access_key = y\n')
    monkeypatch.setenv('AWS_SHARED_CREDENTIALS_FILE', str(tmp_path / 'credentials'))
    monkeypatch.setenv('AWS_PROFILE', 'mine')
    object_store.read(f'{url}/a')
    assert 'Credential=FROMFILE/' in store.authorizations[-1]


@pytest.mark.parametrize(
    ('url', 'message'),
    [
        ('sftp://host/a', 'sftp:// is not supported; use s3://, gs://, .* or a mounted folder'),
        ('s3:///a', 'the bucket is missing'),
        ('azure://me.blob.core.windows.net', 'the bucket is missing'),
        ('s3://bucket/a', 'S3_ENDPOINT_URL: minio:9000 is not a URL; set it to https://minio:9000'),
    ],
)
def test_unsupported_urls_raise_an_error(monkeypatch: pytest.MonkeyPatch, url: str, message: str) -> None:
    monkeypatch.setenv('S3_ENDPOINT_URL', 'minio:9000')
    with pytest.raises(UserError, match=message):
        object_store.read(url)


def test_mount_is_read_like_a_store(tmp_path: Path) -> None:
    (tmp_path / 'a').write_bytes(b'content')
    assert object_store.read(str(tmp_path / 'a'), span=(2, 4)) == b'nt'
    RemoteFolder(str(tmp_path)).refresh('a', tmp_path / 'copy' / 'a')
    assert (tmp_path / 'copy' / 'a').read_bytes() == b'content'
    with pytest.raises(UserError, match=f'{tmp_path}/none: there is no such file'):
        object_store.read(f'{tmp_path}/none')


def test_read_of_a_hung_mount_times_out(tmp_path: Path) -> None:
    fifo = tmp_path / 'fifo'
    os.mkfifo(fifo)  # opening it for reading blocks until a process opens it for writing
    with pytest.raises(TimeoutError, match=r'stalled after 0 bytes \(timeout 0.2 s\)'):
        object_store.read_once(str(fifo), RetryPolicy(timeout_seconds=0.2))
    os.close(os.open(fifo, os.O_RDWR))


def test_import_does_not_import_the_clients_packages() -> None:
    clouds = {'boto3', 'botocore', 'google.cloud', 'azure', 'fsspec', 'huggingface_hub', 'streaming', 'torch'}
    assert not modules_of('import diffusion.storage.object_store') & clouds
