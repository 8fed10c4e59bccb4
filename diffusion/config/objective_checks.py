"""Allowed values and combinations of the training objective's settings, shared by recipes and the model."""

from collections.abc import Mapping
from typing import Any

from diffusion.config import registry
from diffusion.config.recipe import Component, Recipe
from diffusion.config.schema import Problem

PATHS = ('diffusion', 'flow')
PREDICTION_TYPES = {'diffusion': ('epsilon', 'v_prediction', 'sample'), 'flow': ('velocity', 'sample')}
BETA_SCHEDULES = ('scaled_linear', 'linear', 'cosine')
TIMESTEPS = {'diffusion': ('uniform', 'stratified'), 'flow': ('uniform', 'stratified', 'logit_normal')}
DIFFUSION_ONLY = ('beta_schedule', 'beta_start', 'beta_end', 'zero_terminal_snr', 'min_snr_gamma')
"""Settings that a flow does not have."""
LOGIT_NORMAL_ONLY = ('logit_mean', 'logit_std', 'uniform_fraction')
"""Settings that apply only to `timesteps: logit_normal`."""


def check_objective(recipe: Recipe) -> list[Problem]:
    """Return values of `model.objective` that are not allowed, or contradict each other, as problems."""
    given = objective_settings(recipe)
    defaults = registry.settings_of('model', Component(recipe.model.name), 'objective') if given else {}
    if not defaults:
        return []
    # Use the default instead of a value of the wrong type, which the type check reports.
    settings = {key: given[key] if _has_type_of(default, given[key]) else default for key, default in defaults.items()}
    problems = objective_problems(settings, defaults)
    return [Problem(f'model.objective.{key}', what) for key, what in problems.items()]


def objective_settings(recipe: Recipe) -> dict[str, Any]:
    """Return the settings of the model's objective with their defaults; empty for a model without one."""
    return registry.settings_of('model', recipe.model, 'objective')


def objective_problems(settings: Mapping[str, Any], defaults: Mapping[str, Any]) -> dict[str, str]:
    """Return error messages for settings that are not allowed, by key.

    Args:
        settings: All settings of a `diffusion.Objective`.
        defaults: The default of each setting.
    """
    path = settings['path']
    if path not in PATHS:
        return {'path': f'{path!r}; use one of {", ".join(PATHS)}'}
    problems: dict[str, str] = {}
    choices = {'prediction_type': PREDICTION_TYPES[path], 'beta_schedule': BETA_SCHEDULES, 'timesteps': TIMESTEPS[path]}
    for key, allowed in choices.items():
        if settings[key] not in allowed:
            of_path = '' if key == 'beta_schedule' else f' for path: {path}'
            problems[key] = f'{settings[key]!r}; use one of {", ".join(allowed)}{of_path}'
    unused = DIFFUSION_ONLY if path == 'flow' else ()
    problems |= {key: 'a flow has no such setting; remove it' for key in unused if settings[key] != defaults[key]}
    if settings['timesteps'] != 'logit_normal':
        changed = [key for key in LOGIT_NORMAL_ONLY if settings[key] != defaults[key]]
        problems |= dict.fromkeys(changed, 'only timesteps: logit_normal uses it; set that, or remove it')
    if settings['zero_terminal_snr'] and settings['prediction_type'] == 'epsilon':
        problems['zero_terminal_snr'] = 'epsilon does not determine x at zero SNR; use prediction_type: v_prediction'
    gamma = settings['min_snr_gamma']
    if gamma is not None and gamma <= 0:
        problems['min_snr_gamma'] = f'{gamma} is not positive; use 5, or null to turn it off'
    elif gamma is not None and settings['zero_terminal_snr']:
        problems['min_snr_gamma'] = (
            f'{gamma} with zero_terminal_snr: true gives weight 0 to the last step, where sampling starts; remove one '
            'of the two'
        )
    if settings['snr_shift'] <= 0:
        problems['snr_shift'] = f'{settings["snr_shift"]} is not positive; use 1 to leave the schedule unchanged'
    if settings['noise_scale'] <= 0:
        problems['noise_scale'] = f'{settings["noise_scale"]} is not positive; use 1 for standard normal noise'
    elif settings['noise_scale'] != 1 and path != 'flow':
        problems['noise_scale'] = 'only path: flow uses it; set that, or remove it'
    if settings['logit_std'] <= 0:
        problems['logit_std'] = f'{settings["logit_std"]} is not positive; 1 is common'
    if not 0 <= settings['uniform_fraction'] <= 1:
        problems['uniform_fraction'] = f'{settings["uniform_fraction"]} is not a fraction in [0, 1]'
    return problems


def _has_type_of(default: Any, value: Any) -> bool:
    """Return True if a value has the type of a setting, whose default is text, true or false, a number or None."""
    if default is None and value is None:
        return True
    if isinstance(default, str | bool):
        return isinstance(value, type(default))
    return isinstance(value, int | float) and not isinstance(value, bool)
