"""Load a recipe from YAML, reporting all its mistakes in one error, and write a resolved recipe back to YAML."""

import dataclasses
import importlib
import sys
from collections.abc import Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from diffusion.config import registry
from diffusion.config.checks import (
    NAMED_COMPONENT_SECTIONS,
    SINGLE_COMPONENT_SECTIONS,
    SUPPLIED,
    check_components,
    check_recipe,
    keyword_types,
    not_inherited,
)
from diffusion.config.device_checks import check_devices
from diffusion.config.interpolation import KeyPath, Resolved, dotted
from diffusion.config.path_checks import check_output, check_paths
from diffusion.config.recipe import Component, Recipe, StreamConfig
from diffusion.config.schema import MISSING, Gatherer, Problem, build_dataclass, did_you_mean, join
from diffusion.config.secrets import hide_values, secret_problems
from diffusion.config.yaml_files import UnreadableYAML, dump, merge_and_resolve, read_chain, unset_problem
from diffusion.errors import UserError

__all__ = ['Component', 'Recipe', 'RecipeError', 'StreamConfig', 'check_devices', 'check_output', 'check_paths', 'load']


class RecipeError(UserError):
    """Error for a recipe with mistakes. The message lists all of them, and so does the attribute `problems`."""

    def __init__(self, problems: Iterable[Problem], path: str | Path = '') -> None:
        self.problems = list(problems)
        lines = [str(problem) for problem in self.problems]
        if path and len(lines) == 1 and lines[0].startswith(str(path)):
            super().__init__(lines[0])  # a single problem that names the file: it cannot be read
            return
        count = f'{len(lines)} mistakes' if len(lines) > 1 else 'a mistake'
        super().__init__('\n  '.join([f'{path or "the recipe"} has {count}:', *lines]))


SHARDING = ' (SHARD_GRAD_OP is strategy: fsdp2 with reshard_after_forward: false, and FULL_SHARD with true)'
"""Hint for messages about a wrong `parallelism.strategy` or about the unknown key `parallelism.sharding_strategy`."""
UNUSED_SECTIONS = {
    'train': ('precompute', 'generate'),
    'precompute': ('algorithms', 'callbacks', 'loggers', 'evaluators', 'streams', 'eval_streams', 'trainer'),
    'evaluate': ('algorithms', 'callbacks', 'loggers', 'scheduler', 'streams', 'precompute', 'generate'),
    'generate': (
        *('algorithms', 'callbacks', 'loggers', 'evaluators', 'optimizer', 'scheduler', 'runs_dir', 'trainer'),
        *('dataset', 'eval_dataset', 'loader', 'streams', 'eval_streams', 'precompute', 'init_from'),
    ),
}
"""Sections that a task does not read: their values may remain ???, and their environment variables need not be set.
`diffusion export` reads the same sections as generate. All tasks read `trainer.device` and `trainer.precision`."""


def load(
    path: str | Path,
    overrides: Sequence[str] = (),
    *,
    allow_missing: bool = False,
    task: str | None = None,
    environ: Mapping[str, str] | None = None,
    set_later: Collection[str] = (),
) -> Recipe:
    """Load a recipe from YAML, apply overrides, and check everything that can be checked without importing torch.

    A value whose environment variable is neither set nor required stays an interpolation and is not checked.

    Args:
        overrides: Changes as `key=value`, with dots for nested keys and YAML for values: `trainer.max_duration=20ba`.
        allow_missing: Accept values that are still `???` or whose environment variable is not set; they are listed in
            `recipe.missing`.
        task: Task that the recipe is loaded for (default: the recipe's). Variables in sections that the task does not
            read need not be set.
        environ: Environment variables for `${oc.env:...}` (default: those of this process).
        set_later: Names of environment variables that need not be set yet.

    Raises:
        RecipeError: The recipe has mistakes; the error lists all of them.
    """
    resolved, gather = read_values(path, overrides, environ=environ), Gatherer()
    if task not in (None, *UNUSED_SECTIONS):
        raise UserError(f'task: {task!r} is unknown; {did_you_mean(str(task), UNUSED_SECTIONS)}')
    raw = resolved.values
    if 'recipe' in raw and 'backend' in raw:
        what = f'this is a job file, which diffusion launch takes; its recipe is {raw["recipe"]}'
        raise RecipeError([Problem('', what)], path)
    recipe = build_dataclass(Recipe, _with_components(raw, gather), '', gather)
    keys = ('parallelism.strategy', 'parallelism.sharding_strategy')
    gather.problems = [
        Problem(each.where, each.what + SHARDING) if each.where in keys else each for each in gather.problems
    ]
    recipe.from_environment = resolved.from_environment
    unset = {dotted(key_path): names for key_path, names in resolved.unset.items()}
    # The modules in `imports` register components. Importing them runs user code, so skip it if there are mistakes.
    if isinstance(recipe.imports, list) and not _without(gather.problems, unset) and 'imports' not in unset:
        gather.problems += _import_all(recipe.imports)
    if not recipe.imports or not _without(gather.problems, unset):
        gather.problems += check_components(recipe)
    # keyword_types looks up components' signatures, which fails if a name is not registered.
    types = {} if gather.problems else keyword_types(recipe)
    unread = tuple(f'{section}.' for section in UNUSED_SECTIONS.get(recipe.task, ()))
    gather.missing = [
        Problem(each.where, f'is still ???; set a value of type {kind}') if (kind := types.get(each.where)) else each
        for each in gather.missing
        if not each.where.startswith(unread)
    ]
    # Report each path once: a value of the wrong type became None or a default, which later checks may also report.
    found = [problem.where for problem in gather.problems + gather.missing]
    gather.problems += [
        problem for problem in check_recipe(recipe) if not any(overlap(problem.where, where) for where in found)
    ]
    gather.problems += secret_problems(saved_values(recipe))
    if isinstance(recipe.trainer, dict) and recipe.trainer.get('auto_log_hparams'):
        gather.problems += [
            Problem(dotted(each), 'would be logged by trainer.auto_log_hparams in plain text; turn that off')
            for each in recipe.from_environment
            if each[0] == 'trainer'
        ]
    # Drop problems of values that are still interpolations: the real value may have another type and be in range.
    gather.problems = _without(gather.problems, unset)
    gather.missing += _missing_variables(unset, task or recipe.task, set_later)
    problems = gather.problems if allow_missing else gather.problems + gather.missing
    if problems:
        hidden = [Problem(each.where, _hide(each, resolved.from_environment, raw)) for each in problems]
        raise RecipeError(hidden, path)
    recipe.missing = gather.missing
    recipe.not_inherited = not_inherited(recipe, resolved.dropped)
    return recipe


def read_values(
    path: str | Path, overrides: Sequence[str] = (), *, environ: Mapping[str, str] | None = None
) -> Resolved:
    """Return the values of a YAML file, merged with the files it extends and with overrides; resolve interpolations.

    Raises:
        RecipeError: A file or an override cannot be read.
    """
    if not isinstance(path, str | Path):
        raise UserError(f'load: {path!r} is not a path; pass that of a YAML file, or diffusion:NAME')
    try:
        return merge_and_resolve(read_chain(path), overrides, environ)
    except UnreadableYAML as error:
        raise RecipeError([Problem('', str(error))], path) from error


def hide_environment(recipe: Recipe, text: str) -> str:
    """Return a message with each value from an environment variable replaced by its text in the recipe."""
    return hide_values(text, recipe.from_environment, plain_values(recipe))


def _hide(problem: Problem, from_environment: Mapping[KeyPath, str], values: Mapping[str, Any]) -> str:
    here = {path for path in from_environment if overlap(dotted(path), problem.where)}
    return hide_values(problem.what, from_environment, values, quoted_at=here)


def _missing_variables(unset: Mapping[str, tuple[str, ...]], task: str, set_later: Collection[str]) -> list[Problem]:
    unused = UNUSED_SECTIONS.get(task, ())
    always = ('trainer.device', 'trainer.precision')
    return [
        Problem(where, unset_problem([name for name in names if name not in set_later]))
        for where, names in unset.items()
        if (where.split('.')[0] not in unused or where in always) and not set(names) <= set(set_later)
    ]


def _without(problems: Iterable[Problem], unset: Collection[str]) -> list[Problem]:
    """Return the problems, except those about values whose environment variables are not set."""
    return [each for each in problems if not any(overlap(each.where, where) for where in unset if each.where)]


def overlap(one: str, other: str) -> bool:
    """Return True if two paths of recipe keys are equal or one is inside the other."""
    return f'{other}.'.startswith(f'{one}.') or f'{one}.'.startswith(f'{other}.')


def to_yaml(recipe: Recipe) -> str:
    """Return the resolved recipe as YAML that `load` reads back: the values set in the recipe, then the defaults.

    Values that depend on environment variables may be secrets, so they are written as `${oc.env:NAME}`. The YAML omits
    null values whose default is null, component names that equal their key, and the defaults of `trainer` and of
    components that users register.
    """
    values = saved_values(recipe)
    for section in SINGLE_COMPONENT_SECTIONS:
        _add_defaults(section.removeprefix('eval_'), values.get(section))
    for section, kind in NAMED_COMPONENT_SECTIONS.items():
        for key, entry in dict(values[section]).items():
            _add_defaults(kind, entry)
            if isinstance(entry, dict) and entry['name'] == key:
                del entry['name']
    return dump(values)


def _add_defaults(kind: str, entry: Any) -> None:
    if isinstance(entry, dict):  # a null entry or an interpolation has no keywords
        entry |= registry.saved_defaults(kind, entry['name'], entry, supplied=SUPPLIED.get(kind, ()))


def saved_values(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe as plain values; those that depend on environment variables are replaced by their `${...}`."""
    values = plain_values(recipe)
    for path, text in recipe.from_environment.items():
        _replace(values, path, text)
    return values


def _replace(values: Any, path: KeyPath, text: str) -> None:
    """Replace the value at a path in place, if its section still exists."""
    for key in path[:-1]:
        if not isinstance(values, dict | list) or (isinstance(values, dict) and key not in values):
            return
        section: Any = values
        values = section[key]
    if isinstance(values, dict | list):
        section = values
        section[path[-1]] = text


def plain_values(value: Any) -> Any:
    """Convert a recipe, or a value in it, to plain mappings, lists and scalars; omit nulls that are the default."""
    if isinstance(value, Component):
        return {'name': value.name} | plain_values(value.kwargs)
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {
            item.metadata.get('key', item.name): plain_values(getattr(value, item.name))
            for item in dataclasses.fields(value)
            if item.repr and (getattr(value, item.name) is not None or item.default is not None)
        }
    if isinstance(value, dict):
        return {key: plain_values(item) for key, item in value.items()}
    # Copy the list, since callers change the result.
    return [plain_values(item) for item in value] if isinstance(value, list) else value


def _with_components(raw: Mapping[str, Any], gather: Gatherer) -> dict[str, Any]:
    """Return a recipe's YAML values with components split into {name, kwargs}; drop `false` components and streams.

    In YAML, a component's arguments are siblings of `name`; the `Component` dataclass separates them.
    """
    values = dict(raw)
    if isinstance(values.get('generate'), dict):
        values['generate'] = _with_guidance(values['generate'])
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
    if isinstance(precompute := values.get('precompute'), dict) and isinstance(precompute.get('streams'), dict):
        streams = {key: stream for key, stream in precompute['streams'].items() if stream is not False}
        values['precompute'] = {**precompute, 'streams': streams}
    # Null is the same as empty here: YAML reads `callbacks:` as null if all lines below it are commented out.
    emptiable = (*NAMED_COMPONENT_SECTIONS, 'streams', 'eval_streams', 'trainer', 'imports')
    return {key: value for key, value in values.items() if value is not None or key not in emptiable}


def _component(value: Any, name: str | None, where: str, gather: Gatherer) -> Any:
    """Split a component's YAML into {name, kwargs}; `name` is the default of its key `name`, None if it is required."""
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
    name = value.get('name', name)
    return {'name': name, 'kwargs': _with_guidance(kwargs) if name in ('image_grid', 'image_metrics') else kwargs}


def _with_guidance(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Return settings with `guidance: {name: sparse}` in place of `sparse_guidance: true`, its earlier spelling."""
    rest = {key: value for key, value in settings.items() if key != 'sparse_guidance'}
    return {'guidance': {'name': 'sparse'}} | rest if settings.get('sparse_guidance') is True else rest


def _import_all(modules: list[str]) -> list[Problem]:
    problems = []
    # Allow imports from the working directory, as `python -c` does: a console script does not add it to sys.path.
    if '' not in sys.path and str(Path.cwd()) not in sys.path:
        sys.path.insert(0, str(Path.cwd()))
    for index, module in enumerate(modules):
        try:
            importlib.import_module(module)
        except ImportError as error:
            what = f'{module} cannot be imported ({error}); is it on PYTHONPATH?'
            problems.append(Problem(f'imports[{index}]', what))
    return problems
