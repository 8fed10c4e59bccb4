"""Parameters, FLOPs and activation memory of a recipe's model, counted by building the model without weights.

    python -m diffusion.models.cost_counting < request.json

prints the counts as JSON (see `answer`). The planner does not import torch and runs this program in a subprocess.

Shapes: B batch, C latent channels, H W latent size, E text encoders, L text tokens, D text width.
"""

import contextlib
import importlib
import json
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode
from transformers import PretrainedConfig

from diffusion.compatibility.private_names import _LPIPS
from diffusion.config import registry
from diffusion.config.image_shapes import Shape, parse_shape
from diffusion.config.recipe import Component, LoraConfig
from diffusion.config.weight_sources import with_own_config
from diffusion.errors import UserError
from diffusion.models import batch_keys
from diffusion.models.activation_memory import Activations, Inputs, blocks_of, count_activations
from diffusion.models.block_matrices import fused_projections, newton_schulz_flops, trained_matrices
from diffusion.models.families.adapter import adapter_of
from diffusion.models.flops import (
    FlopCount,
    feature_encoder_flops,
    feature_projector_flops,
    forward_flops,
    perceptual_flops,
    text_encoder_flops,
    vae_encoder_flops,
)
from diffusion.models.lora import add_lora
from diffusion.models.perceptual_losses import PerceptualLoss, PerceptualLosses
from diffusion.models.pretrained import without_weights
from diffusion.models.representation_alignment import ENCODERS, FeatureEncoder, FeatureProjector
from diffusion.models.token_routing import Route
from diffusion.models.vae import downsampling, encoder_blocks, latent_channels


class AlignmentCounter:
    """Counter for representation alignment, like `ModelCounter`: a frozen image encoder and a trained MLP.

    Args:
        encoder: Sizes of the image encoder, as in its config.json; `model_type` is one of `ENCODERS`.
        hidden_size: Width of the MLP's hidden layers.
        pixels_per_token: Side of an image token in pixels.
        projection: `conv` for a convolution instead of the MLP.
    """

    def __init__(
        self,
        *,
        encoder: Mapping[str, Any],
        hidden_size: int,
        token_width: int,
        pixels_per_token: int,
        projection: str = 'mlp',
    ) -> None:
        with torch.device('meta'):
            self.encoder = _feature_encoder(encoder)
            self.projector = FeatureProjector.of(projection, token_width, hidden_size, self.encoder.width)
        self.token_width = token_width
        self.side = pixels_per_token

    def facts(self) -> dict[str, int | bool]:
        return {
            'frozen_parameters': _size(self.encoder.encoder.parameters()),
            'trained_parameters': _size(self.projector.parameters()),
        }

    def flops(self, shape: Shape) -> dict[str, int]:
        """Return the FLOPs of one pass of the frozen `encoder`, and of training the MLP (`projector`) on all tokens."""
        grid = self._grid(shape)
        projector = feature_projector_flops(self.projector, grid[0] * grid[1])
        return {'encoder': feature_encoder_flops(self.encoder, grid), 'projector': projector}

    def activations(self, shape: Shape, precision: str) -> Activations:
        """Return the activation memory of the MLP on all tokens; the encoder keeps nothing."""
        height, width = self._grid(shape)

        def tokens(batch: int) -> Inputs:
            return (torch.empty(batch, height * width, self.token_width), (height, width)), {}

        return count_activations(self.projector, tokens, precision.partition('+')[0])

    def _grid(self, shape: Shape) -> tuple[int, int]:
        return shape.height // self.side, shape.width // self.side


class PerceptualCounter:
    """Counter for the networks of perceptual losses, like `ModelCounter`.

    Args:
        lpips: The `network` and `scale` of LPIPS; None if it is off.
        features: The sizes of the `encoder`, and the `side` of its images in pixels; None if patch features are off.
    """

    def __init__(self, *, lpips: Mapping[str, Any] | None, features: Mapping[str, Any] | None) -> None:
        settings: dict[str, Any] = {'lpips_weight': 0.0, 'features_weight': 0.0}
        network = encoder = None
        with torch.device('meta'):
            if lpips is not None:
                network = _LPIPS(pretrained=False, net=lpips['network'], pnet_rand=True)
                settings |= {'lpips_weight': 1.0, 'lpips_network': lpips['network'], 'lpips_scale': lpips['scale']}
                settings |= {'lpips_backbone': 'meta'}
            if features is not None:
                encoder = _feature_encoder(features['encoder'])
                settings |= {'features_weight': 1.0, 'encoder': 'meta', 'features_side': features['side']}
            self.loss = PerceptualLoss(PerceptualLosses(**settings), network, encoder).requires_grad_(False)

    def facts(self) -> dict[str, int | bool]:
        return {'frozen_parameters': _size(self.loss.parameters()), 'trained_parameters': 0}

    def flops(self, shape: Shape) -> dict[str, int]:
        """Return the FLOPs of all passes of all networks, under the key `all`."""
        return {'all': perceptual_flops(self.loss, height=shape.height, width=shape.width)}

    def activations(self, shape: Shape, precision: str) -> Activations:
        def pair(batch: int) -> Inputs:
            images = torch.empty(batch, 3, shape.height, shape.width)
            return (images.clone().requires_grad_(), images), {}

        return count_activations(self.loss, pair, precision.partition('+')[0])


COUNTERS: dict[str, Any] = {'representation_alignment': AlignmentCounter, 'perceptual_losses': PerceptualCounter}
"""Counters of auxiliary networks, by the model argument that adds these networks."""


def _feature_encoder(config: Mapping[str, Any]) -> FeatureEncoder:
    kind = ENCODERS[config['model_type']]
    config_class: type[PretrainedConfig] = kind.config_class  # type: ignore[assignment]
    return FeatureEncoder(kind(config_class(**{key: value for key, value in config.items() if key != 'model_type'})))


def build_empty(name: str, kwargs: Mapping[str, Any]) -> nn.Module:
    with without_weights(), torch.device('meta'):
        return registry.build('model', Component(name, dict(kwargs)))


class ModelCounter:
    """Counter of a model's parameters, FLOPs and activation memory.

    A LatentDiffusion (a model with `denoiser`, `vae` and `text`) is counted part by part; other models are counted in a
    forward pass on images.

    Args:
        model: Composer model on the meta device.
        lora: Settings of a LoRA that is trained instead of the denoiser's weights, or None. The LoRA's own FLOPs, about
            1% of the denoiser's, are not counted, as in `LatentDiffusion.flops_per_batch`.
    """

    def __init__(self, model: nn.Module, lora: LoraConfig | None = None) -> None:
        self.model = model
        self.vae, self.text, denoiser = (_part(model, name) for name in ('vae', 'text', 'denoiser'))
        self.denoiser = denoiser if self.vae is not None and self.text is not None else None
        self.text_length = 0 if self.text is None else self.text.length
        self.text_width = 0 if self.text is None else self.text.width
        self.channels = 0 if self.vae is None else latent_channels(self.vae)
        self.cell = 1 if self.vae is None else downsampling(self.vae)
        self.patch = 1
        self.token_width = 0
        self._routed_flops: dict[Route, FlopCount] = {}
        if self.denoiser is not None:
            self._denoiser_flops = FlopCount(self.denoiser)
            sizes = adapter_of(self.denoiser).sizes(self.denoiser)
            self.patch, self.token_width = sizes.patch, sizes.token_width or 0
            if lora is not None:
                denoiser: Any = self.denoiser
                with torch.device('meta'):
                    add_lora(denoiser.requires_grad_(False), lora, seed=0)

    def facts(self) -> dict[str, int | bool]:
        """Return counts that do not depend on the image shape, by name, such as parameters and FLOPs per caption."""
        # A LatentDiffusion's parameters include a trained text encoder but no frozen parts. Use ids to count each
        # parameter once.
        parts = [part for part in (self.model, self.vae, self.text) if part is not None]
        parameters = {id(each): each for part in parts for each in part.parameters()}.values()
        denoiser = list(self.denoiser.parameters()) if self.denoiser is not None else []
        frozen_denoiser = {id(each) for each in denoiser if not each.requires_grad}
        modules = [] if self.denoiser is None else blocks_of(self.denoiser)
        blocks = [_size(block.parameters()) for block in modules]
        return {
            'latent_diffusion': self.denoiser is not None,
            'trained_parameters': _size(each for each in parameters if each.requires_grad),
            'frozen_parameters': _size(
                each for each in parameters if not each.requires_grad and id(each) not in frozen_denoiser
            ),
            'frozen_denoiser_parameters': _size(each for each in denoiser if not each.requires_grad),
            'block_parameters': sum(blocks),
            'largest_block_parameters': max(blocks, default=0),
            'latent_channels': self.channels,
            'pixels_per_cell': self.cell,
            'pixels_per_patch': self.cell * self.patch,
            'token_width': self.token_width,
            'token_blocks': len(self._token_blocks()),
            **({} if self.denoiser is None else _newton_schulz_flops(self.denoiser)),
            'text_length': self.text_length,
            'text_width': self.text_width,
            'trains_text_encoder': self._trains_text,
            'text_encoder_flops': 0 if self.denoiser is None else self._text_flops(),
        }

    def flops(self, shape: Shape, route: Route | None = None) -> dict[str, int]:
        """Return one image's forward FLOPs: `trained` (denoiser, trained text encoder) and `image_encoder` (the VAE's).

        With a `route`, only the kept tokens count in the blocks that the other tokens skip.
        """
        if self.denoiser is None:
            batch = self._image_batch(1, shape, device='meta')
            with _TrainedFlops(display=False) as trained:
                self.model(batch)
            flops = trained.get_total_flops()
            return {'trained': flops, 'image_encoder': forward_flops(self.model, batch) - flops}
        height, width = shape.height // self.cell, shape.width // self.cell
        flops = self._denoiser_count(route)(height, width, self.text_length)
        if self._trains_text:
            flops += self._text_flops()
        return {'trained': flops, 'image_encoder': vae_encoder_flops(self.vae, height=height, width=width)}

    def activations(self, shape: Shape, precision: str) -> Activations:
        """Return the activation memory of training on images of a shape; `precision` is as for `count_activations`."""
        # Settings of `speed` (compile, low_precision_norms) only apply to the denoiser.
        plain = precision.partition('+')[0]
        if self.denoiser is None:
            return count_activations(self.model, lambda batch: ((self._image_batch(batch, shape),), {}), plain)
        denoiser, size = self.denoiser, (shape.height // self.cell, shape.width // self.cell)

        def inputs(batch: int) -> Inputs:
            return adapter_of(denoiser).example_inputs(denoiser, batch, *size, self.text_length)

        total = count_activations(self.denoiser, inputs, precision)
        if self._trains_text:
            total += count_activations(self.text, lambda batch: ((self._tokens(batch),), {}), plain)
        return total

    def largest_encoder_tensor(self, shape: Shape) -> int:
        """Return the number of elements per image in the largest tensor of a frozen VAE's encoder; 0 without one."""
        if self.denoiser is None or not encoder_blocks(self.vae):
            return 0
        vae = self.vae

        def pixels(batch: int) -> Inputs:
            return (torch.empty(batch, vae.config['in_channels'], shape.height, shape.width, dtype=vae.dtype),), {}

        return count_activations(vae.encoder, pixels, 'float32').largest // vae.dtype.itemsize

    def _denoiser_count(self, route: Route | None) -> FlopCount:
        if route is None:
            return self._denoiser_flops
        assert self.denoiser is not None and route.end <= len(self._token_blocks()), 'checked by TREAD'
        if route not in self._routed_flops:
            self._routed_flops[route] = FlopCount(self.denoiser)
            self._routed_flops[route].route(route)
        return self._routed_flops[route]

    def _token_blocks(self) -> list[nn.Module]:
        blocks = None if self.denoiser is None else adapter_of(self.denoiser).token_blocks
        return [] if blocks is None or self.denoiser is None else blocks.of(self.denoiser)

    @property
    def _trains_text(self) -> bool:
        return self.text is not None and any(each.requires_grad for each in self.text.parameters())

    def _text_flops(self) -> int:
        return text_encoder_flops(self.text, length=self.text.token_length)

    def _tokens(self, count: int, *, device: str = 'cpu') -> Tensor:
        return torch.zeros(count, len(self.text.encoders), self.text.token_length, dtype=torch.int64, device=device)

    def _image_batch(self, count: int, shape: Shape, *, device: str = 'cpu') -> dict[str, Tensor]:
        """Return a batch of black images in the loader's format, with token ids if the model has a text encoder."""
        batch = {batch_keys.IMAGE: torch.zeros(count, 3, shape.height, shape.width, dtype=torch.uint8, device=device)}
        return batch if self.text is None else batch | {batch_keys.INPUT_IDS: self._tokens(count, device=device)}


class _TrainedFlops(FlopCounterMode):
    """FLOP counter for a model's trained parts: ignores operations under no_grad, which frozen parts use."""

    def _count_flops(self, func_packet: Any, out: Any, args: Any, kwargs: Any) -> Any:
        # FlopCounterMode has no public way to filter operations.
        return super()._count_flops(func_packet, out, args, kwargs) if torch.is_grad_enabled() else out


def _part(model: nn.Module, name: str) -> Any:
    part = getattr(model, name, None)
    return part if isinstance(part, nn.Module) else None


def _newton_schulz_flops(denoiser: nn.Module) -> dict[str, int]:
    """Return the FLOPs of one Newton-Schulz iteration on all matrices in the blocks, for each setting of `Muon`.

    Keys end in `_linears` or `_all` (with convolutions), and in `_split` or `_whole` (fused projections as one matrix).
    """
    fused = fused_projections(denoiser)
    counts = {}
    for layers in ('linears', 'all'):
        convolutions = layers == 'all'
        matrices = {
            id(each): each
            for block in blocks_of(denoiser)
            for each in trained_matrices(block, convolutions=convolutions)
        }
        for projections, parts_of in (('split', fused), ('whole', {})):
            counts[f'newton_schulz_flops_{layers}_{projections}'] = sum(
                parts * newton_schulz_flops(len(each) // parts, each[0].numel())
                for key, each in matrices.items()
                for parts in [parts_of.get(key, 1)]
            )
    return counts


def _size(parameters: Iterable[Tensor]) -> int:
    return sum(parameter.numel() for parameter in parameters)


def answer(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the parameter counts, FLOPs and activation memory that the planner requests for a model.

    Args:
        request: `name` and `kwargs` of a model, with the recipe's `imports`, or of a counter in `COUNTERS`; `lora`, a
            LoRA's settings, if any; `flops`, a list of image shapes ('640x384'), with token routing as '640x384
            tread=START:END:FRACTION' (see `Route`); and `activations`, a list of pairs of shape and precision.

    Returns:
        `facts` from the counter's `facts()`, `flops` by shape as requested, and `activations` by 'SHAPE PRECISION':
        the fields of `Activations`, and `largest_encoder_elements` (see `ModelCounter.largest_encoder_tensor`).
    """
    counter = _counter(request)
    requested = [(parse_shape(shape), precision) for shape, precision in request['activations']]
    encoder = dict.fromkeys(dict(requested), 0)  # the networks of losses do not encode the model's input
    if isinstance(counter, ModelCounter):
        encoder = {shape: counter.largest_encoder_tensor(shape) for shape in encoder}
    return {
        'facts': counter.facts(),
        'flops': {name: _flops(counter, name) for name in request['flops']},
        'activations': {
            f'{shape} {precision}': vars(counter.activations(shape, precision))
            | {'largest_encoder_elements': encoder[shape]}
            for shape, precision in requested
        },
    }


def _counter(request: Mapping[str, Any]) -> ModelCounter | AlignmentCounter | PerceptualCounter:
    if request['name'] in COUNTERS:
        return COUNTERS[request['name']](**request['kwargs'])
    for module in request['imports']:
        importlib.import_module(module)
    if (problem := registry.unknown('model', request['name'])) is not None:
        raise UserError(f'{problem} (models are counted in a process that imports only the modules of `imports`)')
    lora = LoraConfig(**request['lora']) if request.get('lora') else None
    kwargs = {key: with_own_config(value) for key, value in request['kwargs'].items()}
    return ModelCounter(build_empty(request['name'], kwargs), lora)


def _flops(counter: ModelCounter | AlignmentCounter | PerceptualCounter, name: str) -> dict[str, int]:
    """Return the counter's `flops` for a shape ('640x384') or a shape with token routing ('640x384 tread=2:13:0.5')."""
    shape, _, route = name.partition(' tread=')
    if not route:
        return counter.flops(parse_shape(shape))
    assert isinstance(counter, ModelCounter)
    start, end, fraction = route.split(':')
    return counter.flops(parse_shape(shape), Route(int(start), int(end), float(fraction)))


def main() -> int:
    """Read a request from stdin, print the costs as JSON, or {"mistake": message} for a UserError; return 0."""
    request = json.load(sys.stdin)
    with contextlib.redirect_stdout(sys.stderr):  # keep other libraries' output out of the JSON
        try:
            result = answer(request)
        except UserError as error:
            result = {'mistake': str(error)}
    json.dump(result, sys.stdout)
    return 0


if __name__ == '__main__':
    sys.exit(main())
