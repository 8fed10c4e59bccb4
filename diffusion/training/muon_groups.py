"""Parameter groups for Muon: the weights of linear layers and convolutions in a model's blocks, and all the others."""

from typing import Any

from torch import nn

from diffusion.errors import UserError
from diffusion.models.activation_memory import blocks_of
from diffusion.models.block_matrices import fused_projections, trained_matrices


def muon_groups(model: nn.Module, *, convolutions: bool = True, split_projections: bool = True) -> list[dict[str, Any]]:
    """Return the parameter groups of a model for `Muon`: one for Muon itself, and one for AdamW.

    Muon updates the weights of linear layers and convolutions inside of blocks, which are the modules that a
    `fsdp_wrap_fn` in the model selects. AdamW updates the rest: embeddings, norms, biases, first and last layers, text
    encoders. Frozen parameters are in no group.

    Args:
        model: A ComposerModel, or any module with a `fsdp_wrap_fn` in itself or in a submodule.
        convolutions: True includes convolutions; their weights [out, in, height, width] are used as matrices [out,
            in * height * width].
        split_projections: True orthogonalizes the queries', keys' and values' matrices of a fused projection
            separately; the families of denoisers name these layers. False takes the layer's weight as one matrix.

    Raises:
        UserError: The model has no blocks, or nothing in them is a matrix that is trained.
    """
    matrices = {
        id(weight): weight for block in _blocks(model) for weight in trained_matrices(block, convolutions=convolutions)
    }
    if not matrices:
        raise UserError(
            f'muon: {type(model).__name__} has no blocks with trained matrices; set `fsdp_wrap_fn` on the module that '
            'has them, a function that returns True for a block, pass parameter groups of your own, or use optimizer '
            'adamw'
        )
    others = [each for each in model.parameters() if each.requires_grad and id(each) not in matrices]
    fused = fused_projections(model) if split_projections else {}
    parts = [fused.get(each, 1) for each in matrices]
    groups: list[dict[str, Any]] = [{'params': list(matrices.values()), 'algorithm': 'muon', 'parts': parts}]
    return [*groups, {'params': others, 'algorithm': 'adamw'}] if others else groups


def _blocks(model: nn.Module) -> list[nn.Module]:
    """Return the blocks of a model, selected by the `fsdp_wrap_fn` of any of its modules."""
    return [block for module in model.modules() for block in blocks_of(module)]
