"""Color profiles: pixels of any ICC profile to sRGB, which the models are trained on."""

import functools
import io

import numpy as np
from PIL import Image, ImageCms

INVISIBLE = 2
"""Largest difference, in levels of 255, at which a profile counts as sRGB and pixels stay as they are."""


def to_srgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    """Return the image in RGB, its colors converted from its ICC profile to sRGB.

    A profile that cannot be read, or is for other channels than the image has, is passed over as viewers do: the
    image counts as sRGB, or CMYK is converted without a profile.
    """
    transform = _transform(profile, image.mode) if profile else None
    if transform is None:
        return image.convert('RGB')
    converted = ImageCms.applyTransform(image, transform)
    assert converted is not None  # None is for conversions in place
    return converted


def is_srgb(image: Image.Image, profile: bytes | None) -> bool:
    """Return True if `to_srgb` leaves the colors as they are."""
    return not profile or _transform(profile, image.mode) is None


@functools.lru_cache(maxsize=128)  # cameras and programs embed the same few profiles over and over
def _transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Return a transform to sRGB, or None where there is nothing to do or the profile is unusable."""
    try:
        transform = ImageCms.buildTransform(
            ImageCms.getOpenProfile(io.BytesIO(profile)),
            ImageCms.createProfile('sRGB'),
            mode,
            'RGB',
            renderingIntent=ImageCms.Intent.RELATIVE_COLORIMETRIC,
            flags=ImageCms.Flags.BLACKPOINTCOMPENSATION,
        )
        return None if mode == 'RGB' and _changes_nothing(transform) else transform
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return None


def _changes_nothing(transform: ImageCms.ImageCmsTransform) -> bool:
    levels = np.linspace(0, 255, 9).round().astype(np.uint8)
    colors = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(1, -1, 3)
    converted = ImageCms.applyTransform(Image.fromarray(colors), transform)
    return bool(np.abs(np.asarray(converted).astype(int) - colors).max() <= INVISIBLE)
