"""Resizing of images for feature networks, by the published convention of each metric, since distances depend on it."""

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional


def clean_resize(image: Tensor, side: int) -> Tensor:
    """Resize an image with an antialiased bicubic filter and without rounding, as clean-fid does.

    Parmar et al., https://arxiv.org/abs/2104.11222: without antialiasing, or with rounding to 8 bits, FID changes by
    more than the difference between good models.

    Args:
        image: uint8 [3, H, W].
        side: Width and height of the result.

    Returns:
        float32 [3, side, side], from 0 to 255.
    """
    planes = [Image.fromarray(plane.astype(np.float32)) for plane in image.cpu().numpy()]
    resized = [np.asarray(plane.resize((side, side), Image.Resampling.BICUBIC)) for plane in planes]
    return torch.from_numpy(np.stack(resized).clip(0, 255))


def bicubic_resize(image: Tensor, side: int) -> Tensor:
    """Resize an image with PyTorch's bicubic interpolation, as the authors of CMMD do: without antialiasing.

    Args:
        image: uint8 [3, H, W].
        side: Width and height of the result.

    Returns:
        float32 [3, side, side]; about 0 to 255, since the filter overshoots.
    """
    return functional.interpolate(image[None].float(), (side, side), mode='bicubic')[0]
