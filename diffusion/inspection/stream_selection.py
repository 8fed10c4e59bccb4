"""Select streams of a recipe by name, from its streams for training, evaluation and precomputing."""

from collections.abc import Mapping, Sequence

from diffusion.config.load import Recipe, RecipeError
from diffusion.config.recipe import StreamConfig
from diffusion.config.schema import did_you_mean
from diffusion.errors import DataError, UserError
from diffusion.training.expand_streams import by_shape

Sections = dict[str, dict[str, StreamConfig]]
"""Streams by section, such as `precompute.streams`, and name."""


def sections_of(recipe: Recipe) -> Sections:
    """Return a recipe's streams grouped by recipe key (streams, eval_streams, precompute.streams); no empty groups."""
    sections = {
        'streams': recipe.streams,
        'eval_streams': recipe.eval_streams,
        'precompute.streams': recipe.precompute.streams,
    }
    return {section: dict(streams) for section, streams in sections.items() if streams}


def select(recipe: Recipe, names: Sequence[str]) -> Sections:
    """Return a recipe's streams with these names, or all streams if `names` is empty, grouped by recipe key.

    Args:
        recipe: The recipe.
        names: Names of streams, with or without their recipe key: `photos`, or `eval_streams.photos`.

    Raises:
        UserError: The recipe has no streams, a name does not exist, or a chosen stream has values that are still ???.
    """
    sections = sections_of(recipe)
    if not sections:
        raise UserError('streams: the recipe has no streams; add at least one')
    known = {f'{section}.{name}' for section, streams in sections.items() for name in streams}
    bare = {name for streams in sections.values() for name in streams}
    for name in names:
        if name not in known | bare:
            raise UserError(f'{name}: no such stream in the recipe; {did_you_mean(name, bare | known)}')
    chosen = {
        section: {
            name: stream
            for name, stream in streams.items()
            if not names or name in names or f'{section}.{name}' in names
        }
        for section, streams in sections.items()
    }
    _check_no_missing_values(recipe, chosen)
    return {section: streams for section, streams in chosen.items() if streams}


def with_shapes(section: str, streams: Mapping[str, StreamConfig]) -> dict[str, StreamConfig]:
    """Return the streams, each one with several aspect-ratio buckets expanded into one stream per image shape.

    Raises:
        UserError: A folder has no list of its shapes.
        DataError: A store with such a list does not answer.
    """
    try:
        return by_shape(streams)
    except (UserError, DataError) as error:
        raise type(error)(f'{section.removesuffix("streams")}{error}') from error


def _check_no_missing_values(recipe: Recipe, chosen: Sections) -> None:
    """Raise RecipeError if a chosen stream has values that are still ??? (not set); other streams may have some."""
    prefixes = [f'{section}.{name}.' for section, streams in chosen.items() for name in streams]
    missing = [problem for problem in recipe.missing if any(f'{problem.where}.'.startswith(p) for p in prefixes)]
    if missing:
        raise RecipeError(missing)
