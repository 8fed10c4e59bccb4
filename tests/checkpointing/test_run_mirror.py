"""Copy of a run's small files to an object store."""

import pytest
from object_store import Store

from diffusion.checkpointing.bucket_storage import _as_storage_fault
from diffusion.checkpointing.run_mirror import MIRROR_RETRY, RunMirror
from diffusion.errors import UserError
from diffusion.storage import retry


@pytest.fixture
def mirror(store: Store, tmp_path) -> RunMirror:
    for number in range(5):
        (tmp_path / 'images').mkdir(exist_ok=True)
        (tmp_path / 'images' / f'{number}.png').write_bytes(b'image')
    return RunMirror(tmp_path, store.bucket('bucket') + '/run')


def test_checkpoint_that_is_being_removed_is_not_uploaded(store, mirror):
    for name in ('ba4', '.ba6.unfinished', 'ba2.unfinished-0123'):
        (mirror.folder / name).mkdir()
        (mirror.folder / name / 'state.pt').write_bytes(b'many bytes')
    mirror.push()
    assert set(store.objects('bucket')) == {f'run/images/{number}.png' for number in range(5)}


def test_store_that_does_not_answer_is_asked_for_one_file_only(store, mirror, monkeypatch):
    monkeypatch.setattr(retry, 'FIRST_PAUSE_SECONDS', 0.01)
    store.fail('PUT', 500)
    with pytest.raises(retry.GaveUp):
        mirror.push(MIRROR_RETRY)
    assert len([request for request in store.requests if request.startswith('PUT /bucket/run')]) == MIRROR_RETRY.tries


class UnauthorizedSSOTokenError(Exception):
    """Error of botocore, which has no HTTP status."""


def test_credentials_that_expire_are_a_fault_of_storage_and_not_a_mistake():
    def ask() -> None:
        raise UnauthorizedSSOTokenError('the token has expired')

    with pytest.raises(UserError, match='no credentials'):
        MIRROR_RETRY.run(ask, 's3://bucket/run')
    with pytest.raises(OSError, match='no credentials'), _as_storage_fault():
        MIRROR_RETRY.run(ask, 's3://bucket/run')
    with pytest.raises(UserError, match='another run'), _as_storage_fault():
        raise UserError('it belongs to another run')
