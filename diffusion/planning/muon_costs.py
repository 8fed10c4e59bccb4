"""FLOPs of Muon's step: the Newton-Schulz iterations on the matrices of a model's blocks."""

from diffusion.config import registry
from diffusion.config.recipe import Recipe
from diffusion.planning.model_costs import ModelCosts


def newton_schulz_flops(recipe: Recipe, model: ModelCosts) -> int:
    """Return the FLOPs of orthogonalization in an optimizer step, of all devices together; 0 for other optimizers.

    Devices orthogonalize a part of the matrices each, and exchange the results.
    """
    if recipe.optimizer.name != 'muon':
        return 0
    settings = registry.settings_of('optimizer', recipe.optimizer)
    layers = 'all' if settings['convolutions'] else 'linears'
    projections = 'split' if settings['split_projections'] else 'whole'
    return settings['newton_schulz_steps'] * model.facts.get(f'newton_schulz_flops_{layers}_{projections}', 0)
