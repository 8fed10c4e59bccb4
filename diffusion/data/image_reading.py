"""Read an untrusted image file as upright sRGB pixels. All commands decode users' images with this module."""

import io
import re
import struct
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache, partial
from typing import cast

import numpy as np
import simplejpeg
from PIL import ExifTags, Image, ImageCms, ImageColor, ImageFile, ImageOps, UnidentifiedImageError, features

from diffusion.data.image_repair import ends_with_stray_bytes, without_stray_bytes, without_texts

MAX_CACHED_PROFILE_BYTES = 2**20
"""Maximum size in bytes of a color profile whose transform is cached, to keep the cache small."""
MAX_SRGB_DIFFERENCE = 2
"""The conversion from a color profile to sRGB is skipped if it changes 8-bit values by at most this much."""
FORMATS = ('JPEG', 'PNG', 'WEBP', 'GIF', 'BMP', 'TIFF', *(['AVIF'] if 'avif' in features.get_supported() else []))
"""Formats that can be read without an extra package, by their names in Pillow."""
MAX_PIXELS = 100_000_000
"""Default maximum of width times height; a decoded RGB image of this size takes 300 MB."""
PNG_START = b'\x89PNG\r\n\x1a\n'
PNG_END = b'IEND\xaeB`\x82'
"""Name and checksum of a PNG's last chunk, which is always empty."""
SIDEWAYS = range(5, 9)
"""EXIF orientations that swap width and height."""
MIN_OVERSAMPLING = 2
"""A JPEG is decoded at a reduced size only if its crop is then still at least this many times the target size.

Measured on photographs and a zone plate: a ratio of 2 gives a PSNR of 50 dB relative to a full decode and about as much
aliasing as bicubic. A ratio of 1 is 15% faster, but gives 46 dB and the aliasing of a box filter, ten times that of
Lanczos.
"""
HARMLESS_WARNINGS = re.compile('Invalid SOS parameters|Unknown Adobe color transform')
"""libjpeg warnings that do not affect any pixel; some cameras write such files."""
STRAY_WARNING = re.compile('Corrupt JPEG data: ([0-9]+) extraneous bytes before marker 0x(d9|da|c4)')
"""libjpeg warning about extra bytes between a scan's data and the next marker: image end, next scan or its tables."""
_pillow_globals = threading.RLock()


class UnreadableImage(ValueError):
    """Raised for a file that cannot be read as an image; the message says why."""

    def __init__(self, reason: str, detail: str) -> None:
        super().__init__(detail)
        self.reason = reason
        """Reason in snake case, such as `truncated`."""


@dataclass(frozen=True)
class DecodedImage:
    """A decoded and corrected image, and the properties of its file that decide how `prepare` stores the image."""

    image: Image.Image
    """Upright RGB image in sRGB, without metadata."""
    width: int
    """Width in pixels of the upright image in the file; `image` is smaller if decoded at a reduced size."""
    height: int
    format: str
    """Format of the file, named as in Pillow, such as JPEG or PNG."""
    lossless: bool
    """True for PNG (mostly drawings and screenshots) and SVG files, which are stored losslessly."""
    is_unmodified: bool
    """True for a JPEG, PNG or WebP file that needed no correction, so that any decoder returns these pixels."""
    is_repaired: bool = False
    """True for a JPEG whose stray bytes outside of segments were ignored; no pixel is missing."""
    pixels: np.ndarray | None = None
    """The pixels of `image`, uint8 [H, W, 3]; None if only `image` has them so far."""


def read_image(
    encoded: bytes,
    *,
    background: str = 'white',
    max_pixels: int = MAX_PIXELS,
    extra_formats: Sequence[str] = (),
    resized_to: Callable[[int, int], tuple[int, int]] | None = None,
    first_frame: bool = False,
) -> DecodedImage:
    """Decode an image completely, apply its orientation, convert it to sRGB, and fill transparent areas.

    Args:
        encoded: The file; may be damaged or not an image at all.
        background: Color of transparent areas, in any notation that Pillow accepts.
        max_pixels: Maximum width times height, checked against the file's header before decoding.
        extra_formats: Names in Pillow of formats to decode besides `FORMATS`.
        resized_to: Function from an image's width and height to the largest size to which the caller will resize it.
            If set, a JPEG is decoded at 1/2, 1/4 or 1/8 size if this is still `MIN_OVERSAMPLING` times that size.
        first_frame: Read the first frame of an animation instead of rejecting it.

    Raises:
        UnreadableImage: Its `reason` is `empty`, `unknown_format`, `too_many_pixels`, `animated`, `truncated`,
            `float_pixels`, `deep_pixels` (32-bit integers) or `undecodable`. No file causes any other exception.
    """
    rgb = ImageColor.getrgb(background)[:3]
    if not encoded:
        raise UnreadableImage('empty', 'the file has no bytes')
    formats = (*FORMATS, *extra_formats)

    def read(file: bytes, profile: bytes | None = None) -> DecodedImage:
        return _read_checked(file, rgb, max_pixels, formats, resized_to, first_frame, profile)

    with strict_pillow(max_pixels), unreadable():
        if encoded.startswith(b'\xff\xd8') and (repaired := without_stray_bytes(encoded)) is not encoded:
            return replace(read(repaired), is_unmodified=False, is_repaired=True)
        try:
            return read(encoded)
        except Exception:
            # Pillow refuses a PNG with large or damaged text chunks. Read the PNG again without these unneeded chunks.
            file, profile = without_texts(encoded) if encoded.startswith(PNG_START) else (encoded, None)
            if file == encoded:
                raise
        return replace(read(file, profile), is_unmodified=False)


def to_upright_srgb(image: Image.Image) -> Image.Image:
    """Return an upright sRGB copy of a Pillow image on a white background, converted as by `read_image`."""
    with strict_pillow(Image.MAX_IMAGE_PIXELS or MAX_PIXELS), unreadable():
        pixels = decode_other(image)
        opaque, _ = _to_opaque_srgb(pixels, image.info.get('icc_profile'), (255, 255, 255))
        upright = apply_orientation(opaque.copy() if opaque is image else opaque, orientation_of(image))
        upright.info = {}
        return upright


def _read_checked(
    encoded: bytes,
    background: tuple[int, ...],
    max_pixels: int,
    formats: Sequence[str],
    resized_to: Callable[[int, int], tuple[int, int]] | None,
    first_frame: bool,
    profile: bytes | None,
) -> DecodedImage:
    image = _open(encoded, formats)
    name = 'JPEG' if image.format == 'MPO' else cast(str, image.format)  # JPEG from a phone, with a preview appended
    check_pixels(image.width, image.height, max_pixels)
    # A JPEG is never an animation: the second frame of a phone's MPO file is a preview. If a HEIC file contains several
    # photographs, Pillow opens the primary one.
    if not first_frame and name not in ('JPEG', 'HEIF') and getattr(image, 'n_frames', 1) > 1:
        raise UnreadableImage('animated', 'the file has several frames or pages')
    array, is_repaired, factor, (width, height) = None, False, 1, image.size
    if name == 'JPEG':
        if orientation_of(image) in SIDEWAYS:
            width, height = height, width
        if resized_to is not None:
            factor = jpeg_reduction((width, height), resized_to(width, height))
        decoded, array, is_repaired = _decode_jpeg(encoded, image, factor)
    else:
        decoded = decode_other(image)
    opaque, is_unchanged = _to_opaque_srgb(decoded, profile or image.info.get('icc_profile'), background)
    # Read the orientation after decoding: by then, Pillow has rotated a TIFF, and its orientation is 1.
    upright = apply_orientation(opaque, orientation_of(image))
    upright.info = {}
    is_unmodified = (
        name in ('JPEG', 'PNG', 'WEBP')
        and image.mode in ('RGB', 'L')
        and is_unchanged
        and upright is opaque
        and factor == 1
        and not is_repaired
    )
    pixels = array if upright is decoded else None
    if factor == 1:
        width, height = upright.size
    return DecodedImage(
        upright,
        width,
        height,
        name,
        lossless=name == 'PNG',
        is_unmodified=is_unmodified,
        is_repaired=is_repaired,
        pixels=pixels,
    )


def check_pixels(width: int, height: int, max_pixels: int) -> None:
    if width * height > max_pixels:
        raise UnreadableImage('too_many_pixels', f'{width} x {height} pixels exceed the limit of {max_pixels}')


def _open(encoded: bytes, formats: Sequence[str]) -> Image.Image:
    """Open an image without decoding it; for PNG and WebP, also check that the file is complete."""
    expected = _signature(encoded)
    try:
        if expected == 'PNG':
            _check_png(encoded)
        elif expected == 'WEBP':
            _check_webp(encoded)
        return Image.open(io.BytesIO(encoded), formats=tuple(formats))
    except UnidentifiedImageError as error:
        if expected in formats:
            raise UnreadableImage(
                'undecodable', 'the first bytes are those of an image, but the header cannot be read'
            ) from error
        raise UnreadableImage('unknown_format', f'the format is none of {", ".join(formats)}') from error
    except Image.DecompressionBombError as error:
        raise UnreadableImage('too_many_pixels', str(error)) from error


def _signature(encoded: bytes) -> str | None:
    """Return the format that the first bytes indicate, or None if unknown."""
    if encoded[:4] == b'RIFF' and encoded[8:12] == b'WEBP':
        return 'WEBP'
    if encoded[4:12] == b'ftypavif':
        return 'AVIF'
    signatures = {b'\xff\xd8\xff': 'JPEG', b'\x89PNG\r\n\x1a\n': 'PNG', b'GIF8': 'GIF'}
    return next((name for start, name in signatures.items() if encoded.startswith(start)), None)


def _check_png(encoded: bytes) -> None:
    # Pillow checks checksums and the end of the file only in `verify`, which leaves the image unusable. So open it
    # separately for this check.
    if PNG_END not in encoded:
        raise UnreadableImage('truncated', 'the last chunk is missing or incomplete')
    with Image.open(io.BytesIO(encoded), formats=['PNG']) as image:
        image.verify()


def _check_webp(encoded: bytes) -> None:
    expected = struct.unpack_from('<I', encoded, 4)[0] + 8
    if expected > len(encoded):
        raise UnreadableImage('truncated', f'the file has only {len(encoded)} of {expected} bytes')


def jpeg_reduction(size: tuple[int, int], resized: tuple[int, int]) -> int:
    """Return the factor by which to reduce a JPEG while decoding it: 1, 2, 4 or 8, which libjpeg does fast.

    The reduced image is at least MIN_OVERSAMPLING times the size to which it will be resized, unless the factor is 1.
    """
    largest = min(size[0] / resized[0], size[1] / resized[1]) / MIN_OVERSAMPLING
    return max((factor for factor in (2, 4, 8) if factor <= largest), default=1)


def _decode_jpeg(encoded: bytes, image: Image.Image, factor: int) -> tuple[Image.Image, np.ndarray | None, bool]:
    """Decode a JPEG. Return the image, its pixels if it is RGB, and True if stray bytes after a scan were ignored.

    Width and height are divided by `factor` and rounded up. If libjpeg warns about corrupt data, the image is rejected.
    """
    # Pillow ignores libjpeg's warnings and returns an image in which libjpeg made up the missing pixels. simplejpeg
    # raises ValueError for every warning, so decode again without checks if the warning is known to be harmless.
    colorspace = {'L': 'GRAY', 'RGB': 'RGB', 'CMYK': 'CMYK'}[image.mode]
    # simplejpeg uses the largest of libjpeg's reduction factors that leaves at least this height and width.
    least = (0, 0) if factor == 1 else (-(-image.height // factor), -(-image.width // factor))
    decode = partial(simplejpeg.decode_jpeg, encoded, colorspace, min_height=least[0], min_width=least[1])
    is_repaired = False
    try:
        pixels = decode()
    except ValueError as error:
        is_repaired = (stray := STRAY_WARNING.search(str(error))) is not None and ends_with_stray_bytes(
            encoded, int(stray[1]), bytes.fromhex(f'ff{stray[2]}'), colorspace
        )
        if not is_repaired and not HARMLESS_WARNINGS.search(str(error)):
            reason = 'truncated' if 'Premature end of JPEG' in str(error) else 'undecodable'
            raise UnreadableImage(reason, str(error)) from error
        pixels = decode(strict=False)
    if image.mode == 'CMYK':  # Adobe stores inverted CMYK; Pillow handles this, but simplejpeg does not
        if factor > 1:
            image.draft(None, (image.width // factor, image.height // factor))
        image.load()
        return image, None, is_repaired
    if image.mode == 'L':
        return Image.fromarray(pixels[:, :, 0]), None, is_repaired
    return Image.fromarray(pixels), pixels, is_repaired


def decode_other(image: Image.Image) -> Image.Image:
    image.load()
    if image.mode == 'F':
        raise UnreadableImage('float_pixels', 'pixels are floating-point numbers of unknown range')
    if image.mode.startswith('I;16') or (image.mode == 'I' and image.format == 'PNG'):
        return _scale_to_8_bits(image)
    if image.mode == '1':
        gray = image.convert('L')
        if 'transparency' in image.info:  # the file stores 0 or 1, but mode L uses 0 or 255
            gray.info['transparency'] = 255 * bool(image.info['transparency'])
        return gray
    if image.mode == 'I':
        raise UnreadableImage('deep_pixels', 'pixels are 32-bit integers of unknown range')
    return image


def _scale_to_8_bits(image: Image.Image) -> Image.Image:
    # Pillow's conversion clips values above 255 instead of scaling them, which makes the image almost white.
    gray16 = np.asarray(image).astype(np.uint32)
    gray = Image.fromarray(((gray16 * 255 + 32767) // 65535).astype(np.uint8))
    transparent = image.info.get('transparency')
    if isinstance(transparent, int):
        gray.putalpha(Image.fromarray(np.where(gray16 == transparent, 0, 255).astype(np.uint8)))
    return gray


def _to_opaque_srgb(
    pixels: Image.Image, profile: bytes | None, background: tuple[int, ...]
) -> tuple[Image.Image, bool]:
    """Convert from an ICC profile (None: sRGB) and fill transparency. Return the image, and True if nothing changed."""
    if not pixels.has_transparency_data:
        plain = pixels.convert('RGB') if pixels.mode == 'P' else pixels
        return to_srgb(plain, profile), is_srgb(plain, profile)
    # Convert the colors before blending: the background is sRGB already.
    rgba = pixels.convert('RGBA')
    opaque = to_srgb(rgba.convert('RGB'), profile)
    return Image.composite(opaque, Image.new('RGB', opaque.size, background), rgba.getchannel('A')), False


def orientation_of(image: Image.Image) -> int:
    """Return the EXIF orientation of an opened image, from 1 (upright) to 8."""
    # A JPEG XL file stores its orientation outside of EXIF, and libjxl applies it; the orientation in EXIF must be
    # ignored (ISO/IEC 18181-2). The exception is a file that wraps a JPEG: it is decoded as that JPEG.
    if image.format == 'JXL' and not getattr(image, 'jpeg', False):
        return 1
    try:
        orientation = image.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # the EXIF block is damaged; ignore it
        return 1
    return orientation if orientation in range(2, 9) else 1


def apply_orientation(image: Image.Image, orientation: int) -> Image.Image:
    """Apply an EXIF orientation to an image; return the same object if the orientation is 1 (upright)."""
    if orientation == 1:
        return image
    # Pixels from simplejpeg have no EXIF, and `exif_transpose` reads the orientation from the image itself.
    image.getexif()[ExifTags.Base.Orientation] = orientation
    return ImageOps.exif_transpose(image)


@contextmanager
def unreadable() -> Iterator[None]:
    """Convert any exception raised by a decoder into UnreadableImage."""
    try:
        yield
    except UnreadableImage:
        raise
    except Exception as error:  # for damaged files Pillow's decoders raise exceptions of many types
        reason = 'truncated' if 'truncated' in str(error).lower() else 'undecodable'
        raise UnreadableImage(reason, f'{type(error).__name__}: {error}') from error


@contextmanager
def strict_pillow(max_pixels: int) -> Iterator[None]:
    """Make Pillow reject truncated files, use our pixel limit, and issue no warnings."""
    # Other libraries set these globals of Pillow too, so set them for each image and restore them afterwards. The lock
    # admits one thread at a time: otherwise, a second thread would save and later restore the values set by the first.
    with _pillow_globals, warnings.catch_warnings():
        lenient, pixels = ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS
        ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS = False, max_pixels
        warnings.simplefilter('ignore')
        try:
            yield
        finally:
            ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS = lenient, pixels


def to_srgb(image: Image.Image, profile: bytes | None) -> Image.Image:
    """Convert an image from its ICC profile to sRGB. The result has mode RGB and may be the same object.

    A profile is ignored, as in image viewers, if it cannot be read or does not match the image's channels. The image is
    then treated as sRGB, and CMYK is converted without a profile.
    """
    transform = _transform(profile, image.mode) if profile else None
    if transform is None:
        # `convert` copies, so return an RGB image as is. An image opened from a file is converted even so, because it
        # is an instance of a subclass of Image that keeps the file's metadata.
        return image if image.mode == 'RGB' and type(image) is Image.Image else image.convert('RGB')
    converted = ImageCms.applyTransform(image, transform)
    assert converted is not None  # applyTransform returns None only for in-place conversion
    return converted


def is_srgb(image: Image.Image, profile: bytes | None) -> bool:
    """Return True if `to_srgb` keeps the colors, since the profile is missing, unusable or equivalent to sRGB."""
    return not profile or _transform(profile, image.mode) is None


def _transform(profile: bytes, mode: str) -> ImageCms.ImageCmsTransform | None:
    """Return the transform from an ICC profile to sRGB, or None if it changes nothing or the profile is unusable."""
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
        # Pixels in modes other than RGB must be converted in any case.
        return None if mode == 'RGB' and _is_identity(transform) else transform
    except (ImageCms.PyCMSError, OSError, ValueError, TypeError):
        return None


# Cache the transforms: building one is slow, and most files have one of a few common profiles.
_cached_transform = lru_cache(maxsize=128)(_built_transform)


def _is_identity(transform: ImageCms.ImageCmsTransform) -> bool:
    levels = np.linspace(0, 255, 9).round().astype(np.uint8)
    colors = np.stack(np.meshgrid(levels, levels, levels), axis=-1).reshape(1, -1, 3)
    converted = ImageCms.applyTransform(Image.fromarray(colors), transform)
    return bool(np.abs(np.asarray(converted).astype(int) - colors).max() <= MAX_SRGB_DIFFERENCE)
