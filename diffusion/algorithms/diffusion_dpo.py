"""Diffusion-DPO: train on pairs of a preferred and a rejected image (Wallace et al. 2023, arXiv 2311.12908).

Shapes: B pairs of a microbatch. The first B of 2 B images are preferred; image B + i is rejected in favor of image i.
"""

from collections.abc import Mapping
from typing import Annotated, Any

import torch
from composer.core import Algorithm, Event, State
from composer.core.precision import get_precision_context
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor
from torch.nn import functional

from diffusion.config.declarations import GreaterThan, constrained, fixed_on_resume
from diffusion.config.model_checks import dpo_problem
from diffusion.errors import UserError
from diffusion.models import batch_keys
from diffusion.models.latent_diffusion import Denoised, LatentDiffusion, squared_error

METRICS = ('implicit_accuracy', 'preferred_error_change', 'rejected_error_change')


class DiffusionDPO(Algorithm):
    """Replace a denoiser's training loss by a preference loss that compares the denoiser with a frozen reference.

    With err the weighted squared error of a prediction, averaged over its elements, w the preferred and l the rejected
    image of a pair at the same timestep and noise (Wallace et al. 2023, eq. 14):

        loss = -log sigmoid(-beta / 2 * ((err_w - err_w_ref) - (err_l - err_l_ref)))

    As in the authors' code, `beta` includes eq. 14's factor T and the number of elements. The error is that of the
    model's prediction: epsilon, v or, for a flow, the velocity. For a flow this is Flow-DPO with a beta that does not
    depend on time (Liu et al. 2025, arXiv 2501.13918). The objective's `min_snr_gamma` sets eq. 14's weight omega.

    The reference has the weights of `init_from`. With LoRA, it is the denoiser without the low-rank updates. Full
    training keeps a frozen copy of the denoiser on each device; the copy is not saved, so resuming reads `init_from`
    again. Text encoders are not trained.

    Logged per batch: `dpo/implicit_accuracy`, the fraction of pairs with err_w - err_w_ref < err_l - err_l_ref, and
    `dpo/preferred_error_change` and `dpo/rejected_error_change`, the means of err_w - err_w_ref and err_l - err_l_ref.

    Cost: each pair is two training images, and the reference runs one additional forward pass for each of them.

    Args:
        beta: A larger value keeps the model closer to the reference; the paper uses 2000 for Stable Diffusion 1.5 and
            5000 for SDXL, and the authors' launchers use 5000 for both.
    """

    on_resume = fixed_on_resume('the loss; its reference is the model from which the run started')

    @constrained
    def __init__(self, beta: Annotated[float, GreaterThan(0)] = 5000.0) -> None:
        self.beta = beta
        self._model: LatentDiffusion | None = None
        self._pairs: Mapping[str, Tensor] = {}
        self._sums: list[Tensor] = []
        self._digest: str | None = None

    def state_dict(self) -> dict[str, Any]:
        return {'reference': self._digest}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if state['reference'] != self._digest:
            raise UserError(
                'init_from: its weights, the reference of diffusion_dpo, have changed since the run started; restore '
                'the ones that it started from'
            )

    def match(self, event: Event, state: State) -> bool:
        of_batch = (Event.BEFORE_TRAIN_BATCH, Event.BEFORE_FORWARD, Event.AFTER_LOSS, Event.AFTER_TRAIN_BATCH)
        return event in (Event.INIT, *of_batch)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.INIT:
            self._model = _checked(state.model)
            self._digest = self._model.reference_digest()
            return
        assert self._model is not None, 'Composer runs Event.INIT first'
        if event == Event.BEFORE_TRAIN_BATCH:
            self._sums = []
        elif event == Event.BEFORE_FORWARD:
            self._pairs = state.batch
            state.batch = both_images(self._model, state.batch)
        elif event == Event.AFTER_LOSS:
            outputs: Denoised = state.outputs  # type: ignore[assignment]
            with get_precision_context(state.precision, state.precision_config):
                reference = self._model.reference_outputs(outputs)
            losses, figures = dpo_losses(outputs, reference, beta=self.beta)
            state.loss, state.batch = losses.mean(), self._pairs
            self._model.sample_losses = losses.detach()
            self._sums.append(figures.detach())
        else:
            sums = torch.cat(self._sums, dim=1)
            totals = torch.cat([sums.sum(dim=1), sums.new_tensor([sums.shape[1]])])
            dist.all_reduce(totals)
            *values, count = totals.tolist()
            logger.log_metrics({f'dpo/{name}': value / count for name, value in zip(METRICS, values, strict=True)})


def both_images(model: LatentDiffusion, batch: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a batch of 2 B samples for a batch of B pairs: the preferred images, then the rejected ones.

    Both images of a pair have the same ids, and therefore the same timestep, noise and dropped caption. Texts are
    encoded once for both.
    """
    if batch_keys.REJECTED_IMAGE not in batch:
        raise UserError(
            f'batch: has no {batch_keys.REJECTED_IMAGE}, but diffusion_dpo trains on pairs; set dataset.name: '
            'preference_pairs'
        )
    pairs = dict(batch)
    rejected, count = pairs.pop(batch_keys.REJECTED_IMAGE), len(batch[batch_keys.INPUT_IDS])
    pairs.setdefault(batch_keys.SAMPLE_ID, torch.randint(2**32, (count,), device=model.device))
    preferred = model.encode_batch(pairs, count)
    shared = {name: preferred[name] for name in preferred.keys() - {batch_keys.IMAGE, batch_keys.LATENT_MOMENTS}}
    other = model.encode_batch(shared | {batch_keys.IMAGE: rejected}, count)
    return {name: torch.cat([preferred[name], other[name]]) for name in preferred}


def dpo_losses(outputs: Denoised, reference: Denoised, *, beta: float) -> tuple[Tensor, Tensor]:
    """Return the loss of each pair, [B], and the values of `METRICS` for each pair, [3, B], for 2 B predictions."""
    change = outputs.weight * (squared_error(outputs) - squared_error(reference))
    preferred, rejected = change.chunk(2)
    losses = -functional.logsigmoid(-beta / 2 * (preferred - rejected))
    return losses, torch.stack([0.5 + 0.5 * (rejected - preferred).sign(), preferred, rejected])


def _checked(model: object) -> LatentDiffusion:
    if not isinstance(model, LatentDiffusion):
        raise UserError(f'diffusion_dpo: a {type(model).__name__} has no denoiser; remove the algorithm')
    losses = {'representation_alignment': model.representation_alignment, 'perceptual_losses': model.perceptual_loss}
    if (problem := dpo_problem(losses | {'sprint': model.sprint})) is not None:
        raise UserError(f'diffusion_dpo: {problem}')
    if not model.denoiser_is_frozen and model.reference_digest() is None:
        raise UserError('diffusion_dpo: has no reference; call keep_reference() of the model before the Trainer')
    return model
