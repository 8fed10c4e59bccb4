"""Checks of muP's base width, shared by recipes and the model, without importing torch."""

from diffusion.config import registry
from diffusion.config.recipe import Component, Recipe
from diffusion.config.schema import Problem

KEY = 'mup_base_width'
OPTIMIZERS = ('adamw', 'decoupled_adamw')
"""Optimizers whose updates are those of Adam, for which the rules of muP hold."""


def check_width_transfer(recipe: Recipe) -> list[Problem]:
    """Return a problem for a base width that does not fit the model, the LoRA or the optimizer."""
    values, optimizer = registry.settings_of('model', recipe.model), recipe.optimizer
    numbers = [values.get(key) for key in (KEY, 'hidden_size', 'num_heads')]
    sizes = [each for each in numbers if isinstance(each, int) and each > 0]
    if len(sizes) < len(numbers):  # no base width, or a wrong value, which is reported elsewhere
        return []
    found = []
    if (problem := base_width_problem(*sizes)) is not None:
        found.append(Problem(f'model.{KEY}', problem))
    if recipe.lora is not None:
        found.append(Problem(f'model.{KEY}', 'lora trains updates of other weights; remove one of the two'))
    if recipe.task == 'train' and isinstance(optimizer, Component):
        problem = optimizer_problem(optimizer.name)
        if problem is not None and registry.unknown('optimizer', optimizer.name) is None:
            found.append(Problem('optimizer.name', problem))
    return found


def base_width_problem(base: int, width: int, heads: int) -> str | None:
    """Return an error message if a base width does not fit a transformer of this width and number of heads."""
    head, rest = divmod(width, heads)
    if rest or base % head == 0:  # a width that does not divide into heads is reported elsewhere
        return None
    near = max(head, round(base / head) * head)
    return f'{base} is not a multiple of {head}, the size of a head, which must not depend on the width; use {near}'


def optimizer_problem(name: str) -> str | None:
    """Return an error message if an optimizer cannot be used with a base width, else None."""
    if name in OPTIMIZERS:
        return None
    return f'{name} has no rules for model.{KEY}, which are those of Adam; use adamw, or remove model.{KEY}'
