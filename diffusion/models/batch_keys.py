"""Keys of a training batch, a dict of tensors whose first dimension is the batch."""

from collections.abc import Mapping

import torch
from torch import Tensor

from diffusion.errors import UserError

IMAGE = 'image'
"""Images, uint8 [B, 3, H, W], with H and W in pixels."""

REJECTED_IMAGE = 'rejected_image'
"""Rejected images of preference pairs, in the format of IMAGE; IMAGE then has the preferred images."""

LATENT_MOMENTS = 'latent_moments'
"""Output of the VAE's encoder before any scaling, [B, C or 2C, H, W]: the mean, or the mean and log-variance."""

INPUT_IDS = 'input_ids'
"""Token ids of the caption, int64 [B, E, L], for E text encoders with L tokens each."""

TEXT_EMBEDS = 'text_embeds'
"""Output of the frozen text encoders, [B, L, D]. The batch also has token ids, for the padding mask."""

TEXT_MASK = 'text_mask'
"""True for tokens, False for padding, bool [B, L]; present if TEXT_EMBEDS are stored without padding."""

TEXT_POOLED = 'text_pooled'
"""Pooled output of the frozen text encoders, [B, P]; stored together with TEXT_EMBEDS for models that use it."""

IMAGE_FEATURES = 'image_features'
"""Features of a frozen image encoder for representation alignment, [B, N, F]: F values for each of N image tokens."""

IMAGE_SIZES = 'image_sizes'
"""Sizes of the image in pixels, int64 [B, 6], for models that use them; see `Condition.sizes`."""

SAMPLE_ID = 'sample_id'
"""Index of the sample in its dataset, int64 [B]; its random numbers are derived from it."""

EPOCH = 'epoch'
"""Epoch that the sample belongs to, int64 [B]."""

OCCURRENCE = 'occurrence'
"""Number of earlier copies of the sample in its epoch, int64 [B]; 0 unless samples are repeated."""

BATCH_INDEX = 'batch_index'
"""Index of the global batch within the epoch, int64 [B]."""

TIMESTEP_QUANTILE = 'timestep_quantile'
"""Number in [0, 1), float64 [B], that determines a sample's timestep; only present for stratified timesteps."""

IS_COUNTED = 'is_counted'
"""False for a sample that only repeats one served before, bool [B]; only present in evaluation batches."""

REPLACED = 'replaced'
"""Note about the bad sample that this sample replaces, or ''; a string, only passed between a worker and the loader."""


def check_batch(batch: Mapping[str, Tensor]) -> None:
    """Raise UserError unless a batch has token ids and its images, if any, are valid; reads no values from the GPU."""
    if not isinstance(batch, Mapping) or INPUT_IDS not in batch:
        has = f'has {sorted(batch)}' if isinstance(batch, Mapping) else f'is a {type(batch).__name__}'
        raise UserError(
            f'batch: {has}, but must be a dict with {INPUT_IDS}, the token ids [B, E, L] of the captions; '
            'diffusion.models.text_conditioner.tokenize makes them'
        )
    for key in (INPUT_IDS, IMAGE, LATENT_MOMENTS):
        value = batch.get(key)
        if value is not None and not isinstance(value, Tensor):
            raise UserError(
                f'batch: {key} is a {type(value).__name__}; use a tensor, whose first dimension is the batch'
            )
    ids = batch[INPUT_IDS]
    if ids.is_floating_point():
        raise UserError(f'{INPUT_IDS}: dtype {ids.dtype}; token ids must be int64')
    if IMAGE in batch:
        check_images(batch[IMAGE])
        if len(batch[IMAGE]) != len(ids):
            raise UserError(f'batch: {len(batch[IMAGE])} samples in {IMAGE}, but {len(ids)} in {INPUT_IDS}')


def check_images(images: Tensor) -> None:
    """Raise UserError unless images are uint8 [B, 3, H, W]."""
    if images.dtype != torch.uint8:
        raise UserError(f'{IMAGE}: dtype {images.dtype}; images must be uint8 in [0, 255]')
    if images.ndim == 4 and images.shape[1] == 3:
        return
    channels_last = images.ndim == 4 and images.shape[3] == 3
    way_out = 'use image.permute(0, 3, 1, 2)' if channels_last else 'convert them to RGB and stack them'
    raise UserError(f'{IMAGE}: shape {tuple(images.shape)}; images must be [B, 3, H, W], so {way_out}')


def device_of(batch: Mapping[str, Tensor]) -> torch.device:
    """Check a batch and return the device of its token ids, which every batch has."""
    check_batch(batch)
    return batch[INPUT_IDS].device


def weights_of(batch: Mapping[str, Tensor], values: Tensor) -> Tensor:
    """Return weights for averaging values [..., B] over samples: 0 where IS_COUNTED is False, else 1."""
    counted = batch.get(IS_COUNTED)
    return values.new_ones(()).expand_as(values) if counted is None else counted.to(values).expand_as(values)
