"""Feature networks and their resizing, against clean-fid, torch-fidelity, transformers and CMMD's published steps."""

import pickle
import shutil
from pathlib import Path
from typing import Any
from unittest.mock import Mock
from urllib.error import URLError

import numpy as np
import pytest
import torch
from cleanfid.resize import make_resizer
from hypothesis import given, settings
from hypothesis import strategies as st
from small_networks import Harmful, write_clip_vision, write_dino, write_inception
from torch import Tensor
from torch.nn import functional
from torch_fidelity.feature_extractor_inceptionv3 import FeatureExtractorInceptionV3
from transformers import CLIPImageProcessor, CLIPVisionModelWithProjection, Dinov2Model

from diffusion.errors import ExternalError, UserError
from diffusion.evaluation import feature_networks
from diffusion.evaluation.feature_networks import Clip, Inception, clean_resize
from diffusion.evaluation.metrics import build_network, frechet_distance, gaussian_distance, kernel_distance
from diffusion.prepare.openmoji import all_emoji


def noise(height: int, width: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (3, height, width), dtype=torch.uint8, generator=generator)


@pytest.fixture(scope='module')
def inception_file(tmp_path_factory) -> Path:
    return write_inception(tmp_path_factory.mktemp('inception') / 'weights.pth')


@pytest.fixture(scope='module')
def clip_folder(tmp_path_factory) -> Path:
    return write_clip_vision(tmp_path_factory.mktemp('clip'))


@pytest.mark.filterwarnings('ignore:.*mode.*parameter is deprecated')  # of Pillow, in clean-fid
@settings(max_examples=30, deadline=None)
@given(st.integers(1, 90), st.integers(1, 90), st.integers(1, 70), st.integers(0, 3))
def test_resize_equals_clean_fid_bit_for_bit(height, width, side, seed):
    image = noise(height, width, seed)
    expected = make_resizer('PIL', False, 'bicubic', (side, side))(image.permute(1, 2, 0).numpy())
    assert np.array_equal(clean_resize(image, side).permute(1, 2, 0).numpy(), expected)


def test_inception_equals_torch_fidelity(inception_file):
    """Neither of the two resizes images of 299 pixels, so that only the network is compared."""
    network: Any = build_network('inception', {'inception': str(inception_file)})
    images = [noise(299, 299)]
    original = FeatureExtractorInceptionV3('inception', ['2048'], str(inception_file))
    expected = original(torch.stack(images))[0]
    assert expected.std() > 0
    torch.testing.assert_close(network.features(images), expected, rtol=1e-5, atol=1e-6)


def test_clip_features_follow_the_published_steps_of_cmmd(clip_folder):
    """Resized by PyTorch in [0, 1] without antialiasing, then only normalized by transformers' processor."""
    images = [noise(40, 52), noise(28, 28, 1)]
    resized = [functional.interpolate(each[None] / 255, (28, 28), mode='bicubic')[0] for each in images]
    processor = CLIPImageProcessor(do_resize=False, do_center_crop=False, do_rescale=False)
    inputs = processor(
        images=[each.numpy() for each in resized], return_tensors='pt', input_data_format='channels_first'
    )
    expected = CLIPVisionModelWithProjection.from_pretrained(clip_folder)(**inputs).image_embeds
    torch.testing.assert_close(Clip(str(clip_folder)).features(images), expected, rtol=1e-4, atol=1e-6)


def test_dino_features_are_the_class_token(tmp_path):
    model = Dinov2Model.from_pretrained(write_dino(tmp_path))
    image = noise(56, 56)
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    pixels = (image / 255 - mean[:, None, None]) / std[:, None, None]
    expected = model(pixel_values=pixels[None]).last_hidden_state[:, 0]
    network: Any = build_network('dino', {'dino': str(tmp_path)})
    network.side = 56
    torch.testing.assert_close(network.features([image]), expected, rtol=1e-4, atol=1e-5)


def test_features_of_an_image_do_not_depend_on_the_others(clip_folder):
    network = Clip(str(clip_folder))
    images = [noise(20 + seed, 30, seed) for seed in range(5)]
    alone = torch.cat([network.features([image]) for image in images])
    torch.testing.assert_close(network.features(images), alone)


def blurred(image: Tensor, amount: float) -> Tensor:
    side = max(2, round(64 * (1 - amount)))
    small = functional.interpolate(image[None].float(), (side, side), mode='bilinear', antialias=True)
    return functional.interpolate(small, (64, 64), mode='bilinear')[0].round().byte()


def test_distances_grow_with_damage():
    drawn = [each.render(64).convert('RGB') for each in all_emoji()[::90][:16]]
    emoji = [torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in drawn]
    network: Any = build_network('efficientnet', {})
    network.side = 96  # a fifth of the time
    assert network.description().items() > {'network': 'EfficientNet-Lite0', 'side': 96, 'resize': 'clean'}.items()
    expected = network.network.extract_features((noise(96, 96)[None].float() - 127) / 128).mean(dim=(2, 3))
    torch.testing.assert_close(network.features([noise(96, 96)]), expected)
    reference, found = network.features(emoji), []
    for amount in (0.1, 0.25, 0.5):
        rows = network.features([blurred(image, amount) for image in emoji])
        some = slice(256)  # a Fréchet distance takes the cube of the number of features
        frechet = frechet_distance(rows[:, some], reference[:, some])
        found.append((frechet, kernel_distance(rows, reference), gaussian_distance(rows, reference)))
    for values in zip(*found, strict=True):
        assert values[0] < values[1] < values[2]


def test_description_changes_with_weights_side_and_resizing(clip_folder, tmp_path):
    bicubic, clean = Clip(str(clip_folder)), Clip(str(clip_folder), resize='clean')
    assert Clip(str(clip_folder)).description() == bicubic.description()
    assert clean.description() != bicubic.description()
    with torch.no_grad():
        next(clean.network.parameters()).view(-1)[0] += 1e-3
    assert clean.description()['weights'] != bicubic.description()['weights']


def test_wrong_weights_are_refused_and_not_run(tmp_path, monkeypatch, inception_file):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(UserError, match=r'missing.pth: does not exist; it must be weights-inception.* from https'):
        Inception('missing.pth')
    wrong = {'pickle': pickle.dumps(Harmful()), 'text': b'<html>404</html>', 'empty': b''}
    wrong['cut'] = inception_file.read_bytes()[:1000]
    for name, content in wrong.items():
        Path(name).write_bytes(content)
        with pytest.raises(UserError, match=f'{name} .*does not contain the weights of torch-fidelity'):
            Inception(name)
    torch.save({'fc.weight': torch.zeros(2)}, 'other')
    with pytest.raises(UserError, match='other .*does not contain the weights'):
        Inception('other')
    assert not Path('harmed').exists()


def test_weights_that_cannot_be_downloaded_or_are_kept(tmp_path, monkeypatch, inception_file):
    monkeypatch.setattr(torch.hub, 'get_dir', lambda: str(tmp_path))
    monkeypatch.setattr(torch.hub, 'download_url_to_file', Mock(side_effect=URLError('no route to host')))
    with pytest.raises(ExternalError, match=r'cannot be downloaded \(.*no route to host.*copy the file to'):
        Inception()
    download = Mock(side_effect=lambda url, path, **_: shutil.copy(inception_file, path))
    monkeypatch.setattr(torch.hub, 'download_url_to_file', download)
    assert Inception().description() == Inception().description()
    path = str(tmp_path / 'checkpoints' / feature_networks.INCEPTION_FILE)
    download.assert_called_once_with(feature_networks.INCEPTION_URL, path, hash_prefix='6726825d', progress=False)


def test_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setattr(feature_networks, 'import_module', Mock(side_effect=ModuleNotFoundError))
    with pytest.raises(UserError, match=r"torch_fidelity is not installed; pip install 'diffusion-recipes\[eval\]'"):
        Inception()
