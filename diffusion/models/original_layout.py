"""Convert models between diffusers and the original layout: tensor names and shapes of Stability AI's own code.

ComfyUI and other programs read files in the original layout, and training can start from them.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Literal

import torch
from diffusers.loaders.single_file_utils import (
    convert_ldm_unet_checkpoint,
    convert_sd3_transformer_checkpoint_to_diffusers,
)
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.modeling_utils import ModelMixin
from diffusers.models.transformers.transformer_sd3 import SD3Transformer2DModel
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from torch import Tensor, nn

from diffusion.compatibility.transformers_versions import with_text_model
from diffusion.errors import UserError
from diffusion.models.diffusers_weights import open_safetensors, way_out

Tensors = dict[str, Tensor]

UNET_PREFIX, AVERAGE_PREFIX = 'model.diffusion_model.', 'model_ema.'
UNET_LAYERS = {
    'time_embedding.linear_1': 'time_embed.0',
    'time_embedding.linear_2': 'time_embed.2',
    'add_embedding.linear_1': 'label_emb.0.0',
    'add_embedding.linear_2': 'label_emb.0.2',
    'conv_in': 'input_blocks.0.0',
    'conv_norm_out': 'out.0',
    'conv_out': 'out.2',
}
UNET_RESNET = {
    'norm1': 'in_layers.0',
    'conv1': 'in_layers.2',
    'time_emb_proj': 'emb_layers.1',
    'norm2': 'out_layers.0',
    'conv2': 'out_layers.3',
    'conv_shortcut': 'skip_connection',
}
VAE_LAYERS = {
    'conv_shortcut': 'nin_shortcut',
    'conv_norm_out': 'norm_out',
    'group_norm': 'norm',
    'to_q': 'q',
    'to_k': 'k',
    'to_v': 'v',
    'to_out.0': 'proj_out',
}
OPEN_CLIP_LAYERS = {
    'text_model.embeddings.token_embedding.weight': 'token_embedding.weight',
    'text_model.embeddings.position_embedding.weight': 'positional_embedding',
    'text_model.final_layer_norm.weight': 'ln_final.weight',
    'text_model.final_layer_norm.bias': 'ln_final.bias',
}
OPEN_CLIP_BLOCK = {
    'layer_norm1': 'ln_1',
    'layer_norm2': 'ln_2',
    'mlp.fc1': 'mlp.c_fc',
    'mlp.fc2': 'mlp.c_proj',
    'self_attn.out_proj': 'attn.out_proj',
}
MMDIT_LAYERS = {
    'pos_embed.pos_embed': 'pos_embed',
    'pos_embed.proj': 'x_embedder.proj',
    'time_text_embed.timestep_embedder.linear_1': 't_embedder.mlp.0',
    'time_text_embed.timestep_embedder.linear_2': 't_embedder.mlp.2',
    'time_text_embed.text_embedder.linear_1': 'y_embedder.mlp.0',
    'time_text_embed.text_embedder.linear_2': 'y_embedder.mlp.2',
    'context_embedder': 'context_embedder',
    'norm_out.linear': 'final_layer.adaLN_modulation.1',
    'proj_out': 'final_layer.linear',
}
MMDIT_BLOCK = {
    'norm1.linear': 'x_block.adaLN_modulation.1',
    'norm1_context.linear': 'context_block.adaLN_modulation.1',
    'attn.to_out.0': 'x_block.attn.proj',
    'attn.to_add_out': 'context_block.attn.proj',
    'attn.norm_q': 'x_block.attn.ln_q',
    'attn.norm_k': 'x_block.attn.ln_k',
    'attn.norm_added_q': 'context_block.attn.ln_q',
    'attn.norm_added_k': 'context_block.attn.ln_k',
    'attn2.to_out.0': 'x_block.attn2.proj',
    'attn2.norm_q': 'x_block.attn2.ln_q',
    'attn2.norm_k': 'x_block.attn2.ln_k',
    'ff.net.0.proj': 'x_block.mlp.fc1',
    'ff.net.2': 'x_block.mlp.fc2',
    'ff_context.net.0.proj': 'context_block.mlp.fc1',
    'ff_context.net.2': 'context_block.mlp.fc2',
}
MMDIT_QKV = {
    'x_block.attn.qkv': ('attn.to_q', 'attn.to_k', 'attn.to_v'),
    'context_block.attn.qkv': ('attn.add_q_proj', 'attn.add_k_proj', 'attn.add_v_proj'),
    'x_block.attn2.qkv': ('attn2.to_q', 'attn2.to_k', 'attn2.to_v'),
}
"""The original code's layers with stacked query, key and value projections, and diffusers' three layers for each."""


def unet_tensors(unet: UNet2DConditionModel) -> Tensors:
    """Return a U-Net's tensors by their original names, `model.diffusion_model.*`; UserError if a tensor has none."""
    if not isinstance(unet.config['layers_per_block'], int):
        raise _no_layout('layers_per_block by level', unet)
    state = unet.state_dict()
    stems = UNET_LAYERS | dict(_unet_blocks(unet))
    names = {}
    for name in state:
        stem = next((each for each in _stems(name) if each in stems), None)
        if stem is None:
            raise _no_layout(name, unet)
        rest = name.removeprefix(stem)
        if '.resnets.' in stem:
            _, layer, leaf = rest.split('.')
            rest = f'.{UNET_RESNET[layer]}.{leaf}'
        names[name] = f'{UNET_PREFIX}{stems[stem]}{rest}'
    # Convert the names back with diffusers' reader, which gets names instead of tensors here. It finds blocks by their
    # numbers, so the comparison detects a U-Net that the original code cannot build.
    read = convert_ldm_unet_checkpoint({each: each for each in names.values()}, unet.config)
    if read != names:
        raise _no_layout(next(name for name in names if read.get(name) != names[name]), unet)
    return {names[name]: tensor for name, tensor in state.items()}


def _unet_blocks(unet: UNet2DConditionModel) -> Iterator[tuple[str, str]]:
    """Yield the name and the original name of each residual block, transformer and resampling layer of a U-Net.

    The original code numbers the input blocks consecutively: the first convolution, then each level's layers and
    downsampling. A level's upsampling is part of its last output block.
    """
    number = 1
    for level, block in enumerate(unet.down_blocks):
        for layer in range(len(block.resnets)):  # type: ignore[arg-type]
            yield f'down_blocks.{level}.resnets.{layer}', f'input_blocks.{number}.0'
            yield f'down_blocks.{level}.attentions.{layer}', f'input_blocks.{number}.1'
            number += 1
        if block.downsamplers is not None:
            yield f'down_blocks.{level}.downsamplers.0.conv', f'input_blocks.{number}.0.op'
            number += 1
    yield 'mid_block.resnets.0', 'middle_block.0'
    yield 'mid_block.attentions.0', 'middle_block.1'
    yield 'mid_block.resnets.1', 'middle_block.2'
    number = 0
    for level, block in enumerate(unet.up_blocks):
        for layer in range(len(block.resnets)):  # type: ignore[arg-type]
            yield f'up_blocks.{level}.resnets.{layer}', f'output_blocks.{number}.0'
            yield f'up_blocks.{level}.attentions.{layer}', f'output_blocks.{number}.1'
            number += 1
        position = 2 if hasattr(block, 'attentions') else 1
        yield f'up_blocks.{level}.upsamplers.0.conv', f'output_blocks.{number - 1}.{position}.conv'


def vae_tensors(vae: AutoencoderKL) -> Tensors:
    """Return an AutoencoderKL's tensors by their original names, without the prefix `first_stage_model.`."""
    last = len(vae.config['block_out_channels']) - 1
    found = {}
    for name, tensor in vae.state_dict().items():
        parts = name.split('.')
        if parts[1] == 'mid_block':
            place = 'attn_1' if parts[2] == 'attentions' else f'block_{int(parts[3]) + 1}'
            parts[1:4] = ['mid', place]
        elif parts[1] in ('down_blocks', 'up_blocks'):
            # The original code numbers the decoder's levels starting from the image.
            level = parts[2] if parts[1] == 'down_blocks' else str(last - int(parts[2]))
            if parts[3] == 'resnets':
                parts[1:4] = [parts[1].removesuffix('_blocks'), level, 'block']
            else:
                parts[1:5] = [parts[1].removesuffix('_blocks'), level, parts[3].removesuffix('rs')]
        original = '.'.join(parts)
        for layer, renamed in VAE_LAYERS.items():
            original = original.replace(f'.{layer}.', f'.{renamed}.')
        # In the original code, attention consists of 1x1 convolutions.
        is_attention = '.attn_1.' in original and tensor.ndim == 2
        found[original] = tensor[:, :, None, None] if is_attention else tensor
    return found


def open_clip_tensors(encoder: nn.Module, *, layers: int | None = None) -> Tensors:
    """Return CLIP's tensors with OpenCLIP's names and shapes; copies of the last layer fill up to `layers` layers."""
    state = with_text_model(encoder).state_dict()
    found = {original: state[name] for name, original in OPEN_CLIP_LAYERS.items()}
    own: int = encoder.config.num_hidden_layers  # type: ignore[assignment,union-attr]
    for number in range(layers or own):
        here, there = f'text_model.encoder.layers.{min(number, own - 1)}', f'transformer.resblocks.{number}'
        for leaf in ('weight', 'bias'):
            for layer, original in OPEN_CLIP_BLOCK.items():
                found[f'{there}.{original}.{leaf}'] = state[f'{here}.{layer}.{leaf}']
            parts = [state[f'{here}.self_attn.{each}_proj.{leaf}'] for each in 'qkv']
            found[f'{there}.attn.in_proj_{leaf}'] = torch.cat(parts)
    if 'text_projection.weight' in state:
        found['text_projection'] = state['text_projection.weight'].T
    return found


def mmdit_tensors(transformer: SD3Transformer2DModel) -> Tensors:
    """Return the tensors of Stable Diffusion 3's transformer by their original names, without a prefix."""
    state = dict(transformer.state_dict())
    found = {}
    for number in range(len(transformer.transformer_blocks)):
        here, there = f'transformer_blocks.{number}', f'joint_blocks.{number}'
        for original, layers in MMDIT_QKV.items():
            if f'{here}.{layers[0]}.weight' in state:
                for leaf in ('weight', 'bias'):
                    found[f'{there}.{original}.{leaf}'] = torch.cat(
                        [state.pop(f'{here}.{layer}.{leaf}') for layer in layers]
                    )
    names = _by_stem(state, MMDIT_LAYERS, MMDIT_BLOCK)
    found |= {original: state[name] for name, original in names.items()}
    # Swap the halves of the last norms' weights: scale and shift in diffusers, shift and scale in the original code.
    last = f'joint_blocks.{len(transformer.transformer_blocks) - 1}.context_block.adaLN_modulation.1'
    for stem in ('final_layer.adaLN_modulation.1', last):
        for leaf in ('weight', 'bias'):
            scale, shift = found[f'{stem}.{leaf}'].chunk(2)
            found[f'{stem}.{leaf}'] = torch.cat([shift, scale])
    return found


def _by_stem(state: Mapping[str, Tensor], layers: Mapping[str, str], block: Mapping[str, str]) -> dict[str, str]:
    """Map a transformer's tensor names to original ones, given the same for layers outside and inside a block."""
    names = {}
    for name in state:
        if name.startswith('transformer_blocks.'):
            _, number, inside = name.split('.', 2)
            stem = next(each for each in _stems(inside) if each in block)
            names[name] = f'joint_blocks.{number}.{block[stem]}{inside.removeprefix(stem)}'
        else:
            stem = next(each for each in _stems(name) if each in layers)
            names[name] = layers[stem] + name.removeprefix(stem)
    return names


def _stems(name: str) -> Iterator[str]:
    """Yield a tensor's name and the names of the modules that contain it, innermost first."""
    while name:
        yield name
        name = name.rpartition('.')[0]


def _no_layout(what: str, unet: UNet2DConditionModel) -> UserError:
    return UserError(
        f'export: the layout of the original code has no place for {what} of this {type(unet).__name__}; export a '
        'folder instead (--out FOLDER)'
    )


def read_original(denoiser: ModelMixin, file: Path, which: Literal['training', 'ema']) -> dict[str, Tensor]:
    """Return a denoiser's weights from a safetensors file in the original layout, by their diffusers names.

    The file has tensors `model.diffusion_model.*` of Stable Diffusion 1.x, 2.x, XL or 3; averaged weights are
    `model_ema.*`. It has no configuration: settings that the shapes do not reveal, such as the number of attention
    heads, cannot be compared. Raises UserError if it is damaged or does not have fitting weights.
    """
    if isinstance(denoiser, SD3Transformer2DModel):
        return _read_mmdit(denoiser, file, which)
    if not isinstance(denoiser, UNet2DConditionModel):
        raise UserError(
            f'{file}: only U-Nets and Stable Diffusion 3 can be read from a single file; use a folder of diffusers'
        )
    with open_safetensors(file) as opened:
        names = renamed(denoiser, [*opened.keys()], file, which)
        return {name: opened.get_tensor(stored) for name, stored in names.items()}


def renamed(
    denoiser: UNet2DConditionModel, stored: list[str], file: Path, which: Literal['training', 'ema']
) -> dict[str, str]:
    """Map the diffusers names of a U-Net's weights to the names in `stored` of its training or EMA weights."""
    inside = [name for name in stored if name.startswith(UNET_PREFIX)]
    if not inside:
        is_diffusers = 'conv_in.weight' in stored or 'proj_out.weight' in stored
        what = (
            'it is in the layout of diffusers: name its folder, with config.json' if is_diffusers else 'is it a U-Net?'
        )
        raise UserError(f'{file}: has no tensors {UNET_PREFIX}*; {what}')
    average = {name: AVERAGE_PREFIX + name.removeprefix('model.').replace('.', '') for name in inside}
    if which == 'ema' and not {*average.values()} <= {*stored}:
        raise UserError(f'{file}: it has no averaged weights ({AVERAGE_PREFIX}*); use weights: training')
    try:
        # When the values are names, diffusers' conversion returns the mapping between both layouts.
        found = convert_ldm_unet_checkpoint({name: name for name in inside}, denoiser.config)
    except KeyError as error:
        raise UserError(f'{file}: lacks {UNET_PREFIX}{error.args[0]}; {way_out(denoiser)}') from error
    # The conversion drops tensors that it does not know; if there are any, the U-Net would compute something else.
    _check_unused({*inside} - {*found.values()}, file, denoiser)
    return {name: average[each] for name, each in found.items()} if which == 'ema' else found


def _read_mmdit(denoiser: SD3Transformer2DModel, file: Path, which: Literal['training', 'ema']) -> dict[str, Tensor]:
    with open_safetensors(file) as opened:
        stored = {name: opened.get_tensor(name) for name in opened.keys() if name.startswith(UNET_PREFIX)}  # noqa: SIM118
    if not any('.joint_blocks.' in name for name in stored):
        raise UserError(f'{file}: has no tensors {UNET_PREFIX}joint_blocks.*; is it Stable Diffusion 3?')
    if which == 'ema':
        raise UserError(f'{file}: it has no averaged weights; use weights: training')
    try:
        found = convert_sd3_transformer_checkpoint_to_diffusers(stored)  # removes known tensors from `stored`
    except KeyError as error:
        raise UserError(f'{file}: lacks {UNET_PREFIX}{error.args[0]}; {way_out(denoiser)}') from error
    _check_unused({f'{UNET_PREFIX}{name}' for name in stored}, file, denoiser)
    return found


def _check_unused(unused: set[str], file: Path, denoiser: ModelMixin) -> None:
    if unused:
        raise UserError(
            f'{file}: the architecture differs from the recipe: {len(unused)} unknown tensors '
            f'({", ".join(sorted(unused)[:2])}); {way_out(denoiser)}'
        )
