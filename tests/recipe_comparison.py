"""Comparison of recipes by what they do: a saved recipe has the defaults of its components, other recipes need not."""

from typing import Any

from diffusion.config.load import Recipe, plain_values
from diffusion.config.recipe_values import recipe_values


def all_values(recipe: Recipe) -> dict[str, Any]:
    """Return all values of a recipe as nested mappings, with the defaults filled in."""
    return recipe_values(plain_values(recipe)).values
