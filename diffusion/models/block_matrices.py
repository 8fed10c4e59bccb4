"""The matrices in a model's blocks: the weights that Muon orthogonalizes."""

import math
from collections.abc import Sequence

from torch import Tensor, nn

from diffusion.models.families.adapter import find_adapter

MATRIX_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers that multiply by a matrix [out, in, ...]. Embeddings look up rows instead, and norms only have vectors."""


def is_matrix(shape: Sequence[int], *, convolutions: bool = True) -> bool:
    """Return True if Muon can update a weight: a matrix (or kernel, if `convolutions`) of several rows and columns."""
    dimensions = len(shape) == 2 or (convolutions and len(shape) > 2)
    return dimensions and shape[0] > 1 and math.prod(shape[1:]) > 1


def trained_matrices(block: nn.Module, *, convolutions: bool) -> list[Tensor]:
    weights = [layer.weight for layer in block.modules() if isinstance(layer, MATRIX_LAYERS)]
    return [each for each in weights if each.requires_grad and is_matrix(each.shape, convolutions=convolutions)]


def fused_projections(model: nn.Module) -> dict[int, int]:
    """Return the number of matrices stacked in each fused projection weight of a model, by the weight's `id`."""
    found = ((module, find_adapter(module)) for module in model.modules())
    return {
        id(layer.weight): parts
        for denoiser, adapter in found
        if adapter is not None
        for name, layer in denoiser.named_modules()
        for ending, parts in adapter.fused_projections.items()
        if f'.{name}'.endswith(f'.{ending}')
    }


def newton_schulz_flops(rows: int, columns: int) -> int:
    """Return the FLOPs of one Newton-Schulz iteration on a matrix X: X X^T, its square, and a product with X."""
    small, large = sorted((rows, columns))
    return 4 * small * small * large + 2 * small**3
