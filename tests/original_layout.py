"""The layout of Stable Diffusion's original code, written by hand for tests: the inverse of what the library reads."""

from torch import Tensor

RESNET = {'norm1': 'in_layers.0', 'conv1': 'in_layers.2', 'norm2': 'out_layers.0', 'conv2': 'out_layers.3'}
RESNET |= {'time_emb_proj': 'emb_layers.1', 'conv_shortcut': 'skip_connection'}
TOP = {'conv_in': 'input_blocks.0.0', 'conv_norm_out': 'out.0', 'conv_out': 'out.2'}
TOP |= {'time_embedding.linear_1': 'time_embed.0', 'time_embedding.linear_2': 'time_embed.2'}
TOP |= {'add_embedding.linear_1': 'label_emb.0.0', 'add_embedding.linear_2': 'label_emb.0.2'}


def original_layout(weights: dict[str, Tensor], *, layers_per_block: int, ema: bool = False) -> dict[str, Tensor]:
    """Return a U-Net's weights under their original names, and with `ema` averaged weights, which are one larger.

    The input blocks are numbered through: the first convolution, then for each level its layers and its downsampling;
    the output blocks likewise, with the upsampling in the last block of a level, after its attention.
    """
    layers = layers_per_block
    attention_in_up = {name.split('.')[1] for name in weights if name.startswith('up_blocks') and 'attentions' in name}
    result = {}
    for name, tensor in weights.items():
        parts = name.split('.')
        stem, leaf = name.rsplit('.', 1)
        if stem in TOP:
            found = f'{TOP[stem]}.{leaf}'
        elif parts[0] == 'mid_block':
            number = 1 if parts[1] == 'attentions' else 2 * int(parts[2])
            found = '.'.join(['middle_block', str(number), *_inside(parts[1], parts[3:])])
        else:
            level, kind, index = int(parts[1]), parts[2], int(parts[3])
            if kind == 'downsamplers':
                found = f'input_blocks.{(layers + 1) * (level + 1)}.0.op.{leaf}'
            elif kind == 'upsamplers':
                place = 2 if parts[1] in attention_in_up else 1
                found = f'output_blocks.{(layers + 1) * level + layers}.{place}.conv.{leaf}'
            else:
                down = parts[0] == 'down_blocks'
                block = (layers + 1) * level + index + (1 if down else 0)
                place = '1' if kind == 'attentions' else '0'
                found = '.'.join(
                    ['input_blocks' if down else 'output_blocks', str(block), place, *_inside(kind, parts[4:])]
                )
        result[f'model.diffusion_model.{found}'] = tensor
        if ema:
            result['model_ema.diffusion_model' + found.replace('.', '')] = tensor + 1
    assert len(result) == len(weights) * (2 if ema else 1)
    return result


def _inside(kind: str, rest: list[str]) -> list[str]:
    return [RESNET.get(part, part) for part in rest] if kind == 'resnets' else rest
