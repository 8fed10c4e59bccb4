"""Costs of the networks that only training losses use: those of representation alignment and of perceptual losses."""

from collections.abc import Mapping
from typing import Any

from diffusion.config import registry
from diffusion.config.image_shapes import Shape
from diffusion.config.recipe import Recipe
from diffusion.planning.count_cache import ModelKey
from diffusion.planning.counted_costs import CountedCosts
from diffusion.planning.image_encoders import encoder_sizes
from diffusion.planning.model_costs import ModelCosts
from diffusion.planning.token_route import TokenRoute


class AlignmentCosts(CountedCosts):
    """Costs of representation alignment: one pass of a frozen image encoder, and the training of an MLP.

    Args:
        settings: All settings of `model.representation_alignment`.
        model: The model, whose tokens are aligned.
        notes: List to which assumptions are appended.
    """

    def __init__(self, settings: Mapping[str, Any], model: ModelCosts, notes: list[str]) -> None:
        kwargs = {
            'encoder': encoder_sizes(settings['encoder'], notes, where='representation_alignment.encoder'),
            'hidden_size': settings['hidden_size'],
            'token_width': model.facts['token_width'],
            'pixels_per_token': model.facts['pixels_per_patch'],
        }
        super().__init__(ModelKey('representation_alignment', kwargs))
        self.block: int = settings['block']

    def training_flops(self, shape: Shape, route: TokenRoute | None, *, encodes: bool) -> float:
        """Return the FLOPs per image of a shape; the MLP sees only the tokens that the aligned block sees.

        Args:
            route: Blocks that some tokens skip, or None.
            encodes: True if the image encoder runs in training, False if its features are stored.
        """
        flops = self.flops(str(shape))
        return encodes * flops['encoder'] + self.seen(route) * flops['projector']

    def seen(self, route: TokenRoute | None) -> float:
        """Return the fraction of the image tokens that are aligned."""
        return 1.0 if route is None else route.fraction_after(self.block)


class PerceptualCosts(CountedCosts):
    """Costs of the networks of perceptual losses: forward passes on prediction and image, and one backward pass.

    Args:
        settings: All settings of `model.perceptual_losses`.
        notes: List to which assumptions are appended.
    """

    def __init__(self, settings: Mapping[str, Any], notes: list[str]) -> None:
        lpips = features = None
        if settings['lpips_weight']:
            lpips = {'network': settings['lpips_network'], 'scale': settings['lpips_scale']}
        if settings['features_weight']:
            sizes = encoder_sizes(settings['encoder'], notes, where='perceptual_losses.encoder')
            features = {'encoder': sizes, 'side': settings['features_side']}
        super().__init__(ModelKey('perceptual_losses', {'lpips': lpips, 'features': features}))

    def training_flops(self, shape: Shape) -> int:
        """Return the FLOPs of all passes per image of a shape."""
        return self.flops(str(shape))['all']


def alignment_of(recipe: Recipe, model: ModelCosts, notes: list[str]) -> AlignmentCosts | None:
    """Return the costs of a recipe's representation alignment, or None if it has none."""
    settings = _settings(recipe, 'representation_alignment')
    return None if settings is None else AlignmentCosts(settings, model, notes)


def perceptual_of(recipe: Recipe, notes: list[str]) -> PerceptualCosts | None:
    """Return the costs of a recipe's perceptual losses, or None if it has none."""
    settings = _settings(recipe, 'perceptual_losses')
    return None if settings is None else PerceptualCosts(settings, notes)


def _settings(recipe: Recipe, keyword: str) -> dict[str, Any] | None:
    """Return all settings of a keyword of a model of this package, defaults included, or None if it is not set."""
    is_set = isinstance(recipe.model.kwargs.get(keyword), Mapping)
    return registry.settings_of('model', recipe.model, keyword) or None if is_set else None
