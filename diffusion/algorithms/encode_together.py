"""Algorithm that runs the frozen encoders on several microbatches at a time."""

import torch
from composer.core import Algorithm, Event, State
from composer.loggers import Logger
from torch import Tensor

from diffusion.algorithms.average import unwrapped
from diffusion.errors import UserError
from diffusion.models import batch_keys
from diffusion.models.latent_diffusion import LatentDiffusion


class EncodeTogether(Algorithm):
    """Encode a device's batch before it is split into microbatches (the setting `speed.encode_batch_size`).

    The frozen VAE and text encoders then run a few large kernels instead of many small ones per microbatch, which
    reduces host overhead. Their activations are freed before the first microbatch is trained. Batches of a single
    microbatch are left unchanged. Random numbers depend on samples, so results differ only by rounding in the kernels.

    Args:
        batch_size: Number of samples that are encoded at a time.
    """

    def __init__(self, batch_size: int) -> None:
        if batch_size < 1:
            raise UserError(f'speed.encode_batch_size: {batch_size} samples; use 1 or more, or null')
        self.batch_size = batch_size
        self._given: dict[str, Tensor] | None = None

    def match(self, event: Event, state: State) -> bool:
        # Encode at BATCH_START: Composer splits the batch afterwards, and again when it tries smaller microbatches.
        return event in (Event.BATCH_START, Event.BATCH_END)

    def apply(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.BATCH_END:
            # Restore the original batch: with the encoded one, SpeedMonitor would not count the encoders' FLOPs.
            if self._given is not None:
                state.batch, self._given = self._given, None
            return
        model, size = unwrapped(state.model), state.device_train_microbatch_size
        if isinstance(model, LatentDiffusion):
            batch_keys.check_batch(state.batch)
        if isinstance(model, LatentDiffusion) and size is not None and len(state.batch[batch_keys.INPUT_IDS]) > size:
            model.place(state.device.tensor_to_device(torch.empty(0)).device)
            self._given, state.batch = state.batch, model.encode_batch(state.batch, self.batch_size)
