"""Guidance: how the denoiser's prediction is moved away from a weaker one, chosen by `guidance: {name: ...}`.

Shapes: B images, C latent channels, H W latent size.
Equations: p is the prediction for the prompt, q the weaker one, w the guidance scale (1 or less turns guidance off),
and t the timestep divided by the number of training timesteps, from 1 for noise to 0.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, ClassVar, Literal, get_type_hints

import torch
from torch import Tensor, nn
from torch.func import functional_call

from diffusion.config import registry
from diffusion.config.declarations import AtLeast, Between, Fraction, check_arguments
from diffusion.config.recipe import Component
from diffusion.config.sampling_checks import guidance_problems, interval_problem
from diffusion.errors import UserError
from diffusion.models.objective import Space

Combine = Callable[[Tensor, Tensor], Tensor]
"""Function that maps a weak and a strong prediction, [B, C, H, W] each, to the guided one."""


class Guidance:
    """Base class of guidance methods; a subclass is a frozen dataclass of settings, registered as kind `guidance`.

    Attributes:
        weak: Source of the weaker prediction: `unconditional` (negative prompt or dropped caption) or, with the same
            prompt, `sparse` (tokens routed as in training) or `checkpoint` (other weights of the run).
        space: Space to which predictions are converted before they are combined; None keeps the denoiser's.
    """

    weak: ClassVar[Literal['unconditional', 'sparse', 'checkpoint']] = 'unconditional'
    space: ClassVar[Space | None] = None

    def __post_init__(self) -> None:
        check_arguments(get_type_hints(type(self), include_extras=True), vars(self))

    @property
    def interval(self) -> tuple[float, float] | None:
        """Times low < t <= high with guidance, or None for all; at other times p is used, and q is not computed."""
        return None

    def start(self, scale: float) -> Combine:
        """Return a function that combines weak and strong predictions; it may have state, so start one per sampling."""
        return lambda weak, strong: weak + scale * (strong - weak)


@dataclass(frozen=True)
class ClassifierFree(Guidance):
    """Classifier-free guidance (Ho and Salimans 2022), q + w (p - q): q is the prediction without the prompt."""


@dataclass(frozen=True)
class LimitedInterval(Guidance):
    """Classifier-free guidance at times low < t <= high only (Kynkäänniemi et al. 2024, arXiv 2404.07724).

    At other times the prediction is p, and q is not computed, which saves half of the compute. The paper's noise level
    sigma is t / (1 - t) for a flow, and sqrt(1 / alpha_bar - 1) for diffusion.
    """

    low: Annotated[float, Between(0, 1)]
    """Time t at and below which there is no guidance, in [0, 1)."""
    high: Annotated[float, Fraction()]
    """Time t above which there is no guidance, in (0, 1]; 1 is noise."""

    def __post_init__(self) -> None:
        super().__post_init__()
        if (problem := interval_problem(self.low, self.high)) is not None:
            raise UserError(f'low: {problem}')

    @property
    def interval(self) -> tuple[float, float]:
        return self.low, self.high


@dataclass(frozen=True)
class AdaptiveProjected(Guidance):
    """Adaptive projected guidance, APG (Sadat et al. 2024, arXiv 2410.02416), on predictions of clean latents.

    With m the sum p - q + momentum * m of the step before, and d = m min(1, norm_threshold / |m|), the prediction is
    p + (w - 1) (d - (1 - eta) <d, p> p / |p|^2). This is the `use_original_formulation` of diffusers with scale w - 1.
    """

    space = 'sample'

    eta: Annotated[float, AtLeast(0)] = 0.0
    """Factor for the component of the update that is parallel to p and saturates colors; 1 leaves it unchanged."""
    norm_threshold: Annotated[float, AtLeast(0)] = 15.0
    """Largest L2 norm of the update over C, H and W; 0 sets no limit. Suitable values grow with the latents' size."""
    momentum: Annotated[float, Between(-1, 1)] = -0.5
    """Weight of the earlier steps' updates; negative values move away from them, and 0 ignores them."""

    def start(self, scale: float) -> Combine:
        total: Tensor | None = None

        def combine(weak: Tensor, strong: Tensor) -> Tensor:
            nonlocal total
            total = strong - weak if total is None else strong - weak + self.momentum * total
            update = total
            if self.norm_threshold > 0:
                update = update * (self.norm_threshold / _dot(update, update).sqrt()).clamp(max=1)
            parallel = _dot(update, strong) / _dot(strong, strong) * strong
            return strong + (scale - 1) * (update - (1 - self.eta) * parallel)

        return combine


@dataclass(frozen=True)
class ZeroStar(Guidance):
    """CFG-Zero* (Fan et al. 2025, arXiv 2503.18886), on the velocities of a flow.

    The velocity is 0 in the first steps, then s q + w (p - s q) with s = <p, q> / |q|^2.
    """

    space = 'velocity'

    zero_init_steps: Annotated[int, AtLeast(0)] = 1
    """Number of steps whose velocity is 0, at most about 4% of the steps in the paper."""

    def start(self, scale: float) -> Combine:
        step = 0

        def combine(weak: Tensor, strong: Tensor) -> Tensor:
            nonlocal step
            step += 1
            if step <= self.zero_init_steps:
                return torch.zeros_like(strong)
            weak = weak * (_dot(strong, weak) / (_dot(weak, weak) + 1e-8))  # the authors' code adds 1e-8 too
            return weak + scale * (strong - weak)

        return combine


@dataclass(frozen=True)
class Sparse(Guidance):
    """Sparse guidance (Krause et al. 2026, arXiv 2601.01608), q + w (p - q), for models with TREAD or SPRINT.

    q is the prediction for the same prompt with tokens routed as in training, drawn again in each step.
    """

    weak = 'sparse'


@dataclass(frozen=True)
class Autoguidance(Guidance):
    """Autoguidance (Karras et al. 2024, arXiv 2406.02507), q + w (p - q), by worse weights of the same run.

    q is the prediction of these weights for the same prompt. They cost memory for another denoiser.
    """

    weak = 'checkpoint'

    batch: Annotated[int, AtLeast(1)]
    """Training batch (step) of the worse weights, which are a checkpoint's or, with `ema_width`, a post-hoc average."""
    ema_width: Annotated[float | None, Fraction()] = None
    """Width of a post-hoc average of the run, as in `diffusion export --ema-width`. Null uses the checkpoint itself,
    with its averaged weights if it has them."""


class WithWeights:
    """A module whose forward pass uses other weights; its attributes are those of the module.

    Args:
        weights: Weights by name in the module; for missing names, the module's own weights are used.
    """

    def __init__(self, module: nn.Module, weights: Mapping[str, Tensor]) -> None:
        self._module, self._weights = module, dict(weights)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        # A copy of the module would also copy what its hooks refer to.
        return functional_call(self._module, self._weights, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._module, name)


def guidance_of(settings: Mapping[str, Any] | None, *, flow: bool) -> Guidance:
    """Return the guidance for a mapping such as `{name: apg, eta: 0.5}`; None means classifier-free guidance.

    `flow`: True for a model trained with flow matching. Raises UserError if the mapping is wrong.
    """
    for problem in guidance_problems(settings, 'guidance', flow=flow):
        raise UserError(str(problem))
    given = dict(settings or {'name': 'cfg'})
    return registry.build('guidance', Component(given.pop('name'), given))


def _dot(one: Tensor, other: Tensor) -> Tensor:
    """Return each image's inner product of two tensors [B, C, H, W], as [B, 1, 1, 1]."""
    return (one * other).sum(dim=tuple(range(1, one.ndim)), keepdim=True)
