"""Keywords that latent diffusion models share, each declared once: `LatentDiffusion` and its builders take them.

A new keyword of all models is a new entry of `TrainingKeywords`, which LatentDiffusion then reads. The builders pass it
on, and recipes, their checks, the rules for resuming, the keys of model counts and the documentation follow from it.
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

# -- keywords of builders that not every model has --

Resolution = Annotated[int, FROZEN_PARTS, NotArchitecture()]
PipelineSource = Annotated[str | None, FROZEN_PARTS, WeightsOf(('vae', 'text_encoder'))]
VaeSource = Annotated[str | None, FROZEN_PARTS, WeightsOf(('vae',))]
Revision = Annotated[str | None, FROZEN_PARTS, NotArchitecture()]
MaskPadding = Annotated[bool, CONDITIONING, NotArchitecture()]


class TrainingKeywords(TypedDict, total=False):
    """Keywords of every latent diffusion model."""

    objective: Annotated[Objective | None, Default(None), OBJECTIVE, NotArchitecture()]
    """Prediction type, noise schedule and loss weighting."""
    caption_dropout: Annotated[
        float, Default(0.1), applied_on_resume('the fraction of captions dropped after the resume'), NotArchitecture()
    ]
    """Fraction of captions dropped, for classifier-free guidance."""
    caption_dropout_mode: Annotated[Literal['empty', 'zeros'], Default('empty'), CONDITIONING, NotArchitecture()]
    """Replacement of a dropped caption: the empty caption, or zeros as its embedding."""
    encoder_dtype: Annotated[
        Literal['auto', 'float32', 'float16', 'bfloat16'],
        Default('auto'),
        applied_on_resume('the precision of the frozen parts'),
        NotArchitecture(),
    ]
    """Data type of the frozen parts; auto is float16 if there is a GPU, else float32."""
    posterior: Annotated[Literal['sample', 'mean'], Default('sample'), FROZEN_PARTS, NotArchitecture()]
    """Train on a sample of the VAE's posterior, or on its mean."""
    seed: Annotated[int, Default(17), fixed_on_resume('all random numbers follow from the seed'), NotArchitecture()]
    """Seed of noise, timesteps, posterior and caption dropout, in [0, 2**32)."""


class TransformerKeywords(TrainingKeywords, total=False):
    """Keywords of models whose denoiser is a transformer, which has image tokens."""

    representation_alignment: Annotated[
        RepresentationAlignment | None,
        Default(None),
        fixed_on_resume('the projection to the features of this encoder is trained, and is part of the weights'),
        NotArchitecture(),
    ]
    """Settings of the alignment of the denoiser's tokens with features of a frozen image encoder; None turns it off."""


class PixelTransformerKeywords(TransformerKeywords, total=False):
    """Keywords of models whose denoiser is a transformer that can be trained on pixels."""

    perceptual_losses: Annotated[
        PerceptualLosses | None,
        Default(None),
        fixed_on_resume('the networks of the perceptual losses: the training objective'),
        NotArchitecture(),
    ]
    """Settings of perceptual losses of a model on pixels; None turns them off."""
