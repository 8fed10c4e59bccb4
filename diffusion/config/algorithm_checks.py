"""Checks of algorithms that only some models support, shared by recipes and the algorithms themselves."""

from collections.abc import Iterator, Mapping
from typing import Any

from diffusion.config import registry
from diffusion.config.objective_checks import objective_settings
from diffusion.config.recipe import Component, Recipe
from diffusion.config.schema import Problem

UNROUTED_BLOCKS = 3
"""Default number of blocks after the end of the route of TREAD, which process all tokens."""


def check_algorithms(recipe: Recipe) -> list[Problem]:
    """Return a problem for each algorithm of a recipe that cannot train its model."""
    checks = {
        'tread': _tread_problems,
        'contrastive_flow_matching': _contrastive_problems,
    }
    return [
        Problem('.'.join(part for part in (where, key) if part), problem)
        for where, component in _algorithms(recipe)
        if component.name in checks
        for key, problem in checks[component.name](recipe, component.kwargs).items()
    ]


def algorithm_names(recipe: Recipe) -> set[str]:
    """Return the registered names of the algorithms that a recipe trains with."""
    return {component.name for _, component in _algorithms(recipe)}


def route_problems(start: int, end: int, fraction: float, *, depth: int | None) -> dict[str, str]:
    """Return error messages for a route of TREAD by key; `depth` is the number of blocks, None if it is not known."""
    problems = {}
    if not 0 < fraction < 1:
        problems['fraction'] = f'{fraction} is not a fraction in (0, 1); 0.5 is the published value'
    if start < 0:
        problems['start'] = f'{start} is negative; use the index of a block, from 0'
    elif depth is not None and not start < end <= depth:
        problems['end'] = (
            f'no tokens can skip the blocks {start} to {end - 1} of {depth}; use start < end <= {depth}, such as '
            f'start: {min(start, depth - 1)}, end: {max(depth - UNROUTED_BLOCKS, min(start, depth - 1) + 1)}'
        )
    return problems


def contrastive_problem(objective: Mapping[str, Any]) -> str | None:
    """Return an error message if contrastive flow matching does not apply to an objective with these settings."""
    found = objective['path'], objective['prediction_type']
    if found == ('flow', 'velocity'):
        return None
    return (
        f'needs a flow that predicts its velocity, but the objective has path: {found[0]} and prediction_type: '
        f'{found[1]}; set model.objective.path: flow and model.objective.prediction_type: velocity'
    )


def contrastive_weight_problem(weight: float) -> str | None:
    """Return an error message for a weight of contrastive flow matching that is out of range, else None."""
    # With a weight of 1 or more the loss has no minimum: it falls as the prediction grows.
    return None if 0 < weight < 1 else f'{weight} is not in (0, 1); 0.05 is the published value'


def microbatch_problem(microbatch: int, device_batch: int) -> str | None:
    """Return an error message if contrastive flow matching cannot train with microbatches of this size, else None."""
    if microbatch >= device_batch:
        return None
    return (
        f"contrastive flow matching takes negatives from the whole global batch, but a device's {device_batch} samples "
        f'are divided into microbatches of {microbatch}; use {device_batch}, with a smaller global_batch, more devices '
        'or parallelism.activation_checkpointing if they do not fit into memory'
    )


def _tread_problems(recipe: Recipe, kwargs: Mapping[str, Any]) -> dict[str, str]:
    if _has_no_denoiser(recipe) or registry.traits(recipe.model.name).u_net:
        return {'': f'the model {recipe.model.name} has no image tokens; use a transformer, such as prx, or remove it'}
    settings = registry.settings_of('algorithm', Component('tread', dict(kwargs)))
    start, end, fraction = (settings[key] for key in ('start', 'end', 'fraction'))
    depth = _depth(recipe)
    if end is None and isinstance(depth, int):
        end = depth - UNROUTED_BLOCKS
    if not isinstance(start, int) or not isinstance(end, int) or not isinstance(fraction, int | float):
        return {}  # the type check reports it
    return route_problems(start, end, fraction, depth=depth)


def _contrastive_problems(recipe: Recipe, kwargs: Mapping[str, Any]) -> dict[str, str]:
    problems = {}
    weight = kwargs.get('weight')
    if isinstance(weight, int | float) and (problem := contrastive_weight_problem(weight)) is not None:
        problems['weight'] = problem
    if _has_no_denoiser(recipe):
        return {**problems, '': f'the model {recipe.model.name} has no denoiser; remove the algorithm'}
    # The builders of transformers set a flow as the default objective, so there is nothing to check without a setting.
    if isinstance(recipe.model.kwargs.get('objective'), Mapping) or registry.traits(recipe.model.name).u_net:
        problem = contrastive_problem(objective_settings(recipe))
        problems |= {} if problem is None else {'': problem}
    return problems


def _has_no_denoiser(recipe: Recipe) -> bool:
    """Return True if a recipe's model is one of this package that has no denoiser."""
    settings = registry.settings_of('model', recipe.model)
    return bool(settings) and 'objective' not in settings


def _depth(recipe: Recipe) -> int | None:
    """Return the number of blocks of a recipe's model, or None if it has no such keyword."""
    depth = registry.settings_of('model', recipe.model).get('depth')
    return depth if isinstance(depth, int) else None


def _algorithms(recipe: Recipe) -> Iterator[tuple[str, Component]]:
    """Yield the path and the component of each of a recipe's algorithms, if it trains a model that is named."""
    if recipe.task != 'train' or not isinstance(recipe.algorithms, dict) or not isinstance(recipe.model, Component):
        return
    for key, component in recipe.algorithms.items():
        if isinstance(component, Component):
            yield f'algorithms.{key}', component
