"""Image shapes and aspect-ratio buckets: images of one bucket have the same shape and can share a batch."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from diffusion.errors import UserError

BUCKETS = 'buckets.json'
"""Name of the file that lists the image shapes of a dataset with one subfolder of shards per shape."""
STEP = 8
"""Image sides in pixels are multiples of this, the downsampling factor of Stable Diffusion's VAEs."""
SDXL_SHAPES = (
    *((512, 2048), (512, 1984), (512, 1920), (512, 1856), (576, 1792), (576, 1728), (576, 1664), (640, 1600)),
    *((640, 1536), (704, 1472), (704, 1408), (704, 1344), (768, 1344), (768, 1280), (832, 1216), (832, 1152)),
    *((896, 1152), (896, 1088), (960, 1088), (960, 1024), (1024, 1024)),
)
"""(Height, width) of SDXL's landscape and square buckets around 1024 px (Podell et al. 2023, appendix I)."""


@dataclass(frozen=True, order=True)
class Shape:
    """Width and height in pixels of the images that the model sees; its text form is 640x384."""

    width: int
    height: int

    def __str__(self) -> str:
        return f'{self.width}x{self.height}'

    @property
    def aspect(self) -> float:
        return self.width / self.height

    @property
    def pixels(self) -> int:
        return self.width * self.height

    @property
    def is_square(self) -> bool:
        return self.width == self.height


def square(side: int) -> Shape:
    return Shape(side, side)


def parse_shape(text: str) -> Shape:
    """Parse a shape written as width x height, such as `640x384`.

    Raises:
        UserError: The text does not have this form, or a side is not a positive multiple of 8.
    """
    match = re.fullmatch(r'(\d+)x(\d+)', text) if isinstance(text, str) else None
    if match is None:
        raise UserError(f'{text!r} is not a shape; write width x height in pixels, such as 640x384')
    shape = Shape(int(match[1]), int(match[2]))
    if not shape.pixels or shape.width % STEP or shape.height % STEP:
        raise UserError(f'{text!r}: sides must be positive multiples of {STEP} pixels')
    return shape


def read_buckets(folder: Path) -> dict[Shape, int]:
    """Read a folder's buckets.json and return the number of samples per image shape.

    Raises:
        UserError: The file does not exist or is not a valid list of buckets.
    """
    path = folder / BUCKETS
    if not path.is_file():
        raise UserError(
            f'{folder} has no {BUCKETS}, so it holds no aspect-ratio buckets; use a folder that does, or remove aspects'
        )
    try:
        content = json.loads(path.read_text(encoding='utf-8'))
        return {parse_shape(name): int(bucket['samples']) for name, bucket in content['buckets'].items()}
    except (ValueError, KeyError, TypeError, AttributeError, OverflowError, RecursionError) as error:
        raise UserError(f'{path} is not a valid list of buckets ({error}); prepare the data again') from error


def resolution_problem(folder: Path, resolution: int) -> str | None:
    """Return an error message if a folder of aspect buckets was prepared for another resolution, else None.

    The shapes of an `aspects` stream come from the folder alone, so another resolution would have no effect. Images are
    stored at the prepared size, so a larger resolution would enlarge them.
    """
    prepared = json.loads((folder / BUCKETS).read_text(encoding='utf-8')).get('resolution')
    if not isinstance(prepared, int) or prepared == resolution:
        return None
    reason = 'its images would be enlarged' if resolution > prepared else f'its images would stay at {prepared} px'
    return (
        f'{resolution}, but {folder} holds aspect buckets of {prepared} px: {reason}; set resolution: {prepared}, or '
        f'use a folder that was prepared with --sizes {resolution}'
    )


def buckets_text(resolution: int, buckets: Mapping[Shape, Mapping[str, int]]) -> str:
    content = {
        'version': 1,
        'resolution': resolution,
        'buckets': {str(shape): dict(buckets[shape]) for shape in sorted(buckets, key=_by_aspect)},
    }
    return json.dumps(content, indent=2) + '\n'


def sdxl_shapes(resolution: int, step: int = STEP) -> list[Shape]:
    """Return SDXL's 41 aspect buckets, from 1:4 to 4:1, scaled to about `resolution`**2 pixels.

    Sides are rounded to multiples of `step`, and also of 64 if `resolution` is 1024 or more. Shapes that become equal
    are merged.
    """
    step = step if resolution < 1024 else math.lcm(step, 64)

    def scaled(side: int) -> int:
        return max(step, round(side * resolution / 1024 / step) * step)

    landscape = {Shape(scaled(width), scaled(height)) for height, width in SDXL_SHAPES}
    return sorted(landscape | {Shape(shape.height, shape.width) for shape in landscape}, key=_by_aspect)


def shape_for(width: int, height: int, shapes: Sequence[Shape]) -> Shape:
    """Return the shape whose aspect ratio is nearest to width:height on a log scale; on a tie, the more square one."""
    # On a log scale, 2:1 and 1:2 are equally far from 1:1.
    aspect = math.log(width / height)
    return min(
        shapes, key=lambda shape: (abs(math.log(shape.aspect) - aspect), abs(math.log(shape.aspect)), _by_aspect(shape))
    )


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """Divide `total` into integers proportional to the weights (largest-remainder method; the first one wins a tie)."""
    weight_sum = math.fsum(weights)
    exact = [total * weight / weight_sum for weight in weights]
    shares = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: (shares[index] - exact[index], index))
    for index in by_remainder[: total - sum(shares)]:
        shares[index] += 1
    return shares


def _by_aspect(shape: Shape) -> tuple[float, int]:
    return shape.aspect, shape.width
