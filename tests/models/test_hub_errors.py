"""Errors of loading weights: which are the user's to correct, and which may pass."""

import errno
import os
import shutil

import pytest
import requests
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError
from transformers import CLIPTextModel, CLIPTokenizer

from diffusion.errors import UserError
from diffusion.models import hub_errors
from diffusion.models.pretrained import load_pretrained

PARTS = [AutoencoderKL, CLIPTextModel, CLIPTokenizer]


def answered(status: int) -> Exception:
    """What huggingface_hub raises for an answer of the Hub."""
    response = requests.Response()
    response.status_code = status
    try:
        try:
            raise HfHubHTTPError(f'{status} Error for url: https://huggingface.co/a/b', response=response)
        except HfHubHTTPError as error:
            raise LocalEntryNotFoundError('cannot find the requested files in the local cache') from error
    except LocalEntryNotFoundError as error:
        return error


def unanswered(cause: Exception) -> Exception:
    error = LocalEntryNotFoundError('cannot find the requested files in the local cache')
    error.__cause__ = cause
    return error


@pytest.mark.parametrize('part', PARTS)
@pytest.mark.parametrize(
    ('reason', 'expected', 'told'),
    [
        (answered(404), UserError, '404 Error for url'),
        (answered(401), UserError, '401 Error for url'),
        (answered(403), UserError, '403 Error for url'),
        (answered(429), OSError, '429 Error for url'),
        (answered(408), OSError, '408 Error for url'),
        (answered(500), OSError, '500 Error for url'),
        (answered(503), OSError, '503 Error for url'),
        (unanswered(requests.ConnectionError('Connection refused')), OSError, 'Connection refused'),
        (unanswered(requests.ReadTimeout('Read timed out')), OSError, 'Read timed out'),
        (ConnectionResetError(errno.ECONNRESET, 'Connection reset by peer'), OSError, 'Connection reset by peer'),
    ],
    ids=lambda value: str(value)[:40] if isinstance(value, str) else '',
)
def test_only_what_fails_again_is_the_users_mistake(monkeypatch, part, reason, expected, told):
    def fail(*_: object, **__: object) -> None:
        raise reason

    def hidden(*_: object, **__: object) -> None:  # as transformers does for a tokenizer
        raise TypeError('expected str, bytes or os.PathLike object, not NoneType')

    monkeypatch.setattr(hub_errors.constants, 'HF_HUB_OFFLINE', False)
    monkeypatch.setattr(hub_errors, 'hf_hub_download', fail)
    monkeypatch.setattr(part, 'from_pretrained', hidden)
    with pytest.raises(expected, match=f'^a/b/part: {part.__name__} at revision c could not be .*{told}') as raised:
        load_pretrained(part, 'a/b', subfolder='part', revision='c')
    assert isinstance(raised.value, UserError) == (expected is UserError)


@pytest.mark.parametrize('part', PARTS)
def test_offline_without_a_cache_is_the_users_mistake(part):
    with pytest.raises(UserError, match='could not be loaded from the Hugging Face Hub'):
        load_pretrained(part, 'nobody/nothing', subfolder='part')


@pytest.mark.parametrize('part', PARTS)
@pytest.mark.parametrize('content', [{}, {'config.json': b'{'}], ids=['empty', 'broken'])
def test_a_folder_of_something_else_is_the_users_mistake(tmp_path, part, content):
    for name, data in content.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match='could not be loaded from this folder'):
        load_pretrained(part, str(tmp_path), subfolder='')


def test_weights_that_are_cut_short_are_the_users_mistake(small_vae, tmp_path):
    shutil.copytree(small_vae, tmp_path / 'vae')
    os.truncate(next((tmp_path / 'vae').glob('*.safetensors')), 1000)
    with pytest.raises(UserError, match='/vae: AutoencoderKL could not be loaded from this folder'):
        load_pretrained(AutoencoderKL, str(tmp_path), subfolder='vae')


@pytest.mark.parametrize('number', [errno.EIO, errno.ESTALE])
def test_a_disk_that_cannot_be_read_is_no_mistake(small_vae, monkeypatch, number):
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(AutoencoderKL, 'from_pretrained', fail)
    with pytest.raises(OSError, match=os.strerror(number)) as raised:
        load_pretrained(AutoencoderKL, str(small_vae), subfolder='')
    assert not isinstance(raised.value, UserError)


@pytest.mark.parametrize('bug', [TypeError('no'), ValueError('not enough values to unpack')])
def test_a_bug_stays_what_it_is(small_vae, monkeypatch, bug):
    def fail(*_: object, **__: object) -> None:
        raise bug

    monkeypatch.setattr(AutoencoderKL, 'from_pretrained', fail)
    with pytest.raises(type(bug)) as raised:
        load_pretrained(AutoencoderKL, str(small_vae), subfolder='')
    assert raised.value is bug
