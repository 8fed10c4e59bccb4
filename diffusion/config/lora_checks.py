"""Checks of the section `lora` of a recipe, without importing torch."""

from diffusion.config import registry
from diffusion.config.recipe import LoraConfig, Recipe
from diffusion.config.schema import Problem


def check_lora(recipe: Recipe) -> list[Problem]:
    """Return a problem for each value of `lora` that is out of range, and for a model that does not support it."""
    settings, found = recipe.lora, []
    if not isinstance(settings, LoraConfig):
        return []
    if isinstance(settings.rank, int) and settings.rank < 1:
        found.append(Problem('lora.rank', f'{settings.rank} is less than 1; 4 to 64 are common'))
    if isinstance(settings.alpha, int | float) and settings.alpha <= 0:
        found.append(Problem('lora.alpha', f'{settings.alpha} is not positive; use the rank, for a factor of 1'))
    if isinstance(settings.targets, list) and not all(settings.targets):
        found.append(Problem('lora.targets', 'has an empty name, which every layer ends with; remove it'))
    if settings.targets == []:
        found.append(Problem('lora.targets', 'is empty, so nothing would be trained; name layers, such as to_q'))
    if recipe.task == 'train' and recipe.init_from is None:
        found.append(Problem('lora', 'trains updates of published weights; set init_from to a source of weights'))
    return found + _model_problems(recipe)


def _model_problems(recipe: Recipe) -> list[Problem]:
    """Return the reasons why the recipe's model cannot be trained with a LoRA."""
    settings = registry.settings_of('model', recipe.model)
    if not settings:
        return []
    if 'train_text_encoder' not in registry.signature('model', recipe.model.name).names():
        return [Problem('lora', f'the model {recipe.model.name} has no denoiser; remove the section')]
    if settings['train_text_encoder'] is True:
        return [
            Problem(
                'model.train_text_encoder', 'lora trains the denoiser alone, and the text encoder is frozen; set false'
            )
        ]
    return []
