"""Errors of loading weights: mistakes of the user against transient failures."""

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
    """Return the error that huggingface_hub raises for an HTTP status."""
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
    """Return the error that huggingface_hub raises if no connection is possible."""
    error = LocalEntryNotFoundError('cannot find the requested files in the local cache')
    error.__cause__ = cause
    return error


@pytest.mark.parametrize('part', PARTS)
@pytest.mark.parametrize(
    ('reason', 'expected', 'message'),
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
def test_only_permanent_failures_are_user_errors(monkeypatch, part, reason, expected, message):
    def fail(*_: object, **__: object) -> None:
        raise reason

    def fail_without_reason(*_: object, **__: object) -> None:  # as transformers does for a tokenizer
        raise TypeError('expected str, bytes or os.PathLike object, not NoneType')

    monkeypatch.setattr(hub_errors.constants, 'HF_HUB_OFFLINE', False)
    monkeypatch.setattr(hub_errors, 'hf_hub_download', fail)
    monkeypatch.setattr(part, 'from_pretrained', fail_without_reason)
    with pytest.raises(expected, match=f'^a/b/part: {part.__name__} at revision c could not be .*{message}') as raised:
        load_pretrained(part, 'a/b', subfolder='part', revision='c')
    assert isinstance(raised.value, UserError) == (expected is UserError)


@pytest.mark.parametrize('part', PARTS)
def test_offline_mode_without_a_cached_file_is_a_user_error(part):
    with pytest.raises(UserError, match='could not be loaded from the Hugging Face Hub'):
        load_pretrained(part, 'nobody/nothing', subfolder='part')


@pytest.mark.parametrize('part', PARTS)
@pytest.mark.parametrize('content', [{}, {'config.json': b'{'}], ids=['empty', 'broken'])
def test_folder_without_the_part_is_a_user_error(tmp_path, part, content):
    for name, data in content.items():
        (tmp_path / name).write_bytes(data)
    with pytest.raises(UserError, match='could not be loaded from this folder'):
        load_pretrained(part, str(tmp_path), subfolder='')


def test_truncated_weights_are_a_user_error(small_vae, tmp_path):
    shutil.copytree(small_vae, tmp_path / 'vae')
    os.truncate(next((tmp_path / 'vae').glob('*.safetensors')), 1000)
    with pytest.raises(UserError, match='/vae: AutoencoderKL could not be loaded from this folder'):
        load_pretrained(AutoencoderKL, str(tmp_path), subfolder='vae')


@pytest.mark.parametrize('number', [errno.EIO, errno.ESTALE])
def test_unreadable_disk_is_not_a_user_error(small_vae, monkeypatch, number):
    def fail(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    monkeypatch.setattr(AutoencoderKL, 'from_pretrained', fail)
    with pytest.raises(OSError, match=os.strerror(number)) as raised:
        load_pretrained(AutoencoderKL, str(small_vae), subfolder='')
    assert not isinstance(raised.value, UserError)


@pytest.mark.parametrize('bug', [TypeError('no'), ValueError('not enough values to unpack')])
def test_other_exceptions_are_raised_unchanged(small_vae, monkeypatch, bug):
    def fail(*_: object, **__: object) -> None:
        raise bug

    monkeypatch.setattr(AutoencoderKL, 'from_pretrained', fail)
    with pytest.raises(type(bug)) as raised:
        load_pretrained(AutoencoderKL, str(small_vae), subfolder='')
    assert raised.value is bug
