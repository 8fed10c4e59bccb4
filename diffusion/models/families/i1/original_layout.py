"""Read and write files of i1's own code: saved by `torch.save`, with other tensor names and the opposite output sign.

Their transformer predicts the image minus the noise; our denoiser, like all flows here, the noise minus the image.
"""

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor

from diffusion.errors import UserError
from diffusion.models.families.i1.transformer_i1 import (
    GRID,
    SIZES,
    THETA,
    I1Transformer2DModel,
    grid_positions,
    rotations,
    sine_cosine_table,
)
from diffusion.models.objective import Objective

log = logging.getLogger(__name__)

Tensors = dict[str, Tensor]

ADAPTER = 'text_encoder_adapter.'
LAYERS = {
    'patch_embed': 'x_embedder.proj',
    'null_caption': f'{ADAPTER}learnable_null_caption',
    'text_embed': f'{ADAPTER}connector_in',
    'output_norm': 'final_layer.norm_final',
    'output': 'final_layer.linear',
}
TEXT_ATTENTION = {'qkv': 'qkv', 'q_norm': 'q_norm', 'k_norm': 'k_norm', 'out': 'proj'}
MLP = {'up': 'w12', 'down': 'w3'}
BLOCK = {
    'attention_norm': 'norm1',
    'mlp_norm': 'norm2',
    'attention_output_norm': 'norm3',
    'mlp_output_norm': 'norm4',
    'q_norm': 'attn.q_norm',
    'k_norm': 'attn.k_norm',
    **{f'{kind}_qkv': f'attn.qkv_{kind}' for kind in ('image', 'text')},
    **{f'{kind}_out': f'attn.proj_{kind}' for kind in ('image', 'text')},
    **{f'{kind}_skip': f'skip_linear_{kind}' for kind in ('image', 'text')},
    **{f'{kind}_mlp.{ours}': f'mlp_{kind}.{theirs}' for kind in ('image', 'text') for ours, theirs in MLP.items()},
}
TIMESTEP_CHANNELS = 256
"""Input width of the timestep embedding in i1's own files; no layer reads this embedding."""
UNUSED = 't_embedder.'


def original_name(name: str, depth: int) -> str:
    """Convert the name of a tensor of our denoiser, which has `depth` blocks, to its name in i1's own files."""
    stem, _, leaf = name.rpartition('.')
    if not stem:
        return LAYERS[name]
    leaf = 'scale' if stem.endswith('norm') else leaf
    kind, _, inside = stem.partition('.')
    if kind not in ('blocks', 'text_blocks'):
        return f'{LAYERS[stem]}.{leaf}'
    number, _, layer = inside.partition('.')
    if kind == 'text_blocks':
        return f'{ADAPTER}{_text_layer(int(number), layer)}.{leaf}'
    after = int(number) - depth // 2
    block = f'in_blocks.{number}' if after < 0 else f'out_blocks.{after - 1}' if after else 'mid_block'
    return f'{block}.{BLOCK[layer]}.{leaf}'


def _text_layer(number: int, layer: str) -> str:
    suffix = str(number + 1) if number else ''
    if layer in ('attention_norm', 'mlp_norm'):
        return f'connector_norm{2 * number + (1 if layer == "attention_norm" else 2)}'
    if layer.startswith('mlp.'):
        return f'connector_mlp{suffix}.{MLP[layer.removeprefix("mlp.")]}'
    return f'connector_attn{suffix}.{TEXT_ATTENTION[layer]}'


def from_original(
    denoiser: I1Transformer2DModel, content: Mapping[str, Any], which: Literal['training', 'ema'], where: str
) -> Tensors:
    """Return a denoiser's weights by name, from the content of a file of i1's own code.

    The key `model` holds averaged weights, `train_state.model_raw` the training weights. Published files have only
    averaged weights, which `training` then returns too.

    Raises:
        UserError: The file has other tensors, or its model has another size than the denoiser.
    """
    stored = _stored_weights(content, which, where)
    config: Mapping[str, Any] = denoiser.config
    names = {name: original_name(name, config['depth']) for name in denoiser.state_dict()}
    _check_sizes(stored, config, where)
    tables = fixed_tables(denoiser, _grid_side(stored, where))
    shapes = {original: denoiser.get_parameter(name).shape for name, original in names.items()}
    shapes |= {name: each.shape for name, each in tables.items() if not name.startswith(UNUSED)}
    missing = [name for name in shapes if name not in stored]
    foreign = [name for name in stored if name not in shapes and not name.startswith(UNUSED)]
    other = [name for name in shapes if name in stored and stored[name].shape != shapes[name]]
    if missing or foreign or other:
        labels = {'missing': missing, 'unknown': foreign, 'of another shape': other}
        what = '; '.join(f'{len(each)} {label} ({", ".join(each[:2])})' for label, each in labels.items() if each)
        raise UserError(f'{where}: not the tensors of i1: {what}; use a file that the code of i1 wrote, unchanged')
    if any(name.startswith(UNUSED) for name in stored):
        log.info('%s: %s* is not read: the transformer has no timestep input', where, UNUSED)
    return {name: _signed(name, stored[original]) for name, original in names.items()}


def _stored_weights(content: Mapping[str, Any], which: str, where: str) -> Tensors:
    state = content.get('train_state')
    raw = state.get('model_raw') if isinstance(state, Mapping) else None
    found = raw if which == 'training' and raw is not None else content.get('model')
    if found is not None and which == 'training' and raw is None:
        log.info('%s: has only averaged weights, which are read', where)
    if not isinstance(found, Mapping) or not all(isinstance(each, Tensor) for each in found.values()):
        raise UserError(
            f'{where}: has no weights in `model`{"" if which == "ema" else " or `train_state.model_raw`"}; use a file '
            'of i1, such as 256_resolution_checkpoint_torch.pt, or a checkpoint of a run'
        )
    return dict(found)


def _check_sizes(stored: Tensors, config: Mapping[str, Any], where: str) -> None:
    """Raise UserError, which lists the differences, unless the stored weights have the denoiser's sizes."""
    patch, null, head = 'x_embedder.proj.weight', f'{ADAPTER}learnable_null_caption', 'mid_block.attn.q_norm.scale'
    if lacking := [name for name in (patch, null, head) if name not in stored]:
        raise UserError(f'{where}: has no tensor {lacking[0]}; is it a file of i1?')
    width, channels, side = stored[patch].shape[:3]
    blocks = {name.split('.')[1] for name in stored if name.startswith('in_blocks.')}
    sizes = {
        'hidden_size': width,
        'num_heads': width // stored[head].numel(),
        'depth': 2 * len(blocks) + 1,
        'in_channels': channels,
        'patch_size': side,
        'text_length': stored[null].shape[1],
        'text_width': stored[null].shape[2],
    }
    different = [f'{name} {size} instead of {config[name]}' for name, size in sizes.items() if size != config[name]]
    if different:
        has_width = (sizes['hidden_size'], sizes['num_heads']) == (config['hidden_size'], config['num_heads'])
        name = None if has_width else _size_name(sizes)
        way_out = f'set model.size: {name}' if name else 'use model settings that fit'
        is_size = f'is the size {name}' if name else 'has another size'
        raise UserError(f'{where}: {is_size}, unlike the recipe: {", ".join(different)}; {way_out}')


def _size_name(sizes: Mapping[str, int]) -> str | None:
    return next((name for name, size in SIZES.items() if size == (sizes['hidden_size'], sizes['num_heads'])), None)


def _grid_side(stored: Tensors, where: str) -> int:
    """Return the number of tokens per image side from a file's position table; 16 if the file has no such table."""
    tokens = stored['pos_embed'].shape[1] if 'pos_embed' in stored and stored['pos_embed'].ndim == 3 else GRID**2
    if math.isqrt(tokens) ** 2 != tokens:
        raise UserError(f'{where}: pos_embed has {tokens} positions, which is not a square; is it a file of i1?')
    return math.isqrt(tokens)


def _signed(name: str, tensor: Tensor) -> Tensor:
    """Negate a tensor of the output layer, and return other tensors unchanged; converts from i1's files and back."""
    return -tensor if name.startswith('output.') else tensor


def fixed_tables(denoiser: I1Transformer2DModel, side: int) -> Tensors:
    """Return the tensors of i1's own files that our denoiser does not have, for images of `side` x `side` tokens.

    These are the position table, the RoPE tables, and zeros for the timestep embedding, which nothing reads.
    """
    width: int = denoiser.config['hidden_size']
    channels, length = denoiser.head_width, denoiser.config['text_length'] + 1
    tables = {'pos_embed': sine_cosine_table(grid_positions(side, side, device='cpu'), width)[None]}
    parts = [channels // 4, channels // 8, channels // 8]
    for axis, (count, scale) in enumerate([(length, 1.0), (side, GRID / side), (side, GRID / side)]):
        positions = (torch.arange(count) * scale)[None, :, None].expand(1, -1, 3)
        pairs = rotations(positions, channels).view(torch.float32)[0].split(parts, dim=1)[axis]
        for kind, each in zip(('cos', 'sin'), pairs.unbind(-1), strict=True):
            tables[f'rope_embedder.{kind}_tables.{axis}'] = each.contiguous()
    for number, inputs in ((1, TIMESTEP_CHANNELS), (2, width)):
        tables |= {
            f'{UNUSED}linear{number}.weight': torch.zeros(width, inputs),
            f'{UNUSED}linear{number}.bias': torch.zeros(width),
        }
    return tables


@dataclass(frozen=True)
class OriginalFile:
    """Writer of a denoiser's file for i1's own code, for square images with latents of `latent_size` cells per side."""

    denoiser: I1Transformer2DModel
    latent_size: int

    def save(self, path: Path, *, dtype: torch.dtype, title: str, objective: Objective, resolution: int) -> None:
        """Write the file, for images of `resolution` px; UserError if i1's code cannot sample this model."""
        if objective.prediction_type != 'velocity' or objective.noise_scale != 1:
            raise UserError(
                f'export: the code of i1 samples a flow of velocities from standard normal noise, but {title} has path '
                f'{objective.path}, prediction_type {objective.prediction_type} and noise_scale '
                f'{objective.noise_scale:g}; export a folder instead (--out FOLDER, without --layout)'
            )
        own: Mapping[str, Any] = self.denoiser.config
        side = self.latent_size // own['patch_size']
        weights = {
            original_name(name, own['depth']): _signed(name, each) for name, each in self.denoiser.state_dict().items()
        } | fixed_tables(self.denoiser, side)
        config = {
            **{name: own[name] for name in ('in_channels', 'patch_size', 'hidden_size', 'num_heads', 'depth')},
            **{'text_embed_dim': own['text_width'], 'text_num_tokens': own['text_length']},
            **{'input_size': self.latent_size, 'image_resolution': resolution, 'mlp_ratio': 4.0, 'rope_theta': THETA},
        }
        content = {name: each.detach().to('cpu', dtype).contiguous() for name, each in weights.items()}
        torch.save({'config': config, 'model': content}, path)
