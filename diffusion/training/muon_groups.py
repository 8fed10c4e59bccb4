"""Parameter groups for Muon: the weights of linear layers and convolutions in a model's blocks, and all the others."""

import math
from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn

from diffusion.errors import UserError
from diffusion.models.activation_memory import blocks_of

MATRIX_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
"""Layers that multiply by a matrix. Embeddings look up rows instead, and norms have vectors."""


def muon_groups(model: nn.Module, *, convolutions: bool = True) -> list[dict[str, Any]]:
    """Return the parameter groups of a model for `Muon`: one that it orthogonalizes, and one that AdamW updates.

    Muon updates the weights of linear layers and convolutions inside of blocks, which are the modules that a
    `fsdp_wrap_fn` in the model selects. AdamW updates the rest: embeddings, norms, biases, first and last layers, text
    encoders. Frozen parameters are in no group.

    Args:
        model: A ComposerModel, or any module with a `fsdp_wrap_fn` in itself or in a submodule.
        convolutions: True includes convolutions; their weights [out, in, height, width] are used as matrices [out,
            in * height * width].

    Raises:
        UserError: The model has no blocks, or nothing in them is a matrix that is trained.
    """
    matrices = {id(weight): weight for block in _blocks(model) for weight in _matrices(block, convolutions)}
    if not matrices:
        raise UserError(
            f'muon: {type(model).__name__} has no blocks with trained matrices; set `fsdp_wrap_fn` on the module that '
            'has them, a function that returns True for a block, pass parameter groups of your own, or use optimizer '
            'adamw'
        )
    others = [each for each in model.parameters() if each.requires_grad and id(each) not in matrices]
    groups = [{'params': list(matrices.values()), 'algorithm': 'muon'}]
    return [*groups, {'params': others, 'algorithm': 'adamw'}] if others else groups


def is_matrix(shape: Sequence[int], *, convolutions: bool = True) -> bool:
    """Return True for the shape of a weight that Muon can update: a matrix with more than one row and column."""
    dimensions = len(shape) == 2 or (convolutions and len(shape) > 2)
    return dimensions and shape[0] > 1 and math.prod(shape[1:]) > 1


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model, selected by the `fsdp_wrap_fn` of any of its modules."""
    return [block for module in model.modules() for block in blocks_of(module)]


def _matrices(block: nn.Module, convolutions: bool) -> list[Tensor]:
    """Return the trained matrices among the weights of a block's layers."""
    weights = [layer.weight for layer in block.modules() if isinstance(layer, MATRIX_LAYERS)]
    return [each for each in weights if each.requires_grad and is_matrix(each.shape, convolutions=convolutions)]
