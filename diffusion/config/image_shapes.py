"""Buckets: which shape a picture is seen at, and which pictures may share a batch. Sizes are in pixels."""

import json
import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from diffusion.errors import UserError
from diffusion.storage.atomic import write_whole

BUCKETS = 'buckets.json'
"""Lists the shapes of a folder that holds a folder of shards for each."""
STEP = 8
"""Sides are multiples of a latent cell."""
SDXL_SHAPES = (
    *((512, 2048), (512, 1984), (512, 1920), (512, 1856), (576, 1792), (576, 1728), (576, 1664), (640, 1600)),
    *((640, 1536), (704, 1472), (704, 1408), (704, 1344), (768, 1344), (768, 1280), (832, 1216), (832, 1152)),
    *((896, 1152), (896, 1088), (960, 1088), (960, 1024), (1024, 1024)),
)
"""Height and width of the landscape half of the aspect buckets around 1024 px (Podell et al. 2023, appendix I)."""


@dataclass(frozen=True, order=True)
class Shape:
    """Width and height of what the model sees, in pixels; written 640x384."""

    width: int
    height: int

    def __str__(self) -> str:
        return f'{self.width}x{self.height}'

    @property
    def aspect(self) -> float:
        """Width over height."""
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
    """The shape that `640x384` stands for: width, then height.

    Raises:
        UserError: It is written otherwise, or a side is not a positive multiple of 8.
    """
    match = re.fullmatch(r'(\d+)x(\d+)', text) if isinstance(text, str) else None
    if match is None:
        raise UserError(f'{text!r} is no shape; write width x height in pixels, such as 640x384')
    shape = Shape(int(match[1]), int(match[2]))
    if min(shape.width, shape.height) <= 0 or shape.width % STEP or shape.height % STEP:
        raise UserError(f'{text!r}: sides are positive multiples of {STEP} pixels')
    return shape


def read_buckets(folder: Path) -> dict[Shape, int]:
    """The shapes of a folder and their numbers of samples, as its buckets.json says.

    Raises:
        UserError: There is none, or it is something else.
    """
    path = folder / BUCKETS
    try:
        content = json.loads(path.read_text(encoding='utf-8'))
        return {parse_shape(name): int(bucket['samples']) for name, bucket in content['buckets'].items()}
    except FileNotFoundError as error:
        raise UserError(
            f'{folder} has no {BUCKETS}; is it a folder of aspect buckets? Else leave out aspects'
        ) from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise UserError(f'{path} is no list of buckets ({error}); prepare the data again') from error


def write_buckets(folder: Path, resolution: int, buckets: Mapping[Shape, Mapping[str, int]]) -> None:
    """Write buckets.json: of each shape at least its number of `samples`."""
    write_whole(folder / BUCKETS, buckets_text(resolution, buckets))


def buckets_text(resolution: int, buckets: Mapping[Shape, Mapping[str, int]]) -> str:
    """Return the content of buckets.json."""
    content = {
        'version': 1,
        'resolution': resolution,
        'buckets': {str(shape): dict(buckets[shape]) for shape in sorted(buckets, key=_by_aspect)},
    }
    return json.dumps(content, indent=2) + '\n'


def sdxl_shapes(resolution: int) -> list[Shape]:
    """SDXL's aspect buckets of about `resolution`**2 pixels, by aspect: 41 of them, from 1:4 to 4:1.

    The table is that of 1024 px, scaled; sides are rounded to multiples of 8, and of 64 from 1024 px on.
    """
    step = STEP if resolution < 1024 else 64

    def scaled(side: int) -> int:
        return max(step, round(side * resolution / 1024 / step) * step)

    landscape = {Shape(scaled(width), scaled(height)) for height, width in SDXL_SHAPES}
    return sorted(landscape | {Shape(shape.height, shape.width) for shape in landscape}, key=_by_aspect)


def shape_for(width: int, height: int, shapes: Sequence[Shape]) -> Shape:
    """The shape nearest in aspect, by ratio; of two as near, the more square one."""
    aspect = math.log(width / height)
    return min(
        shapes, key=lambda shape: (abs(math.log(shape.aspect) - aspect), abs(math.log(shape.aspect)), _by_aspect(shape))
    )


def apportion(total: int, weights: Sequence[float]) -> list[int]:
    """`total` shared out by weights in whole numbers, each off by less than one (largest remainders; ties: first)."""
    whole = math.fsum(weights)
    exact = [total * weight / whole for weight in weights]
    shares = [math.floor(value) for value in exact]
    by_remainder = sorted(range(len(exact)), key=lambda index: (shares[index] - exact[index], index))
    for index in by_remainder[: total - sum(shares)]:
        shares[index] += 1
    return shares


def _by_aspect(shape: Shape) -> tuple[float, int]:
    return shape.aspect, shape.width
