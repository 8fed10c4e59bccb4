"""Errors of loading weights from a folder: mistakes of the user against faults of the disk."""

import errno
import os
import shutil

import pytest
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from transformers import CLIPTextModel, CLIPTokenizer

from diffusion.errors import UserError
from diffusion.models.pretrained import load_pretrained

PARTS = [AutoencoderKL, CLIPTextModel, CLIPTokenizer]


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
