"""TREAD: during training, random image tokens skip most transformer blocks (Krause et al. 2025, arXiv 2501.04765)."""

import logging
from dataclasses import asdict

from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from torch import nn

from diffusion.config.declarations import applied_on_resume
from diffusion.config.model_checks import UNROUTED_BLOCKS, route_problems, routed_alignment_problem
from diffusion.errors import UserError
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.token_routing import Route, TokenRouter

log = logging.getLogger(__name__)


class TREAD(Algorithm):
    """Token routing: in each training step a random subset of the image tokens skips blocks start, ..., end - 1.

    With x the N image tokens before block `start`, and m_i = 0 for the tokens drawn to skip the blocks, else 1:

        y_i = blocks({x_j: m_j = 1})_i   if m_i = 1
        y_i = x_i                        if m_i = 0

    Block `end` receives y (Krause et al. 2025). The loss covers all tokens. Evaluation and sampling run all tokens
    through all blocks. Each sample's own random numbers choose its tokens, so the choice does not depend on the number
    of devices.

    Cost: in the skipped blocks, linear layers take 1 - `fraction` of their time without TREAD, and attention even less;
    the docs page "Cheaper training" has measurements.

    The defaults are those of PRX (Photoroom 2026, algorithm/tread.py): half of the tokens skip blocks 2 to 12
    (inclusive) of 16.

    Args:
        start: Index (from 0) of the first block that is skipped.
        end: Index of the first block that processes all tokens again; by default no token skips the last 3 blocks.
        fraction: Fraction of the image tokens that skip blocks, in (0, 1).
    """

    on_resume = applied_on_resume(
        'the tokens that skip blocks after the resume; the weights have the same names and shapes'
    )

    def __init__(self, *, start: int = 2, end: int | None = None, fraction: float = 0.5) -> None:
        self.start = start
        self.end = end
        self.fraction = fraction
        self._model: LatentDiffusion | None = None
        self._router: TokenRouter | None = None

    def match(self, event: Event, state: State) -> bool:
        return event in (Event.INIT, Event.BEFORE_FORWARD, Event.AFTER_BACKWARD)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.INIT:
            self.install(state.model)
            return
        assert self._model is not None and self._router is not None, 'Composer runs Event.INIT first'
        if event == Event.BEFORE_FORWARD:
            self._router.begin(self._model.draws_of(state.batch))
        else:
            self._router.finish()

    def install(self, model: nn.Module) -> None:
        """Make a model's image tokens skip the blocks; raise UserError if the model does not support this."""
        if not isinstance(model, LatentDiffusion):
            raise UserError(f'tread: a {type(model).__name__} has no denoiser; remove the algorithm')
        blocks = model.adapter.token_blocks
        if blocks is None:
            raise UserError(
                f'tread: a {type(model.denoiser).__name__} has no image tokens that can skip blocks; use a '
                'transformer, such as prx, or remove the algorithm'
            )
        depth = len(blocks.of(model.denoiser))
        end = depth - UNROUTED_BLOCKS if self.end is None else self.end
        for key, problem in route_problems(self.start, end, self.fraction, depth=depth).items():
            raise UserError(f'tread.{key}: {problem}')
        alignment = model.representation_alignment
        problem = alignment and routed_alignment_problem(asdict(alignment), self.start, end)
        if problem:
            raise UserError(f'tread: {problem}')
        self._model = model
        self._router = model.route_tokens(Route(self.start, end, self.fraction))
        log.info('tread: %g%% of the image tokens skip blocks %d to %d', 100 * self.fraction, self.start, end - 1)
