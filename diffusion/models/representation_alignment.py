"""Representation alignment (REPA): a transformer's tokens learn to predict a frozen image encoder's features.

Yu et al. 2024, arXiv 2410.06940. Shapes: B batch, N image tokens in a grid h x w, K tokens that a router keeps, D width
of a token, F width of the encoder's features.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Annotated, Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import Dinov2Model, Dinov2WithRegistersModel, DINOv3ViTModel, PreTrainedModel

from diffusion.config.declarations import LOSS
from diffusion.config.model_checks import alignment_problems
from diffusion.errors import UserError
from diffusion.models.families.adapter import DenoiserAdapter, TokenBlocks
from diffusion.models.pretrained import check_sources, load_pretrained, read_config

ENCODERS: dict[str, type[PreTrainedModel]] = {
    'dinov2': Dinov2Model,
    'dinov2_with_registers': Dinov2WithRegistersModel,
    'dinov3_vit': DINOv3ViTModel,
}
"""Classes of image encoders, by the `model_type` of their configuration; their output ends with the patch tokens."""
IMAGENET_MEAN = (0.485, 0.456, 0.406)
IMAGENET_STD = (0.229, 0.224, 0.225)


@dataclass(frozen=True)
class RepresentationAlignment:
    """Settings of representation alignment (Yu et al. 2024): the tokens after a block predict an encoder's features.

    With h_n token n after the block, and y_n the feature at the same position in the noise-free image:

        loss += weight * mean over n of (1 - cos(MLP(h_n), y_n))

    This is the paper's loss plus a constant, so that the loss stays positive, which `loss_guard` requires. The image is
    resized so that the encoder has one patch per token. The MLP is trained with the denoiser and saved in checkpoints,
    but it is not part of exports. Evaluation does not use it.

    Cost: one forward pass of the encoder per image, and its memory. PRX reported 3.46 instead of 3.95 batches per
    second with DINOv3. With this setting, `task: precompute` stores the features next to the latents, so that training
    needs no encoder.

    iREPA (Singh et al. 2025, arXiv 2512.10794) is `projection: conv` with `spatial_norm: 1.0`: the MLP becomes a 3x3
    convolution over the grid of tokens, and the targets y are normalized over the tokens of an image, per channel:

        y_n <- (y_n - gamma * mean over n of y_n) / (std over n of y_n + 1e-6)
    """

    encoder: str
    """Image encoder: a folder, or a repository on the Hub, with a DINOv2 or DINOv3 ViT, such as facebook/dinov2-base,
    or facebook/dinov3-vitl16-pretrain-lvd1689m, which is downloaded only after its license is accepted on the Hub."""
    revision: str | None = None
    """Commit of the repository `encoder`."""
    block: int = 7
    """Index (from 0) of the block whose output is aligned; 7 is the 8th block, as in the paper (encoder depth 8)."""
    weight: Annotated[float, LOSS] = 0.5
    """Weight of the loss (lambda in the paper); the default is the paper's."""
    hidden_size: int = 2048
    """Width of the MLP's two hidden layers; the default is the authors'. A convolution has no hidden layers."""
    projection: str = 'mlp'
    """Trained projection from tokens to features: `mlp`, applied to each token, or `conv`, a 3x3 convolution, which
    needs all tokens and therefore a block outside TREAD's route."""
    spatial_norm: float | None = None
    """Strength gamma, in [0, 1], of the spatial normalization of the features; iREPA's default is 1. None turns it
    off."""

    def __post_init__(self) -> None:
        for key, problem in alignment_problems(asdict(self), depth=None).items():
            raise UserError(f'representation_alignment.{key}: {problem}')


class FeatureEncoder(nn.Module):
    """Frozen image encoder, one of `ENCODERS`, that returns one feature per cell of a grid."""

    mean: Tensor
    std: Tensor

    def __init__(self, encoder: PreTrainedModel) -> None:
        super().__init__()
        self.encoder = encoder
        self.register_buffer('mean', torch.tensor(IMAGENET_MEAN).view(3, 1, 1), persistent=False)
        self.register_buffer('std', torch.tensor(IMAGENET_STD).view(3, 1, 1), persistent=False)

    @property
    def width(self) -> int:
        """F, width of the features."""
        return self.encoder.config.hidden_size

    @property
    def patch_size(self) -> int:
        """Side of the encoder's patches in pixels."""
        return self.encoder.config.patch_size

    def forward(self, images: Tensor, grid: tuple[int, int]) -> Tensor:
        """Return features [B, N, F] of uint8 images [B, 3, height, width], resized to one patch per grid cell."""
        return self.of_pixels(images.float() / 255, grid)

    def of_pixels(self, pixels: Tensor, grid: tuple[int, int]) -> Tensor:
        """Return features [B, N, F] of images [B, 3, height, width] in [0, 1], resized to one patch per grid cell."""
        size = [side * self.patch_size for side in grid]
        pixels = functional.interpolate(pixels, size, mode='bicubic', antialias=True)
        pixels = (pixels - self.mean) / self.std
        output = self.encoder(pixel_values=pixels.to(self.encoder.dtype)).last_hidden_state
        # The class and register tokens come before the patch tokens.
        return output[:, -grid[0] * grid[1] :]


class FeatureProjector(nn.Sequential):
    """Trained MLP that maps tokens, width D, to features, width F: three layers with SiLU, as in the authors' code."""

    @classmethod
    def of(cls, projection: str, width: int, hidden_size: int, features: int) -> 'FeatureProjector':
        """Return a randomly initialized projector for a value of the setting `RepresentationAlignment.projection`."""
        return ConvolutionProjector(width, features) if projection == 'conv' else cls(width, hidden_size, features)

    def __init__(self, width: int, hidden_size: int, features: int) -> None:
        super().__init__(
            nn.Linear(width, hidden_size),
            nn.SiLU(),
            nn.Linear(hidden_size, hidden_size),
            nn.SiLU(),
            nn.Linear(hidden_size, features),
        )

    def forward(self, tokens: Tensor, grid: tuple[int, int]) -> Tensor:  # type: ignore[override]
        """Return predicted features [B, N, F] of tokens [B, N, D] on a grid of h x w cells."""
        return super().forward(tokens)


class ConvolutionProjector(FeatureProjector):
    """iREPA's projector: one 3x3 convolution with zero padding."""

    def __init__(self, width: int, features: int) -> None:
        nn.Sequential.__init__(self, nn.Conv2d(width, features, kernel_size=3, padding=1))

    def forward(self, tokens: Tensor, grid: tuple[int, int]) -> Tensor:
        return self[0](tokens.transpose(1, 2).unflatten(2, grid)).flatten(2).transpose(1, 2)


class TokenCapture:
    """Forward hook on a transformer block that captures the image tokens in its output."""

    def __init__(self, blocks: TokenBlocks, block: nn.Module) -> None:
        self._blocks = blocks
        self._captured: list[Tensor] | None = None
        block.register_forward_hook(self._keep)

    @contextmanager
    def capturing(self) -> Iterator[list[Tensor]]:
        """Yield a list; each forward pass in the context appends its image tokens, [B, N, D] ([B, K, D] if routed)."""
        # Capture only in this context: activation checkpointing runs the hook again in the backward pass, outside it.
        self._captured = []
        try:
            yield self._captured
        finally:
            self._captured = None

    def _keep(self, block: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        if self._captured is not None:
            self._captured.append(self._blocks.tokens(output))


def build_alignment(
    settings: RepresentationAlignment,
    denoiser: nn.Module,
    family: DenoiserAdapter,
    *,
    width: int | None,
    encoder: FeatureEncoder | None = None,
) -> tuple[FeatureEncoder, FeatureProjector, TokenCapture]:
    """Return the image encoder, the projector with random weights, and a hook that captures a denoiser's tokens.

    Call it before FSDP wraps the denoiser. `width` is D, the width of its tokens. If `encoder` is None, the one named
    in the settings is loaded. Raises UserError if the denoiser has no image tokens or no block `settings.block`.
    """
    if family.token_blocks is None or width is None:
        raise UserError(f'representation_alignment: a {type(denoiser).__name__} has no image tokens; use a transformer')
    blocks = family.token_blocks.of(denoiser)
    for key, problem in alignment_problems(asdict(settings), depth=len(blocks)).items():
        raise UserError(f'representation_alignment.{key}: {problem}')
    if encoder is None:
        encoder = load_feature_encoder(settings.encoder, settings.revision, where='representation_alignment.encoder')
    projector = FeatureProjector.of(settings.projection, width, settings.hidden_size, encoder.width)
    return encoder, projector, TokenCapture(family.token_blocks, blocks[settings.block])


def load_feature_encoder(source: str, revision: str | None, *, where: str) -> FeatureEncoder:
    """Return a pretrained image encoder, one of `ENCODERS`; `where` is the setting's key, for messages."""
    check_sources(**{where: source})
    options: dict[str, Any] = {'subfolder': '', 'revision': revision}
    # Do not use AutoConfig: it would ask in the terminal whether to run the code named in `auto_map`.
    config = read_config(PreTrainedModel, source, **options)
    kind = config.get('model_type')
    if kind not in ENCODERS:
        what = 'has no config.json with a model_type' if kind is None else f'is a {kind}'
        code = '' if 'auto_map' not in config else ' with code of its own (auto_map), which is not run'
        raise UserError(f'{where}: {source} {what}{code}; use one of {", ".join(ENCODERS)}')
    return FeatureEncoder(load_pretrained(ENCODERS[kind], source, **options))


def normalized_over_tokens(features: Tensor, gamma: float) -> Tensor:
    """Return features [B, N, F] minus gamma times their mean over the N tokens, divided by their standard deviation."""
    features = features.to(torch.promote_types(features.dtype, torch.float32))
    std, mean = torch.std_mean(features, dim=1, keepdim=True)
    return (features - gamma * mean) / (std + 1e-6)


def alignment_losses(projected: Tensor, features: Tensor, kept: Tensor | None) -> Tensor:
    """Return 1 - mean cosine similarity, [B], of projected tokens [B, K, F] to features [B, N, F].

    `kept` has the positions of the K tokens among the N features; None if K = N.
    """
    if kept is not None:
        features = torch.take_along_dim(features, kept[:, :, None], dim=1)
    dtype = torch.promote_types(projected.dtype, torch.float32)
    return 1 - functional.cosine_similarity(projected.to(dtype), features.to(dtype), dim=-1).mean(dim=1)
