"""All values of a recipe as plain nested mappings with the defaults filled in, to compare two recipes.

This module reads a recipe's YAML instead of a `Recipe`, so that it can also read recipes saved by other versions of
this package. It imports no component.
"""

import dataclasses
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from diffusion.config import registry
from diffusion.config.checks import NAMED_COMPONENT_SECTIONS, SET_IN_OTHER_SECTIONS, SINGLE_COMPONENT_SECTIONS, SUPPLIED
from diffusion.config.recipe import InitFrom, LoraConfig, Recipe, StreamConfig
from diffusion.config.signatures import Signature

STREAM_SECTIONS = ('streams', 'eval_streams')
OPTIONAL_SECTIONS = {'init_from': InitFrom, 'lora': LoraConfig}
"""Sections that are null by default, with their classes."""


@dataclass(frozen=True)
class RecipeValues:
    """Values of a recipe."""

    values: dict[str, Any]
    """Plain nested mappings, with the defaults of sections and components filled in."""
    unknown: list[str]
    """Paths of keys that this version of the package does not know."""


def recipe_values(raw: Mapping[str, Any]) -> RecipeValues:
    """Return the values of a recipe with defaults filled in, given the plain mapping in its YAML."""
    unknown: list[str] = []
    values: dict[str, Any] = {}
    hints = get_type_hints(Recipe)
    for item in dataclasses.fields(Recipe):
        if item.repr:
            given = raw[item.name] if item.name in raw else _default(item)
            values[item.name] = _section(item.name, hints[item.name], given, raw, unknown)
    unknown += [key for key in raw if key not in values]
    return RecipeValues(values, unknown)


def _section(name: str, hint: Any, given: Any, raw: Mapping[str, Any], unknown: list[str]) -> Any:
    """Return a top-level value with its defaults filled in; add the paths of unknown keys to `unknown`."""
    if name == 'init_from' and isinstance(given, str):
        given = {'from': given}
    if name in OPTIONAL_SECTIONS and isinstance(given, Mapping):
        # Fill in the defaults, so that a recipe that leaves out a key equals one that sets its default.
        fields = {each.metadata.get('key', each.name): each for each in dataclasses.fields(OPTIONAL_SECTIONS[name])}
        return {key: _default(each) for key, each in fields.items()} | _plain(given)
    if name in SINGLE_COMPONENT_SECTIONS:
        offered = {'seed': raw.get('seed', Recipe.seed)} if name == 'model' else {}
        return _component(name, name.removeprefix('eval_'), None, given, offered, unknown)
    if name in NAMED_COMPONENT_SECTIONS:
        kind = NAMED_COMPONENT_SECTIONS[name]
        return {
            key: _component(f'{name}.{key}', kind, key, entry, {}, unknown)
            for key, entry in (given or {}).items()
            if entry is not False
        }
    if name in STREAM_SECTIONS:
        return _streams(name, given, unknown)
    if name == 'trainer':
        belongs_elsewhere = {*SET_IN_OTHER_SECTIONS, 'model'}
        defaults = registry.signature('trainer', 'composer').parameters
        return {each.name: _plain(each.default) for each in defaults if each.name not in belongs_elsewhere} | (
            _plain(given or {})
        )
    if dataclasses.is_dataclass(hint):
        return _dataclass(name, hint, given, unknown)
    return _plain(given)


def _default(item: dataclasses.Field[Any]) -> Any:
    """Return the default of a dataclass field as YAML represents it; None for a field without a default."""
    if item.default_factory is not dataclasses.MISSING:
        value = item.default_factory()
        return {'name': value.name, **value.kwargs} if hasattr(value, 'kwargs') else _plain(value)
    return None if item.default is dataclasses.MISSING else item.default


def _dataclass(where: str, kind: Any, given: Any, unknown: list[str]) -> dict[str, Any]:
    given = given if isinstance(given, Mapping) else {}
    hints = get_type_hints(kind)
    found = {}
    for item in dataclasses.fields(kind):
        value = given[item.name] if item.name in given else _default(item)
        is_streams = StreamConfig in get_args(hints[item.name])
        found[item.name] = _streams(f'{where}.{item.name}', value, unknown) if is_streams else _plain(value)
    unknown += [f'{where}.{key}' for key in given if key not in found]
    return found


def _streams(where: str, given: Any, unknown: list[str]) -> dict[str, Any]:
    return {
        key: _dataclass(f'{where}.{key}', StreamConfig, stream, unknown)
        for key, stream in (given or {}).items()
        if stream is not False
    }


def _component(
    where: str, kind: str, label: str | None, given: Any, offered: Mapping[str, Any], unknown: list[str]
) -> dict[str, Any] | None:
    if given is None and label is None:
        return None
    given = given if isinstance(given, Mapping) else {}
    name = str(given.get('name', label))
    keywords = {str(key): value for key, value in given.items() if key != 'name'}
    if registry.unknown(kind, name) is not None:  # a user's component that is not registered any more
        return {'name': name} | _plain(keywords)
    set_by_program = {*registry.PROGRAM_DEFAULTS.get(kind, ())} - {*keywords, *offered}
    left_out = {*SUPPLIED.get(kind, ()), *set_by_program}
    return {'name': name} | _keywords(where, registry.signature(kind, name), keywords, offered, unknown, left_out)


def _keywords(
    where: str,
    signature: Signature,
    given: Mapping[str, Any],
    offered: Mapping[str, Any],
    unknown: list[str],
    left_out: Collection[str] = (),
) -> dict[str, Any]:
    found: dict[str, Any] = {}
    for parameter in signature.parameters:
        if parameter.name in left_out:
            continue
        value = given.get(parameter.name, offered.get(parameter.name, parameter.default))
        nested = signature.nested_signature(parameter)
        if nested is not None and (value is None or isinstance(value, Mapping)):
            found[parameter.name] = _keywords(f'{where}.{parameter.name}', nested, value or {}, {}, unknown)
        else:
            found[parameter.name] = _plain(value)
    rest = {key: _plain(value) for key, value in given.items() if key not in found}
    unknown += [] if signature.open_ended else [f'{where}.{key}' for key in rest]
    return found | rest


def _plain(value: Any) -> Any:
    """Convert a value to what YAML represents: mappings, lists and scalars; anything else becomes text."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    return value if value is None or isinstance(value, str | int | float | bool) else str(value)
