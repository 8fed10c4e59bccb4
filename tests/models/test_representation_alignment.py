"""Representation alignment against plain PyTorch, with TREAD, in checkpoints, and its errors."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from model_batches import CAPTIONS, batch_of
from torch.nn import functional
from transformers import CLIPTextConfig, Dinov2Config, Dinov2Model, DINOv3ViTConfig, DINOv3ViTModel

from diffusion.checkpointing.checkpoint_weights import load_weights
from diffusion.errors import UserError
from diffusion.models import batch_keys
from diffusion.models.families.adapter import adapter_of
from diffusion.models.families.prx.builder import tiny_prx
from diffusion.models.families.sd2.builder import tiny
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.representation_alignment import RepresentationAlignment, build_alignment, load_feature_encoder
from diffusion.models.token_routing import Route
from diffusion.training.initial_weights import SourceWeights, load_source

THREE = CAPTIONS[:3]
SIZES: dict[str, Any] = {'hidden_size': 32, 'num_attention_heads': 2, 'num_hidden_layers': 2, 'image_size': 28}


@pytest.fixture(scope='module')
def encoders(tmp_path_factory) -> dict[str, Path]:
    """Folders of miniature encoders: DINOv2 with patches of 14 px, and DINOv3 with patches of 16 px and registers."""
    torch.manual_seed(0)
    models = {
        'dinov2': Dinov2Model(Dinov2Config(**SIZES, patch_size=14)),
        'dinov3': DINOv3ViTModel(DINOv3ViTConfig(**SIZES, intermediate_size=64, patch_size=16, num_register_tokens=2)),
    }
    folder = tmp_path_factory.mktemp('encoders')
    for name, model in models.items():
        model.save_pretrained(folder / name)
    return {name: folder / name for name in models}


@pytest.fixture
def make_prx(small_vae, encoders):
    """Function that builds a PRX of 3 blocks whose parameters are all random, aligned after block 1."""

    def make(encoder: str | None = 'dinov2', alignment: Any = None, **settings: Any) -> LatentDiffusion:
        torch.manual_seed(0)
        sizes = {'hidden_size': 32, 'num_heads': 2, 'depth': 3, 'text_width': 32, 'text_layers': 1}
        kwargs = {'block': 1, 'hidden_size': 48, **(alignment or {})}
        model = tiny_prx(
            vae=str(small_vae),
            caption_dropout=0.0,
            representation_alignment=RepresentationAlignment(str(encoders[encoder]), **kwargs) if encoder else None,
            **{**sizes, **settings},  # type: ignore[arg-type]
        )
        torch.manual_seed(1)
        for parameter in model.denoiser.parameters():
            torch.nn.init.normal_(parameter, std=0.1)
        return model

    return make


def reference_similarity(model: LatentDiffusion, batch: Any, tokens: torch.Tensor, folder: Path, kept: Any):
    """Return the mean cosine similarity of each sample, in plain PyTorch, cell by cell."""
    dino: Any = (Dinov2Model if folder.name == 'dinov2' else DINOv3ViTModel).from_pretrained(folder)
    patch = 14 if folder.name == 'dinov2' else 16
    pixels = torch.stack(
        [
            functional.interpolate(image[None].float() / 255, (8 * patch, 6 * patch), mode='bicubic', antialias=True)[0]
            for image in batch[batch_keys.IMAGE]
        ]
    )
    for channel, (mean, std) in enumerate(((0.485, 0.229), (0.456, 0.224), (0.406, 0.225))):
        pixels[:, channel] = (pixels[:, channel] - mean) / std
    first = 1 if folder.name == 'dinov2' else 1 + 2
    with torch.no_grad():
        features = dino(pixels).last_hidden_state[:, first:]
    assert features.shape[1] == 48
    assert model.representation_alignment is not None
    if (gamma := model.representation_alignment.spatial_norm) is not None:
        center = features.sum(dim=1, keepdim=True) / 48
        variance = ((features - center) ** 2).sum(dim=1, keepdim=True) / 47
        features = (features - gamma * center) / (variance.sqrt() + 1e-6)
    results = []
    for i in range(len(tokens)):
        cells = range(48) if kept is None else kept[i].tolist()
        cosines = []
        for place, cell in enumerate(cells):
            found, wanted = reference_projection(model.feature_projector, tokens[i], place), features[i, cell]
            cosines.append((found @ wanted) / (found.norm() * wanted.norm()))
        results.append(torch.stack(cosines).mean())
    return torch.stack(results)


def reference_projection(projector: Any, tokens: torch.Tensor, place: int) -> torch.Tensor:
    """Return the predicted feature of one token of an image, [F]; a convolution sees a grid of 8 x 6 tokens."""
    if len(projector) == 1:
        (layer,) = projector
        row, column = divmod(place, 6)
        found = layer.bias
        for i, j in ((i, j) for i in (-1, 0, 1) for j in (-1, 0, 1)):
            if 0 <= row + i < 8 and 0 <= column + j < 6:
                found = found + layer.weight[:, :, i + 1, j + 1] @ tokens[(row + i) * 6 + column + j]
        return found
    one, _, two, _, three = projector
    hidden = functional.silu(one.weight @ tokens[place] + one.bias)
    hidden = functional.silu(two.weight @ hidden + two.bias)
    return three.weight @ hidden + three.bias


@pytest.mark.parametrize(
    ('encoder', 'route', 'settings'),
    [
        pytest.param('dinov2', None, {}, marks=pytest.mark.slow),
        ('dinov3', Route(0, 2, 0.25), {'spatial_norm': 1.0}),
        ('dinov3', Route(2, 3, 0.25), {'projection': 'conv', 'spatial_norm': 0.6}),
    ],
)
def test_loss_and_gradients_equal_plain_pytorch(make_prx, encoders, encoder, route, settings):
    model, plain = make_prx(encoder, settings), make_prx(None)
    batch = batch_of(model, THREE, height=64, width=48)
    if route is not None:
        for each in (model, plain):
            each.route_tokens(route).begin(model.draws_of(batch))
    block, seen = plain.denoiser.blocks[1], []
    forward = block.forward

    def recorded(*args: Any, **kwargs: Any) -> torch.Tensor:
        seen.append(forward(*args, **kwargs))
        return seen[0]

    block.forward = recorded
    outputs = plain(batch)
    kept = None if route is None or route.start > 1 else route.kept(model.draws_of(batch), 48)
    assert seen[0].shape[1] == (48 if kept is None else 36)
    similarity = reference_similarity(model, batch, seen[0], encoders[encoder], kept)
    expected = plain.loss(outputs, batch) + 0.5 * (1 - similarity).mean()
    expected.backward()
    wanted = {name: each.grad for name, each in plain.named_parameters() if each.grad is not None}
    wanted |= {f'feature_projector.{name}': each.grad for name, each in model.feature_projector.named_parameters()}
    model.zero_grad()
    loss = model.loss(model(batch), batch)
    loss.backward()
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-6)
    found = {name: each.grad for name, each in model.named_parameters() if each.grad is not None}
    assert found.keys() == wanted.keys()
    for name, gradient in wanted.items():
        torch.testing.assert_close(found[name], gradient, rtol=2e-3, atol=1e-6, msg=name)


def test_denoiser_starts_and_is_evaluated_as_without_alignment_and_frozen_encoder_is_not_saved(make_prx):
    model, plain = make_prx(), make_prx(None)
    names = {name for name in model.state_dict() if not name.startswith('feature_projector.')}
    assert names == plain.state_dict().keys()
    assert len(model.state_dict()) == len(names) + 6
    assert not any(each.requires_grad for each in model._frozen['image_encoder'].parameters())
    assert {'feature_projector.0.weight'} <= {name for name, _ in model.named_parameters()}
    batch = batch_of(model, THREE, height=64, width=48)
    # Do not compare bit for bit: MKL chooses kernels by the alignment of memory.
    torch.testing.assert_close(model.eval_forward(batch), plain.eval_forward(batch), rtol=1e-6, atol=1e-6)
    moments = {**batch, batch_keys.LATENT_MOMENTS: model.encode(batch.pop(batch_keys.IMAGE))}
    moments.pop(batch_keys.IMAGE)
    model.eval_forward(moments)
    with pytest.raises(UserError, match='batch: has neither image nor image_features, but model.representation'):
        model(moments)


@pytest.mark.parametrize('routed', [pytest.param(False, marks=pytest.mark.slow), True])
def test_stored_features_in_half_precision_give_the_loss_of_images(make_prx, routed):
    model = make_prx(posterior='mean')
    batch = batch_of(model, THREE, height=64, width=48)
    if routed:
        model.route_tokens(Route(0, 2, 0.25)).begin(model.draws_of(batch))
    expected = model(batch).alignment
    images = batch.pop(batch_keys.IMAGE)
    batch[batch_keys.LATENT_MOMENTS] = model.encode(images)
    batch[batch_keys.IMAGE_FEATURES] = model.image_features(images).half()
    encoder_flops = model.flops_per_batch({**batch, batch_keys.IMAGE: images}) - model.flops_per_batch(batch)
    model.use_stored_features()
    assert model.image_encoder is None
    found = model(batch).alignment
    assert not torch.equal(found, expected)
    torch.testing.assert_close(found, expected, rtol=0, atol=5e-5)
    assert encoder_flops == 0 < model.flops_per_batch(batch)


def test_weights_are_exchanged_with_models_without_alignment(make_prx):
    """`init_from` starts a run with alignment from one without, and the other way around."""
    model, plain = make_prx(), make_prx(None)
    with torch.no_grad():
        model.denoiser.img_in.weight.add_(1)
    load_weights(plain, model.state_dict(), 'a')
    assert torch.equal(plain.denoiser.img_in.weight, model.denoiser.img_in.weight)
    before = model.feature_projector[0].weight.clone()
    load_weights(model, make_prx(None).state_dict(), 'b')
    assert not torch.equal(plain.denoiser.img_in.weight, model.denoiser.img_in.weight)
    assert torch.equal(model.feature_projector[0].weight, before)
    for target, source in ((model, plain), (make_prx(None), model)):
        load_source(target, SourceWeights(source.state_dict(), 'run', 'the training weights'), resize=False)
        assert torch.equal(target.denoiser.img_in.weight, source.denoiser.img_in.weight)
    assert torch.equal(model.feature_projector[0].weight, before)


def test_flops_include_encoder_and_projection(make_prx):
    model, plain = make_prx(), make_prx(None)
    batch = batch_of(model, THREE, height=64, width=48)
    added = (model.flops_per_batch(batch) - plain.flops_per_batch(batch)) // 3
    convolution = make_prx(alignment={'projection': 'conv'}).flops_per_batch(batch) - model.flops_per_batch(batch)
    projection = 3 * 2 * 48 * (32 * 48 + 48 * 48 + 48 * 32)
    assert convolution == 3 * (3 * 2 * 48 * 9 * 32 * 32 - projection)
    # 49 tokens in two layers of width 32 with MLPs of width 128, and the patches of 14 px.
    linear = 2 * 2 * 49 * (4 * 32 * 32 + 2 * 32 * 128) + 2 * 48 * 32 * 3 * 14 * 14
    attention = 2 * 2 * 2 * 49 * 49 * 32
    assert added == pytest.approx(projection + linear + attention, rel=0.01)


def test_wrong_settings_are_refused(encoders, small_vae):
    """The files in tests/config/golden/mistakes have the other messages."""
    folder = str(encoders['dinov2'])
    with pytest.raises(UserError, match='^representation_alignment.hidden_size: 0 is not positive'):
        RepresentationAlignment(folder, hidden_size=0)
    unet = tiny(vae=str(small_vae), block_out_channels=[32], text_layers=1).denoiser
    with pytest.raises(UserError, match='a UNet2DConditionModel has no image tokens; use a transformer'):
        build_alignment(RepresentationAlignment(folder), unet, adapter_of(unet), width=None)


def test_other_encoders_are_refused(make_prx, tmp_path):
    CLIPTextConfig().save_pretrained(tmp_path / 'clip')
    prx = make_prx(None)
    with pytest.raises(UserError, match='clip is a clip_text_model; use one of dinov2, dinov2_with_registers, dinov3'):
        build_alignment(RepresentationAlignment(str(tmp_path / 'clip'), block=1), prx.denoiser, prx.adapter, width=32)
    with pytest.raises(UserError, match=r'^representation_alignment\.encoder: /nowhere/at/all is not a folder'):
        build_alignment(RepresentationAlignment('/nowhere/at/all', block=1), prx.denoiser, prx.adapter, width=32)


@pytest.mark.parametrize('alignment', [{}, {'projection': 'conv'}])
def test_first_layer_of_the_projection_is_an_output_layer_for_mup(make_prx, alignment):
    """Its input is as wide as the denoiser, and its output is not."""
    sizes = {'hidden_size': 64, 'num_heads': 4}
    plain, scaled = (make_prx(alignment=alignment, **sizes, **base) for base in ({}, {'mup_base_width': 16}))
    before, after = (dict(model.feature_projector.named_parameters()) for model in (plain, scaled))
    scales = {'0.weight': 0.5, '0.bias': 2.0}
    for name, parameter in after.items():
        torch.testing.assert_close(parameter, scales.get(name, 1.0) * before[name])
    factors = scaled.learning_rate_factors
    assert {name: each for name, each in factors.items() if 'projector' in name} == {'feature_projector.0.weight': 0.25}
    assert plain.learning_rate_factors == {}


@pytest.mark.parametrize('kind', ['custom', None])
def test_code_of_an_encoder_is_neither_run_nor_asked_for(encoders, tmp_path, monkeypatch, kind):
    def asked(*_: object) -> str:
        raise AssertionError('asked on the terminal')

    monkeypatch.setattr('builtins.input', asked)
    folder = shutil.copytree(encoders['dinov2'], tmp_path / 'encoder')
    (folder / 'evil.py').write_text(f'open({str(tmp_path / "ran")!r}, "w")\nclass Evil: pass\n')
    auto_map = {'auto_map': {'AutoConfig': 'evil.Evil', 'AutoModel': 'evil.Evil'}}
    config = json.loads((folder / 'config.json').read_text()) | auto_map
    (folder / 'config.json').write_text(json.dumps(config))
    load_feature_encoder(str(folder), None, where='encoder')
    config.pop('model_type')
    (folder / 'config.json').write_text(json.dumps(config | ({} if kind is None else {'model_type': kind})))
    what = 'has no config.json with a model_type' if kind is None else 'is a custom'
    message = rf'^encoder: .*/encoder {what} with code of its own \(auto_map\), which is not run; use one of dinov2'
    with pytest.raises(UserError, match=message):
        load_feature_encoder(str(folder), None, where='encoder')
    assert not (tmp_path / 'ran').exists()
