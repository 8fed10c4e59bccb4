"""Decode a source image (including optional formats) or reject it with a reason; encode it for storage."""

import io
from collections.abc import Callable, Sequence
from dataclasses import replace

from PIL import Image

from diffusion.config.image_shapes import Shape
from diffusion.data.image_reading import (
    FORMATS,
    MAX_PIXELS,
    DecodedImage,
    UnreadableImage,
    check_pixels,
    read_image,
    unreadable,
)
from diffusion.prepare.optional_formats import SVG_START, pillow_formats, read_jxl_header, render_svg
from diffusion.prepare.source import Unfit

__all__ = ['FORMATS', 'MAX_PIXELS', 'DecodedImage', 'Unfit', 'covering_size', 'decode_image', 'encode', 'shrink']

FULL_CHROMA_QUALITY = 95
"""Lowest JPEG quality at which chroma is stored at full resolution."""


def decode_image(
    encoded: bytes,
    *,
    background: str = 'white',
    max_pixels: int = MAX_PIXELS,
    formats: Sequence[str] = (),
    svg_side: int = 0,
    resized_to: Callable[[int, int], tuple[int, int]] | None = None,
) -> DecodedImage:
    """Read an image with `data.image_reading.read_image`, including optional formats.

    Args:
        background: Color of transparent areas, in any notation that Pillow accepts.
        max_pixels: Maximum width times height, checked against the file's header before decoding.
        formats: Names of optional formats to decode: heic, jxl and svg (`optional_formats`).
        svg_side: Minimum length in pixels of the shorter side of a rendered SVG drawing.
        resized_to: Function of an image's width and height that returns the largest size to which it will be resized;
            much larger JPEGs are decoded at a reduced size. None means to decode all images at full size.

    Raises:
        Unfit: The image is rejected for one of `read_image`'s reasons or, for SVG, svg_text, svg_other_file or
            svg_too_complex. No other exception is raised for any input.
    """
    is_svg = 'svg' in formats and SVG_START.match(encoded) is not None
    file = render_svg(encoded, side=svg_side, max_pixels=max_pixels) if is_svg else encoded
    extra = pillow_formats(formats)
    try:
        if 'jxl' in formats:
            with unreadable():
                header = read_jxl_header(file)
                if header is not None:
                    check_pixels(header.width, header.height, max_pixels)
                    if header.is_animated:
                        raise UnreadableImage('animated', 'the file has several frames')
        decoded = read_image(
            file, background=background, max_pixels=max_pixels, extra_formats=extra, resized_to=resized_to
        )
    except UnreadableImage as error:
        raise Unfit(error.reason, str(error)) from error
    return replace(decoded, format='SVG', is_unmodified=False) if is_svg else decoded


RESIZE_FILTERS = {'lanczos': Image.Resampling.LANCZOS, 'bilinear': Image.Resampling.BILINEAR}


def encode(image: Image.Image, *, kind: str, quality: int) -> bytes:
    """Encode an image without metadata as png, or at a quality from 1 to 100 as jpeg or webp; deterministic."""
    file = io.BytesIO()
    # Copy the image, because its `info` belongs to the caller.
    stripped = image.copy() if image.info else image
    stripped.info = {}  # without this, Pillow would write location, camera and comments to the file
    if kind == 'png':
        stripped.save(file, 'PNG', compress_level=6)
    elif kind == 'webp':
        stripped.save(file, 'WEBP', quality=quality)
    else:
        subsampling = '4:4:4' if quality >= FULL_CHROMA_QUALITY else '4:2:0'
        stripped.save(file, 'JPEG', quality=quality, subsampling=subsampling)
    return file.getvalue()


def covering_size(width: int, height: int, shape: Shape) -> tuple[int, int]:
    """Return the size to which to shrink a width x height image so that it just covers a shape; never enlarge it."""
    scale = max(shape.width / width, shape.height / height)
    if scale >= 1:
        return width, height
    return max(shape.width, round(width * scale)), max(shape.height, round(height * scale))


def shrink(image: Image.Image, size: tuple[int, int], resize: str = 'lanczos') -> Image.Image:
    """Downscale an image to (width, height) by a filter; return the same object if it already has this size."""
    if size == image.size:
        return image
    # With `reducing_gap`, Pillow first reduces by an integer factor, which is faster; according to Pillow's
    # documentation, the result is practically the same with a gap of 3.0 or more.
    return image.resize(size, RESIZE_FILTERS[resize], reducing_gap=3.0)
