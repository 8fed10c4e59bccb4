"""Interface of a family of denoisers: a class of diffusers, and how LatentDiffusion calls, divides and exports it.

Shapes: B batch, C latent channels, H W latent size, L text tokens, D text width, P width of the pooled text.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from diffusion.errors import UserError
from diffusion.models.denoisers.condition import SIZES, Condition


@dataclass(frozen=True)
class DenoiserSizes:
    """Sizes that a denoiser's configuration fixes, to which the other parts of the model must fit."""

    in_channels: int
    """Channels of the noisy latents."""
    out_channels: int
    """Channels of the prediction."""
    text_width: int
    """D, width of the text embeddings."""
    pooled_width: int | None = None
    """P, width of the pooled text; None if the denoiser takes none."""
    patch: int = 1
    """Side of a patch in latent cells; height and width of the latents are multiples of it."""
    token_width: int | None = None
    """Width of an image token of a transformer; None for other denoisers."""
    sample_size: int | None = None
    """Side of the latents that the denoiser was built for, in cells; None if it was built for no particular side."""


@dataclass(frozen=True)
class TokenBlocks:
    """Blocks of a transformer that process the image tokens in turn, and the tokens' place in arguments and outputs."""

    attribute: str
    """Name of the denoiser's list of blocks."""
    argument: str = 'hidden_states'
    """Argument of a block with the image tokens, [B, N, width], for N image tokens in row-major order."""
    per_token: Mapping[str, int] = field(default_factory=dict)
    """Other arguments of a block that have one entry per image token, such as RoPE's angles: name and dimension."""
    output: int | None = None
    """Position of the image tokens in a block's output; None if the output is the image tokens alone."""

    def of(self, denoiser: nn.Module) -> list[nn.Module]:
        """Return the blocks of a denoiser, in their order."""
        return list(getattr(denoiser, self.attribute))

    def tokens(self, output: Any) -> Tensor:
        """Return the image tokens in a block's output."""
        return output if self.output is None else output[self.output]

    def replaced(self, output: Any, tokens: Tensor) -> Any:
        """Return a block's output with other image tokens."""
        if self.output is None:
            return tokens
        return *output[: self.output], tokens, *output[self.output + 1 :]


class DenoiserFamily(ABC):
    """Adapter of one family of denoisers. It has no state, so that one object serves all denoisers of the family."""

    denoiser_class: ClassVar[type[nn.Module]]
    """diffusers' class of the denoiser."""
    block_classes: ClassVar[tuple[type[nn.Module], ...]]
    """Classes of its blocks, the units of FSDP, compilation and activation checkpointing."""
    timesteps_up_to_one: ClassVar[bool] = False
    """True if the denoiser takes timesteps in [0, 1]; False if it takes the steps of the noise schedule, 0 to T."""
    takes_text_mask: ClassVar[bool]
    """True if the denoiser can ignore the padding of captions; False if padding is part of its input."""
    takes_sizes: ClassVar[bool] = False
    """True if the denoiser is conditioned on the sizes of the image, `Condition.sizes`."""
    fused_projections: ClassVar[Mapping[str, int]] = {}
    """Linear layers of a block whose weight holds the rows of several matrices, such as those of queries, keys and
    values: the end of the layer's name, and the number of matrices. Muon orthogonalizes each matrix by itself."""
    token_blocks: ClassVar[TokenBlocks | None] = None
    """Blocks of image tokens; None if the denoiser is not a transformer, or if its tokens cannot skip blocks."""

    def owns(self, denoiser: nn.Module) -> bool:
        """Return True if a denoiser belongs to this family."""
        return isinstance(denoiser, self.denoiser_class)

    def is_block(self, module: nn.Module) -> bool:
        """Return True if a part of the denoiser is one of its blocks."""
        return isinstance(module, self.block_classes)

    @abstractmethod
    def sizes(self, denoiser: Any) -> DenoiserSizes:
        """Return the sizes in a denoiser's configuration."""

    @abstractmethod
    def keywords(self, timesteps: Tensor, condition: Condition) -> dict[str, Any]:
        """Return the keyword arguments of the denoiser's forward pass; the noisy latents are its first argument."""

    @abstractmethod
    def pipeline(self, model: Any) -> Any:
        """Return the pipeline of diffusers that generates the same images as a LatentDiffusion.

        Raises:
            UserError: The pipeline cannot represent the model.
        """

    def single_file(self, model: Any) -> Any:
        """Return the model's pipeline as a `models.single_file.SingleFile`, which programs such as ComfyUI read.

        Raises:
            UserError: There is no such layout for this family, or it cannot represent the model.
        """
        raise UserError(
            f'--out: no program reads a {self.denoiser_class.__name__} from a single file; give a folder, which '
            'diffusers loads'
        )

    def check_exportable(self, model: Any, pipeline: str) -> None:
        """Raise UserError if a pipeline cannot sample the model, because it starts from standard normal noise."""
        scale = model.objective.noise_scale
        if scale != 1:
            raise UserError(
                f'export: trained with noise_scale {scale}, but a {pipeline} starts from standard normal noise; draw '
                'with task=generate'
            )

    def predict(self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, condition: Condition) -> Tensor:
        """Return a denoiser's prediction for noisy latents, [B, C, H, W]."""
        return denoiser(noisy, **self.keywords(timesteps, condition), return_dict=False)[0]

    def example_inputs(
        self, denoiser: nn.Module, batch: int, height: int, width: int, text_length: int, *, device: str = 'cpu'
    ) -> tuple[tuple[Tensor], dict[str, Any]]:
        """Return inputs without data for counting a denoiser's costs: positional and keyword arguments.

        Args:
            batch: B.
            height: H.
            width: W.
            text_length: L.
        """
        sizes = self.sizes(denoiser)
        pooled = None if sizes.pooled_width is None else torch.empty(batch, sizes.pooled_width, device=device)
        condition = Condition(
            torch.empty(batch, text_length, sizes.text_width, device=device),
            pooled=pooled,
            sizes=torch.zeros(batch, SIZES, dtype=torch.int64, device=device) if self.takes_sizes else None,
        )
        noisy = torch.empty(batch, sizes.in_channels, height, width, device=device)
        timesteps = torch.zeros(batch, device=device)
        return (noisy,), self.keywords(timesteps, condition) | {'return_dict': False}
