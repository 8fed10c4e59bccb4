"""Files of recipes, and all values of a recipe, by which recipes are compared."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import yaml

from diffusion.config.load import Recipe, plain_values
from diffusion.config.resume_rules import recipe_values


def write_yaml(path: Path, content: Mapping[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(content), encoding='utf-8')
    return path


def all_values(recipe: Recipe) -> dict[str, Any]:
    """Return all values of a recipe as nested mappings, with the defaults filled in."""
    return recipe_values(plain_values(recipe)).values
