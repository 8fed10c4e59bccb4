"""Conditioning inputs that a batch contains: precomputed text embeddings, their padding mask, and image sizes.

Shapes: B batch, C latent channels, H W latent size, L text tokens.
"""

from collections.abc import Mapping

import torch
from torch import Tensor

from diffusion.errors import UserError
from diffusion.models import batch_keys
from diffusion.models.text_conditioner import TextOutput


def stored_text(batch: Mapping[str, Tensor], *, takes_pooled: bool) -> TextOutput | None:
    """Return a batch's precomputed text, or None if it has none; raise UserError if required pooled text is missing."""
    if batch_keys.TEXT_EMBEDS not in batch:
        return None
    pooled = batch.get(batch_keys.TEXT_POOLED)
    if pooled is None and takes_pooled:
        raise UserError(
            f'batch: has {batch_keys.TEXT_EMBEDS} but no {batch_keys.TEXT_POOLED}, which this denoiser takes; '
            'precompute the text again with this model, or leave the text out of the batch'
        )
    return TextOutput(batch[batch_keys.TEXT_EMBEDS], pooled)


def stored_mask(batch: Mapping[str, Tensor], *, mask_padding: bool) -> Tensor | None:
    """Return the mask of text that is stored without padding, bool [B, L]; None if padding, or no text, is stored.

    Raises UserError for a mask without `mask_padding`: the model would need the padding that is not stored.
    """
    mask = batch.get(batch_keys.TEXT_MASK)
    if mask is not None and not mask_padding:
        raise UserError(
            f'batch: {batch_keys.TEXT_EMBEDS} are stored without padding, but this model attends to padding; '
            'set mask_padding, or precompute the text again with this model'
        )
    return mask


def image_sizes(batch: Mapping[str, Tensor]) -> Tensor:
    """Return the sizes of a batch's images, int64 [B, 6], as in `Condition.sizes`; raise UserError if it has none."""
    if batch_keys.IMAGE_SIZES not in batch:
        raise UserError(
            f'batch: has no {batch_keys.IMAGE_SIZES}, which this denoiser takes; build the dataset with '
            'image_sizes=True'
        )
    return batch[batch_keys.IMAGE_SIZES]


def sizes_of_uncropped(latents: Tensor, *, cell: int) -> Tensor:
    """Return the sizes of images neither resized nor cropped, int64 [B, 6]; `cell` is a latent pixel's side in px."""
    height, width = (side * cell for side in latents.shape[2:])
    return torch.tensor([height, width, 0, 0, height, width], device=latents.device).expand(len(latents), -1)
