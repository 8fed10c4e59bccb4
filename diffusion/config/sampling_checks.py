"""Checks of the settings for generating images, shared by recipes, command lines and the model.

The functions `..._problem` return an error message with the allowed values, or None if the value is allowed.
"""

import ast
import difflib
import functools
import math
from collections.abc import Callable, Mapping
from typing import Any

from diffusion.config import registry
from diffusion.config.language_model_checks import language_model_problems
from diffusion.config.model_checks import has_no_denoiser, objective_settings, routes_tokens
from diffusion.config.recipe import Component, GenerateConfig, Recipe
from diffusion.config.schema import MISSING, Problem, join
from diffusion.config.signatures import source_file

SEEDS = 2**32
"""Number of possible seeds: the initial noise is drawn with Philox, whose seed is a 32-bit word."""


def seeds_problem(first: int, count: int = 1) -> str | None:
    if 0 <= first <= SEEDS - count:
        return None
    last = '' if count == 1 else f' for the first of {count} images'
    return f'{first} is out of range; use 0 to {SEEDS - count}{last}'


def steps_problem(steps: int, num_train_timesteps: int | None) -> str | None:
    if steps >= 1 and (num_train_timesteps is None or steps <= num_train_timesteps):
        return None
    if num_train_timesteps is None:
        return f'{steps} is out of range; use 1 or more'
    return f'{steps} is out of range; use 1 to {num_train_timesteps}, the number of timesteps of the noise schedule'


def guidance_problem(scale: float) -> str | None:
    if math.isfinite(scale) and scale >= 0:
        return None
    return f'{scale} is out of range; use 0 or more (1 turns guidance off, 7.5 is common)'


def rescale_problem(rescale: float) -> str | None:
    return None if 0 <= rescale <= 1 else f'{rescale} is out of range; use 0 (off) to 1'


def interval_problem(low: float, high: float) -> str | None:
    return None if low < high else f'{low:g} is not below high, {high:g}; use low < high for times from 0 to 1'


def guidance_problems(settings: Any, where: str, *, flow: bool) -> list[Problem]:
    """Return the mistakes in a `guidance` mapping, such as {name: apg, eta: 0.5}, for diffusion or a `flow`."""
    if settings is None:
        return []
    if not isinstance(settings, Mapping):
        return [Problem(where, f'{settings!r} is not a mapping (key: value); write for example {{name: apg}}')]
    name, kwargs = settings.get('name'), {str(key): value for key, value in settings.items() if key != 'name'}
    known = ', '.join(registry.names('guidance'))
    if not isinstance(name, str):
        return [Problem(join(where, 'name'), f'is missing or not a name; use one of: {known}')]
    what = registry.unknown('guidance', name) or registry.contract_problem('guidance', name)
    if what is None and name == 'cfg_zero_star' and not flow:
        what = 'cfg_zero_star works on the velocities of a flow, and this model is diffusion; use apg or interval'
    if what is not None:
        return [Problem(join(where, 'name'), what)]
    problems = registry.check_keywords(where, 'guidance', name, kwargs)
    if name == 'interval' and not problems and MISSING not in kwargs.values():
        what = interval_problem(kwargs['low'], kwargs['high'])
    return problems + ([] if what is None else [Problem(join(where, 'low'), what)])


def guidances_of(settings: Mapping[str, Any]) -> list[Any]:
    """Return the setting `guidance` as a list: one mapping or None, or the several that an evaluator compares."""
    given = settings.get('guidance')
    if isinstance(given, list | tuple) and given and 'guidance_scales' in settings:
        return list(given)
    return [given]


def swept(value: Any) -> list[Any]:
    """Return the values of a setting that may be a list of values to compare, such as the numbers of steps."""
    return list(value) if isinstance(value, list | tuple) else [value]


def guidance_text(settings: Mapping[str, Any] | None) -> str:
    """Return a guidance as text, such as `apg eta=0.5`; empty for None, which means classifier-free guidance."""
    if not isinstance(settings, Mapping):
        return ''
    return ' '.join([str(settings.get('name')), *(f'{key}={each}' for key, each in settings.items() if key != 'name')])


def shift_problem(shift: float | None, *, flow: bool) -> str | None:
    if shift is None or (flow and math.isfinite(shift) and shift > 0):
        return None
    if not flow:
        return f'{shift} shifts the times of a flow, and this model is diffusion; remove it'
    return f'{shift} is not positive; use 1 for no shift, or more for more steps near noise'


SCHEDULERS = {
    'ddim': 'DDIMScheduler',
    'ddpm': 'DDPMScheduler',
    'dpm++': 'DPMSolverMultistepScheduler',
    'euler': 'EulerDiscreteScheduler',
    'euler_ancestral': 'EulerAncestralDiscreteScheduler',
    'heun': 'HeunDiscreteScheduler',
    'pndm': 'PNDMScheduler',
    'unipc': 'UniPCMultistepScheduler',
}
FLOW_SCHEDULERS = {
    'ddim': 'FlowMatchEulerDiscreteScheduler',
    'dpm++': 'DPMSolverMultistepScheduler',
    'euler': 'FlowMatchEulerDiscreteScheduler',
    'heun': 'FlowMatchHeunDiscreteScheduler',
    'unipc': 'UniPCMultistepScheduler',
}
"""Schedulers for flow-matching models by short name. For a flow, DDIM is Euler's method (Gao et al. 2024)."""
FLOW_SCHEDULER_CLASSES = (*FLOW_SCHEDULERS.values(), 'DPMSolverSinglestepScheduler')
"""diffusers' schedulers that can sample flow-matching models; the others require the betas of a diffusion schedule."""


def scheduler_class_name(name: str, *, flow: bool = False) -> str:
    """Return the name of a diffusers scheduler class, given a short name such as `ddim` or a class name.

    `flow` selects the class that a short name stands for with flow-matching models.
    """
    return (FLOW_SCHEDULERS if flow else SCHEDULERS).get(name, name)


def scheduler_problem(name: str, *, flow: bool) -> str | None:
    """Return an error message if a noise scheduler is unknown or cannot sample the model (a flow model if `flow`)."""
    known = _scheduler_classes()
    is_known = scheduler_class_name(name) in known
    if flow and is_known and scheduler_class_name(name, flow=True) not in FLOW_SCHEDULER_CLASSES:
        return f'{name!r} cannot sample a flow; use {", ".join(FLOW_SCHEDULERS)}'
    if not flow and name.startswith('FlowMatch'):
        return f'{name!r} samples a flow, and this model is diffusion; use {", ".join(SCHEDULERS)}'
    if is_known:
        return None
    near = difflib.get_close_matches(name, [*SCHEDULERS, *known], n=1)
    hint = f'did you mean {near[0]!r}? ' if near else ''
    return f'{name!r} is unknown; {hint}short names: {", ".join(SCHEDULERS)}'


@functools.cache
def _scheduler_classes() -> list[str]:
    # diffusers imports each class on first use, so its source file lists the classes as strings.
    tree = ast.parse(source_file('diffusers.schedulers').read_text(encoding='utf-8'))
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    return sorted(text for text in texts if text.endswith('Scheduler') and not text.startswith('Flax'))


def check_sampling(recipe: Recipe, components: Mapping[str, Mapping[str, Any]]) -> list[Problem]:
    """Return a problem for each sampling setting that is out of range in `generate` or a component.

    `components` maps the path of each component that samples images to its arguments.
    """
    timesteps, flow = num_train_timesteps(recipe.model), is_flow(recipe.model)
    # Training does not read `generate`, whose default of 50 steps would be an error for a model with fewer timesteps.
    places = [('generate', vars(recipe.generate), timesteps if recipe.task == 'generate' else None)]
    places += [(where, settings, timesteps) for where, settings in components.items()]
    problems = [
        Problem(join(where, key), what)
        for where, settings, limit in places
        for key, what in sampling_problems(settings, limit, flow=flow).items()
    ]
    problems += [each for where, settings, _ in places for each in language_model_problems(settings, where)]
    in_training = 'callbacks.' if recipe.evaluators_interval is None else ('callbacks.', 'evaluators.')
    for where, settings, _ in places:
        for index, guidance in enumerate(guidances_of(settings)):
            place = join(where, 'guidance' if guidance is settings.get('guidance') else f'guidance[{index}]')
            problems += guidance_problems(guidance, place, flow=flow)
            name = guidance.get('name') if isinstance(guidance, Mapping) else None
            if name == 'sparse' and not routes_tokens(recipe):
                what = 'sparse needs algorithms.tread or model.sprint in training; use another guidance'
                problems.append(Problem(join(place, 'name'), what))
            if name == 'autoguidance' and recipe.task == 'train' and where.startswith(in_training):
                what = 'autoguidance reads checkpoints of the run, but not in training; use it in generate or evaluate'
                problems.append(Problem(join(place, 'name'), what))
    if recipe.task == 'generate' and (what := model_problem(recipe.model)) is not None:
        problems.append(Problem('model.name', what))
    return problems + _check_images(recipe.generate)


def sampling_problems(settings: Mapping[str, Any], timesteps: int | None, *, flow: bool) -> dict[str, str]:
    """Return error messages, by key, for wrong sampling settings; `timesteps` limits the number of steps, if known."""
    scale, rescale = settings.get('guidance_scale'), settings.get('guidance_rescale')
    problems: dict[str, str | None] = {}
    if isinstance(scale, int | float):
        problems['guidance_scale'] = guidance_problem(scale)
    if isinstance(rescale, int | float):
        problems['guidance_rescale'] = rescale_problem(rescale)
    checks: list[tuple[str, Any, Callable[[Any], str | None]]] = [
        ('num_inference_steps', int, lambda steps: steps_problem(steps, timesteps)),
        ('snr_shift', (int | float), lambda shift: shift_problem(shift, flow=flow)),
        ('noise_scheduler', str, lambda name: None if name == MISSING else scheduler_problem(name, flow=flow)),
    ]
    for key, kind, check in checks:
        values = [each for each in swept(settings.get(key)) if isinstance(each, kind)]
        problems[key] = next((what for each in values if (what := check(each)) is not None), None)
    return {key: what for key, what in problems.items() if what is not None}


def num_train_timesteps(model: Component) -> int | None:
    """Return the number of timesteps of a model's noise schedule; None for a model without `diffusion.Objective`."""
    timesteps = objective_settings(model).get('num_train_timesteps')
    return timesteps if isinstance(timesteps, int) else None


def is_flow(model: Component) -> bool:
    return objective_settings(model).get('path') == 'flow'


def model_problem(model: Component) -> str | None:
    """Return an error message for a model of this package that cannot generate images from prompts, else None."""
    if not has_no_denoiser(model):
        return None
    return f'{model.name} does not generate images from prompts; use sd2, for example'


def _check_images(settings: GenerateConfig) -> list[Problem]:
    copies, seed = settings.num_images_per_prompt, settings.seed
    if not isinstance(copies, int) or not isinstance(seed, int) or not isinstance(settings.prompts, list):
        return []
    if copies < 1:
        return [Problem('generate.num_images_per_prompt', f'{copies} is out of range; use 1 or more')]
    what = seeds_problem(seed, max(1, copies * len(settings.prompts)))
    return [] if what is None else [Problem('generate.seed', what)]
