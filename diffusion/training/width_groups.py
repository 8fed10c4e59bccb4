"""Parameter groups for AdamW with muP: the learning rate of each layer follows from its fan_in."""

from typing import Any

from torch import nn

from diffusion.config.width_checks import optimizer_problem
from diffusion.errors import UserError


def width_groups(
    model: nn.Module, *, optimizer: str, lr: float, weight_decay: float, factors: dict[str, float]
) -> list[dict[str, Any]]:
    """Return the parameter groups of a model, one for each factor of the learning rate; the group of factor 1 is first.

    Args:
        model: The model; frozen parameters are in no group.
        optimizer: Name of the optimizer, `adamw` or `decoupled_adamw`. AdamW multiplies the weight decay by the
            learning rate, so its weight decay is divided by the factor to keep the decay per step equal in all groups.
        lr: Learning rate of layers with the factor 1.
        weight_decay: Weight decay of layers with the factor 1.
        factors: Factor of the learning rate by name of parameter; 1 for others. See `scale_for_width`.

    Raises:
        UserError: The optimizer has other rules for the width.
    """
    problem = optimizer_problem(optimizer)
    if problem is not None:
        raise UserError(f'optimizer.name: {problem}')
    by_factor: dict[float, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            by_factor.setdefault(factors.get(name, 1.0), []).append(parameter)
    groups = []
    for factor in sorted(by_factor, key=lambda each: (each != 1, each)):
        decay = weight_decay / factor if optimizer == 'adamw' else weight_decay
        groups.append({'params': by_factor[factor], 'lr': lr * factor, 'weight_decay': decay})
    return groups
