"""Perceptual losses against plain PyTorch, for each kind of prediction, and their mistakes."""

from typing import Any

import pytest
import torch
from model_batches import CAPTIONS, batch_of
from safetensors.torch import save_file
from torch.nn import functional
from torchmetrics.functional.image import lpips as torchmetrics_lpips
from torchvision.models import alexnet, get_model
from transformers import Dinov2Config, Dinov2Model

from diffusion.errors import UserError
from diffusion.models import batch_keys
from diffusion.models.families.prx.builder import tiny_prx
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.objective import Objective
from diffusion.models.perceptual_losses import PerceptualLosses, load_perceptual_loss, lpips_network
from diffusion.models.representation_alignment import FeatureEncoder, RepresentationAlignment
from diffusion.models.vae import PixelSpace

SIZES: dict[str, Any] = {'hidden_size': 32, 'num_heads': 2, 'depth': 2, 'text_width': 32, 'text_layers': 1}


@pytest.fixture(scope='module')
def weights(tmp_path_factory) -> dict[str, str]:
    """Files of AlexNet's convolutions with random weights, and the folder of a miniature DINOv2."""
    folder = tmp_path_factory.mktemp('networks')
    torch.manual_seed(0)
    with torch.device('meta'):  # the weights of its last layers would take most of the time
        layers = alexnet().features
    layers.to_empty(device='cpu')
    for layer in layers:
        if isinstance(layer, torch.nn.Conv2d):
            layer.reset_parameters()
    convolutions = {f'features.{name}': each for name, each in layers.state_dict().items()}
    torch.save(convolutions, folder / 'alex.pth')
    save_file(convolutions, folder / 'alex.safetensors')
    config = Dinov2Config(hidden_size=32, num_attention_heads=2, num_hidden_layers=2, image_size=28, patch_size=14)
    Dinov2Model(config).save_pretrained(folder / 'dino')
    return {'alex': str(folder / 'alex.pth'), 'safe': str(folder / 'alex.safetensors'), 'dino': str(folder / 'dino')}


@pytest.fixture
def make(weights):
    """Function that builds a PRX on 64 px pixels with perceptual losses, whose parameters are all random."""

    def make(prediction: str = 'sample', **settings: Any) -> LatentDiffusion:
        defaults = {'lpips_network': 'alex', 'lpips_backbone': weights['alex'], 'encoder': weights['dino']}
        torch.manual_seed(0)
        model = tiny_prx(
            vae='pixels',
            patch_size=8,
            caption_dropout=0.0,
            objective=Objective(path='flow', prediction_type=prediction, noise_scale=2.0),  # type: ignore[arg-type]
            perceptual_losses=PerceptualLosses(**{**defaults, 'features_side': 28, **settings}),
            **SIZES,
        )
        for parameter in model.denoiser.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        return model

    return make


@pytest.mark.parametrize(
    ('network', 'architecture', 'file'),
    [
        pytest.param('alex', 'alexnet', 'alexnet-owt-7be5be79.pth', marks=pytest.mark.slow),
        pytest.param('vgg', 'vgg16', 'vgg16-397923af.pth', marks=pytest.mark.slow),
        ('squeeze', 'squeezenet1_1', 'squeezenet1_1-b8a52dc0.pth'),
    ],
)
def test_lpips_of_each_network_equals_torchmetrics(tmp_path, monkeypatch, network, architecture, file):
    path = tmp_path / 'hub/checkpoints' / file  # from which torchvision reads weights that it has downloaded
    path.parent.mkdir(parents=True)
    monkeypatch.setenv('TORCH_HOME', str(tmp_path))
    with torch.device('meta'):
        shapes = {name: each.shape for name, each in get_model(architecture).state_dict().items()}
    generator = torch.Generator().manual_seed(0)
    # The last layers of VGG are 500 MB, and LPIPS does not use them.
    weights = {
        name: torch.randn(shape, generator=generator) / shape[1:].numel() ** 0.5
        if name.startswith('features.')
        else torch.zeros(()).expand(shape)
        for name, shape in shapes.items()
    }
    torch.save(weights, path)
    one, other = torch.rand(2, 2, 3, 64, 64, generator=generator) * 2 - 1
    expected = [
        torchmetrics_lpips.learned_perceptual_image_patch_similarity(*pair, net_type=network)
        for pair in zip(one.split(1), other.split(1), strict=True)
    ]
    ours = lpips_network(PerceptualLosses(lpips_network=network, lpips_backbone=str(path), features_weight=0.0))
    torch.testing.assert_close(ours(one, other).flatten(), torch.stack(expected), rtol=1e-5, atol=0)
    assert all(each > 0.01 for each in expected)


def features_by_hand(weights: dict[str, str], one: torch.Tensor, other: torch.Tensor) -> torch.Tensor:
    encoder = Dinov2Model.from_pretrained(weights['dino'])
    mean, std = torch.tensor([0.485, 0.456, 0.406]), torch.tensor([0.229, 0.224, 0.225])
    patches = []
    for images in (one, other):
        small = functional.interpolate(images / 2 + 0.5, (28, 28), mode='bicubic', antialias=True)
        normalized = (small - mean.view(3, 1, 1)) / std.view(3, 1, 1)
        patches.append(encoder(pixel_values=normalized).last_hidden_state[:, 1:])
    return (1 - functional.cosine_similarity(*patches, dim=-1)).mean(dim=1)


@pytest.mark.parametrize('prediction', [pytest.param('sample', marks=pytest.mark.slow), 'velocity'])
def test_loss_and_gradients_equal_a_reference_in_plain_pytorch(make, weights, prediction):
    model = make(prediction, lpips_weight=0.3, features_weight=0.2)
    batch = batch_of(model, CAPTIONS[:3])
    outputs = model(batch)
    model.loss(outputs, batch).backward()
    ours = {name: parameter.grad.clone() for name, parameter in model.denoiser.named_parameters()}
    model.zero_grad()

    seen = {}
    hook = model.denoiser.register_forward_pre_hook(
        lambda _, args, kwargs: seen.update(noisy=args[0], time=kwargs['timestep']), with_kwargs=True
    )
    again = model(batch)
    hook.remove()
    images, time = batch[batch_keys.IMAGE].float() / 127.5 - 1, seen['time'].view(-1, 1, 1, 1)
    predicted = again.prediction if prediction == 'sample' else seen['noisy'] - time * again.prediction
    half = [functional.interpolate(each, (32, 32), mode='bilinear', antialias=True) for each in (predicted, images)]
    lpips = model._frozen['perceptual_loss'].lpips(*half).flatten()
    perceptual = 0.3 * lpips + 0.2 * features_by_hand(weights, predicted, images)
    torch.testing.assert_close(outputs.perceptual, perceptual, rtol=1e-4, atol=1e-6)
    squared = again.weight * (again.prediction - again.target).square().flatten(1).mean(dim=1)
    (squared + perceptual).mean().backward()
    for name, parameter in model.denoiser.named_parameters():
        torch.testing.assert_close(ours[name], parameter.grad, rtol=1e-3, atol=1e-5)


def test_a_perfect_prediction_costs_nothing_and_evaluation_uses_no_network(make, monkeypatch):
    model = make()
    images = batch_of(model, CAPTIONS[:3])[batch_keys.IMAGE].float() / 127.5 - 1
    loss = model._frozen['perceptual_loss']
    assert loss(images, images).abs().max() < 1e-5
    assert loss(images.flip(3), images).min() > 1e-3
    assert not any('perceptual' in name for name in model.state_dict())
    assert not any(each.requires_grad for each in loss.parameters())
    monkeypatch.delitem(model._frozen, 'perceptual_loss')
    assert model.eval_forward(batch_of(model, CAPTIONS[:3])).shape == (8, 3)


def test_one_of_the_two_losses_is_enough(make, weights):
    model = make(features_weight=0.0, encoder=None, lpips_backbone=weights['safe'])
    assert model._frozen['perceptual_loss'].features is None
    assert model(batch_of(model, CAPTIONS[:3])).perceptual.shape == (3,)
    model = make(lpips_weight=0.0, lpips_backbone=None)
    assert model._frozen['perceptual_loss'].lpips is None


def test_mistakes_are_named(weights, small_vae, tmp_path):
    (tmp_path / 'cut.pth').write_bytes(b'no weights')
    torch.save({'features.0.weight': torch.zeros(1)}, tmp_path / 'other.pth')
    valid: dict[str, Any] = {'lpips_network': 'squeeze', 'lpips_backbone': 'not read', 'encoder': weights['dino']}
    for settings, message in {
        'missing': ({'lpips_backbone': str(tmp_path / 'none.pth')}, 'none.pth does not exist; download'),
        'damaged': ({'lpips_backbone': str(tmp_path / 'cut.pth')}, 'cut.pth cannot be read as weights'),
        'other': ({'lpips_backbone': str(tmp_path / 'other.pth')}, 'has no features.0.bias, so it is not a squee'),
        'network': ({'lpips_backbone': weights['alex']}, 'is not a squeeze of torchvision'),
        'no encoder': ({'encoder': None}, r'perceptual_losses\.encoder: is missing; give a folder'),
        'no loss': ({'lpips_weight': 0.0, 'features_weight': 0.0}, 'perceptual_losses: both weights are 0'),
    }.values():
        with pytest.raises(UserError, match=message):
            load_perceptual_loss(PerceptualLosses(**{**valid, **settings}))
    losses = PerceptualLosses(lpips_weight=0.0, encoder=weights['dino'])
    with pytest.raises(UserError, match='perceptual_losses: need a model on pixels'):
        tiny_prx(vae=str(small_vae), perceptual_losses=losses, **SIZES)
    with pytest.raises(UserError, match='perceptual_losses: needs a flow or x-prediction, but .* epsilon'):
        tiny_prx(vae='pixels', patch_size=8, objective=Objective(), perceptual_losses=losses, **SIZES)


def test_given_encoder_replaces_the_named_one(make, weights):
    """Build the model in Python, for both perceptual losses and alignment."""
    named = make(lpips_weight=0.0, features_weight=0.2)
    batch = batch_of(named, CAPTIONS[:3])
    model = LatentDiffusion(
        named.denoiser,
        PixelSpace(),
        named.text,
        objective=named.objective,
        caption_dropout=0.0,
        mask_padding=True,
        latent_size=64,
        representation_alignment=RepresentationAlignment('not read', block=1, hidden_size=8),
        perceptual_losses=PerceptualLosses(lpips_weight=0.0, features_weight=0.2, encoder='not read', features_side=28),
        feature_encoder=FeatureEncoder(Dinov2Model.from_pretrained(weights['dino'])),
    )
    outputs = model(batch)
    torch.testing.assert_close(outputs.perceptual, named(batch).perceptual)
    assert outputs.alignment is not None and outputs.alignment.shape == (3,)
