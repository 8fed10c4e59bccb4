"""Upload of exports to a Hub on localhost: what arrives, who may write where, and what a fault leaves."""

import json
from pathlib import Path

import pytest
from hub_server import TOKEN, Repository, logged_in

from diffusion.errors import ExternalError, UserError
from diffusion.storage import retry
from diffusion.storage.retry import RetryPolicy
from diffusion.tasks import hub_upload
from diffusion.tasks.hub_upload import check_access, upload

NAME, CARD = 'someone/painter', '---\nlibrary_name: diffusers\n---\n\n# painter\n'
FILES = {'unet/diffusion_pytorch_model.safetensors': b'weights' * 100, 'model_index.json': b'{}', 'README.md': b'local'}


@pytest.fixture
def hub(tmp_path, monkeypatch):
    monkeypatch.setattr(retry, 'LONGEST_PAUSE_SECONDS', 0.01)
    monkeypatch.setattr(hub_upload, 'POLICY', RetryPolicy(tries=3, timeout_seconds=2.0))
    with logged_in(tmp_path, monkeypatch) as server:
        yield server


@pytest.fixture
def exported(tmp_path) -> Path:
    for name, content in FILES.items():
        path = tmp_path / 'export' / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(content)
    return tmp_path / 'export'


@pytest.mark.parametrize('public', [False, True])
def test_folder_or_file_arrives_with_its_card_in_one_commit(hub, exported, public):
    check_access(NAME, public=public)
    assert upload(exported, NAME, CARD, public=public) == f'{hub.url}/{NAME}'
    assert hub.uploaded[NAME].files == FILES | {'README.md': CARD.encode()}
    assert hub.uploaded[NAME].private != public
    assert sum('/commit/' in request for request in hub.requests) == 1
    (exported / 'model_index.json').write_bytes(b'{"new": 1}')
    check_access(NAME, public=public)
    upload(exported, NAME, CARD, public=public)
    assert hub.uploaded[NAME].files['model_index.json'] == b'{"new": 1}', 'a newer export replaces the files'
    upload(exported / 'model_index.json', 'someone/file', CARD, public=public)
    assert hub.uploaded['someone/file'].files == {'model_index.json': b'{"new": 1}', 'README.md': CARD.encode()}


def test_outage_is_retried_and_then_no_mistake_of_the_user(hub, exported):
    hub.faults = [503, 500]  # of model_info, whose third try succeeds
    upload(exported, NAME, CARD, public=False)
    assert hub.uploaded[NAME].files == FILES | {'README.md': CARD.encode()}
    hub.always = 503
    with pytest.raises(ExternalError, match=r'hf://someone/painter: cannot be written, tried 3 times') as refused:
        upload(exported, NAME, CARD, public=False)
    assert f'upload it later with `hf upload {NAME} {exported}`' in str(refused.value)
    assert TOKEN not in str(refused.value)
    with pytest.raises(ExternalError, match=r'--push: hf://someone/painter: cannot be written, tried 3 times'):
        check_access(NAME, public=False)


def test_failed_upload_of_a_large_file_is_retried(hub, exported):
    plain = hub.take

    def fail_once(request, path, body):
        if path.startswith('/lfs/') and failures:
            return hub.send(request, failures.pop(), b'')
        return plain(request, path, body)

    failures = [400]  # huggingface_hub itself retries 500 and above, with pauses of seconds
    hub.take = fail_once
    with pytest.raises(UserError, match=r'the store refuses \(BadRequestError: .*The export is complete'):
        upload(exported, NAME, CARD, public=False)
    refused = {'objects': [{'oid': 'a', 'size': 1, 'error': {'code': 403, 'message': 'storage limit reached'}}]}
    hub.take = lambda request, path, body: (
        hub.send(request, 200, json.dumps(refused).encode()) if '/lfs/' in path else plain(request, path, body)
    )
    with pytest.raises(UserError, match=r'--push: LFS batch API .*storage limit reached.*The export is complete'):
        upload(exported, NAME, CARD, public=False)
    hub.take = fail_once
    failures = [429]
    upload(exported, NAME, CARD, public=False)
    assert hub.uploaded[NAME].files == FILES | {'README.md': CARD.encode()}


def test_refusals_name_the_way_out(hub, exported, monkeypatch):
    with pytest.raises(UserError, match=r'someone may not write to other; use one of someone, team, or another login'):
        check_access('other/painter', public=False)
    with pytest.raises(UserError, match=r'--push: hf://team/painter: the store refuses access \(403\).*is complete'):
        upload(exported, 'team/painter', CARD, public=False)
    hub.uploaded[NAME] = Repository(private=False, files=dict.fromkeys(('.gitattributes', *'dabc'), b''))
    with pytest.raises(UserError, match=r'someone/painter exists and is public; add --public, or change it at'):
        check_access(NAME, public=False)
    check_access(NAME, public=True)
    with pytest.raises(UserError, match=r'has other files \(a, b, c\), which this export would not replace'):
        upload(exported, NAME, CARD, public=True)
    assert set(hub.uploaded[NAME].files) == {'.gitattributes', *'dabc'}
    hub.uploaded[NAME].private = True
    with pytest.raises(UserError, match=r'exists and is private; remove --public, or change it at'):
        check_access(NAME, public=True)
    monkeypatch.setenv('HF_TOKEN', 'hf_of_nobody')
    with pytest.raises(UserError, match=r'--push: .*401.*HF_TOKEN'):
        check_access(NAME, public=False)
    monkeypatch.delenv('HF_TOKEN')
    with pytest.raises(UserError, match=r'not logged in to the Hugging Face Hub; set HF_TOKEN, or log in with'):
        check_access(NAME, public=False)
