"""`init_from`: start a run from the weights of another run's checkpoint."""

import logging
from pathlib import Path

import torch
from composer.models import ComposerModel
from composer.utils import dist
from torch import Tensor

from diffusion.checkpointing.checkpoint_store import DamagedCheckpoint
from diffusion.checkpointing.checkpoint_weights import NoAverages, load_weights, weights_of
from diffusion.checkpointing.rank_agreement import raise_on_all_ranks, run_on_rank_zero
from diffusion.checkpointing.run_folder import find_checkpoint
from diffusion.config.recipe import InitFrom
from diffusion.errors import UserError

log = logging.getLogger(__name__)


def start_from(model: ComposerModel, start: InitFrom) -> None:
    """Load weights of another run's checkpoint into a model, without optimizer state and step counter; a collective.

    Rank 0 reads and verifies the checkpoint once, and broadcasts the weights one tensor at a time. Call this before the
    model is wrapped for data parallelism.

    Raises:
        UserError: The checkpoint does not exist, is damaged, lacks these weights or has another architecture; on every
            rank.
        OSError: The checkpoint cannot be read for minutes; on every rank.
    """
    read = run_on_rank_zero(lambda: read_weights(start), 'init_from')
    with raise_on_all_ranks('init_from'):
        if read is not None:
            checkpoint, weights = read
            load_weights(model, weights, f'init_from: {checkpoint}')
            log.info('init_from: loaded the %s weights of %s', start.weights, checkpoint)
    if dist.get_world_size() > 1:
        for tensor in model.state_dict().values():
            broadcast(tensor)


def read_weights(start: InitFrom) -> tuple[Path, dict[str, Tensor]]:
    """Return the verified checkpoint that `init_from` names and its weights by parameter name.

    Raises:
        UserError: As in `start_from`; the message has the key and the way out.
    """
    try:
        checkpoint = find_checkpoint(start.source)
        weights, _ = weights_of(checkpoint, start.weights)
    except DamagedCheckpoint as error:
        raise UserError(f'init_from: {error}; copy the checkpoint again, or name an earlier one') from error
    except NoAverages as error:
        raise UserError(f'init_from.weights: ema, but {error.reason}; use training') from error
    except UserError as error:
        raise UserError(f'init_from: {str(error).removeprefix("checkpoint: ")}') from error
    return checkpoint, weights


@torch.no_grad()
def broadcast(tensor: Tensor) -> None:
    """Replace the values of a tensor on all ranks by those of rank 0; a collective."""
    # NCCL broadcasts from GPU memory only, and the model is still on the CPU. One tensor at a time, so that no rank has
    # a second copy of the model.
    device = 'cuda' if torch.distributed.get_backend() == 'nccl' else tensor.device
    values = tensor.detach().to(device).contiguous()
    dist.broadcast(values, src=0)
    tensor.copy_(values)
