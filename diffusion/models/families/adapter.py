"""Interface between LatentDiffusion and a family's denoiser: how it is called, divided into blocks, and exported.

Shapes: B batch, C latent channels, H W latent size, L text tokens, D text width, P width of the pooled text.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from diffusion.config import families
from diffusion.errors import UserError
from diffusion.models.text_conditioner import TextConditioner
from diffusion.models.vae import Vae, latent_channels

SIZES = 6
"""Number of values per image in `Condition.sizes`."""


@dataclass(frozen=True)
class Condition:
    """Inputs of a denoiser besides the noisy latents and the timestep."""

    embeds: Tensor
    """Text embeddings, [B, L, D]."""
    mask: Tensor | None = None
    """True for tokens, False for padding, bool [B, L]; None to attend to all tokens."""
    pooled: Tensor | None = None
    """One embedding per caption, [B, P]; None for families without it."""
    sizes: Tensor | None = None
    """Original height and width, top and left of the crop, and target height and width in pixels, int64 [B, 6]
    (Podell et al. 2023, section 2.2); None for families without it. They are integers because FSDP would cast floats to
    the dtype of the parameters, and bfloat16 rounds sizes above 256."""

    def __len__(self) -> int:
        return len(self.embeds)

    def followed_by(self, other: 'Condition') -> 'Condition':
        """Concatenate two conditions along the batch, this one first, as guidance needs it."""

        def joined(first: Any, second: Any) -> Any:
            return None if first is None else torch.cat([first, second])

        return Condition(*(joined(first, second) for first, second in zip(self._all(), other._all(), strict=True)))

    def _all(self) -> tuple[Tensor | None, ...]:
        return self.embeds, self.mask, self.pooled, self.sizes


@dataclass(frozen=True)
class DenoiserSizes:
    """Sizes fixed by a denoiser's configuration, which the other parts of the model must match."""

    in_channels: int
    """Channels of the noisy latents."""
    out_channels: int
    """Channels of the prediction."""
    text_width: int
    """D, width of the text embeddings."""
    pooled_width: int | None = None
    """P, width of the pooled text; None if the denoiser does not use it."""
    patch: int = 1
    """Side of a patch in latent cells; the latents' height and width must be multiples of it."""
    token_width: int | None = None
    """Width of a transformer's image tokens; None for other denoisers."""
    sample_size: int | None = None
    """Side length, in latent pixels, that the denoiser was built for; None if it was built for no particular size."""


def check_parts(denoiser: DenoiserSizes, vae: Vae, text: TextConditioner) -> None:
    """Raise UserError unless the channels and widths of denoiser, VAE and text encoders match."""
    channels = latent_channels(vae)
    if denoiser.in_channels != channels or denoiser.out_channels != channels:
        raise UserError(
            f'denoiser: {denoiser.in_channels} input and {denoiser.out_channels} output channels, '
            f'but the VAE has {channels} latent channels; build the denoiser for this VAE'
        )
    if denoiser.text_width != text.width:
        raise UserError(
            f'denoiser: takes text embeddings of width {denoiser.text_width}, but the text encoders have width '
            f'{text.width}; use equal widths'
        )
    if denoiser.pooled_width != text.pooled_width:
        raise UserError(
            f'denoiser: takes pooled text of width {denoiser.pooled_width}, but the text encoders give '
            f'{text.pooled_width}; use the text encoders that it was built for'
        )


@dataclass(frozen=True)
class TokenBlocks:
    """Blocks that process a transformer's image tokens one after another, and where inputs and outputs hold them."""

    attribute: str
    """Name of the denoiser's list of blocks."""
    argument: str = 'hidden_states'
    """Name of the block argument with the image tokens, [B, N, width], for N image tokens in row-major order."""
    per_token: Mapping[str, int] = field(default_factory=dict)
    """Other block arguments that have one entry per image token, such as RoPE angles: name and token dimension."""
    output: int | None = None
    """Position of the image tokens in a block's output; None if the output is only the image tokens."""
    mirrored: bool = False
    """True if block i of n also passes its tokens to block n - 1 - i, so that a route must skip both or neither."""

    def of(self, denoiser: nn.Module) -> list[nn.Module]:
        return list(getattr(denoiser, self.attribute))

    def tokens(self, output: Any) -> Tensor:
        return output if self.output is None else output[self.output]

    def replaced(self, output: Any, tokens: Tensor) -> Any:
        if self.output is None:
            return tokens
        return *output[: self.output], tokens, *output[self.output + 1 :]


class DenoiserAdapter(ABC):
    """Adapter for one family's denoisers. It is stateless, so a single object serves all denoisers of the family."""

    block_classes: ClassVar[tuple[type[nn.Module], ...]]
    """Classes of the denoiser's blocks: the units of FSDP, compilation and activation checkpointing."""
    timesteps_up_to_one: ClassVar[bool] = False
    """True if the denoiser's timesteps are in [0, 1]; False if they are steps of the noise schedule, 0 to T."""
    takes_text_mask: ClassVar[bool]
    """True if the denoiser can mask the padding of captions; False if padding is part of its input."""
    reads_padding: ClassVar[bool] = False
    """True if the output depends on the embeddings of masked padding, so that stored text needs them."""
    takes_sizes: ClassVar[bool] = False
    """True if the denoiser is conditioned on image sizes, `Condition.sizes`."""
    fused_projections: ClassVar[Mapping[str, int]] = {}
    """Linear layers in a block whose weight stacks the rows of several matrices, such as queries, keys and values: the
    suffix of the layer's name, and the number of matrices. Muon orthogonalizes each matrix separately."""
    token_blocks: ClassVar[TokenBlocks | None] = None
    """Blocks that process image tokens; None if the denoiser is not a transformer or its tokens cannot skip blocks."""

    samples_even_times: ClassVar[bool] = False
    """True if sampling times divide [0, 1] evenly before the shift (`sampler.sample_latents`), unlike in diffusers."""
    reads_pickles: ClassVar[bool] = False
    """True if `init_from` can read `.pt` files that the original code of the family wrote."""
    lora_writer: ClassVar[tuple[Any, str] | None] = None
    """diffusers' mixin that writes a LoRA for the denoiser, and its argument for the weights; None if none."""

    def owns(self, denoiser: Any) -> bool:
        """Return True if a denoiser belongs to this family; needed if several families share a denoiser class."""
        return True

    def is_block(self, module: nn.Module) -> bool:
        return isinstance(module, self.block_classes)

    @abstractmethod
    def sizes(self, denoiser: Any) -> DenoiserSizes:
        """Return the sizes fixed by a denoiser's configuration."""

    @abstractmethod
    def keywords(self, timesteps: Tensor, condition: Condition) -> dict[str, Any]:
        """Return the denoiser's keyword arguments; the noisy latents are passed as the first positional argument."""

    @abstractmethod
    def pipeline(self, model: Any) -> Any:
        """Return the diffusers pipeline that generates the same images as a LatentDiffusion, or raise UserError.

        Families import the pipeline's class in this method: it takes seconds, and training does not need it.
        """

    def single_file(self, model: Any) -> Any:
        """Return the model as a `models.single_file.SingleFile` for ComfyUI; UserError if its family has none."""
        raise UserError(
            f'--out: no program reads a {type(model.denoiser).__name__} from a single file; give a folder, which '
            'diffusers loads'
        )

    def from_original(self, denoiser: Any, content: Any, which: Literal['training', 'ema'], where: str) -> Any:
        """Return a denoiser's weights by name, from the content of a `.pt` file of the family's original code."""
        raise NotImplementedError(f'{type(self).__name__} has reads_pickles, but no from_original')

    def noise_shape(self, pipeline: Any) -> tuple[int, int, int]:
        """Return the shape [C, H, W] of the noise for an exported pipeline, at the image size used in training."""
        denoiser = pipeline.unet if hasattr(pipeline, 'unet') else pipeline.transformer
        return denoiser.config['in_channels'], denoiser.config['sample_size'], denoiser.config['sample_size']

    def call_arguments(self, pipeline: Any, *, negative: str, guidance: float) -> dict[str, Any]:
        """Return the arguments that make an exported pipeline generate images as the model was trained to.

        An empty negative prompt counts as none; a guidance scale of 1 or less turns guidance off.
        """
        # Pass None for an empty prompt: Stable Diffusion XL then uses zeros, if dropped captions were zeros in
        # training.
        return {'guidance_scale': guidance, 'negative_prompt': negative or None}

    def draw(
        self, pipeline: Any, prompts: list[str], *, noise: Tensor, generators: list[torch.Generator], **arguments: Any
    ) -> Tensor:
        """Generate images for prompts with an exported pipeline; return float32 [B, 3, height, width] in [0, 1].

        Noise is standard normal, [B, C, H, W]. Schedulers that draw noise in every step use one generator per image.
        """
        arguments |= {'latents': noise, 'generator': generators, 'output_type': 'pt', 'return_dict': False}
        images = pipeline(prompts, **arguments)[0]
        assert isinstance(images, Tensor)
        return images.float()

    def check_exportable(self, model: Any, pipeline: str) -> None:
        """Raise UserError if the model needs other noise than a pipeline starts from, which is standard normal."""
        scale = model.objective.noise_scale
        if scale != 1:
            raise UserError(
                f'export: trained with noise_scale {scale}, but a {pipeline} starts from standard normal noise; '
                'generate images with task=generate'
            )

    def predict(self, denoiser: nn.Module, noisy: Tensor, timesteps: Tensor, condition: Condition) -> Tensor:
        """Return a denoiser's prediction for noisy latents, [B, C, H, W]."""
        return denoiser(noisy, **self.keywords(timesteps, condition), return_dict=False)[0]

    def example_inputs(
        self, denoiser: nn.Module, batch: int, height: int, width: int, text_length: int, *, device: str = 'cpu'
    ) -> tuple[tuple[Tensor], dict[str, Any]]:
        """Return dummy inputs for counting a denoiser's costs: positional and keyword arguments."""
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


def find_adapter(module: nn.Module) -> DenoiserAdapter | None:
    # FSDP2 and peft derive classes from the denoiser's class, so compare the names of all base classes.
    classes = {each.__name__ for each in type(module).__mro__}
    for family in families.families():
        if family.denoiser_class in classes and (adapter := family.load_adapter()).owns(module):
            return adapter
    return None


def adapter_of(denoiser: nn.Module) -> DenoiserAdapter:
    """Return the adapter of a denoiser's family; raise UserError if it belongs to none."""
    if (adapter := find_adapter(denoiser)) is not None:
        return adapter
    known = ', '.join(dict.fromkeys(each.denoiser_class for each in families.families() if each.denoiser_class))
    raise UserError(
        f'denoiser: {type(denoiser).__name__} belongs to no known family; use {known}, or add one with '
        'diffusion.register_family'
    )
