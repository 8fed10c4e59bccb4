"""Checks of representation alignment's settings, shared by recipes and the model."""

from collections.abc import Mapping

from diffusion.config import registry
from diffusion.config.recipe import Recipe
from diffusion.config.schema import Problem

KEY = 'representation_alignment'


def check_alignment(recipe: Recipe) -> list[Problem]:
    """Return a problem for each wrong setting of `model.representation_alignment`."""
    values, settings = (registry.settings_of('model', recipe.model, key) for key in (None, KEY))
    if not isinstance(values.get(KEY), Mapping) or not settings:
        return []
    depth = values.get('depth')
    numbers = [settings[key] for key in ('block', 'weight', 'hidden_size')]
    problems = {}
    if all(isinstance(each, int | float) for each in numbers):
        problems = alignment_problems(*numbers, depth=depth if isinstance(depth, int) else None)
    return [Problem(f'model.{KEY}.{key}', problem) for key, problem in problems.items()]


def no_features_problem(stream: str) -> str:
    """Return the error message for a stream of latents without image features, which the alignment needs."""
    return (
        f'needs images or stored features, but the latents of streams.{stream} have none; precompute them again with '
        f'this recipe (task=precompute), use dataset.name: image_text with the images, or set model.{KEY}: null'
    )


def alignment_problems(block: int, weight: float, hidden_size: int, *, depth: int | None) -> dict[str, str]:
    """Return error messages, by key, for the aligned block's index, the loss's weight and the MLP's width.

    Args:
        depth: Number of blocks of the denoiser, or None if it is not known.
    """
    problems = {}
    if block < 0 or (depth is not None and block >= depth):
        known = '' if depth is None else f' to {depth - 1}'
        problems['block'] = f'the denoiser has no block {block}; use the index of a block, from 0{known}'
    if weight <= 0:
        problems['weight'] = f'{weight} is not positive; use 0.5, or no representation_alignment'
    if hidden_size < 1:
        problems['hidden_size'] = f'{hidden_size} is not positive; 2048 is the default'
    return problems
