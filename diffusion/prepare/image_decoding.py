"""Decoding an image file, whatever its bytes are, into upright sRGB pixels or a reason why it is left out."""

import io
import re
import struct
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import cast

import numpy as np
import simplejpeg
from PIL import ExifTags, Image, ImageColor, ImageFile, ImageOps, UnidentifiedImageError, features

from diffusion.config.image_shapes import Shape
from diffusion.prepare.color_profiles import is_srgb, to_srgb

FORMATS = ('JPEG', 'PNG', 'WEBP', 'GIF', 'BMP', 'TIFF', *(['AVIF'] if 'avif' in features.get_supported() else []))
"""Formats that are read, by Pillow's names."""
MAX_PIXELS = 100_000_000
"""Larger images are refused before they are decoded; one of these takes 300 MB."""
FULL_CHROMA_QUALITY = 95
"""JPEG quality from which color is stored at full resolution."""
PNG_END = b'IEND\xaeB`\x82'
"""Name and checksum of a PNG's last chunk, which is empty."""
HARMLESS = re.compile('Invalid SOS parameters|Unknown Adobe color transform')
"""Warnings of libjpeg after which every pixel is right; some cameras write such files."""


class Unfit(Exception):
    """An image or caption that is left out; the message is the reason, words joined by underscores."""

    def __init__(self, reason: str, detail: str = '') -> None:
        super().__init__(reason)
        self.detail = detail
        """The reason in words, with figures."""


@dataclass(frozen=True)
class Clean:
    """An image that was decoded in full."""

    image: Image.Image
    """RGB in sRGB, upright, without metadata."""
    format: str
    """The file's format by Pillow's name: JPEG, PNG."""
    lossless: bool
    """True for PNG files: drawings and screenshots, to be stored without loss as they were."""
    as_found: bool
    """True for a JPEG, PNG or WebP file that needed no correction: any decoder gives these pixels."""

    @property
    def width(self) -> int:
        return self.image.width

    @property
    def height(self) -> int:
        return self.image.height


def clean(encoded: bytes, *, background: str = 'white', max_pixels: int = MAX_PIXELS) -> Clean:
    """Decode an image in full, turn it upright, and bring it to sRGB over a background.

    Reasons to refuse it: empty, unknown_format, too_many_pixels, animated, truncated, float_pixels, deep_pixels (32-bit
    integers), undecodable.

    Args:
        background: Any of Pillow's colors, for what is transparent.
        max_pixels: Width times height at most, as the file's header has them.

    Raises:
        Unfit: It is refused; nothing else, whatever the bytes are.
    """
    rgb = ImageColor.getrgb(background)[:3]
    if not encoded:
        raise Unfit('empty', 'the file has no bytes')
    with _pillow_strict_and_silent(max_pixels):
        try:
            return _clean(encoded, rgb, max_pixels)
        except Unfit:
            raise
        except Exception as error:  # on damaged files Pillow's decoders raise nearly anything
            reason = 'truncated' if 'truncated' in str(error).lower() else 'undecodable'
            raise Unfit(reason, f'{type(error).__name__}: {error}') from error


def encode(image: Image.Image, *, lossless: bool, jpeg_quality: int) -> bytes:
    """Encode pixels, without metadata, as PNG or as JPEG with full chroma from quality 95 on; deterministic."""
    file = io.BytesIO()
    bare = image.copy() if image.info else image
    bare.info = {}  # place, camera and comments stay out of the dataset
    if lossless:
        bare.save(file, 'PNG', compress_level=6)
    else:
        subsampling = '4:4:4' if jpeg_quality >= FULL_CHROMA_QUALITY else '4:2:0'
        bare.save(file, 'JPEG', quality=jpeg_quality, subsampling=subsampling)
    return file.getvalue()


def fitted(image: Image.Image, shape: Shape) -> Image.Image:
    """Reduce an image so that it just covers a shape, with its own aspect; a smaller one stays as it is."""
    scale = max(shape.width / image.width, shape.height / image.height)
    if scale >= 1:
        return image
    size = max(shape.width, round(image.width * scale)), max(shape.height, round(image.height * scale))
    return image.resize(size, Image.Resampling.LANCZOS, reducing_gap=3.0)


def _clean(encoded: bytes, background: tuple[int, ...], max_pixels: int) -> Clean:
    image = _open(encoded)
    name = 'JPEG' if image.format == 'MPO' else cast(str, image.format)  # a phone's JPEG with a preview behind it
    if image.width * image.height > max_pixels:
        raise Unfit('too_many_pixels', f'{image.width} x {image.height} pixels are more than {max_pixels}')
    if name != 'JPEG' and getattr(image, 'n_frames', 1) > 1:
        raise Unfit('animated', 'it has several frames or pages')
    pixels = _decode_jpeg(encoded, image) if name == 'JPEG' else _decode(image)
    opaque, is_same = _over(pixels, image.info.get('icc_profile'), background)
    upright = _upright(opaque, image)
    upright.info = {}
    as_found = name in ('JPEG', 'PNG', 'WEBP') and image.mode in ('RGB', 'L') and is_same and upright is opaque
    return Clean(upright, name, lossless=name == 'PNG', as_found=as_found)


def _open(encoded: bytes) -> Image.Image:
    """Open an image, and check that the file is all there as far as its format can tell."""
    promised = _signature(encoded)
    try:
        if promised == 'PNG':
            _check_png(encoded)
        elif promised == 'WEBP':
            _check_webp(encoded)
        return Image.open(io.BytesIO(encoded), formats=FORMATS)
    except UnidentifiedImageError as error:
        if promised in FORMATS:
            raise Unfit('undecodable', 'it begins as an image, but its header cannot be read') from error
        raise Unfit('unknown_format', f'it is none of {", ".join(FORMATS)}') from error
    except Image.DecompressionBombError as error:
        raise Unfit('too_many_pixels', str(error)) from error


def _signature(encoded: bytes) -> str | None:
    """Return the format that the first bytes promise."""
    if encoded[:4] == b'RIFF' and encoded[8:12] == b'WEBP':
        return 'WEBP'
    if encoded[4:12] == b'ftypavif':
        return 'AVIF'
    beginnings = {b'\xff\xd8\xff': 'JPEG', b'\x89PNG\r\n\x1a\n': 'PNG', b'GIF8': 'GIF'}
    return next((name for start, name in beginnings.items() if encoded.startswith(start)), None)


def _check_png(encoded: bytes) -> None:
    """Compare the chunks' checksums, which Pillow's decoding does not, and look for the last chunk."""
    if PNG_END not in encoded:
        raise Unfit('truncated', 'its last chunk is missing or cut')
    with Image.open(io.BytesIO(encoded), formats=['PNG']) as image:
        image.verify()


def _check_webp(encoded: bytes) -> None:
    promised = struct.unpack_from('<I', encoded, 4)[0] + 8
    if promised > len(encoded):
        raise Unfit('truncated', f'{len(encoded)} bytes of {promised}')


def _decode_jpeg(encoded: bytes, image: Image.Image) -> Image.Image:
    """Decode a JPEG, unless libjpeg warns that it made up pixels; Pillow ignores these warnings."""
    colorspace = {'L': 'GRAY', 'RGB': 'RGB', 'CMYK': 'CMYK'}[image.mode]
    try:
        pixels = simplejpeg.decode_jpeg(encoded, colorspace)
    except ValueError as error:
        if not HARMLESS.search(str(error)):
            reason = 'truncated' if 'Premature end of JPEG' in str(error) else 'undecodable'
            raise Unfit(reason, str(error)) from error
        pixels = simplejpeg.decode_jpeg(encoded, colorspace, strict=False)
    if image.mode == 'CMYK':  # Adobe's are inverted, which Pillow knows
        image.load()
        return image
    return Image.fromarray(pixels[:, :, 0] if image.mode == 'L' else pixels)


def _decode(image: Image.Image) -> Image.Image:
    image.load()
    if image.mode == 'F':
        raise Unfit('float_pixels', 'its pixels are floating-point numbers, of unknown range')
    if image.mode.startswith('I;16') or (image.mode == 'I' and image.format == 'PNG'):
        return _eight_bits(image)
    if image.mode == '1':
        gray = image.convert('L')
        if 'transparency' in image.info:  # 0 or 1, which Pillow compares with 0 and 255
            gray.info['transparency'] = 255 * image.info['transparency']
        return gray
    if image.mode == 'I':
        raise Unfit('deep_pixels', 'its pixels are 32-bit numbers, of unknown range')
    return image


def _eight_bits(image: Image.Image) -> Image.Image:
    """Scale 16-bit gray to 8 bits; Pillow's own conversion clips, which leaves white."""
    deep = np.asarray(image).astype(np.uint32)
    gray = Image.fromarray(((deep * 255 + 32767) // 65535).astype(np.uint8))
    clear = image.info.get('transparency')
    if isinstance(clear, int):
        gray.putalpha(Image.fromarray(np.where(deep == clear, 0, 255).astype(np.uint8)))
    return gray


def _over(pixels: Image.Image, profile: bytes | None, background: tuple[int, ...]) -> tuple[Image.Image, bool]:
    """Return pixels in sRGB, over a background where they are transparent, and True if they did not change."""
    if not pixels.has_transparency_data:
        plain = pixels.convert('RGB') if pixels.mode == 'P' else pixels
        return to_srgb(plain, profile), is_srgb(plain, profile)
    whole = pixels.convert('RGBA')
    opaque = to_srgb(whole.convert('RGB'), profile)
    return Image.composite(opaque, Image.new('RGB', opaque.size, background), whole.getchannel('A')), False


def _upright(image: Image.Image, source: Image.Image) -> Image.Image:
    """Turn pixels as the EXIF block of the file they come from says; without a need, return the same object."""
    try:
        orientation = source.getexif().get(ExifTags.Base.Orientation, 1)
    except Exception:  # a broken EXIF block says nothing; the image is as good as one without
        orientation = 1
    if orientation not in range(2, 9):
        return image
    image.getexif()[ExifTags.Base.Orientation] = orientation
    return ImageOps.exif_transpose(image)


@contextmanager
def _pillow_strict_and_silent(max_pixels: int) -> Iterator[None]:
    """Make Pillow refuse truncated files whatever another library has set, use our limit, and not warn."""
    lenient, pixels = ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS
    ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS = False, max_pixels
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            yield
    finally:
        ImageFile.LOAD_TRUNCATED_IMAGES, Image.MAX_IMAGE_PIXELS = lenient, pixels
