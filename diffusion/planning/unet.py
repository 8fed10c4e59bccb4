"""diffusers' UNet2DConditionModel on paper, from its configuration alone."""

from collections.abc import Mapping, Sequence
from typing import Any

from diffusion.errors import UserError
from diffusion.planning.cost_tape import FLOAT32, Activation, Tape

SUPPORTED: dict[str, tuple[Any, ...]] = {
    'act_fn': ('silu', 'swish'),
    'addition_embed_type': (None, 'text_time'),
    'attention_type': ('default',),
    'class_embed_type': (None,),
    'class_embeddings_concat': (False,),
    'conv_in_kernel': (3,),
    'conv_out_kernel': (3,),
    'cross_attention_norm': (None,),
    'downsample_padding': (1,),
    'dual_cross_attention': (False,),
    'encoder_hid_dim_type': (None,),
    'mid_block_only_cross_attention': (None, False),
    'mid_block_type': ('UNetMidBlock2DCrossAttn', None),
    'num_class_embeds': (None,),
    'only_cross_attention': (False,),
    'resnet_time_scale_shift': ('default',),
    'reverse_transformer_layers_per_block': (None,),
    'time_cond_proj_dim': (None,),
    'time_embedding_act_fn': (None,),
    'time_embedding_type': ('positional',),
    'timestep_post_act': (None,),
    'upcast_attention': (False,),
}
"""What the pass below knows of the options that change it; the first value is diffusers' default."""
BLOCKS = {'DownBlock2D', 'CrossAttnDownBlock2D', 'UpBlock2D', 'CrossAttnUpBlock2D'}
DEFAULTS: dict[str, Any] = {
    'in_channels': 4,
    'out_channels': 4,
    'down_block_types': ('CrossAttnDownBlock2D', 'CrossAttnDownBlock2D', 'CrossAttnDownBlock2D', 'DownBlock2D'),
    'up_block_types': ('UpBlock2D', 'CrossAttnUpBlock2D', 'CrossAttnUpBlock2D', 'CrossAttnUpBlock2D'),
    'block_out_channels': (320, 640, 1280, 1280),
    'layers_per_block': 2,
    'norm_num_groups': 32,
    'cross_attention_dim': 1280,
    'transformer_layers_per_block': 1,
    'attention_head_dim': 8,
    'use_linear_projection': False,
    'time_embedding_dim': None,
    'addition_time_embed_dim': None,
    'projection_class_embeddings_input_dim': None,
}


def run_unet(tape: Tape, config: Mapping[str, Any], *, height: int, width: int, text_length: int) -> Activation:
    """Pass one sample through the U-Net.

    Args:
        tape: Adds up what the pass takes.
        config: Of a UNet2DConditionModel; what it leaves out is diffusers' default.
        height: H, in latent cells.
        width: W.
        text_length: L, tokens of the condition.

    Raises:
        UserError: The configuration has a part that is not known here.
    """
    _check(config)
    settings = DEFAULTS | {key: value for key, value in config.items() if key in DEFAULTS}
    return _Pass(tape, settings, config.get('addition_embed_type')).run(height, width, text_length)


class _Pass:
    """One pass, and what all of its blocks share."""

    def __init__(self, tape: Tape, settings: Mapping[str, Any], addition: str | None) -> None:
        self.tape = tape
        self.settings = settings
        self.addition = addition
        self.channels: Sequence[int] = settings['block_out_channels']
        levels = len(self.channels)
        self.heads = _per_level(settings['attention_head_dim'], levels)
        self.text_widths = _per_level(settings['cross_attention_dim'], levels)
        self.depths = _per_level(settings['transformer_layers_per_block'], levels)
        self.layers = _per_level(settings['layers_per_block'], levels)

    def run(self, height: int, width: int, text_length: int) -> Activation:
        tape, levels = self.tape, len(self.channels)
        self.timestep = self._time_embedding()
        self.text = {width: Activation((text_length, width), FLOAT32) for width in set(self.text_widths)}
        x = tape.conv(Activation((self.settings['in_channels'], height, width), FLOAT32), self.channels[0])
        skips = [x]
        for level, kind in enumerate(self.settings['down_block_types']):
            for _ in range(self.layers[level]):
                x = self._layer(x, level, attends=kind.startswith('CrossAttn'))
                skips.append(x)
            if level < levels - 1:
                x = tape.conv(x, self.channels[level], stride=2)
                skips.append(x)
        x = self._middle(x)
        for index, kind in enumerate(self.settings['up_block_types']):
            level = levels - 1 - index
            for _ in range(self.layers[level] + 1):
                x = self._layer(tape.concatenate(x, skips.pop()), level, attends=kind.startswith('CrossAttn'))
            if level:
                x = tape.conv(tape.resize(x, skips[-1].shape[1:]), self.channels[level])
        x = tape.activate(tape.group_norm(x, self.settings['norm_num_groups']))
        return tape.conv(x, self.settings['out_channels'])

    def _time_embedding(self) -> Activation:
        """The timestep's sinusoids through two layers; SDXL adds those of sizes and pooled text."""
        width = self.settings['time_embedding_dim'] or 4 * self.channels[0]
        embedded = self._two_layers(self.channels[0], width)
        if self.addition == 'text_time':
            added = self._two_layers(self.settings['projection_class_embeddings_input_dim'], width)
            embedded = self.tape.add(embedded, added)
        return embedded

    def _two_layers(self, inputs: int, features: int) -> Activation:
        x = self.tape.linear(Activation((inputs,), FLOAT32), features)
        return self.tape.linear(self.tape.activate(x), features)

    def _layer(self, x: Activation, level: int, *, attends: bool) -> Activation:
        with self.tape.unit(), self.tape.recomputed(x, self.timestep):
            x = self._residual(x, self.channels[level])
        return self._transformer(x, level) if attends else x

    def _middle(self, x: Activation) -> Activation:
        if self.settings.get('mid_block_type', 'UNetMidBlock2DCrossAttn') is None:
            return x
        level = len(self.channels) - 1
        with self.tape.unit():  # the one residual block that diffusers never recomputes
            x = self._residual(x, self.channels[level])
        return self._layer(self._transformer(x, level), level, attends=False)

    def _residual(self, x: Activation, channels: int) -> Activation:
        tape, groups = self.tape, self.settings['norm_num_groups']
        hidden = tape.conv(tape.activate(tape.group_norm(x, groups)), channels)
        shift = tape.linear(tape.activate(self.timestep), channels)
        hidden = tape.add(hidden, shift)
        hidden = tape.conv(tape.activate(tape.group_norm(hidden, groups)), channels)
        shortcut = x if x.shape[0] == channels else tape.conv(x, channels, kernel=1, padding=0)
        return tape.add(shortcut, hidden)

    def _transformer(self, x: Activation, level: int) -> Activation:
        with self.tape.unit():
            return self._transformer_layers(x, level)

    def _transformer_layers(self, x: Activation, level: int) -> Activation:
        tape, (channels, height, width) = self.tape, x.shape
        hidden, tokens = tape.group_norm(x, self.settings['norm_num_groups']), height * width
        linear = self.settings['use_linear_projection']
        if linear:
            hidden = tape.linear(tape.reshape(hidden, (tokens, channels)), channels)
        else:
            hidden = tape.reshape(tape.conv(hidden, channels, kernel=1, padding=0), (tokens, channels))
        text = self.text[self.text_widths[level]]
        for _ in range(self.depths[level]):
            with tape.recomputed(hidden, text):
                hidden = self._transformer_block(hidden, text, self.heads[level])
        if linear:
            hidden = tape.reshape(tape.linear(hidden, channels), x.shape)
        else:
            hidden = tape.conv(tape.reshape(hidden, x.shape), channels, kernel=1, padding=0)
        return tape.add(hidden, x)

    def _transformer_block(self, x: Activation, text: Activation, heads: int) -> Activation:
        tape, channels = self.tape, x.shape[-1]
        for other in (None, text):
            normed = tape.layer_norm(x)
            source = normed if other is None else other
            query = tape.linear(normed, channels, bias=False)
            key, value = (tape.linear(source, channels, bias=False) for _ in range(2))
            x = tape.add(tape.linear(tape.attention(query, key, value, heads=heads), channels), x)
        hidden = tape.geglu(tape.linear(tape.layer_norm(x), 8 * channels))
        return tape.add(tape.linear(hidden, channels), x)


def _check(config: Mapping[str, Any]) -> None:
    for key, known in SUPPORTED.items():
        value = config.get(key, known[0])
        if not any(value == choice and type(value) is type(choice) for choice in known):
            raise UserError(f'U-Net: {key}={value!r} is not counted; {key} may be {_list(known)}')
    blocks = [*config.get('down_block_types', ()), *config.get('up_block_types', ())]
    for kind in blocks:
        if kind not in BLOCKS:
            raise UserError(f'U-Net: blocks of type {kind} are not counted; known: {", ".join(sorted(BLOCKS))}')


def _per_level(value: Any, levels: int) -> Sequence[Any]:
    return value if isinstance(value, Sequence) else (value,) * levels


def _list(values: tuple[Any, ...]) -> str:
    return ' or '.join(repr(value) for value in values)
