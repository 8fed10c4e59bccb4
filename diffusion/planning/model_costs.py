"""What a recipe's model is made of: configurations of its parts, without building any of them."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from diffusion.config import registry
from diffusion.config.image_shapes import Shape, square
from diffusion.config.signatures import defaults_of_source
from diffusion.errors import UserError
from diffusion.models import sd2_config
from diffusion.planning import encoders
from diffusion.planning.cost_tape import AMP_LOW_NORMS, Precision, Tape
from diffusion.planning.unet import run_unet

_ANY_SHAPE = square(512)
"""For counting what does not depend on it."""
TINY_VAE = Path(__file__).parents[1] / 'models' / 'weights' / 'tiny_vae'


@dataclass(frozen=True)
class Model:
    """The parts of a model as configurations: a U-Net with VAE and text encoder, or (denoiser None) a VAE alone."""

    vae: Mapping[str, Any]
    denoiser: Mapping[str, Any] | None = None
    text: Mapping[str, Any] = field(default_factory=dict)
    text_length: int = 0
    trains_text: bool = False
    posterior: str = 'sample'
    notes: tuple[str, ...] = ()
    """What was assumed."""

    def check_shape(self, shape: Shape) -> None:
        cell = encoders.downsampling(self.vae)
        if shape.width % cell or shape.height % cell:
            raise UserError(f'streams: {shape} px is not a multiple of {cell} px, the size of a latent cell')

    def denoise(self, shape: Shape, precision: Precision = AMP_LOW_NORMS, *, compiles: bool = False) -> Tape:
        """The denoiser's pass over one sample; none of it for a VAE alone."""
        tape = Tape(precision, compiles=compiles)
        if self.denoiser is not None:
            cell = encoders.downsampling(self.vae)
            height, width = shape.height // cell, shape.width // cell
            run_unet(tape, self.denoiser, height=height, width=width, text_length=self.text_length)
        return tape

    def encode_text(self, precision: Precision = AMP_LOW_NORMS) -> Tape:
        tape = Tape(precision)
        if self.text:
            encoders.run_clip_text(tape, self.text, length=self.text_length)
        return tape

    def encode_image(self, shape: Shape, precision: Precision = AMP_LOW_NORMS) -> Tape:
        """The VAE's encoder alone."""
        tape = Tape(precision)
        encoders.run_vae_encoder(tape, self.vae, height=shape.height, width=shape.width)
        return tape

    def reconstruct(self, shape: Shape, precision: Precision = AMP_LOW_NORMS) -> Tape:
        """The whole VAE, encoder and decoder."""
        tape, cell = self.encode_image(shape, precision), encoders.downsampling(self.vae)
        encoders.run_vae_decoder(tape, self.vae, height=shape.height // cell, width=shape.width // cell)
        return tape

    def train(self, shape: Shape, precision: Precision = AMP_LOW_NORMS, *, compiles: bool = False) -> Tape:
        """The pass over one sample of all that is trained."""
        if self.denoiser is None:
            return self.reconstruct(shape, precision)
        tape = self.denoise(shape, precision, compiles=compiles)
        if self.trains_text:
            encoders.run_clip_text(tape, self.text, length=self.text_length)
        return tape

    @property
    def trained_parameters(self) -> int:
        return self.train(_ANY_SHAPE).parameters

    @property
    def frozen_parameters(self) -> int:
        if self.denoiser is None:
            return 0
        text = 0 if self.trains_text else self.encode_text().parameters
        return self.reconstruct(_ANY_SHAPE).parameters + text

    def latent_elements(self, shape: Shape) -> int:
        """Numbers of a latent, without its variances."""
        cell = encoders.downsampling(self.vae)
        return self.vae.get('latent_channels', 4) * (shape.height // cell) * (shape.width // cell)


Describer = Callable[[Mapping[str, Any]], Model]
_DESCRIBERS: dict[str, Describer] = {}


def describes(name: str) -> Callable[[Describer], Describer]:
    """Tell the plan what a model registered under `name` is made of, from its keywords with their defaults."""

    def tie(describer: Describer) -> Describer:
        _DESCRIBERS[name] = describer
        return describer

    return tie


def describe(name: str, kwargs: Mapping[str, Any]) -> Model:
    """What a recipe's model is made of.

    Raises:
        UserError: The plan does not know this model.
    """
    if name not in _DESCRIBERS:
        raise UserError(
            f'model.name: the plan does not know what {name!r} is made of (it knows {", ".join(sorted(_DESCRIBERS))}); '
            f"say it in a function under @diffusion.planning.model_costs.describes('{name}') in a module of `imports`"
        )
    target = registry.TARGETS['model'][name]
    defaults = defaults_of_source(*target.split(':')) if isinstance(target, str) else {}
    return _DESCRIBERS[name](defaults | dict(kwargs))


@describes('sd2')
def _sd2(settings: Mapping[str, Any]) -> Model:
    notes: list[str] = []
    own = settings['pretrained'] in (None, sd2_config.PRETRAINED)
    vae = text = None
    if settings['vae'] is not None:
        vae = _read(settings['vae'], 'vae', notes)
    elif not own:
        vae = _read(settings['pretrained'], 'vae', notes)
    if not own:
        text = _read(settings['pretrained'], 'text_encoder', notes)
    vae, text = vae or sd2_config.VAE, text or sd2_config.TEXT_ENCODER
    channels = vae.get('latent_channels', 4)
    return Model(
        vae=vae,
        denoiser=sd2_config.UNET | {'in_channels': channels, 'out_channels': channels},
        text=text,
        text_length=text['max_position_embeddings'],
        trains_text=settings['train_text_encoder'],
        posterior=settings['posterior'],
        notes=tuple(notes),
    )


@describes('tiny')
def _tiny(settings: Mapping[str, Any]) -> Model:
    """As `diffusion.models.builders.tiny` makes it."""
    notes: list[str] = []
    vae = _read(settings['vae'] or str(TINY_VAE), 'vae', notes) or _read(str(TINY_VAE), 'vae', notes)
    assert vae is not None, 'the tiny VAE ships with the package'
    channels, widths = vae['latent_channels'], tuple(settings['block_out_channels'])
    width = settings['text_width']
    denoiser = {
        'in_channels': channels,
        'out_channels': channels,
        'down_block_types': ('CrossAttnDownBlock2D',) * len(widths),
        'up_block_types': ('CrossAttnUpBlock2D',) * len(widths),
        'block_out_channels': widths,
        'layers_per_block': settings['layers_per_block'],
        'attention_head_dim': tuple(features // 32 for features in widths),
        'cross_attention_dim': width,
        'use_linear_projection': True,
    }
    text = {
        'vocab_size': 49408,
        'hidden_size': width,
        'intermediate_size': 4 * width,
        'num_hidden_layers': settings['text_layers'],
        'num_attention_heads': width // 32,
        'max_position_embeddings': settings['max_length'],
    }
    return Model(
        vae=vae,
        denoiser=denoiser,
        text=text,
        text_length=settings['max_length'],
        trains_text=settings['train_text_encoder'],
        posterior=settings['posterior'],
        notes=tuple(notes),
    )


@describes('autoencoder')
def _autoencoder(settings: Mapping[str, Any]) -> Model:
    keys = ('block_out_channels', 'latent_channels', 'layers_per_block', 'norm_num_groups')
    return Model(vae={key: settings[key] for key in keys} | {'mid_block_add_attention': False})


def _read(place: str, part: str, notes: list[str]) -> dict[str, Any] | None:
    """A part's configuration from a local folder: of the part itself, or of a pipeline."""
    for path in (Path(place, part, 'config.json'), Path(place, 'config.json')):
        if path.is_file():
            try:
                return json.loads(path.read_text(encoding='utf-8'))
            except ValueError as error:
                raise UserError(f'{path}: not JSON ({error}); was the folder written by save_pretrained?') from error
    notes.append(f"{place} is not a local folder with a {part}; counted as this model's usual one")
    return None
