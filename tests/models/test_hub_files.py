"""Files from the Hugging Face Hub: fetched once per node, under one retry policy, and never requested if cached."""

import logging
import shutil
import threading
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from hub_server import COMMIT, serving
from huggingface_hub import constants
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from diffusion.errors import ExternalError, UserError
from diffusion.models import hub_files
from diffusion.models.hub_files import check_weights, fetch_file, missing_size
from diffusion.models.pretrained import clip_tokenizer, load_pretrained, load_vae

PARTS = {'vae': AutoencoderKL, 'text_encoder': CLIPTextModel, 'tokenizer': CLIPTokenizer}


@pytest.fixture(scope='module')
def repository(small_vae, tmp_path_factory):
    """Folder of a pipeline's VAE, text encoder and tokenizer, with weight files that nobody needs."""
    folder = tmp_path_factory.mktemp('repository')
    shutil.copytree(small_vae, folder / 'vae')
    (folder / 'vae/diffusion_pytorch_model.fp16.safetensors').write_bytes(b'not needed')
    config = CLIPTextConfig(hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=1)
    CLIPTextModel(config).save_pretrained(folder / 'text_encoder', max_shard_size='2MB')
    clip_tokenizer(max_length=16).save_pretrained(folder / 'tokenizer')
    (folder / 'unet').mkdir()
    (folder / 'unet/diffusion_pytorch_model.safetensors').write_bytes(b'not needed')
    return folder


@pytest.fixture
def hub(repository, tmp_path, monkeypatch):
    """Hub that serves the repository, used by huggingface_hub with an empty cache, and retries without pauses."""
    with serving(repository, tmp_path, monkeypatch) as server:
        yield server


def load(name: str, **settings: Any):
    return load_pretrained(PARTS[name], 'someone/model', subfolder=name, **{'revision': COMMIT, **settings})


@pytest.mark.parametrize('name', PARTS)
def test_part_is_fetched_once_and_then_loaded_without_a_request(hub, repository, name):
    loaded = load(name)
    fetched = [request for request in hub.requests if request.startswith('GET') and '/resolve/' in request]
    assert {request.rpartition('/')[2] for request in fetched} <= {path.name for path in (repository / name).iterdir()}
    assert not any('fp16' in request or 'unet' in request for request in hub.requests)
    assert name != 'text_encoder' or fetched[-1].endswith('.index.json'), 'shards, which it lists, come first'
    listings = [request for request in hub.requests if '/api/' in request]
    assert listings == [f'GET /api/models/someone/model/revision/{COMMIT}']
    before = len(hub.requests)
    hub.always = 503
    again = load(name)
    assert len(hub.requests) == before, 'everything is in the cache'
    if isinstance(loaded, torch.nn.Module):
        expected = PARTS[name].from_pretrained(repository / name).state_dict()
        assert all(torch.equal(value, expected[key]) for key, value in again.state_dict().items())
        assert check_weights(PARTS[name], 'someone/model', subfolder=name, revision=COMMIT) == 0
    else:
        assert again('a cat').input_ids == clip_tokenizer(max_length=16)('a cat').input_ids
        assert again.model_max_length == 16


@pytest.mark.parametrize(
    ('fault', 'reason'),
    [
        ('no-repository', '401: there is no such repository, or it is private: check the name, and HF_TOKEN'),
        ('no-revision', f'404: there is no revision {COMMIT}'),
        ('gated', 'access is restricted: accept the terms at .*/someone/model, and set HF_TOKEN'),
        (403, 'the store refuses access .403.'),
        (404, '404'),
    ],
)
def test_refusal_is_a_user_error_without_a_retry(hub, fault, reason):
    hub.always = fault
    message = f'^someone/model/vae: AutoencoderKL at revision {COMMIT} could not be .*{reason}.*model.pretrained='
    with pytest.raises(UserError, match=message):
        load('vae')
    assert len(hub.requests) == 1


@pytest.mark.parametrize('fault', [429, 503, 'hang'])
def test_hub_that_does_not_answer_is_an_external_error_after_all_tries(hub, fault, caplog):
    caplog.set_level(logging.INFO)
    hub.always = fault
    text = 'timed out' if fault == 'hang' else str(fault)
    with pytest.raises(
        ExternalError, match=f'{COMMIT} could not be .*tried 3 times .*{text}.*HF_HUB_OFFLINE=1'
    ) as error:
        load('vae')
    assert not isinstance(error.value, UserError)
    assert len(str(error.value)) < 900
    assert len(hub.requests) == 3
    assert [each.name for each in caplog.records if each.name.startswith('diffusion')] == [
        'diffusion.storage.retry'
    ] * 2


def test_faults_that_pass_and_cut_bodies_are_retried(hub, repository, monkeypatch):
    monkeypatch.setattr('huggingface_hub.utils._http.time.sleep', lambda _: None)
    monkeypatch.setattr('huggingface_hub.file_download.time.sleep', lambda _: None)
    # The listing three times, HEAD and GET of config.json, HEAD and GET of the weights.
    hub.faults = [503, 429, '', '', 'cut', '', '', 'cut']
    weights = load('vae').state_dict()
    expected = AutoencoderKL.from_pretrained(repository / 'vae').state_dict()
    assert all(torch.equal(value, expected[key]) for key, value in weights.items())
    assert hub.faults == []


def test_two_processes_of_a_node_download_once(hub):
    threads = [threading.Thread(target=load, args=('vae',)) for _ in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    bodies = [request for request in hub.requests if request.startswith('GET') and '/resolve/' in request]
    assert len(bodies) == len(set(bodies)) == 2


def test_branch_is_resolved_to_a_commit_and_read_from_the_cache_if_the_hub_does_not_answer(hub, caplog):
    load('vae', revision='v2')
    before, refs = len(hub.requests), Path(constants.HF_HUB_CACHE, 'models--someone--model/refs')
    written = (refs / 'v2').stat().st_ino
    load('vae', revision='v2')
    assert hub.requests[before:] == ['GET /api/models/someone/model/revision/v2'], 'it may have moved'
    assert (refs / 'v2').stat().st_ino == written
    load('vae')
    assert len(hub.requests) == before + 1
    hub.always = 503
    load('vae', revision='v2')
    assert 'someone/model/vae: AutoencoderKL at revision v2: the Hub does not answer' in caplog.text
    hub.always = None
    shutil.rmtree(refs)
    refs.touch()  # the cache cannot be written
    load('vae', revision='v2')
    assert f"File exists: '{refs}'; without a response of the Hub, this branch will not be found" in caplog.text


def test_full_disk_of_the_cache_is_neither_retried_nor_a_user_error(hub, monkeypatch):
    download = Mock(side_effect=RuntimeError('Internal error: No space left on device (os error 28)'))
    monkeypatch.setattr(hub_files, 'hf_hub_download', download)
    with pytest.raises(OSError, match=r'Errno 28\] No space left on device'):
        load('vae')
    assert download.call_count == 1


def test_half_precision_alone_on_the_hub_is_refused_with_the_way_out(repository, tmp_path, monkeypatch):
    folder = shutil.copytree(repository, tmp_path / 'repository')
    (folder / 'vae/diffusion_pytorch_model.safetensors').unlink()
    message = r'only has half-precision weights \(vae/diffusion_pytorch_model.fp16.safetensors\), .* a local folder'
    with serving(folder, tmp_path, monkeypatch):
        with pytest.raises(UserError, match=message):
            load('vae')
        with pytest.raises(UserError, match=message):
            check_weights(AutoencoderKL, 'someone/model', subfolder='vae', revision=COMMIT)
        (folder / 'vae/diffusion_pytorch_model.fp16.safetensors').unlink()
        with pytest.raises(UserError, match='has no weights in the format safetensors'):
            load('vae')


def test_files_are_missing_until_they_are_fetched_once(hub, repository):
    size = check_weights(CLIPTextModel, 'someone/model', subfolder='text_encoder', revision=COMMIT)
    assert size == sum(each.stat().st_size for each in (repository / 'text_encoder').glob('*-of-*.safetensors'))
    name = 'vae/diffusion_pytorch_model.fp16.safetensors'
    for size in (len(b'not needed'), 0):
        assert missing_size('someone/model', name, revision=COMMIT) == size
        assert fetch_file('someone/model', name, revision=COMMIT).read_bytes() == b'not needed'
    assert sum(each.startswith('GET') and each.endswith(name) for each in hub.requests) == 1
    with pytest.raises(UserError, match='404: there is no such file in the repository, see .*/someone/model/tree/main'):
        fetch_file('someone/model', 'other.pt', revision=COMMIT)
    with pytest.raises(UserError, match='someone/model.*: has no unet/vocabulary'):
        load_pretrained(CLIPTokenizer, 'someone/model', subfolder='unet', revision=COMMIT)


def test_offline_mode_uses_the_cache_and_says_what_it_lacks(hub, monkeypatch):
    load('vae')
    place: dict[str, Any] = {'subfolder': 'text_encoder', 'revision': COMMIT}
    check_weights(CLIPTextModel, 'someone/model', **place)
    before = len(hub.requests)
    monkeypatch.setattr(constants, 'HF_HUB_OFFLINE', True)
    load('vae')
    for request in (load_pretrained, check_weights):
        with pytest.raises(UserError, match=r'could not be loaded .*HF_HUB_OFFLINE is set, and the cache .* lacks it'):
            request(CLIPTextModel, 'someone/model', **place)
    assert len(hub.requests) == before


@pytest.mark.parametrize('layout', ['pipeline', 'vae alone'])
def test_vae_is_found_in_the_repository_of_a_pipeline_and_in_its_own(
    repository, small_vae, tmp_path, monkeypatch, layout
):
    with serving(repository if layout == 'pipeline' else small_vae, tmp_path, monkeypatch):
        loaded = load_vae('someone/model', revision=COMMIT)
    expected = AutoencoderKL.from_pretrained(small_vae, low_cpu_mem_usage=False).state_dict()
    assert all(torch.equal(expected[name], tensor) for name, tensor in loaded.state_dict().items())
