"""diffusers' AutoencoderKL and transformers' CLIPTextModel on paper, from their configurations alone."""

from collections.abc import Mapping
from typing import Any

from diffusion.errors import UserError
from diffusion.planning.cost_tape import FLOAT32, Activation, Tape

VAE_DEFAULTS: dict[str, Any] = {
    'in_channels': 3,
    'out_channels': 3,
    'block_out_channels': (64,),
    'layers_per_block': 1,
    'latent_channels': 4,
    'norm_num_groups': 32,
    'mid_block_add_attention': True,
    'use_quant_conv': True,
    'use_post_quant_conv': True,
}
VAE_BLOCKS = {'DownEncoderBlock2D', 'UpDecoderBlock2D'}


def run_vae_encoder(tape: Tape, config: Mapping[str, Any], *, height: int, width: int) -> Activation:
    """Pass one picture of height x width pixels through the encoder, to mean and log-variance [2C, H, W]."""
    settings = _vae_settings(config)
    channels, latent = settings['block_out_channels'], 2 * settings['latent_channels']
    x = tape.conv(Activation((settings['in_channels'], height, width), FLOAT32), channels[0])
    for level, features in enumerate(channels):
        for _ in range(settings['layers_per_block']):
            x = _residual(tape, x, features, settings)
        if level < len(channels) - 1:
            # Padded by a row and a column on one side only.
            padded = tape.resize(x, (x.shape[1] + 1, x.shape[2] + 1))
            x = tape.conv(padded, features, stride=2, padding=0)
    x = _middle(tape, x, settings)
    x = tape.conv(tape.activate(tape.group_norm(x, settings['norm_num_groups'])), latent)
    return tape.conv(x, latent, kernel=1, padding=0) if settings['use_quant_conv'] else x


def run_vae_decoder(tape: Tape, config: Mapping[str, Any], *, height: int, width: int) -> Activation:
    """Pass one latent of height x width cells through the decoder, to a picture."""
    settings = _vae_settings(config)
    channels, latent = list(settings['block_out_channels'])[::-1], settings['latent_channels']
    x = Activation((latent, height, width), FLOAT32)
    if settings['use_post_quant_conv']:
        x = tape.conv(x, latent, kernel=1, padding=0)
    x = _middle(tape, tape.conv(x, channels[0]), settings)
    for level, features in enumerate(channels):
        for _ in range(settings['layers_per_block'] + 1):
            x = _residual(tape, x, features, settings)
        if level < len(channels) - 1:
            x = tape.conv(tape.resize(x, (2 * x.shape[1], 2 * x.shape[2])), features)
    x = tape.activate(tape.group_norm(x, settings['norm_num_groups']))
    return tape.conv(x, settings['out_channels'])


def run_clip_text(tape: Tape, config: Mapping[str, Any], *, length: int) -> Activation:
    """Pass a caption of `length` tokens through the text encoder, to its last hidden states [L, D]."""
    features, heads = config['hidden_size'], config['num_attention_heads']
    tape.embedding(config['vocab_size'], features)
    tape.embedding(config['max_position_embeddings'], features)
    x = Activation((length, features), FLOAT32)
    for _ in range(config['num_hidden_layers']):
        normed = tape.layer_norm(x)
        query, key, value = (tape.linear(normed, features) for _ in range(3))
        x = tape.add(tape.linear(tape.attention(query, key, value, heads=heads), features), x)
        hidden = tape.activate(tape.linear(tape.layer_norm(x), config['intermediate_size']))
        x = tape.add(tape.linear(hidden, features), x)
    return tape.layer_norm(x)


def downsampling(config: Mapping[str, Any]) -> int:
    """Pixels that a latent cell of this VAE spans along a side."""
    return 2 ** (len(_vae_settings(config)['block_out_channels']) - 1)


def _residual(tape: Tape, x: Activation, channels: int, settings: Mapping[str, Any]) -> Activation:
    groups = settings['norm_num_groups']
    hidden = tape.conv(tape.activate(tape.group_norm(x, groups)), channels)
    hidden = tape.conv(tape.activate(tape.group_norm(hidden, groups)), channels)
    shortcut = x if x.shape[0] == channels else tape.conv(x, channels, kernel=1, padding=0)
    return tape.add(shortcut, hidden)


def _middle(tape: Tape, x: Activation, settings: Mapping[str, Any]) -> Activation:
    channels = x.shape[0]
    x = _residual(tape, x, channels, settings)
    if settings['mid_block_add_attention']:
        tokens = tape.reshape(tape.group_norm(x, settings['norm_num_groups']), (x.shape[1] * x.shape[2], channels))
        query, key, value = (tape.linear(tokens, channels) for _ in range(3))
        attended = tape.linear(tape.attention(query, key, value, heads=1), channels)
        x = tape.add(tape.reshape(attended, x.shape), x)
    return _residual(tape, x, channels, settings)


def _vae_settings(config: Mapping[str, Any]) -> dict[str, Any]:
    for kind in (*config.get('down_block_types', ()), *config.get('up_block_types', ())):
        if kind not in VAE_BLOCKS:
            raise UserError(f'VAE: blocks of type {kind} are not counted; known: {", ".join(sorted(VAE_BLOCKS))}')
    return VAE_DEFAULTS | {key: value for key, value in config.items() if key in VAE_DEFAULTS}
