"""muP, the maximal update parametrization: the learning rate tuned on a narrow model is also best for a wide model.

Source: Yang et al. 2022, "Tensor Programs V: Tuning large neural networks via zero-shot hyperparameter transfer",
arXiv 2203.03466, table 3. It adds no multipliers to the forward pass, so unmodified pipelines can load the model.
"""

import math

import torch
from torch import nn

from diffusion.errors import UserError
from diffusion.models.block_matrices import MATRIX_LAYERS


def scale_for_width(model: nn.Module, base: nn.Module, *, prefix: str = '') -> dict[str, float]:
    """Scale a model's initial weights in place, and return the learning rate factors of its layers.

    A layer's fan_in ratio is its fan_in divided by that of the same layer in the base model. The layer's kind depends
    on which dimensions of its weight differ between the two models. PyTorch initializes weights with variance 1 / (3
    fan_in):

        layer   fan_in   fan_out   standard deviation of initial weights   learning rate of Adam
        input   same     any       unchanged                               unchanged
        hidden  differs  differs   unchanged: PyTorch's is fan_in^(-1/2)   divided by the fan_in ratio
        output  differs  same      divided by ratio^(1/2): fan_in^(-1)     divided by the fan_in ratio

    Initial biases, which PyTorch also scales down with fan_in, are multiplied by ratio^(1/2). Biases and norms keep
    their learning rate. If both models have the same width, nothing changes.

    The base may be on any device (`torch.device('meta')` allocates nothing). Returned factors are keyed by `prefix` +
    parameter name; other parameters have the factor 1. Raises UserError if the models differ in more than width.
    """
    shapes = {name: parameter.shape for name, parameter in base.named_parameters()}
    if shapes.keys() != dict(model.named_parameters()).keys():
        raise UserError('mup: the model and its base model have different layers; they may differ only in width')
    factors: dict[str, float] = {}
    for path, layer in model.named_modules():
        for name, parameter in layer.named_parameters(recurse=False):
            full = f'{path}.{name}'.lstrip('.')
            grown = [size != before for size, before in zip(parameter.shape, shapes[full], strict=True)]
            if isinstance(layer, MATRIX_LAYERS) and name == 'weight':
                ratio = math.prod(parameter.shape[1:]) / math.prod(shapes[full][1:])
                _scale_initial_weights(layer, ratio, is_output=not grown[0])
                if ratio != 1:
                    factors[prefix + full] = 1 / ratio
            elif sum(grown) > 1:
                raise UserError(
                    f'mup: {full} of a {type(layer).__name__} grows in {sum(grown)} dimensions, and no muP rule is '
                    'known for it; use linear layers and convolutions'
                )
    return factors


@torch.no_grad()
def _scale_initial_weights(layer: nn.Module, ratio: float, *, is_output: bool) -> None:
    """Scale a layer's initial weight and bias from PyTorch's parametrization to muP, by its fan_in ratio."""
    if is_output:
        layer.weight.mul_(ratio**-0.5)  # type: ignore[operator]
    if layer.bias is not None:
        layer.bias.mul_(ratio**0.5)  # type: ignore[operator]
