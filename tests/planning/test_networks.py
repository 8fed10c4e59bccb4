"""Parameters, FLOPs and kept activations on paper, against diffusers and transformers themselves."""

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.flop_counter import FlopCounterMode
from transformers import CLIPTextConfig, CLIPTextModel

from diffusion.models import sd2_config
from diffusion.planning.cost_tape import AMP, AMP_LOW_NORMS, FULL, Tape
from diffusion.planning.encoders import downsampling, run_clip_text, run_vae_decoder, run_vae_encoder
from diffusion.planning.unet import run_unet

GOLDEN = {
    (32, 32): (181.09, 104.59, 67.96, 8.55),
    (64, 64): (804.26, 418.36, 259.85, 126.05),
    (96, 96): (2149.11, 941.31, 579.66, 628.13),
    (128, 128): (4674.99, 1673.44, 1027.40, 1974.14),
}
"""Forward GFLOP of SD2's U-Net by latent size: in all, convolutions, products, attention."""
KINDS: dict[str, Any] = {
    'convolution': 'conv',
    'addmm': 'linear',
    'mm': 'linear',
    'bmm': 'attention',  # on the meta device attention is two products
    '_scaled_dot_product_flash_attention': 'attention',
    '_scaled_dot_product_flash_attention_for_cpu': 'attention',
    '_scaled_dot_product_efficient_attention': 'attention',
}
TEXT_LENGTH = 7


def on_paper(config, height=64, width=64, text_length=77, precision=AMP_LOW_NORMS):
    tape = Tape(precision)
    run_unet(tape, config, height=height, width=width, text_length=text_length)
    return tape


def counted(module, *inputs, **keywords):
    with torch.no_grad(), FlopCounterMode(display=False) as counter:
        module(*inputs, **keywords)
    kinds = {'conv': 0, 'linear': 0, 'attention': 0}
    for operator, flops in counter.get_flop_counts()['Global'].items():
        kinds[KINDS[operator.__name__]] += flops
    return kinds


def parameters(module):
    return sum(parameter.numel() for parameter in module.parameters())


def on_meta(kind, *arguments, **keywords):
    with torch.device('meta'):
        return kind(*arguments, **keywords)


def run_on_meta(unet, height, width, text_length=TEXT_LENGTH, **keywords):
    """FLOPs by kind of a U-Net on the meta device."""
    config = unet.config
    sample = torch.empty(1, config.in_channels, height, width, device='meta')
    text_width = config.cross_attention_dim
    text = torch.empty(1, text_length, text_width if isinstance(text_width, int) else text_width[0], device='meta')
    return counted(unet, sample, torch.zeros(1, device='meta'), text, return_dict=False, **keywords)


@pytest.mark.parametrize('size', GOLDEN)
def test_flops_of_the_sd2_unet_are_the_golden_figures(size):
    tape = on_paper(sd2_config.UNET, *size)
    found = [tape.forward_flops, *(tape.flops[kind] for kind in ('conv', 'linear', 'attention'))]
    assert [flops / 1e9 for flops in found] == pytest.approx(GOLDEN[size], rel=0.005)


def test_parameters_of_sd2_are_the_golden_figures():
    text, vae = Tape(), Tape()
    run_clip_text(text, sd2_config.TEXT_ENCODER, length=77)
    run_vae_encoder(vae, sd2_config.VAE, height=256, width=256)
    assert text.forward_flops / 1e9 == pytest.approx(45.13, abs=0.005)
    assert vae.forward_flops / 1e9 == pytest.approx(272.7, abs=0.05)
    run_vae_decoder(vae, sd2_config.VAE, height=32, width=32)
    larger = Tape()
    run_vae_encoder(larger, sd2_config.VAE, height=512, width=512)
    assert larger.forward_flops / 1e9 == pytest.approx(1116.7, abs=0.05)
    assert (on_paper(sd2_config.UNET).parameters, text.parameters, vae.parameters) == (
        865_910_724,
        340_387_840,
        83_653_863,
    )


@pytest.mark.parametrize('size', [(32, 32), (40, 24), (64, 88)])
def test_the_sd2_unet_is_what_diffusers_builds(size):
    unet = on_meta(UNet2DConditionModel, **sd2_config.UNET)
    tape = on_paper(sd2_config.UNET, *size, text_length=77)
    assert tape.parameters == parameters(unet)
    assert dict(tape.flops) == run_on_meta(unet, *size, text_length=77)


@st.composite
def unet_configs(draw):
    """Small U-Nets of every sort that the formulas know."""
    levels = draw(st.integers(1, 4))
    attends = draw(st.lists(st.booleans(), min_size=levels, max_size=levels))
    heads = draw(st.lists(st.sampled_from([1, 2, 4]), min_size=levels, max_size=levels))
    return {
        'in_channels': draw(st.sampled_from([4, 16])),
        'out_channels': draw(st.sampled_from([4, 16])),
        'down_block_types': ['CrossAttnDownBlock2D' if attend else 'DownBlock2D' for attend in attends],
        'up_block_types': ['CrossAttnUpBlock2D' if attend else 'UpBlock2D' for attend in reversed(attends)],
        'block_out_channels': draw(st.lists(st.sampled_from([32, 64, 96]), min_size=levels, max_size=levels)),
        'layers_per_block': draw(st.integers(1, 3)),
        'attention_head_dim': draw(st.sampled_from([heads, heads[0]])),
        'transformer_layers_per_block': draw(
            st.one_of(st.integers(1, 2), st.lists(st.integers(1, 2), min_size=levels, max_size=levels))
        ),
        'cross_attention_dim': draw(st.sampled_from([32, 48])),
        'use_linear_projection': draw(st.booleans()),
        'norm_num_groups': draw(st.sampled_from([8, 32])),
    }


@settings(max_examples=15, deadline=None)
@given(unet_configs(), st.integers(9, 24), st.integers(9, 24))
def test_any_unet_is_what_diffusers_builds(config, height, width):
    unet = on_meta(UNet2DConditionModel, **config)
    tape = on_paper(config, height, width, TEXT_LENGTH)
    assert tape.parameters == parameters(unet)
    assert {kind: tape.flops[kind] for kind in ('conv', 'linear', 'attention')} == run_on_meta(unet, height, width)


def test_sdxls_unet_is_what_diffusers_builds():
    config = {
        'down_block_types': ['DownBlock2D', 'CrossAttnDownBlock2D', 'CrossAttnDownBlock2D'],
        'up_block_types': ['CrossAttnUpBlock2D', 'CrossAttnUpBlock2D', 'UpBlock2D'],
        'block_out_channels': [320, 640, 1280],
        'attention_head_dim': [5, 10, 20],
        'transformer_layers_per_block': [1, 2, 10],
        'cross_attention_dim': 2048,
        'use_linear_projection': True,
        'addition_embed_type': 'text_time',
        'addition_time_embed_dim': 256,
        'projection_class_embeddings_input_dim': 2816,
    }
    unet = on_meta(UNet2DConditionModel, **config)
    added = {'text_embeds': torch.empty(1, 1280, device='meta'), 'time_ids': torch.empty(1, 6, device='meta')}
    tape = on_paper(config, 32, 32, TEXT_LENGTH)
    assert tape.parameters == parameters(unet) == 2_567_463_684
    assert dict(tape.flops) == run_on_meta(unet, 32, 32, added_cond_kwargs=added)


@pytest.mark.parametrize(
    'config',
    [sd2_config.VAE, sd2_config.VAE | {'block_out_channels': [64, 96, 96], 'mid_block_add_attention': False}],
    ids=['sd2', 'without-attention'],
)
def test_the_vae_is_what_diffusers_builds(config):
    levels = len(config['block_out_channels'])
    blocks = {'down_block_types': ['DownEncoderBlock2D'] * levels, 'up_block_types': ['UpDecoderBlock2D'] * levels}
    vae = on_meta(AutoencoderKL, **config | blocks)
    tape = Tape()
    run_vae_encoder(tape, config | blocks, height=64, width=96)
    pictures = torch.empty(1, 3, 64, 96, device='meta')
    encoded: dict[str, int] = {**tape.flops}
    assert {kind: encoded.get(kind, 0) for kind in KINDS.values()} == counted(vae.encode, pictures)
    cell = downsampling(config | blocks)
    run_vae_decoder(tape, config | blocks, height=64 // cell, width=96 // cell)
    latents = torch.empty(1, 4, 64 // cell, 96 // cell, device='meta')
    decoded = {kind: {**tape.flops}.get(kind, 0) - encoded.get(kind, 0) for kind in KINDS.values()}
    assert decoded == counted(vae.decode, latents)
    assert tape.parameters == parameters(vae)


def test_the_text_encoder_is_what_transformers_builds():
    config: dict[str, Any] = sd2_config.TEXT_ENCODER | {'num_hidden_layers': 2}
    text = on_meta(CLIPTextModel, CLIPTextConfig(**config))
    tape = Tape()
    run_clip_text(tape, config, length=77)
    assert tape.parameters == parameters(text)
    assert {'conv': 0, **tape.flops} == counted(text, torch.zeros(1, 77, dtype=torch.int64, device='meta'))


@pytest.mark.parametrize(
    ('key', 'value'),
    [('class_embed_type', 'timestep'), ('upcast_attention', True), ('only_cross_attention', True), ('act_fn', 'relu')],
)
def test_a_part_that_is_not_counted_is_an_error(key, value):
    with pytest.raises(ValueError, match=f'U-Net: {key}={value!r} is not counted; {key} may be'):
        on_paper(sd2_config.UNET | {key: value})


def test_blocks_that_are_not_counted_are_an_error():
    with pytest.raises(ValueError, match='blocks of type AttnDownBlock2D are not counted; known: CrossAttnDownBlock2D'):
        on_paper(sd2_config.UNET | {'down_block_types': ['AttnDownBlock2D'] * 4})
    with pytest.raises(ValueError, match='VAE: blocks of type AttnDownEncoderBlock2D are not counted'):
        run_vae_encoder(Tape(), {'down_block_types': ['AttnDownEncoderBlock2D']}, height=8, width=8)


SMALL: dict[str, Any] = {
    'down_block_types': ['CrossAttnDownBlock2D', 'CrossAttnDownBlock2D', 'DownBlock2D'],
    'up_block_types': ['UpBlock2D', 'CrossAttnUpBlock2D', 'CrossAttnUpBlock2D'],
    'block_out_channels': [32, 64, 64],
    'attention_head_dim': [1, 2, 2],
    'cross_attention_dim': 64,
}


def kept(unet, batch, height, width, *, autocast):
    """Bytes that autograd keeps for the backward pass, the parameters themselves left out."""
    own = {parameter.untyped_storage()._cdata for parameter in unet.parameters()}
    storages = {}

    def pack(tensor):
        storage = tensor.untyped_storage()
        storages[storage._cdata] = storage  # held, so that no other takes its address
        return tensor

    text = torch.randn(batch, 16, unet.config.cross_attention_dim)
    context = torch.autocast('cpu', torch.bfloat16) if autocast else nullcontext()
    with context, torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        unet(torch.randn(batch, 4, height, width), torch.zeros(batch), text)[0]
    return sum(storage.nbytes() for key, storage in storages.items() if key not in own)


@pytest.mark.parametrize('linear', [True, False], ids=['linear', 'conv'])
@pytest.mark.parametrize(('autocast', 'precision'), [(False, FULL), (True, AMP_LOW_NORMS)], ids=['fp32', 'bf16'])
def test_kept_activations_are_what_autograd_keeps(autocast, precision, linear):
    config: dict[str, Any] = SMALL | {'use_linear_projection': linear}
    unet = UNet2DConditionModel(**config).train()
    two, four = (kept(unet, batch, 16, 24, autocast=autocast) for batch in (2, 4))
    tape = on_paper(config, 16, 24, 16, precision)
    assert (four - two) / 2 == tape.kept_bytes  # what does not grow with the batch are autocast's copies of weights
    copies = two - 2 * tape.kept_bytes
    assert copies == pytest.approx(2 * tape.matrices if autocast else 0, rel=0.1)


def test_recomputing_keeps_what_is_between_blocks():
    config: dict[str, Any] = SMALL | {'use_linear_projection': True}
    unet = UNet2DConditionModel(**config).train()
    unet.enable_gradient_checkpointing()
    tape = on_paper(config, 16, 24, 16, FULL)
    # The hooks see neither a block's inputs, which its closure keeps, nor its inside.
    seen = (kept(unet, 4, 16, 24, autocast=False) - kept(unet, 2, 16, 24, autocast=False)) / 2
    assert seen < tape.kept_bytes_recomputing < tape.kept_bytes / 2


def test_norms_in_float32_keep_more():
    """CUDA's autocast widens them: their input and what follows is kept in float32, and a narrow copy besides."""
    narrow, wide = (on_paper(sd2_config.UNET, precision=precision).kept_bytes for precision in (AMP_LOW_NORMS, AMP))
    assert 1.2 < wide / narrow < 1.7
    assert wide < on_paper(sd2_config.UNET, precision=FULL).kept_bytes


@pytest.mark.slow
@torch._dynamo.config.patch(recompile_limit=100, specialize_float=True)
def test_compiled_blocks_keep_what_torchs_partitioner_keeps():
    """Which tensors are kept is decided before kernels are made; this backend makes none."""
    from diffusion.models.latent_diffusion import is_block

    config: dict[str, Any] = SMALL | {'use_linear_projection': True}
    unet = UNet2DConditionModel(**config).train()
    for block in unet.modules():
        if is_block(block):
            block.forward = torch.compile(block.forward, dynamic=False, backend='aot_eager_decomp_partition')
    two, four = (kept(unet, batch, 16, 24, autocast=True) for batch in (2, 4))
    tape = Tape(AMP_LOW_NORMS, compiles=True)
    run_unet(tape, config, height=16, width=24, text_length=16)
    assert tape.kept_bytes == pytest.approx((four - two) / 2, rel=0.03)
