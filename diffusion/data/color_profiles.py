"""Conversion of images with an ICC profile to sRGB, the color space of the training data."""

import functools
import io

import numpy as np
from PIL import Image, ImageCms

MAX_CACHED_PROFILE_BYTES = 2**20
"""Size above which the transform of a profile is not kept, so that the cache stays small."""
MAX_SRGB_DIFFERENCE = 2
"""Maximum difference to sRGB, in levels of 255, of a profile that is treated as sRGB: its pixels are not converted."""


def to_srgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    """Convert an image from its ICC profile to sRGB; the result has mode RGB, and may be the image itself.

    Like an image viewer, it ignores a profile that cannot be read or that has other channels than the image: the image
    is treated as sRGB, and CMYK is converted without a profile.
    """
    transform = _transform(profile, image.mode) if profile else None
    if transform is None:
        # `convert` copies, so return an RGB image itself. An image that was opened from a file is converted all the
        # same: it has a subclass of Image, which holds the file's metadata.
        return image if image.mode == 'RGB' and type(image) is Image.Image else image.convert('RGB')
    converted = ImageCms.applyTransform(image, transform)
    assert converted is not None  # applyTransform returns None only for in-place conversion
    return converted


def is_srgb(image: Image.Image, profile: bytes | None) -> bool:
    """Return True if `to_srgb` does not change the colors."""
    return not profile or _transform(profile, image.mode) is None


def _transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Return the transform from an ICC profile to sRGB; None if it changes nothing or the profile is unusable."""
    return (_cached_transform if len(profile) <= MAX_CACHED_PROFILE_BYTES else _built_transform)(profile, mode)


def _built_transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    try:
        transform = ImageCms.buildTransform(
            ImageCms.getOpenProfile(io.BytesIO(profile)),
            ImageCms.createProfile('sRGB'),
            mode,
            'RGB',
            renderingIntent=ImageCms.Intent.RELATIVE_COLORIMETRIC,
            flags=ImageCms.Flags.BLACKPOINTCOMPENSATION,
        )
        # Pixels of another mode than RGB must be converted in any case.
        return None if mode == 'RGB' and _is_identity(transform) else transform
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return None


# Building a transform is slow, and most files have one of a few common profiles.
_cached_transform = functools.lru_cache(maxsize=128)(_built_transform)


def _is_identity(transform: ImageCms.ImageCmsTransform) -> bool:
    levels = np.linspace(0, 255, 9).round().astype(np.uint8)
    colors = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(1, -1, 3)
    converted = ImageCms.applyTransform(Image.fromarray(colors), transform)
    return bool(np.abs(np.asarray(converted).astype(int) - colors).max() <= MAX_SRGB_DIFFERENCE)
