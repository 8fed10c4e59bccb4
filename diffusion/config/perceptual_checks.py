"""Checks of the settings of perceptual losses, shared by recipes and the model."""

from collections.abc import Mapping

from diffusion.config import registry
from diffusion.config.autoencoders import PIXELS
from diffusion.config.objective_checks import objective_settings
from diffusion.config.recipe import Recipe
from diffusion.config.schema import Problem

KEY = 'perceptual_losses'
BACKBONES = ('vgg', 'alex', 'squeeze')
"""Networks for which the linear layers of LPIPS are published."""


def check_perceptual_losses(recipe: Recipe) -> list[Problem]:
    """Return a problem for each wrong setting of `model.perceptual_losses`, and for an unsupported model."""
    model = recipe.model
    settings = registry.settings_of('model', model, KEY)
    if not settings or not isinstance(model.kwargs.get(KEY), Mapping):
        return []
    numbers = [settings[key] for key in ('lpips_weight', 'lpips_scale', 'features_weight', 'features_side')]
    problems = {}
    if all(isinstance(each, int | float) for each in numbers):
        problems = perceptual_problems(settings)
    found = [Problem('.'.join(part for part in (f'model.{KEY}', key) if part), what) for key, what in problems.items()]
    vae = model.kwargs.get('vae')
    if vae != PIXELS:
        found.append(Problem(f'model.{KEY}', f'needs a model on pixels, but model.vae is {vae}; set model.vae: pixels'))
    if (problem := objective_problem(objective_settings(recipe))) is not None and 'objective' in model.kwargs:
        found.append(Problem(f'model.{KEY}', problem))
    return found


def perceptual_problems(settings: Mapping[str, object]) -> dict[str, str]:
    """Return error messages for settings of perceptual losses, by key; the key '' is the section as a whole.

    Args:
        settings: All settings of a `PerceptualLosses`; the types of the numbers must have been checked.
    """
    problems = {}
    for key in ('lpips_weight', 'features_weight'):
        if settings[key] < 0:  # type: ignore[operator]
            problems[key] = f'{settings[key]} is negative; 0 turns the loss off'
    if settings['lpips_weight'] == settings['features_weight'] == 0:
        problems[''] = f'both weights are 0; set lpips_weight or features_weight, or remove {KEY}'
    if settings['lpips_weight'] and not settings['lpips_backbone']:
        problems['lpips_backbone'] = "is missing; give the file of the network's weights, such as vgg16-397923af.pth"
    if settings['lpips_network'] not in BACKBONES:
        problems['lpips_network'] = f'{settings["lpips_network"]!r}; use one of {", ".join(BACKBONES)}'
    if not 0 < settings['lpips_scale'] <= 1:  # type: ignore[operator]
        problems['lpips_scale'] = f'{settings["lpips_scale"]} is not a fraction in (0, 1]'
    if settings['features_weight'] and not settings['encoder']:
        problems['encoder'] = 'is missing; give a folder or repository of a DINOv2 or DINOv3 ViT'
    if settings['features_side'] < 1:  # type: ignore[operator]
        problems['features_side'] = f'{settings["features_side"]} is not positive; 224 is the default'
    return problems


def objective_problem(objective: Mapping[str, object]) -> str | None:
    """Return an error message if predictions of an objective with these settings do not give the clean image."""
    if objective['path'] == 'flow' or objective['prediction_type'] == 'sample':
        return None
    return (
        f'needs a flow or x-prediction, but the objective has path: {objective["path"]} and prediction_type: '
        f'{objective["prediction_type"]}; set model.objective.path: flow and prediction_type: sample'
    )
