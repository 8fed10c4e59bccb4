"""Contrastive flow matching: push predictions away from the velocities of other samples (Stoica et al. 2025).

arXiv 2506.05350. Shapes: G global batch, B batch of a device, C latent channels, H W latent size.
"""

import torch
from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from composer.utils import dist
from torch import Tensor

from diffusion.config.declarations import LOSS
from diffusion.config.model_checks import contrastive_problem, contrastive_weight_problem, microbatch_problem
from diffusion.errors import UserError
from diffusion.models import batch_keys
from diffusion.models.latent_diffusion import Denoised, LatentDiffusion, squared_error
from diffusion.models.randomness import Draws, Purpose


class ContrastiveFlowMatching(Algorithm):
    """Contrastive term of a flow-matching loss; the negatives are velocities of other samples in the global batch.

    With v the velocity predicted for sample i, v_i = eps_i - x_i its target, and v_j the target of another sample j
    (Stoica et al. 2025):

        loss_i = ||v - v_i||^2 - weight * ||v - v_j||^2

    The samples of the global batch are arranged in a random cycle, and j is the sample after i. The cycle depends on
    the samples' ids, epoch and batch, but not on the number of devices. It includes the whole global batch, so a
    device's batch must be one microbatch. If an epoch repeats samples, j is the next sample in the cycle whose id
    differs from that of i.

    The minimum of the loss is v = (E[v_i | x_t] - weight * E[v_j]) / (1 - weight). Where the mean velocity E[v_j] is
    near 0, predictions are scaled up by 1 / (1 - weight). The authors undo this when they sample with guidance (their
    section 5.4); `generate` does not. The logged training loss includes the term; validation losses do not.

    Cost: an all-gather of the targets per step, as large as the latents of the global batch (0.25 MiB per sample of 16
    channels at 512 px), and one more squared error.

    Args:
        weight: Weight of the term (lambda in the paper), in (0, 1); the default is the paper's.
    """

    on_resume = LOSS

    def __init__(self, weight: float = 0.05) -> None:
        if (problem := contrastive_weight_problem(weight)) is not None:
            raise UserError(f'contrastive_flow_matching.weight: {problem}')
        self.weight = weight
        self._model: LatentDiffusion | None = None

    def match(self, event: Event, state: State) -> bool:
        return event in (Event.INIT, Event.AFTER_DATALOADER, Event.AFTER_LOSS)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event == Event.INIT:
            self._model = _checked(state.model)
        elif event == Event.AFTER_DATALOADER:
            size, microbatch = len(state.batch[batch_keys.INPUT_IDS]), state.device_train_microbatch_size
            if isinstance(microbatch, int) and (problem := microbatch_problem(microbatch, size)) is not None:
                raise UserError(f'device_train_microbatch_size: {problem}')
        else:
            assert self._model is not None, 'Composer runs Event.INIT first'
            outputs: Denoised = state.outputs  # type: ignore[assignment]
            error = contrastive_error(outputs, *negatives_of(outputs.target, self._model.draws_of(state.batch)))
            state.loss = state.loss - self.weight * error  # type: ignore[operator]


def contrastive_error(outputs: Denoised, negatives: Tensor, exists: Tensor) -> Tensor:
    """Return the mean weighted squared error to `negatives`; samples without a negative (`exists` is False) add 0."""
    return (outputs.weight * squared_error(outputs._replace(target=negatives)) * exists).mean()


def negatives_of(targets: Tensor, draws: Draws) -> tuple[Tensor, Tensor]:
    """Return, for each of a device's samples, the target of another sample of the global batch; a collective.

    Also returns a mask, bool [B], which is False if the whole global batch is copies of the same sample. Targets
    [B, C, H, W] have the same shape on all devices. Raises UserError if the global batch is a single sample.
    """
    keys = torch.stack([draws.sample_id, draws.words(Purpose.NEGATIVE, 1)[:, 0]])
    keys = torch.cat(list(dist.all_gather(keys)), dim=1)
    everything = torch.cat(list(dist.all_gather(targets.detach().contiguous())))
    if len(everything) < 2:
        raise UserError('contrastive_flow_matching: a global_batch of 1 has no other sample; use 2 or more')
    start = dist.get_global_rank() * len(targets)
    after = successors(*keys)[start : start + len(targets)]
    return everything[after], keys[0, after] != draws.sample_id


def successors(sample_id: Tensor, words: Tensor) -> Tensor:
    """Arrange samples in a random cycle; return, per sample, the index of the next one with another id, int64 [G].

    The cycle depends on `sample_id` and the random numbers `words`, int64 [G], but not on the order of the samples.
    """
    # Sort samples by random words. Equal words are rare and are sorted by sample id.
    by_id = sample_id.argsort(stable=True)
    cycle = by_id[words[by_id].argsort(stable=True)]
    # From a sample's position in the cycle, find the first p with ids[p] != ids[p + 1]: the sample's negative is at
    # p + 1. The search may pass the end of the cycle, so two copies of the cycle are laid out one after the other.
    ids, size = sample_id[cycle], len(cycle)
    position = torch.arange(2 * size, device=ids.device)
    last_copy = torch.where((ids != ids.roll(-1)).repeat(2), position, 2 * size - 1)
    last_copy = last_copy.flip(0).cummin(0).values.flip(0)[:size]
    return torch.empty_like(cycle).scatter_(0, cycle, cycle[(last_copy + 1) % size])


def _checked(model: object) -> LatentDiffusion:
    if not isinstance(model, LatentDiffusion):
        raise UserError(f'contrastive_flow_matching: a {type(model).__name__} has no denoiser; remove the algorithm')
    if (problem := contrastive_problem(vars(model.objective))) is not None:
        raise UserError(f'contrastive_flow_matching: {problem}')
    return model
