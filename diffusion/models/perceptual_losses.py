"""Perceptual losses for models on pixels: distances between features of the predicted and the clean image.

They are LPIPS (Zhang et al. 2018, arXiv 1801.03924) and the distance between a vision transformer's patch features.
Shapes: B batch, images [B, 3, H, W] in [-1, 1].
"""

import re
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated

import torch
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn import functional

from diffusion.compatibility.private_names import _LPIPS
from diffusion.config.declarations import LOSS
from diffusion.config.model_checks import clean_image_problem, perceptual_problems
from diffusion.errors import UserError
from diffusion.models.hub_errors import reading_weights
from diffusion.models.objective import Objective
from diffusion.models.representation_alignment import FeatureEncoder, load_feature_encoder
from diffusion.models.vae import PixelSpace, Vae


@dataclass(frozen=True)
class PerceptualLosses:
    """Settings of perceptual losses, applied at every noise level, for a model on pixels (`vae: pixels`).

    With x the clean image and x' the predicted image, both scaled down:

        loss += lpips_weight * LPIPS(x', x) + features_weight * mean over patches of (1 - cos(f(x'), f(x)))

    Evaluation does not use them. PRX's published run used the weights 0.1 and 0.01. Cost: three passes of each network
    per image, and the activation memory of one pass.
    """

    lpips_weight: Annotated[float, LOSS] = 0.1
    """Weight of LPIPS; 0 turns it off."""
    lpips_network: str = 'vgg'
    """Network of LPIPS: vgg, alex or squeeze."""
    lpips_backbone: str | None = None
    """File with that network's ImageNet weights in torchvision's layout, .pth or .safetensors, such as
    vgg16-397923af.pth."""
    lpips_scale: float = 0.5
    """Side of the images for LPIPS, as a fraction of the original side; the default is PRX's."""
    features_weight: Annotated[float, LOSS] = 0.01
    """Weight of the patch feature distance; 0 turns it off."""
    encoder: str | None = None
    """Image encoder: a folder, or a repository on the Hub, with a DINOv2 or DINOv3 ViT, such as
    facebook/dinov2-base."""
    revision: str | None = None
    """Commit of the repository `encoder`."""
    features_side: int = 224
    """Side in pixels of the images for the encoder, rounded down to whole patches; the default is PRX's."""

    def __post_init__(self) -> None:
        for key, problem in perceptual_problems(asdict(self)).items():
            raise UserError(f'{".".join(part for part in ("perceptual_losses", key) if part)}: {problem}')


class PerceptualLoss(nn.Module):
    """Frozen networks that compute the weighted perceptual loss per image; a network is None if its weight is 0."""

    def __init__(self, settings: PerceptualLosses, lpips: nn.Module | None, features: FeatureEncoder | None) -> None:
        super().__init__()
        self.settings = settings
        self.lpips = lpips
        self.features = features

    def forward(self, predicted: Tensor, images: Tensor) -> Tensor:
        """Return the weighted loss [B] of predicted images relative to the originals, both [B, 3, H, W] in [-1, 1]."""
        losses = predicted.new_zeros(len(predicted))
        if self.lpips is not None:
            size = [max(1, round(self.settings.lpips_scale * side)) for side in images.shape[2:]]
            pair = [functional.interpolate(each, size, mode='bilinear', antialias=True) for each in (predicted, images)]
            losses = losses + self.settings.lpips_weight * self.lpips(*pair).flatten()
        if self.features is not None:
            cells = max(1, self.settings.features_side // self.features.patch_size)
            found = self.features.of_pixels(predicted / 2 + 0.5, (cells, cells))
            with torch.no_grad():
                expected = self.features.of_pixels(images / 2 + 0.5, (cells, cells))
            distances = 1 - functional.cosine_similarity(found, expected, dim=-1).mean(dim=1)
            losses = losses + self.settings.features_weight * distances
        return losses


def load_perceptual_loss(settings: PerceptualLosses, encoder: FeatureEncoder | None = None) -> PerceptualLoss:
    """Load the networks of the perceptual loss with their weights; `encoder` replaces the one named in the settings."""
    lpips = lpips_network(settings) if settings.lpips_weight else None
    if not settings.features_weight:
        return PerceptualLoss(settings, lpips, None)
    if encoder is None:
        assert settings.encoder is not None, 'checked by PerceptualLosses'
        encoder = load_feature_encoder(settings.encoder, settings.revision, where='perceptual_losses.encoder')
    return PerceptualLoss(settings, lpips, encoder)


def lpips_network(settings: PerceptualLosses) -> nn.Module:
    """Return LPIPS with the published linear layers from torchmetrics, and backbone weights from a local file."""
    # Use the private class: torchmetrics' public classes download the network's weights in their constructor.
    network = _LPIPS(net=settings.lpips_network, pnet_rand=True)  # type: ignore[arg-type]
    path = Path(str(settings.lpips_backbone))
    where = f'perceptual_losses.lpips_backbone: {path}'
    with reading_weights(where, 'the weights of torchvision'):
        # weights_only rejects pickles that would run code.
        found = load_file(path) if path.suffix == '.safetensors' else torch.load(path, 'cpu', weights_only=True)
    # Map to torchvision's names, which have the same layer numbers: slice3.10.weight and slices.3.10.weight are
    # features.10.weight.
    names = {name: re.sub(r'^slices?\.?\d+', 'features', name) for name in network.net.state_dict()}
    missing = [source for source in names.values() if source not in found]
    if missing:
        raise UserError(f'{where} has no {missing[0]}, so it is not a {settings.lpips_network} of torchvision')
    try:
        network.net.load_state_dict({name: found[source] for name, source in names.items()})
    except RuntimeError as error:
        raise UserError(f'{where} is not a {settings.lpips_network} of torchvision ({error})') from error
    return network


def check_perceptual(vae: Vae, objective: Objective) -> None:
    if not isinstance(vae, PixelSpace):
        raise UserError('perceptual_losses: need a model on pixels, but this one is on latents; use vae: pixels')
    if (problem := clean_image_problem(vars(objective))) is not None:
        raise UserError(f'perceptual_losses: {problem}')
