"""Errors of loading weights from a folder: mistakes of the user against faults of the disk."""

import errno
import json
import pickle
import shutil
import struct
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from transformers import CLIPTextConfig, CLIPTextModel, CLIPTokenizer

from diffusion.errors import UserError
from diffusion.models.pretrained import clip_tokenizer, load_pretrained, load_vae

PARTS = [AutoencoderKL, CLIPTextModel, CLIPTokenizer]
AUTO_CLASSES = ('AutoConfig', 'AutoModel', 'AutoTokenizer')


class Opens:
    """Object whose unpickling creates a file."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[object, tuple[str, str]]:
        return open, (str(self.path), 'w')


@pytest.fixture
def small_text_encoder(tmp_path) -> Path:
    """Folder of a CLIP text model with random weights, and its tokenizer."""
    folder = tmp_path / 'text_encoder'
    config = CLIPTextConfig(hidden_size=8, intermediate_size=16, num_hidden_layers=1, num_attention_heads=2)
    CLIPTextModel(config).save_pretrained(folder)
    clip_tokenizer().save_pretrained(folder)
    return folder


@pytest.mark.parametrize('part', PARTS)
def test_folder_without_the_part_is_a_user_error(tmp_path, part):
    with pytest.raises(UserError, match=f'^{tmp_path}: {part.__name__} could not be loaded from this folder'):
        load_pretrained(part, str(tmp_path), subfolder='', revision='v2')


@pytest.mark.parametrize('variant', ['fp16', 'bf16'])
@pytest.mark.parametrize('part', [AutoencoderKL, CLIPTextModel])
def test_folder_with_half_precision_only_is_loaded(small_vae, small_text_encoder, tmp_path, part, variant, caplog):
    whole = small_vae if part is AutoencoderKL else small_text_encoder
    model: Any = load_pretrained(part, str(whole), subfolder='')
    halves = model.to(torch.float16 if variant == 'fp16' else torch.bfloat16)
    halves.save_pretrained(tmp_path / 'halves', variant=variant)
    assert [each.name for each in (tmp_path / 'halves').glob(f'*.{variant}.safetensors')]
    caplog.clear()
    loaded = load_pretrained(part, str(tmp_path), subfolder='halves').state_dict()
    assert caplog.messages == [f'{tmp_path}/halves: only has half-precision weights ({variant}), which are loaded']
    expected = {name: each.float() for name, each in halves.state_dict().items()}
    torch.testing.assert_close(loaded, expected, rtol=0, atol=0)


@pytest.mark.parametrize(
    'content',
    [b'{"a": ' + b'[' * 200_000, b'[]', b'\xff\xfe\x00', b'{"latent_channels": ' + b'1' * 6000 + b'}'],
)
@pytest.mark.parametrize('part', [AutoencoderKL, CLIPTextModel])
def test_configuration_that_is_no_object_is_a_user_error(tmp_path, part, content):
    (tmp_path / 'config.json').write_bytes(content)
    with pytest.raises(UserError, match=r'config\.json: (is not valid JSON|has \w+, expected)'):
        load_pretrained(part, str(tmp_path), subfolder='')
    with pytest.raises(UserError, match=r'config\.json: (is not valid JSON|has list, expected)'):
        load_vae(str(tmp_path))


@pytest.mark.parametrize('header', [b'{}', b'{"other": {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}}'])
def test_missing_tensors_are_a_user_error_instead_of_random_numbers(small_vae, tmp_path, header):
    shutil.copytree(small_vae, tmp_path / 'vae')
    weights = next((tmp_path / 'vae').glob('*.safetensors'))
    weights.write_bytes(struct.pack('<Q', len(header)) + header)
    with pytest.raises(UserError, match=r'/vae: its weight files lack \d+ tensors of AutoencoderKL, such as decoder\.'):
        load_pretrained(AutoencoderKL, str(tmp_path), subfolder='vae')


@pytest.mark.parametrize(
    'content',
    [
        b'cut',
        struct.pack('<Q', 1 << 60) + b'{}',
        struct.pack('<Q', 1_000_005) + b'{"a":' + b'[' * 1_000_000,
        struct.pack('<Q', 67) + b'{"a": {"dtype": "F32", "shape": [1099511627776], "data_offsets": []}}',
    ],
    ids=['truncated', 'longer than the file', 'deep', 'huge shape'],
)
def test_hostile_header_of_weights_is_a_user_error_at_once(small_vae, tmp_path, content):
    shutil.copytree(small_vae, tmp_path / 'vae')
    next((tmp_path / 'vae').glob('*.safetensors')).write_bytes(content)
    with pytest.raises(UserError, match='/vae: AutoencoderKL could not be loaded from this folder'):
        load_pretrained(AutoencoderKL, str(tmp_path), subfolder='vae')


@pytest.mark.parametrize('part', PARTS)
def test_code_beside_the_weights_is_never_run(small_vae, small_text_encoder, tmp_path, part):
    """`auto_map` names classes in the folder's own files, and pickled weights name functions."""
    source = small_vae if part is AutoencoderKL else small_text_encoder
    folder = shutil.copytree(source, tmp_path / 'part')
    ran = tmp_path / 'ran'
    (folder / 'evil.py').write_text(f'open({str(ran)!r}, "w")\nclass Evil: pass\n')
    for name in ('config.json', 'tokenizer_config.json'):
        if (folder / name).exists():
            content = json.loads((folder / name).read_text())
            (folder / name).write_text(json.dumps(content | {'auto_map': dict.fromkeys(AUTO_CLASSES, 'evil.Evil')}))
    load_pretrained(part, str(folder), subfolder='')
    if part is not CLIPTokenizer:
        next(folder.glob('*.safetensors')).unlink()
        for name in ('pytorch_model.bin', 'diffusion_pytorch_model.bin'):
            (folder / name).write_bytes(pickle.dumps(Opens(ran)))
        with pytest.raises(UserError, match='could not be loaded'):
            load_pretrained(part, str(folder), subfolder='')
    assert not ran.exists()


@pytest.mark.parametrize(
    'error', [OSError(errno.EIO, 'Input/output error'), TypeError('no'), ValueError('not enough values to unpack')]
)
def test_faults_of_the_disk_and_bugs_are_not_user_errors(small_vae, monkeypatch, error):
    monkeypatch.setattr(AutoencoderKL, 'from_pretrained', Mock(side_effect=error))
    with pytest.raises(type(error)) as raised:
        load_pretrained(AutoencoderKL, str(small_vae), subfolder='')
    assert type(raised.value) is type(error), 'no UserError'
    assert raised.value is error or (isinstance(error, OSError) and str(error) in str(raised.value))
