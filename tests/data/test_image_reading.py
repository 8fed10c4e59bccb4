"""Files in odd encodings have the same pixels for preparation, training, reference images, comparisons and grids."""

import io
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image, ImageCms, PngImagePlugin
from prepare.drawn import encode, swapped_profile

from diffusion.config.image_shapes import Shape
from diffusion.data.transforms import decode, decode_for_model
from diffusion.evaluation.compared_images import read_image
from diffusion.evaluation.reference_images import FolderImages
from diffusion.prepare.image_decoding import decode_image

Y, X = np.mgrid[0:16, 0:24]
RGB = np.stack([X * 10, Y * 15, 255 - X * 5 - Y * 5], axis=2).astype(np.uint8)
GRAY, ALPHA = RGB[..., 0], (Y * 17).astype(np.uint8)
DEEP = (X * 2700 + Y * 100).astype(np.uint16)
PICTURE = Image.fromarray(RGB)
PALETTE = PICTURE.quantize(16)
WITH_ALPHA = Image.fromarray(np.dstack([RGB, ALPHA]))
INDEX_ALPHA = np.arange(0, 256, 17, dtype=np.uint8)


def png(image: Image.Image, **options: Any) -> bytes:
    return encode(image, 'PNG', **options)


def turned(orientation: int) -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = orientation
    return exif


def texts(method: str, *values: Any, workflow: bool = False, **options: Any) -> PngImagePlugin.PngInfo:
    info = PngImagePlugin.PngInfo()
    if workflow:
        info.add_itxt('workflow', WORKFLOW, zip=True)
    getattr(info, method)(*values, **options)
    return info


def over_white(pixels: np.ndarray, alpha: np.ndarray) -> np.ndarray:
    opacity = alpha[..., None] / 255
    return pixels * opacity + 255 * (1 - opacity)


def gray(values: np.ndarray) -> np.ndarray:
    return np.repeat(values[..., None], 3, axis=2)


def in_srgb(pixels: np.ndarray) -> np.ndarray:
    source, target = ImageCms.getOpenProfile(io.BytesIO(PROFILE)), ImageCms.createProfile('sRGB')
    intent, flags = ImageCms.Intent.RELATIVE_COLORIMETRIC, ImageCms.Flags.BLACKPOINTCOMPENSATION
    converted = ImageCms.profileToProfile(
        Image.fromarray(pixels), source, target, renderingIntent=intent, outputMode='RGB', flags=flags
    )
    return np.asarray(converted)


def plain(encoded: bytes) -> np.ndarray:
    """Return the pixels of a file that needs no correction, by Pillow."""
    return np.asarray(Image.open(io.BytesIO(encoded)).convert('RGB'))


JPEG = encode(PICTURE, 'JPEG')
CMYK = encode(PICTURE.convert('CMYK'), 'JPEG')
WORKFLOW, XMP = 'workflow ' * 300_000, '<x xmlns:tiff="t" tiff:Orientation="3"/>'
XMP_TEXT, EXIF_TEXT = ('XML:com.adobe.xmp', XMP), ('Raw profile type exif', f'\nexif\n0\n{turned(2).tobytes().hex()}')
LARGEST, LARGER = (('XML:com.adobe.xmp', XMP.ljust(size)) for size in (999_978, 999_979))  # 1 MB with the keyword
EXIF_LARGEST, EXIF_LARGER = ((EXIF_TEXT[0], EXIF_TEXT[1].ljust(size, '\n')) for size in (1_000_000, 1_000_001))
PROFILE = swapped_profile()
PALETTE_RGB, DEEP_GRAY = np.asarray(PALETTE.convert('RGB')), gray(np.round(DEEP / 257))
LAYER, OF_INDEX = Image.fromarray(ALPHA), INDEX_ALPHA[np.asarray(PALETTE)]
ZTXT = png(PICTURE, pnginfo=texts('add_text', 'workflow', WORKFLOW, zip=True))
DAMAGED, ITXT = ZTXT.index(b'workflow\0\0') + 15, texts('add_itxt', 'workflow', WORKFLOW, zip=True)
LATE = b'w\0\0' + zlib.compress(WORKFLOW.encode())
TABLES = JPEG.index(b'\xff\xdb')
WITH_INDEX = PALETTE_RGB, np.where(np.asarray(PALETTE) == 3, 0, 255)
FILES: dict[str, tuple[bytes, np.ndarray]] = {
    'rgb.png': (png(PICTURE), RGB),
    'gray.png': (png(Image.fromarray(GRAY)), gray(GRAY)),
    'bits.png': (encode(Image.fromarray(GRAY > 100), 'PNG'), gray((GRAY > 100) * 255)),
    'bits-key.png': (encode(Image.fromarray(GRAY > 100), 'PNG', transparency=0), np.full_like(RGB, 255)),
    'palette.png': (png(PALETTE), PALETTE_RGB),
    'palette-index.png': (png(PALETTE, transparency=3), over_white(*WITH_INDEX)),
    'palette-alpha.png': (png(PALETTE, transparency=INDEX_ALPHA.tobytes()), over_white(PALETTE_RGB, OF_INDEX)),
    'gray-alpha.png': (png(Image.merge('LA', [Image.fromarray(GRAY), LAYER])), over_white(gray(GRAY), ALPHA)),
    'alpha.png': (png(WITH_ALPHA), over_white(RGB, ALPHA)),
    'color-key.png': (png(PICTURE, transparency=(0, 0, 255)), over_white(RGB, (RGB != (0, 0, 255)).any(axis=2) * 255)),
    'gray-key.png': (png(Image.fromarray(GRAY), transparency=50), over_white(gray(GRAY), (GRAY != 50) * 255)),
    'deep.png': (png(Image.fromarray(DEEP)), DEEP_GRAY),
    'deep-key.png': (png(Image.fromarray(DEEP), transparency=2700), over_white(DEEP_GRAY, (DEEP != 2700) * 255)),
    'mirrored.png': (png(PICTURE, exif=turned(2)), RGB[:, ::-1]),
    'right.png': (png(PICTURE, exif=turned(6)), np.rot90(RGB, -1)),
    'left.png': (png(PICTURE, exif=turned(8)), np.rot90(RGB)),
    'xmp.png': (png(PICTURE, pnginfo=texts('add_itxt', 'XML:com.adobe.xmp', XMP)), RGB[::-1, ::-1]),
    'profile.png': (png(PICTURE, icc_profile=PROFILE), in_srgb(RGB)),
    'profile-alpha.png': (png(WITH_ALPHA, icc_profile=PROFILE), over_white(in_srgb(RGB), ALPHA)),
    'damaged-profile.png': (png(PICTURE, icc_profile=b'no profile'), RGB),
    'large-profile.png': (png(PICTURE, icc_profile=bytes(3_000_000)), RGB),
    'ztxt.png': (ZTXT, RGB),
    'ztxt-damaged.png': (ZTXT[:DAMAGED] + b'!' + ZTXT[DAMAGED + 1 :], RGB),
    'itxt-turned.png': (png(PICTURE, pnginfo=ITXT, exif=turned(6)), np.rot90(RGB, -1)),
    'itxt-xmp.png': (png(PICTURE, pnginfo=texts('add_itxt', *XMP_TEXT, workflow=True)), RGB[::-1, ::-1]),
    'itxt-xmp-zip.png': (png(PICTURE, pnginfo=texts('add_itxt', *XMP_TEXT, workflow=True, zip=True)), RGB[::-1, ::-1]),
    'itxt-exif-zip.png': (png(PICTURE, pnginfo=texts('add_text', *EXIF_TEXT, workflow=True, zip=True)), RGB[:, ::-1]),
    'itxt-xmp-largest.png': (png(PICTURE, pnginfo=texts('add_itxt', *LARGEST, workflow=True)), RGB[::-1, ::-1]),
    'itxt-xmp-larger.png': (png(PICTURE, pnginfo=texts('add_itxt', *LARGER, workflow=True)), RGB),
    'itxt-zip-largest.png': (
        png(PICTURE, pnginfo=texts('add_text', *EXIF_LARGEST, workflow=True, zip=True)),
        RGB[:, ::-1],
    ),
    'itxt-zip-larger.png': (png(PICTURE, pnginfo=texts('add_text', *EXIF_LARGER, workflow=True, zip=True)), RGB),
    'late-text.png': (png(PICTURE, pnginfo=texts('add', b'zTXt', LATE, after_idat=True)), RGB),
    'rgb.jpg': (JPEG, plain(JPEG)),
    'gray.jpg': (encode(Image.fromarray(GRAY), 'JPEG'), plain(encode(Image.fromarray(GRAY), 'JPEG'))),
    'cmyk.jpg': (CMYK, plain(CMYK)),
    'progressive.jpg': (encode(PICTURE, 'JPEG', progressive=True), plain(encode(PICTURE, 'JPEG', progressive=True))),
    'turned.jpg': (encode(PICTURE, 'JPEG', exif=turned(6)), np.rot90(plain(JPEG), -1)),
    'xmp.jpg': (encode(PICTURE, 'JPEG', xmp=XMP.encode()), plain(JPEG)[::-1, ::-1]),
    'profile.jpg': (encode(PICTURE, 'JPEG', icc_profile=PROFILE), in_srgb(plain(JPEG))),
    'stray.jpg': (JPEG[:TABLES] + b'stray' + JPEG[TABLES:], plain(JPEG)),
    'stray-end.jpg': (JPEG[:-2] + bytes(100) + JPEG[-2:], plain(JPEG)),
    'alpha.webp': (encode(WITH_ALPHA, 'WEBP', lossless=True, exact=True), over_white(RGB, ALPHA)),
    'turned.webp': (encode(PICTURE, 'WEBP', lossless=True, exif=turned(8)), np.rot90(RGB)),
    'index.gif': (encode(PALETTE, 'GIF', transparency=3), over_white(*WITH_INDEX)),
    'rgb.bmp': (encode(PICTURE, 'BMP'), RGB),
    'deep.tiff': (encode(Image.fromarray(DEEP), 'TIFF'), DEEP_GRAY),
    'turned.tiff': (encode(PICTURE, 'TIFF', exif=turned(6), compression='tiff_lzw'), np.rot90(RGB, -1)),
}


@pytest.mark.parametrize('name', FILES)
def test_all_readers_return_the_pixels_that_a_viewer_shows(name: str, tmp_path: Path) -> None:
    encoded, expected = FILES[name]
    (tmp_path / name).write_bytes(encoded)
    shape = Shape(expected.shape[1], expected.shape[0])
    found = {
        'preparation': np.asarray(decode_image(encoded).image),
        'loader': decode_for_model(encoded, shape).permute(1, 2, 0).numpy(),
        'check of shards': np.asarray(decode(encoded)),
        'reference folder': FolderImages(tmp_path)[0].permute(1, 2, 0).numpy(),
        'comparison': np.asarray(read_image(tmp_path / name)),
    }
    for reader, pixels in found.items():
        assert pixels.shape == expected.shape, reader
        assert np.array_equal(pixels, found['preparation']), reader
    assert np.abs(found['preparation'] - expected.astype(float)).max() <= 1


@pytest.mark.parametrize(
    'name', [name for name in FILES if not name.startswith(('large', 'ztxt', 'itxt', 'stray', 'late'))]
)
def test_image_that_a_shard_decodes_has_the_pixels_of_its_file(name: str) -> None:
    encoded, _ = FILES[name]
    opened = Image.open(io.BytesIO(encoded))
    assert np.array_equal(np.asarray(decode(opened)), np.asarray(decode(encoded)))
