"""Image decoding: every format and mode, and damaged files."""

import io
import struct
import time
import tracemalloc
import warnings
import zlib
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image, ImageCms, ImageFile, JpegImagePlugin, PngImagePlugin
from prepare.drawn import encode as file_of
from prepare.drawn import smooth, swapped_profile

from diffusion.config.image_shapes import Shape
from diffusion.prepare.image_decoding import FORMATS, DecodedImage, Unfit, covering_size, decode_image, encode, shrink

SRGB = ImageCms.ImageCmsProfile(ImageCms.createProfile('sRGB')).tobytes()
LOSSY = 12
"""Maximum error of JPEG in a smooth image, in levels of 255."""


def difference(image: Image.Image, other: Image.Image) -> int:
    return int(np.abs(np.asarray(image).astype(int) - np.asarray(other)).max())


def reason(encoded: bytes, **options: Any) -> str:
    with pytest.raises(Unfit) as rejection:
        decode_image(encoded, **options)
    assert rejection.value.detail
    return str(rejection.value)


@pytest.mark.parametrize('kind', FORMATS)
def test_every_format_is_decoded(kind: str) -> None:
    lossless = kind in ('PNG', 'BMP', 'TIFF')
    decoded = decode_image(file_of(smooth(), kind, **({'quality': 95} if kind in ('JPEG', 'WEBP', 'AVIF') else {})))
    assert (decoded.format, decoded.width, decoded.height, decoded.image.mode) == (kind, 48, 32, 'RGB')
    assert decoded.lossless == (kind == 'PNG')
    assert np.abs(np.asarray(decoded.image).astype(int) - np.asarray(smooth())).mean() <= (0 if lossless else 4)


@pytest.mark.parametrize('exif', [b'Exif\0\0MM\0*', b'Exif\0\0no', b'Exif\0\0II*\0\xff\xff\xff\xff\xff\xff'])
@pytest.mark.parametrize('kind', ['JPEG', 'PNG', 'WEBP'])
def test_damaged_exif_is_ignored(kind: str, exif: bytes) -> None:
    assert decode_image(file_of(smooth(), kind, exif=exif)).image.size == (48, 32)


@pytest.mark.parametrize('kind', ['PNG', 'WEBP', 'TIFF'])
def test_transparent_areas_show_the_background(kind: str) -> None:
    image = Image.new('RGBA', (16, 16), (200, 0, 0, 0))
    image.paste((0, 0, 200, 255), (0, 0, 8, 16))
    image.paste((0, 0, 0, 128), (8, 8, 16, 16))
    encoded = file_of(image, kind, **({'lossless': True} if kind == 'WEBP' else {}))
    for background, rgb in (('white', (255, 255, 255)), ('#204060', (32, 64, 96))):
        decoded = decode_image(encoded, background=background).image
        assert decoded.getpixel((2, 2)) == (0, 0, 200)
        assert decoded.getpixel((12, 2)) == rgb
        assert difference(decoded.crop((12, 12, 13, 13)), Image.new('RGB', (1, 1), tuple(v // 2 for v in rgb))) <= 1


def test_profile_that_equals_srgb_up_to_rounding_changes_nothing() -> None:
    profile = bytearray(SRGB)
    at = int.from_bytes(profile[profile.index(b'rXYZ') + 4 :][:4], 'big') + 8
    profile[at : at + 4] = (int.from_bytes(profile[at : at + 4], 'big') + 30).to_bytes(4, 'big')
    profile = bytes(profile)
    transform = ImageCms.buildTransform(io.BytesIO(profile), ImageCms.createProfile('sRGB'), 'RGB', 'RGB')
    assert difference(ImageCms.applyTransform(smooth(), transform), smooth()) == 1  # type: ignore[arg-type]
    assert difference(decode_image(file_of(smooth(), 'PNG', icc_profile=profile)).image, smooth()) == 0


def test_profiles_apply_to_palettes_and_transparent_images() -> None:
    clear = Image.new('RGBA', (8, 8), (250, 10, 10, 255))
    clear.paste((0, 0, 0, 0), (0, 0, 4, 8))
    decoded = decode_image(file_of(clear, 'PNG', icc_profile=swapped_profile()), background='red').image
    assert decoded.getpixel((1, 1)) == (255, 0, 0)  # the background is sRGB, so it is not converted
    assert decoded.getpixel((6, 1))[1] > 200  # type: ignore[index]
    palette = Image.new('P', (8, 8), 0)
    palette.putpalette([250, 10, 10])
    assert decode_image(file_of(palette, 'PNG', icc_profile=swapped_profile())).image.getpixel((1, 1))[1] > 200  # type: ignore[index]


@pytest.mark.parametrize('profile', [b'no profile', b'\0' * 128, SRGB])
@pytest.mark.parametrize('mode', ['RGB', 'L', 'CMYK'])
def test_profile_that_is_unreadable_or_has_other_channels_is_ignored(profile: bytes, mode: str) -> None:
    encoded = file_of(smooth().convert(mode), icc_profile=profile)
    assert difference(decode_image(encoded).image, decode_image(file_of(smooth().convert(mode))).image) == 0


def test_16_bit_color_is_scaled() -> None:
    ramp = (np.arange(256) * 257).astype('>u2')
    row = b'\0' + np.stack([ramp] * 3, axis=1).tobytes()
    decoded = decode_image(png(struct.pack('>IIBBBBB', 256, 1, 16, 2, 0, 0, 0), row))
    assert np.array_equal(np.asarray(decoded.image)[0, :, 1], np.arange(256))


def png(header: bytes, rows: bytes, *extra: tuple[bytes, bytes]) -> bytes:
    chunks = [(b'IHDR', header), *extra, (b'IDAT', zlib.compress(rows)), (b'IEND', b'')]
    packed = b'\x89PNG\r\n\x1a\n'
    for kind, data in chunks:
        packed += struct.pack('>I', len(data)) + kind + data + struct.pack('>I', zlib.crc32(kind + data))
    return packed


def test_pixels_of_unknown_range_are_rejected() -> None:
    assert reason(file_of(Image.new('F', (8, 8), 0.5), 'TIFF')) == 'float_pixels'
    assert reason(file_of(Image.new('I', (8, 8), 7), 'TIFF')) == 'deep_pixels'


@pytest.mark.parametrize('kind', ['GIF', 'PNG', 'WEBP', 'TIFF', *(['AVIF'] if 'AVIF' in FORMATS else [])])
def test_animated_images_are_rejected(kind: str) -> None:
    frames = [Image.new('RGB', (16, 16), color) for color in ('red', 'green')]
    assert reason(file_of(frames[0], kind, save_all=True, append_images=frames[1:])) == 'animated'


def test_jpeg_with_an_appended_preview_is_a_jpeg() -> None:
    decoded = decode_image(file_of(smooth(), 'MPO', save_all=True, append_images=[smooth(12, 8)]))
    assert (decoded.format, decoded.image.size) == ('JPEG', (48, 32))


def test_file_that_is_not_an_image_or_changed_is_rejected() -> None:
    for encoded in (b'x', b'<html>404</html>', bytes(5000), b'\x1f\x8b' + bytes(50), file_of(smooth(), 'PPM')):
        assert reason(encoded) == 'unknown_format'
    assert reason(b'') == 'empty'
    encoded = bytearray(file_of(smooth(100, 100), 'PNG'))
    encoded[len(encoded) // 2] ^= 1
    assert reason(bytes(encoded)) == 'undecodable'


@pytest.mark.parametrize('lenient', [False, True])
@pytest.mark.parametrize('kind', FORMATS)
def test_truncated_images_are_always_rejected(kind: str, lenient: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ImageFile, 'LOAD_TRUNCATED_IMAGES', lenient)
    encoded = file_of(smooth(200, 150), kind)
    expected = {'truncated'} if kind in ('JPEG', 'PNG', 'WEBP') else {'truncated', 'undecodable'}
    for kept in (len(encoded) - 2, len(encoded) * 3 // 4, len(encoded) // 2):
        if (kind, kept) == ('GIF', len(encoded) - 2):
            continue  # only the trailer is missing, all pixels can be decoded
        assert reason(encoded[:kept]) in expected, kept
    assert ImageFile.LOAD_TRUNCATED_IMAGES is lenient


@pytest.mark.parametrize('options', [{}, {'progressive': True}, {'subsampling': '4:4:4'}])
def test_jpeg_with_missing_data_is_rejected(options: dict[str, Any]) -> None:
    encoded = file_of(smooth(400, 300), quality=95, **options)
    assert reason(encoded[:-2]) == 'truncated'
    middle = len(encoded) // 2
    assert reason(encoded[:middle] + bytes(len(encoded) - middle)) == 'truncated'
    assert reason(encoded[:middle] + bytes(300) + encoded[middle + 300 :]) == 'undecodable'
    assert decode_image(encoded + b'\0' * 100).image.size == (400, 300)  # trailing bytes are ignored


@pytest.mark.parametrize('options', [{}, {'progressive': True}, {'restart_marker_blocks': 8}])
def test_jpeg_with_stray_bytes_and_complete_pixels_is_repaired(options: dict[str, Any]) -> None:
    encoded = file_of(smooth(96, 64), **options)
    expected, tables = decode_image(encoded), encoded.index(b'\xff\xdb')
    assert not expected.is_repaired
    for stray in (bytes(100), b'stray bytes' * 20):
        for file in (encoded[:-2] + stray + encoded[-2:], encoded[:tables] + stray + encoded[tables:]):
            found = decode_image(file)
            assert found.is_repaired and not found.is_unmodified
            assert difference(found.image, expected.image) == 0
            assert reason(file[: len(file) // 2]) in ('truncated', 'undecodable')


def test_most_jpegs_with_damaged_pixels_are_not_taken_for_ones_with_stray_bytes() -> None:
    noise = np.random.default_rng(0).integers(0, 256, (64, 96, 3), np.uint8)
    encoded = file_of(Image.fromarray(noise), quality=95, subsampling='4:4:4')
    damaged = [encoded[:at] + bytes([encoded[at] ^ 8]) + encoded[at + 1 :] for at in range(1000, len(encoded) - 2, 50)]
    outcomes = [outcome(file) for file in damaged]
    assert sum('truncated' in each or 'undecodable' in each for each in outcomes) > 2 * outcomes.count('repaired')


def outcome(encoded: bytes, **options: Any) -> str:
    try:
        decoded = decode_image(encoded, **options)
        return 'repaired' if decoded.is_repaired else str(decoded.width)
    except Unfit as unfit:
        return str(unfit)


def test_huge_images_are_rejected_before_they_are_decoded() -> None:
    start = time.monotonic()
    bomb = png(struct.pack('>IIBBBBB', 60_000, 60_000, 1, 0, 0, 0, 0), bytes(7501 * 1000))
    assert reason(bomb) == 'too_many_pixels'
    assert reason(file_of(smooth(20, 20), 'PNG'), max_pixels=399) == 'too_many_pixels'
    assert decode_image(file_of(smooth(20, 20), 'PNG'), max_pixels=400).width == 20
    assert time.monotonic() - start < 5


def test_pillow_pixel_limit_is_ignored_and_restored(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Image, 'MAX_IMAGE_PIXELS', 300)
    with warnings.catch_warnings(record=True) as shown:
        warnings.simplefilter('always')
        assert decode_image(file_of(smooth(20, 20), 'PNG')).width == 20
        assert decode_image(file_of(smooth(40, 20), 'PNG')).width == 40
    assert not shown
    assert Image.MAX_IMAGE_PIXELS == 300


def test_only_images_without_correction_are_unmodified() -> None:
    exif = Image.Exif()
    exif[0x0112] = 3
    found = [file_of(smooth()), file_of(smooth(), 'WEBP'), file_of(smooth().convert('L'), 'PNG')]
    found.append(file_of(smooth(), icc_profile=SRGB))
    assert all(decode_image(encoded).is_unmodified for encoded in found)
    corrected = [file_of(smooth(), exif=exif), file_of(smooth(), icc_profile=swapped_profile())]
    corrected += [file_of(smooth().convert('CMYK')), file_of(smooth(), 'PNG', transparency=(1, 2, 3))]
    corrected += [file_of(smooth().convert(mode), 'PNG') for mode in ('P', 'RGBA')] + [file_of(smooth(), 'BMP')]
    assert not any(decode_image(encoded).is_unmodified for encoded in corrected)


def test_decompression_bomb_in_a_text_of_a_png_is_not_decompressed() -> None:
    info = PngImagePlugin.PngInfo()
    info.add_text('Comment', 'x' * 50_000_000, zip=True)
    encoded = file_of(smooth(), 'PNG', pnginfo=info)
    tracemalloc.start()
    decoded = decode_image(encoded)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20_000_000
    assert difference(decoded.image, smooth()) == 0
    assert not decoded.is_unmodified  # other decoders refuse the file


def test_large_color_profile_of_a_png_is_applied_and_a_damaged_or_huge_one_ignored() -> None:
    image = Image.new('RGB', (16, 16), (200, 30, 30))
    profile = swapped_profile()
    padded = (len(profile) + 2_000_000).to_bytes(4, 'big') + profile[4:] + bytes(2_000_000)
    red, green, _ = decode_image(file_of(image, 'PNG', icc_profile=padded)).image.getpixel((8, 8))  # type: ignore[misc]
    assert green > red
    for unusable in (b'no profile' * 300_000, bytes(50_000_000)):
        assert difference(decode_image(file_of(image, 'PNG', icc_profile=unusable)).image, image) == 0


SEEDS = {
    **{kind: file_of(smooth(), kind) for kind in FORMATS},
    'progressive': file_of(smooth(), progressive=True),
    'cmyk': file_of(smooth().convert('CMYK')),
    'palette': file_of(smooth().convert('P'), 'PNG', transparency=3),
    'alpha': file_of(smooth().convert('RGBA'), 'WEBP', lossless=True),
    'deep': file_of(Image.fromarray(np.arange(1024, dtype=np.uint16).reshape(32, 32)), 'PNG'),
    'exif': file_of(smooth(), exif=Image.Exif().tobytes(), icc_profile=swapped_profile()),
    'animated': file_of(smooth(), 'GIF', save_all=True, append_images=[smooth(48, 32).rotate(90)]),
    'lzw': file_of(smooth(), 'TIFF', compression='tiff_lzw'),
}


@settings(max_examples=15, deadline=5000)
@given(data=st.data())
def test_any_bytes_are_decoded_or_rejected(data: st.DataObject) -> None:
    encoded = bytearray(SEEDS[data.draw(st.sampled_from(sorted(SEEDS)))])
    for _ in range(data.draw(st.integers(0, 4))):
        at = data.draw(st.integers(0, len(encoded) - 1))
        encoded[at] = data.draw(st.integers(0, 255))
    cut = data.draw(st.integers(0, len(encoded)) | st.just(len(encoded)))
    try:
        decoded = decode_image(bytes(encoded[:cut]), max_pixels=1_000_000)
    except Unfit:
        return
    assert isinstance(decoded, DecodedImage)
    assert decoded.image.mode == 'RGB'
    assert np.asarray(decoded.image).shape == (decoded.height, decoded.width, 3)


@pytest.mark.parametrize('kind', ['png', 'jpeg', 'webp'])
def test_encoding_is_deterministic_and_keeps_no_metadata(kind: str) -> None:
    image, lossless = smooth(), kind == 'png'
    image.info |= {'comment': b'my house', 'exif': b'Exif\0\0', 'icc_profile': b'x', 'dpi': (72, 72), 'gamma': 0.5}
    without_metadata = smooth()
    encoded = encode(image, kind=kind, quality=95)
    assert encoded == encode(without_metadata, kind=kind, quality=95)
    assert image.info['dpi'] == (72, 72)
    decoded = Image.open(io.BytesIO(encoded))
    assert decoded.format == kind.upper()
    # WebP stores chroma at half the resolution, which shows at the edge of the dark corner.
    assert difference(decoded, without_metadata) <= {'png': 0, 'jpeg': LOSSY, 'webp': 60}[kind]
    assert decode_image(encoded).lossless == lossless


def photograph(width: int, height: int) -> Image.Image:
    """Return an image with structures of all sizes, as photographs have."""
    rng, total = np.random.default_rng(width * height), np.zeros((height, width, 3), np.float32)
    for octave in (4, 16, 64):
        coarse = Image.fromarray(rng.integers(0, 256, (octave, octave, 3), np.uint8))
        total += np.asarray(coarse.resize((width, height), Image.Resampling.BICUBIC)) / octave
    return Image.fromarray((total / total.max() * 255).astype(np.uint8))


@pytest.mark.parametrize(
    ('width', 'height', 'side', 'factor'),
    [(483, 642, 32, 4), (511, 600, 32, 4), (1024, 1100, 32, 8), (255, 300, 64, 1), (256, 300, 64, 2)],
)
@pytest.mark.parametrize(('mode', 'orientation'), [('RGB', 1), ('L', 3), ('CMYK', 6)])
def test_large_jpeg_is_reduced(width: int, height: int, side: int, factor: int, mode: str, orientation: int) -> None:
    """It has the size of the file, and resized to its bucket nearly the pixels of the whole image."""
    exif = Image.Exif()
    exif[0x0112] = orientation
    encoded = file_of(photograph(width, height).convert(mode), quality=90, exif=exif)
    shape = Shape(side, side)
    whole, fast = (
        decode_image(encoded, resized_to=resized_to)
        for resized_to in (None, lambda width, height: covering_size(width, height, shape))
    )
    assert (fast.width, fast.height) == (whole.width, whole.height) == whole.image.size
    assert fast.image.size == (-(-whole.width // factor), -(-whole.height // factor))
    assert whole.is_unmodified == (orientation == 1 and mode != 'CMYK')
    assert fast.is_unmodified == (whole.is_unmodified and factor == 1)
    size = covering_size(whole.width, whole.height, shape)
    small, expected = (np.asarray(shrink(each.image, size).convert('RGB'), np.float32) for each in (fast, whole))
    assert small.shape == expected.shape
    assert np.sqrt(np.square(small - expected).mean()) < 2.5


def test_jpegs_of_quality_95_and_more_keep_the_full_resolution_of_colors() -> None:
    files = [io.BytesIO(encode(smooth(), kind='jpeg', quality=quality)) for quality in (94, 95)]
    assert [JpegImagePlugin.get_sampling(Image.open(file)) for file in files] == [2, 0]  # 4:2:0, then 4:4:4


@pytest.mark.parametrize('progressive', [False, True])
def test_damage_is_found_in_a_jpeg_that_is_decoded_smaller(progressive: bool) -> None:
    encoded = file_of(photograph(640, 480), quality=80, progressive=progressive)
    damaged = [encoded[:cut] for cut in range(100, len(encoded), len(encoded) // 23)]
    for position in range(700, len(encoded), len(encoded) // 23):
        changed = bytes(byte ^ 0x5A for byte in encoded[position : position + 8])
        damaged.append(encoded[:position] + changed + encoded[position + 8 :])
    found = [outcome(each) for each in damaged]
    assert {'truncated', '640'} <= set(found)
    assert [outcome(each, resized_to=lambda width, height: (40, 30)) for each in damaged] == found


@given(width=st.integers(1, 300), height=st.integers(1, 300), shape=st.tuples(st.integers(1, 20), st.integers(1, 20)))
@settings(max_examples=80, deadline=2000)
def test_shrink_just_covers_the_shape_and_never_upscales(width: int, height: int, shape: tuple[int, int]) -> None:
    wanted = Shape(shape[0] * 8, shape[1] * 8)
    image = shrink(Image.new('RGB', (width, height)), covering_size(width, height, wanted))
    if width < wanted.width or height < wanted.height:
        assert image.size == (width, height)
        return
    assert image.width >= wanted.width and image.height >= wanted.height
    assert image.width == wanted.width or image.height == wanted.height
    scale = max(wanted.width / width, wanted.height / height)
    assert abs(image.width - width * scale) <= 0.5 and abs(image.height - height * scale) <= 0.5
