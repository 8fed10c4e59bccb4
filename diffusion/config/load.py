"""Load a recipe from YAML, with all its mistakes in one error, and write a resolved recipe back to YAML."""

import dataclasses
import importlib
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from diffusion.config import registry
from diffusion.config.checks import (
    NAMED_COMPONENT_SECTIONS,
    SINGLE_COMPONENT_SECTIONS,
    check_components,
    check_devices,
    check_recipe,
    keyword_types,
)
from diffusion.config.path_checks import check_output, check_paths
from diffusion.config.recipe import Component, Recipe, StreamConfig
from diffusion.config.schema import MISSING, Gatherer, Problem, build_dataclass, join
from diffusion.config.yaml_files import UnreadableYAML, dump, merge, read_chain
from diffusion.errors import UserError

__all__ = [
    'Component',
    'Problem',
    'Recipe',
    'RecipeError',
    'StreamConfig',
    'check_devices',
    'check_output',
    'check_paths',
    'load',
    'to_yaml',
]


class RecipeError(UserError):
    """Error for a recipe with mistakes; its message lists them all, and `problems` holds them one by one."""

    def __init__(self, problems: Iterable[Problem], path: str | Path = '') -> None:
        self.problems = list(problems)
        lines = [str(problem) for problem in self.problems]
        count = f'{len(lines)} mistakes' if len(lines) > 1 else 'a mistake'
        super().__init__('\n  '.join([f'{path or "the recipe"} has {count}:', *lines]))


def load(path: str | Path, overrides: Sequence[str] = (), *, allow_missing: bool = False) -> Recipe:
    """Load a recipe from YAML, apply overrides, and check everything that can be checked without importing torch.

    Args:
        path: The recipe's YAML file.
        overrides: Changes as `key=value`, with dots for depth and YAML for values: `trainer.max_duration=20ba`.
        allow_missing: Accept values that are still `???`, and list them in `recipe.missing`.

    Raises:
        RecipeError: The recipe has mistakes; the error lists all of them.
    """
    raw, gather = read_values(path, overrides), Gatherer()
    if 'recipe' in raw and 'backend' in raw:
        what = f'this is a job file, which diffusion launch takes; its recipe is {raw["recipe"]}'
        raise RecipeError([Problem('', what)], path)
    recipe = build_dataclass(Recipe, _with_components(raw, gather), '', gather)
    # Components of `imports` are known only after importing these modules, which runs user code. Do not run it for a
    # recipe that has mistakes already.
    if isinstance(recipe.imports, list) and not gather.problems:
        gather.problems += _import_all(recipe.imports)
    if not recipe.imports or not gather.problems:
        gather.problems += check_components(recipe)
    # keyword_types looks up signatures, which needs component names that are known to be registered.
    meanings = {} if gather.problems else keyword_types(recipe)
    gather.missing = [
        Problem(value.where, f'is still ???; set a value of type {meanings[value.where]}')
        if meanings.get(value.where)
        else value
        for value in gather.missing
    ]
    # A value of the wrong type was replaced by None or its default, so a later check may report the same path again.
    found = [problem.where for problem in gather.problems + gather.missing]
    gather.problems += [
        problem for problem in check_recipe(recipe) if not any(_overlap(problem.where, where) for where in found)
    ]
    problems = gather.problems if allow_missing else gather.problems + gather.missing
    if problems:
        raise RecipeError(problems, path)
    recipe.missing = gather.missing
    return recipe


def read_values(path: str | Path, overrides: Sequence[str] = ()) -> dict[str, Any]:
    """Return the plain values of a YAML file, merged with the files it extends and with overrides.

    Raises:
        RecipeError: A file or an override cannot be read.
    """
    try:
        return merge(read_chain(Path(path)), overrides)
    except UnreadableYAML as error:
        raise RecipeError([Problem('', str(error))], path) from error


def _overlap(one: str, other: str) -> bool:
    """Return True if two paths of recipe keys are equal or one is inside the other."""
    return f'{other}.'.startswith(f'{one}.') or f'{one}.'.startswith(f'{other}.')


def to_yaml(recipe: Recipe) -> str:
    """Return the resolved recipe, defaults included, as YAML that `load` reads back to an equal recipe.

    Omits values that are null by default, and component names that equal their key.
    """
    values = _plain(recipe)
    for section in NAMED_COMPONENT_SECTIONS:
        for key, entry in dict(values[section]).items():
            if isinstance(entry, dict) and entry['name'] == key:
                del entry['name']
    return dump(values)


def _plain(value: Any) -> Any:
    """Convert a recipe, or a value in a recipe, to plain mappings, lists and scalars."""
    if isinstance(value, Component):
        return {'name': value.name} | _plain(value.kwargs)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            item.name: _plain(getattr(value, item.name))
            for item in dataclasses.fields(value)
            if item.repr and (getattr(value, item.name) is not None or item.default is not None)
        }
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    return value


def _with_components(raw: Mapping[str, Any], gather: Gatherer) -> dict[str, Any]:
    """Return a recipe's raw values with each component as {name, kwargs}, and without entries that are set to false.

    In YAML, a component's keywords are beside its name; the `Component` dataclass separates them.
    """
    values = dict(raw)
    for section in SINGLE_COMPONENT_SECTIONS:
        if isinstance(values.get(section), dict):
            values[section] = _component(values[section], None, section, gather)
    for section in NAMED_COMPONENT_SECTIONS:
        if isinstance(values.get(section), dict):
            values[section] = {
                key: _component({} if entry in (None, True, '') else entry, str(key), join(section, key), gather)
                for key, entry in values[section].items()
                if entry is not False
            }
    for section in ('streams', 'eval_streams'):
        if isinstance(values.get(section), dict):
            values[section] = {key: stream for key, stream in values[section].items() if stream is not False}
    # A key without a value, such as `callbacks:` with all its lines commented out, is null in YAML.
    emptiable = (*NAMED_COMPONENT_SECTIONS, 'streams', 'eval_streams', 'trainer', 'imports')
    return {key: value for key, value in values.items() if value is not None or key not in emptiable}


def _component(value: Any, name: str | None, where: str, gather: Gatherer) -> Any:
    """Return a component's raw mapping as {name, kwargs}; `name` is the default name, None if it is required."""
    if value == MISSING:
        return value
    if not isinstance(value, dict):
        gather.problem(where, f'{value!r} is not a mapping of keywords; use one, or false to remove the component')
        return {'name': '', 'kwargs': {}}
    kwargs = {str(key): item for key, item in value.items() if key != 'name'}
    if 'name' not in value and name is None:
        known = ', '.join(registry.names(where.removeprefix('eval_')))
        gather.problem(join(where, 'name'), f'is missing; use one of: {known}')
        return {'name': '', 'kwargs': kwargs}
    return {'name': value.get('name', name), 'kwargs': kwargs}


def _import_all(modules: list[str]) -> list[Problem]:
    """Import the modules that a recipe's `imports` names; return a problem for each that cannot be imported."""
    problems = []
    # As with `python -c`, modules of the working directory can be imported; a console script does not add it.
    if '' not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    for index, module in enumerate(modules):
        try:
            importlib.import_module(module)
        except ImportError as error:
            problems.append(
                Problem(f'imports[{index}]', f'{module} cannot be imported ({error}); is it on PYTHONPATH?')
            )
    return problems
