"""Checks of the settings for generating images, in the section `generate`, image grids and evaluators."""

from collections.abc import Mapping
from typing import Any

from diffusion.config import noise_schedulers, registry, sampling_limits
from diffusion.config.objective_checks import objective_settings
from diffusion.config.recipe import GenerateConfig, Recipe
from diffusion.config.schema import MISSING, Problem, join


def check_sampling(recipe: Recipe, components: Mapping[str, Mapping[str, Any]]) -> list[Problem]:
    """Return settings that are out of range as problems.

    Args:
        recipe: The recipe, whose section `generate` is checked.
        components: Keywords of this package's components in the recipe, by path. Keywords that are not about sampling
            are ignored.
    """
    if not isinstance(recipe.generate, GenerateConfig):
        return []
    timesteps, flow = num_train_timesteps(recipe), is_flow(recipe)
    # Training does not read `generate`, whose default of 50 steps is too high for a model of, say, 40 timesteps.
    places = [('generate', vars(recipe.generate), timesteps if recipe.task == 'generate' else None)]
    places += [(where, settings, timesteps) for where, settings in components.items()]
    problems = [
        Problem(join(where, key), what)
        for where, settings, limit in places
        for key, what in sampling_problems(settings, limit, flow=flow).items()
    ]
    if recipe.task == 'generate' and (what := model_problem(recipe)) is not None:
        problems.append(Problem('model.name', what))
    return problems + _check_images(recipe.generate)


def sampling_problems(settings: Mapping[str, Any], timesteps: int | None, *, flow: bool = False) -> dict[str, str]:
    """Return error messages for settings that are out of range, by key.

    Args:
        settings: Settings such as `num_inference_steps` and `guidance_scale`; others are ignored.
        timesteps: Number of timesteps of the model's noise schedule; None if unknown.
        flow: True for a model that is trained on a flow.
    """
    steps, scale = settings.get('num_inference_steps'), settings.get('guidance_scale')
    rescale, name = settings.get('guidance_rescale'), settings.get('noise_scheduler')
    problems: dict[str, str | None] = {}
    if isinstance(steps, int):
        problems['num_inference_steps'] = sampling_limits.steps_problem(steps, timesteps)
    if isinstance(scale, int | float):
        problems['guidance_scale'] = sampling_limits.guidance_problem(scale)
    if isinstance(rescale, int | float):
        problems['guidance_rescale'] = sampling_limits.rescale_problem(rescale)
    if isinstance(name, str) and name != MISSING:
        problems['noise_scheduler'] = noise_schedulers.name_problem(name, flow=flow)
    return {key: what for key, what in problems.items() if what is not None}


def num_train_timesteps(recipe: Recipe) -> int | None:
    """Return the number of timesteps of the model's noise schedule; None for a model without `diffusion.Objective`."""
    timesteps = objective_settings(recipe).get('num_train_timesteps')
    return timesteps if isinstance(timesteps, int) else None


def is_flow(recipe: Recipe) -> bool:
    """Return True if the model is trained on a flow instead of diffusion."""
    return objective_settings(recipe).get('path') == 'flow'


def model_problem(recipe: Recipe) -> str | None:
    """Return an error message if the model is one of this package that generates no images from prompts, else None."""
    settings = registry.settings_of('model', recipe.model)
    if not settings or 'objective' in settings:
        return None
    return f'{recipe.model.name} does not generate images from prompts; use sd2, for example'


def _check_images(settings: GenerateConfig) -> list[Problem]:
    """Return a problem if the number of images is out of range, or the seeds of that many images."""
    copies, seed = settings.num_images_per_prompt, settings.seed
    if not isinstance(copies, int) or not isinstance(seed, int) or not isinstance(settings.prompts, list):
        return []
    if copies < 1:
        return [Problem('generate.num_images_per_prompt', f'{copies} is out of range; use 1 or more')]
    what = sampling_limits.seeds_problem(seed, max(1, copies * len(settings.prompts)))
    return [] if what is None else [Problem('generate.seed', what)]
