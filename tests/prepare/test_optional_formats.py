"""HEIC, JPEG XL and SVG: read if they are named, and damaged or hostile files are rejected."""

import base64
import importlib.util
import io
import re
from pathlib import Path

import numpy as np
import pytest
from golden import check_transcripts
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import ExifTags, Image, ImageOps
from prepare.drawn import encode as file_of
from prepare.drawn import report_of, smooth, tar_of, write_files

from diffusion.errors import UserError
from diffusion.prepare import optional_formats, svg_process
from diffusion.prepare.image_decoding import MAX_PIXELS, DecodedImage, decode_image
from diffusion.prepare.optional_formats import JxlHeader, pillow_formats, read_jxl_header
from diffusion.prepare.settings import settings_of
from diffusion.prepare.source import Unfit

EVERY = ('heic', 'jxl', 'svg')
XMLNS = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
pillow_formats(EVERY)


def svg(content: str, size: str = 'width="40" height="40"') -> bytes:
    return f'<svg {XMLNS} {size}>{content}</svg>'.encode()


def rotated() -> Image.Exif:
    exif = Image.Exif()
    exif[ExifTags.Base.Orientation] = 6
    return exif


def decoded(encoded: bytes, *, svg_side: int = 64, max_pixels: int = MAX_PIXELS) -> DecodedImage:
    return decode_image(encoded, formats=EVERY, svg_side=svg_side, max_pixels=max_pixels)


def error(image: Image.Image, other: Image.Image) -> float:
    assert image.size == other.size and image.mode == other.mode == 'RGB'
    return float(np.abs(np.asarray(image).astype(int) - np.asarray(other)).mean())


def reason(encoded: bytes, **options: int) -> str:
    with pytest.raises(Unfit) as rejection:
        decoded(encoded, **options)
    assert rejection.value.detail
    return str(rejection.value)


@pytest.mark.parametrize('kind', ['HEIF', 'JXL'])
def test_photographs(kind: str) -> None:
    encoded = file_of(smooth(), kind, quality=95)
    found = decoded(encoded)
    assert found.format == kind and not found.lossless and not found.is_unmodified
    assert error(found.image, smooth()) < 3
    with pytest.raises(Unfit, match='unknown_format'):
        decode_image(encoded)
    assert reason(encoded, max_pixels=48 * 32 - 1) == 'too_many_pixels'


def test_orientation_is_applied_once(tmp_path: Path) -> None:
    upright = ImageOps.exif_transpose(Image.open(io.BytesIO(file_of(smooth(), 'PNG', exif=rotated()))))
    assert upright.size == (32, 48)
    # libheif applies the rotation, which pillow-heif writes as a property of the image.
    assert error(decoded(file_of(smooth(), 'HEIF', quality=95, exif=rotated().tobytes())).image, upright) < 3
    # EXIF of a JPEG XL file does not count, except that of a JPEG within.
    assert decoded(file_of(smooth(), 'JXL', exif=rotated().tobytes())).image.size == (48, 32)
    jpeg = file_of(smooth(), 'JPEG', quality=95, exif=rotated().tobytes())
    (tmp_path / 'photo.jpg').write_bytes(jpeg)  # the encoder reads the file itself
    with Image.open(tmp_path / 'photo.jpg') as image:
        repacked = file_of(image, 'JXL', lossless_jpeg=True)
    assert error(decoded(repacked).image, decoded(jpeg).image) < 3


@pytest.mark.parametrize('kind', ['HEIF', 'JXL'])
@pytest.mark.parametrize('share', [0.1, 0.5, 0.9, 0.99])
def test_truncated_photographs(kind: str, share: float) -> None:
    noise = Image.fromarray(np.random.default_rng(0).integers(0, 255, (40, 60, 3), dtype=np.uint8))
    encoded = file_of(noise, kind)
    assert reason(encoded[: int(share * len(encoded))]) in ('undecodable', 'truncated', 'unknown_format')


@pytest.mark.parametrize(('width', 'height'), [(48, 32), (256, 256), (1000, 7), (513, 300), (1280, 720)])
@pytest.mark.parametrize('container', [False, True])
def test_jxl_header(width: int, height: int, container: bool) -> None:
    encoded = file_of(Image.new('RGB', (width, height)), 'JXL', effort=1, use_container=container)
    boxes = b'\0\0\0\x08free' + b'\0\0\0\x01free' + (24).to_bytes(8, 'big') + bytes(8)  # one of no, one of 64-bit size
    encoded = encoded[:12] + boxes + encoded[12:] if container else encoded
    assert read_jxl_header(encoded) == JxlHeader(width, height, False)
    assert read_jxl_header(file_of(smooth(), 'PNG')) is None
    start, bare = b'\0\0\0\x0cJXL \r\n\x87\n' + boxes, file_of(Image.new('RGB', (width, height)), 'JXL', effort=1)
    assert read_jxl_header(start + b'\0\0\0\0jxlp' + bytes(4) + bare) == JxlHeader(width, height, False)
    for damaged, problem in {b'\0\0\0\0jxlc': 'header is incomplete', b'\0\0\0\7jxl': 'has no codestream'}.items():
        with pytest.raises(ValueError, match=problem):
            read_jxl_header(start + damaged)


def test_animated_jxl() -> None:
    # Small, 32 rows, a ratio of 1 to 1; not all values are the defaults; extra fields: orientation 1, no other size or
    # one of 8 x 8, no preview, an animation.
    for other_size in ('0', '1' + '1' + '00000' + '100'):
        bits = '1' + '11000' + '100' + '0' + '1' + '000' + other_size + '0' + '1'
        header = int(bits[::-1], 2).to_bytes(4, 'little')
        assert read_jxl_header(b'\xff\x0a' + header + bytes(8)) == JxlHeader(32, 32, True)
        assert reason(b'\xff\x0a' + header + bytes(8)) == 'animated'
    assert read_jxl_header(b'\xff\x0a\x00\xc8') is not None, 'the shortest header: 512 rows at most, 1 to 1'


def test_drawing_fills_the_bucket() -> None:
    found = decoded(svg('<rect width="100" height="30" fill="#f00"/>', 'viewBox="0 0 100 30"'), svg_side=300)
    assert found.format == 'SVG' and found.lossless
    assert found.image.getpixel((found.width // 2, found.height // 2)) == (255, 0, 0)
    empty = decode_image(svg(''), formats=EVERY, background='blue', svg_side=64)
    assert empty.image.getpixel((5, 5)) == (0, 0, 255), 'the background fills a transparent drawing'


def test_drawings_are_rendered_at_a_size_or_rejected() -> None:
    """Side of the bucket, pixels at most, attributes, and content: the size of the image, or why there is none."""

    def outcome(line: str) -> list[str]:
        side, pixels, attributes, content = line.split(' | ')
        try:
            found = decoded(svg(content.strip('.'), attributes), svg_side=int(side), max_pixels=int(pixels))
        except Unfit as unfit:
            return [re.sub('Error: .*', 'Error', f'{unfit}: {unfit.detail}')]
        return [f'{found.width} x {found.height}']

    check_transcripts(Path(__file__).parent / 'golden/drawings', outcome)
    assert reason(svg('<g>' * 100_000 + '</g>' * 100_000)) == 'undecodable'
    png = 'data:image/png;base64,' + base64.b64encode(file_of(smooth(), 'PNG')).decode()
    assert decoded(svg(f'<image href="{png}" width="9" height="9"/>')).width >= 64
    assert decoded(b'\xef\xbb\xbf<?xml version="1.0"?>' + svg('')).width >= 64


def test_entities_that_expand_to_gigabytes() -> None:
    names = 'abcdefghij'
    entities = ''.join(
        f'<!ENTITY {name} "{f"&{names[at - 1]};" * 10 if at else "aaaaaaaaaa"}">' for at, name in enumerate(names)
    )
    assert reason(f'<!DOCTYPE svg [{entities}]>'.encode() + svg('<title>&j;</title>')) == 'undecodable'


def test_drawing_that_takes_too_long_ends_its_process(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    program = Path(svg_process.__file__).read_text().replace('TIMEOUT_SECONDS = 20', 'TIMEOUT_SECONDS = 1')
    (tmp_path / 'svg_process.py').write_text(program)
    monkeypatch.setattr(svg_process, '__file__', str(tmp_path / 'svg_process.py'))
    renderer = optional_formats._Renderer()
    monkeypatch.setattr(optional_formats, '_renderer', lambda: renderer)
    region = 'x="-1000000" y="-1000000" width="9000000" height="9000000" filterUnits="userSpaceOnUse"'
    noise = f'<filter id="f" {region}><feTurbulence numOctaves="1000000"/></filter>'
    assert reason(svg(f'{noise}<rect filter="url(#f)" width="9" height="9"/>')) == 'svg_too_complex'
    assert decoded(svg('')).width >= 64, 'another process renders the next'
    renderer.close()


SEEDS = {
    'heic': file_of(smooth(), 'HEIF'),
    'jxl': file_of(smooth(), 'JXL'),
    'container': file_of(smooth(), 'JXL', use_container=True),
}


@settings(max_examples=40, deadline=5000)
@given(data=st.data())
def test_any_photograph_is_decoded_or_rejected(data: st.DataObject) -> None:
    encoded = bytearray(SEEDS[data.draw(st.sampled_from(sorted(SEEDS)))])
    for _ in range(data.draw(st.integers(1, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    try:
        found = decode_image(bytes(encoded), formats=('heic', 'jxl'), max_pixels=10**6)
    except Unfit:
        return
    assert found.image.mode == 'RGB'


@pytest.mark.parametrize('kind', ['folder', 'webdataset'])
def test_sources_read_the_named_formats(tmp_path: Path, kind: str) -> None:
    images = {'phone.HEIC': file_of(smooth(), 'HEIF'), 'small.jxl': file_of(smooth(), 'JXL')}
    images |= {'drawn.svg': svg('<circle cx="20" cy="20" r="15"/>'), 'plain.png': file_of(smooth(), 'PNG')}
    images |= {f'{Path(name).stem}.txt': b'a caption' for name in images}
    files = images if kind == 'folder' else {'a.tar': tar_of(sorted(images.items()))}
    folder = write_files(tmp_path / 'in', files)
    values = {'source': {'kind': kind, 'location': str(folder)}, 'sizes': [32], 'max_rejected': 1.0}
    plain = report_of(values | {'out': str(tmp_path / 'plain')})
    assert plain.pictures == 1
    assert [note for note in plain.notes if '--formats' in note] == [
        f'images of other formats were skipped; read them with --formats {name}' for name in EVERY
    ]
    report = report_of(values | {'out': str(tmp_path / 'out'), 'formats': list(EVERY)})
    assert report.pictures == 4 and not report.passed_over and not report.notes
    assert report.versions.keys() >= {'pillow-heif', 'pillow-jxl-plugin', 'resvg-py'}


def test_missing_packages_and_unknown_formats_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    values = {'source': {'kind': 'folder', 'location': 'in'}, 'sizes': [32], 'out': 'out'}
    monkeypatch.setattr(importlib.util, 'find_spec', lambda name: None)
    with pytest.raises(UserError, match=r'heic, svg needs pillow-heif and resvg-py; install .*\[formats\]'):
        settings_of(values | {'formats': ['heic', 'svg']})
    with pytest.raises(UserError, match='formats'):
        settings_of(values | {'formats': ['raw']})
