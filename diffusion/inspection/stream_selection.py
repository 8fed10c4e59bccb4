"""Select streams of a recipe by name, from its streams for training, evaluation and precomputing."""

import sys
from collections.abc import Collection, Mapping, Sequence

from diffusion.config.load import Recipe, RecipeError
from diffusion.config.recipe import StreamConfig
from diffusion.config.schema import MISSING, Problem, did_you_mean
from diffusion.errors import DataError, UserError, printable
from diffusion.training.expand_streams import by_shape

Sections = dict[str, dict[str, StreamConfig]]
"""Streams by section, such as `precompute.streams`, and name."""
SECTIONS = ('streams', 'eval_streams', 'precompute.streams')


def sections_of(recipe: Recipe, sections: Sequence[str] = SECTIONS) -> Sections:
    """Return a recipe's streams grouped by recipe key; no groups that are empty or still ???."""
    found = {
        'streams': recipe.streams,
        'eval_streams': recipe.eval_streams,
        'precompute.streams': recipe.precompute.streams,
    }
    return {section: dict(found[section]) for section in sections if found[section] and found[section] != MISSING}


def select(
    recipe: Recipe, names: Sequence[str], *, sections: Sequence[str] = SECTIONS, unused: Collection[str] = ()
) -> Sections:
    """Return a recipe's streams with these names; without names, all streams that have no values that are still ???.

    Args:
        names: Names of streams, with or without their recipe key: `photos`, or `eval_streams.photos`.
        unused: Keys of a stream that the caller does not use, so that their values may be ???.

    Raises:
        UserError: There are no streams, a name does not exist, or a stream has values that are still ???.
    """
    found = sections_of(recipe, sections)
    if not found:
        check_complete(recipe, sections)
        raise UserError(f'{sections[0]}: the recipe has no streams; add at least one')
    known = {f'{section}.{name}' for section, streams in found.items() for name in streams}
    bare = {name for streams in found.values() for name in streams}
    for name in names:
        if name not in known | bare:
            place = 'the recipe' if len(sections) > 1 else f"the recipe's {sections[0]}"
            raise UserError(f'{name}: no such stream in {place}; {did_you_mean(name, bare | known)}')
    chosen: Sections = {}
    incomplete: list[Problem] = []
    for section, streams in found.items():
        for name, stream in streams.items():
            where = f'{section}.{name}'
            if not names or name in names or where in names:
                problems = [each for each in missing(recipe, [where]) if each.where.split('.')[-1] not in unused]
                incomplete += problems
                if not problems:
                    chosen.setdefault(section, {})[name] = stream
    if incomplete and (names or not chosen):
        raise RecipeError(incomplete)
    for problem in incomplete:
        print(f'skipped: {printable(str(problem))}', file=sys.stderr)
    return chosen


def check_complete(recipe: Recipe, paths: Collection[str]) -> None:
    """Raise RecipeError if values at these paths of a recipe, such as `model`, are still ???; others may be."""
    problems = missing(recipe, paths)
    if problems:
        raise RecipeError(problems)


def missing(recipe: Recipe, paths: Collection[str]) -> list[Problem]:
    """Return the values at these paths of a recipe, or inside them, that are still ???."""
    return [each for each in recipe.missing if any(f'{each.where}.'.startswith(f'{path}.') for path in paths)]


def with_shapes(section: str, streams: Mapping[str, StreamConfig]) -> dict[str, StreamConfig]:
    """Return the streams, each one with several aspect-ratio buckets expanded into one stream per image shape.

    Raises:
        UserError: A folder lacks the list of its shapes. DataError: A store with such a list does not answer.
    """
    try:
        return by_shape(streams)
    except (UserError, DataError) as error:
        raise type(error)(f'{section.removesuffix("streams")}{error}') from error
