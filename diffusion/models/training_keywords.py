"""Settings shared by all latent diffusion models: keyword arguments of `LatentDiffusion` and of its builders.

To add a setting to all models, add a field to `TrainingKeywords` and use the setting in LatentDiffusion. The builders
pass it on. Recipes, checks, resume rules, cache keys of model counts and documentation are derived from the field.

Several builders have the following arguments of their own; a builder's docstring describes exceptions:

Args:
    resolution: Side of the images in pixels, a multiple of 8 and of the VAE's downsampling; only sets the default size
        of generated images.
    pretrained: Source of VAE, text encoders and tokenizers: a repository on the Hub or a local folder in diffusers'
        layout. None builds them with random weights, for tests and for counting parameters and FLOPs.
    revision: Commit of the repository `pretrained`; required unless that is a folder.
    vae: Source of the VAE if it is not `pretrained`: a folder or repository with an AutoencoderKL, AutoencoderKLFlux2,
        AutoencoderDC or AutoencoderRAE at its top or in `vae`, or `pixels` to train on pixels.
    vae_revision: Commit of the repository `vae`.
    vae_layout: Layout of an AutoencoderKLFlux2's latents: `channels` has 32 per cell of 8x8 px, and `grouped` 128 per
        cell of 16x16 px, which needs `patch_size: 1` for as many tokens.
    depth: Number of blocks.
    num_heads: Number of attention heads.
    patch_size: Side of a token in latent cells.
    bottleneck_size: Width of an additional layer before the first one, for large pixel patches; null means no such
        layer.
    mup_base_width: Width at which `optimizer.lr` was tuned; muP scales the layers' initial weights and learning rates
        from this width to `hidden_size`. null means that all layers have the same learning rate.
    layers_per_block: Residual blocks per level.
    text_width: Width of the text encoder, a multiple of 32.
    text_layers: Number of layers of each text encoder.
    max_length: Number of tokens, with the tokenizer's start and end, to which captions are padded and truncated.
"""

from typing import Annotated, Literal, TypedDict

from diffusion.config.declarations import (
    CONDITIONING,
    FROZEN_PARTS,
    OBJECTIVE,
    Default,
    NotArchitecture,
    WeightsOf,
    applied_on_resume,
    fixed_on_resume,
)
from diffusion.models.objective import Objective
from diffusion.models.perceptual_losses import PerceptualLosses
from diffusion.models.representation_alignment import RepresentationAlignment
from diffusion.models.token_routing import Sprint

# -- types of builder arguments that only some models have --

Resolution = Annotated[int, FROZEN_PARTS, NotArchitecture()]
PipelineSource = Annotated[str | None, FROZEN_PARTS, WeightsOf(('vae', 'text_encoder'))]
VaeSource = Annotated[str | None, FROZEN_PARTS, WeightsOf(('vae',))]
VaeLayout = Annotated[Literal['channels', 'grouped'], FROZEN_PARTS]
Revision = Annotated[str | None, FROZEN_PARTS, NotArchitecture()]
MaskPadding = Annotated[bool, CONDITIONING, NotArchitecture()]


class TrainingKeywords(TypedDict, total=False):
    """Settings of every latent diffusion model."""

    objective: Annotated[Objective | None, Default(None), OBJECTIVE, NotArchitecture()]
    """Prediction type, noise schedule and loss weighting."""
    caption_dropout: Annotated[
        float, Default(0.1), applied_on_resume('the fraction of captions dropped after the resume'), NotArchitecture()
    ]
    """Fraction of captions that are dropped, for classifier-free guidance."""
    caption_dropout_mode: Annotated[Literal['empty', 'zeros'], Default('empty'), CONDITIONING, NotArchitecture()]
    """Replacement for a dropped caption: the empty caption, or zeros as its embedding."""
    encoder_dtype: Annotated[
        Literal['auto', 'float32', 'float16', 'bfloat16'],
        Default('auto'),
        applied_on_resume('the precision of the frozen parts'),
        NotArchitecture(),
    ]
    """Data type of the frozen parts; auto is float16 with a GPU and float32 without."""
    posterior: Annotated[Literal['sample', 'mean'], Default('sample'), FROZEN_PARTS, NotArchitecture()]
    """Train on a sample from the VAE's posterior or on its mean."""
    seed: Annotated[int, Default(17), fixed_on_resume('all random numbers follow from the seed'), NotArchitecture()]
    """Seed for noise, timesteps, samples from the VAE's posterior, and caption dropout, in [0, 2**32)."""


class TransformerKeywords(TrainingKeywords, total=False):
    """Settings of models whose denoiser is a transformer with image tokens."""

    representation_alignment: Annotated[
        RepresentationAlignment | None,
        Default(None),
        fixed_on_resume('the projection to the features of this encoder is trained, and is part of the weights'),
        NotArchitecture(),
    ]
    """Settings for aligning the denoiser's tokens with a frozen image encoder's features; None turns alignment off."""
    sprint: Annotated[
        Sprint | None,
        Default(None),
        fixed_on_resume('the layer that fuses dense and sparse tokens is trained, and is part of the weights'),
        NotArchitecture(),
    ]
    """Settings of SPRINT, which trains most blocks on a fraction of the image tokens; None turns it off."""


class PixelTransformerKeywords(TransformerKeywords, total=False):
    """Settings of models whose denoiser is a transformer that can be trained on pixels."""

    perceptual_losses: Annotated[
        PerceptualLosses | None,
        Default(None),
        fixed_on_resume('the networks of the perceptual losses: the training objective'),
        NotArchitecture(),
    ]
    """Settings of perceptual losses for a model on pixels; None turns them off."""
