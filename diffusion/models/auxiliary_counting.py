"""Costs of the networks that only training losses use: representation alignment and perceptual losses.

Like the model in cost_counting.py, they are built on the meta device from their sizes alone.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import PretrainedConfig

from diffusion.compatibility.private_names import _LPIPS
from diffusion.config.image_shapes import Shape
from diffusion.models.activation_memory import Activations, Inputs, count_activations
from diffusion.models.flops import feature_encoder_flops, feature_projector_flops, perceptual_flops
from diffusion.models.perceptual_losses import PerceptualLoss, PerceptualLosses
from diffusion.models.representation_alignment import ENCODERS, FeatureEncoder, FeatureProjector


class AuxiliaryCounter(ABC):
    """Counter of the costs of a loss's networks, with the interface of `cost_counting.ModelCounter`."""

    @abstractmethod
    def facts(self) -> dict[str, int | bool]:
        """Return counts that do not depend on the image shape."""

    @abstractmethod
    def flops(self, shape: Shape) -> dict[str, int]:
        """Return FLOPs of a training step for one image of a shape, by part."""

    @abstractmethod
    def activations(self, shape: Shape, precision: str) -> Activations:
        """Return the memory that the networks keep for the backward pass; `precision` is as for the model."""

    def largest_encoder_tensor(self, shape: Shape) -> int:
        """Return 0: these networks do not encode the model's input."""
        return 0


class AlignmentCounter(AuxiliaryCounter):
    """Counter of representation alignment: a frozen image encoder, and an MLP that is trained.

    Args:
        encoder: Sizes of the image encoder, as in its config.json; `model_type` is one of `ENCODERS`.
        hidden_size: Width of the MLP's hidden layers.
        token_width: Width of the denoiser's tokens.
        pixels_per_token: Side of an image token in pixels.
    """

    def __init__(
        self, *, encoder: Mapping[str, Any], hidden_size: int, token_width: int, pixels_per_token: int
    ) -> None:
        with torch.device('meta'):
            self.encoder = _feature_encoder(encoder)
            self.projector = FeatureProjector(token_width, hidden_size, self.encoder.width)
        self.token_width = token_width
        self.side = pixels_per_token

    def facts(self) -> dict[str, int | bool]:
        return {'frozen_parameters': _size(self.encoder.encoder), 'trained_parameters': _size(self.projector)}

    def flops(self, shape: Shape) -> dict[str, int]:
        """Return the FLOPs of one pass of the `encoder`, and of training the MLP, `projector`, on all tokens."""
        grid = self._grid(shape)
        projector = feature_projector_flops(self.projector, grid[0] * grid[1])
        return {'encoder': feature_encoder_flops(self.encoder, grid), 'projector': projector}

    def activations(self, shape: Shape, precision: str) -> Activations:
        """Return the activation memory of the MLP on all tokens; the encoder keeps nothing."""
        height, width = self._grid(shape)

        def tokens(batch: int) -> Inputs:
            return (torch.empty(batch, height * width, self.token_width),), {}

        return count_activations(self.projector, tokens, precision.partition('+')[0])

    def _grid(self, shape: Shape) -> tuple[int, int]:
        return shape.height // self.side, shape.width // self.side


class PerceptualCounter(AuxiliaryCounter):
    """Counter of the networks of perceptual losses.

    Args:
        lpips: The `network` and the `scale` of LPIPS; None if it is off.
        features: The sizes of the `encoder` and the `side` of its images in pixels; None if patch features are off.
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
        return {'frozen_parameters': _size(self.loss), 'trained_parameters': 0}

    def flops(self, shape: Shape) -> dict[str, int]:
        """Return `all`, the FLOPs of all passes of the networks."""
        return {'all': perceptual_flops(self.loss, height=shape.height, width=shape.width)}

    def activations(self, shape: Shape, precision: str) -> Activations:
        def pair(batch: int) -> Inputs:
            images = torch.empty(batch, 3, shape.height, shape.width)
            return (images.clone().requires_grad_(), images), {}

        return count_activations(self.loss, pair, precision.partition('+')[0])


COUNTERS: dict[str, type[AuxiliaryCounter]] = {
    'representation_alignment': AlignmentCounter,
    'perceptual_losses': PerceptualCounter,
}
"""Counters by the model's keyword whose networks they count, apart from the model."""


def _feature_encoder(config: Mapping[str, Any]) -> FeatureEncoder:
    """Return an image encoder with the sizes in `config`, on the default device."""
    kind = ENCODERS[config['model_type']]
    config_class: type[PretrainedConfig] = kind.config_class  # type: ignore[assignment]
    return FeatureEncoder(kind(config_class(**{key: value for key, value in config.items() if key != 'model_type'})))


def _size(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())
