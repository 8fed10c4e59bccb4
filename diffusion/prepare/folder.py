"""`diffusion prepare folder`: pictures and captions of a folder, checked, upright, resized into resolution buckets."""

import io
import time
from collections.abc import Sequence
from pathlib import Path

from PIL import Image
from tqdm import tqdm

from diffusion.data.transforms import decode
from diffusion.prepare.captions import Captioned, from_captions_file, from_text_files
from diffusion.prepare.report import Report, versions_of
from diffusion.prepare.writer import REPORT, SHARD_BYTES, BucketWriter, Picture, check_new, check_sizes, new_dataset

FORMATS = ('JPEG', 'PNG', 'WEBP', 'BMP', 'GIF')
MAX_JPEG_SIDE = 65_500


class Unfit(Exception):
    """A picture that is left out; the message is the reason, one word."""


def prepare_folder(
    source: str | Path,
    out: str | Path,
    sizes: Sequence[int],
    *,
    captions: str | Path | None = None,
    max_rejected: float = 0.01,
    jpeg_quality: int = 95,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> Report:
    """Write a folder's pictures to `out`/<size>px, each to the largest size that it need not be enlarged for.

    A picture is decoded in full, turned upright, put on white where it is transparent, and stored with its shorter
    side equal to the size and its shape kept, as PNG if it was one and else as JPEG.

    Args:
        source: The pictures, in sub-folders or not.
        out: The dataset's folder, which must not exist yet.
        sizes: Shorter sides of the buckets in pixels; smaller pictures are rejected.
        captions: A CSV or JSONL of file and caption; without it each picture needs a .txt, a caption a line.
        max_rejected: Largest share of rejected pictures with which the report passes.
        jpeg_quality: 1 to 100, of what is stored as JPEG.
        overwrite: Replace `out` if it is there.
        shard_bytes: Largest size of a shard.

    Raises:
        ValueError: An argument or the captions file is wrong, `out` is not empty, or no picture is left.
    """
    start = time.monotonic()
    source, out = Path(source), Path(out)
    arguments = {
        'source': str(source),
        'out': str(out),
        'sizes': list(sizes),
        'captions': None if captions is None else str(captions),
        'max_rejected': max_rejected,
        'jpeg_quality': jpeg_quality,
    }
    sizes = check_sizes(sizes)
    _check_numbers(max_rejected, jpeg_quality)
    _check_apart(out, source, captions)
    check_new(out.resolve(), overwrite=overwrite)
    report = Report(source=str(source), arguments=arguments, max_rejected=max_rejected)
    report.versions = versions_of('pillow', 'mosaicml-streaming')
    entries = (
        from_text_files(source, report) if captions is None else from_captions_file(source, Path(captions), report)
    )
    with new_dataset(out, overwrite=overwrite) as folder:
        with BucketWriter(folder, shard_bytes=shard_bytes) as writer:
            for entry in tqdm(entries, desc='preparing', unit='picture', disable=None):
                try:
                    size, picture = _fit(entry, sizes, jpeg_quality)
                except Unfit as reason:
                    report.reject(str(reason), entry.key)
                    continue
                writer.write(size, picture)
        report.buckets = writer.buckets
        report.pictures = sum(report.buckets.values())
        if not report.pictures:
            raise ValueError('\n'.join([f'{source}: no picture is left, nothing is written', *report.rejections()]))
        report.seconds = time.monotonic() - start
        report.save(folder / REPORT)
    return report


def bucket_of(width: int, height: int, sizes: Sequence[int]) -> int | None:
    """The largest size that is at most the shorter side; None for a picture smaller than all."""
    return max((size for size in sizes if size <= min(width, height)), default=None)


def _fit(entry: Captioned, sizes: Sequence[int], jpeg_quality: int) -> tuple[int, Picture]:
    """A picture's bucket and the sample that goes there."""
    image, lossless = _decode(entry.path)
    size = bucket_of(*image.size, sizes)
    if size is None:
        raise Unfit('too_small')
    shorter = min(image.size)
    width, height = (round(side * size / shorter) for side in image.size)
    if max(width, height) > MAX_JPEG_SIDE:
        raise Unfit('too_long')
    if (width, height) != image.size:
        image = image.resize((width, height), Image.Resampling.LANCZOS)
    encoded = _encode(image, jpeg_quality=None if lossless else jpeg_quality)
    return size, Picture(encoded, entry.captions, width, height, entry.key)


def _decode(path: Path) -> tuple[Image.Image, bool]:
    """The whole picture, upright in RGB, and whether its file was a PNG."""
    try:
        encoded = path.read_bytes()
    except OSError as error:
        raise Unfit('unreadable') from error
    try:
        image = Image.open(io.BytesIO(encoded), formats=FORMATS)
        image.load()
        deep = image.mode.startswith(('I', 'F'))
        upright = decode(image)
    except Exception as error:  # on damaged files Pillow's decoders raise nearly anything
        raise Unfit('undecodable') from error
    if deep:  # Pillow clips 16 bits to 8, which leaves white
        raise Unfit('more_than_8_bits')
    return upright, image.format == 'PNG'


def _encode(image: Image.Image, *, jpeg_quality: int | None) -> bytes:
    """PNG without a quality, else JPEG."""
    encoded = io.BytesIO()
    image.info.clear()  # place, camera and comments stay out of the dataset
    if jpeg_quality is None:
        image.save(encoded, 'PNG')
    else:
        image.save(encoded, 'JPEG', quality=jpeg_quality)
    return encoded.getvalue()


def _check_numbers(max_rejected: float, jpeg_quality: int) -> None:
    if not 0 <= max_rejected <= 1:
        raise ValueError(f'--max-rejected: {max_rejected} is no share; give 0 to 1')
    if not 1 <= jpeg_quality <= 100:
        raise ValueError(f'--jpeg-quality: {jpeg_quality} is out of range; give 1 to 100')


def _check_apart(out: Path, source: Path, captions: str | Path | None) -> None:
    """Replacing `out` must not delete what is read."""
    for path in (source, *([] if captions is None else [Path(captions)])):
        if path.resolve().is_relative_to(out.resolve()):
            raise ValueError(f'--out: {out} holds {path}, which is read; give another folder')
