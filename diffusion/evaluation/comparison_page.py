"""Build the comparison page: an HTML file that has all images but does not reveal which model made which.

Images of both models are re-encoded from their pixels in the same way, at the same size per pair. So no metadata, file
name or file format can tell the models apart.
"""

import base64
import io
import json
import random
import secrets
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np
from PIL import Image

from diffusion.errors import UserError

KEY = 'key.json'
Side = Literal['first', 'second']
"""Position of an image in the stored pair; the page shows it on the left or right at random for each rater."""
SIDES: tuple[Side, Side] = ('first', 'second')


@dataclass(frozen=True)
class Pair:
    """Two images for one prompt.

    Args:
        prompt: Index of the prompt.
        a: Position of A's image; None for an attention check, which shows one model's image and its damaged copy.
        source: For an attention check, the model whose image is shown, `a` or `b`; otherwise None.
        damaged: For an attention check, the position of the damaged copy; otherwise None.
    """

    prompt: int
    text: str
    a: Side | None
    source: Literal['a', 'b'] | None = None
    damaged: Side | None = None


@dataclass(frozen=True)
class ComparisonKey:
    """Key of a comparison: reveals which model made which image.

    Args:
        comparison: Random identifier of the comparison, 16 hex digits, also stored in the page and its answers.
        a: Description of model A: its `source` and how its images were generated; `b` describes model B.
        prompts: Source of the prompts.
        pairs: Pairs, in the page's order.
        token: Secret part of the server's URL.
    """

    comparison: str
    a: Mapping[str, Any]
    b: Mapping[str, Any]
    prompts: str
    pairs: Sequence[Pair]
    token: str = field(default_factory=lambda: secrets.token_urlsafe(16))

    def damaged(self) -> dict[int, str]:
        """Return the position of the damaged image, `first` or `second`, by pair index, for the attention checks."""
        return {index: pair.damaged for index, pair in enumerate(self.pairs) if pair.damaged is not None}

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + '\n'


def make_pairs(prompts: Sequence[str], checks: int, rng: random.Random) -> list[Pair]:
    """Return one pair per prompt plus `checks` attention checks; their order and the images' positions are random.

    `rng` should be `secrets.SystemRandom()`, which cannot be predicted from the page.
    """
    pairs = [Pair(index, text, rng.choice(SIDES)) for index, text in enumerate(prompts)]
    # Alternate between images of A and B, so that seeing images a second time favors neither model.
    for number, index in enumerate(rng.sample(range(len(prompts)), checks)):
        pairs.append(Pair(index, prompts[index], None, 'ab'[number % 2], rng.choice(SIDES)))  # type: ignore[arg-type]
    rng.shuffle(pairs)
    return pairs


def read_key(path: Path) -> ComparisonKey:
    """Read a key from its file; raise UserError if the file is missing or not a key."""
    try:
        content = json.loads(path.read_text(encoding='utf-8'))
        return ComparisonKey(**content | {'pairs': [Pair(**each) for each in content['pairs']]})
    except FileNotFoundError as error:
        raise UserError(f'{path}: does not exist; give the {KEY} beside the page') from error
    except (IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise UserError(f'{path}: cannot be read ({error.strerror}); give the {KEY} beside the page') from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f'{path}: is not the {KEY} that diffusion compare wrote ({type(error).__name__})') from error


TEMPLATE = Path(__file__).parent / 'assets' / 'comparison.html'
PAGE = 'index.html'
JPEG_QUALITY = 92
MAX_ASPECT_RATIO_ERROR = 0.02
"""Aspect ratios of a pair that differ by up to this fraction are made equal by stretching; others are an error."""
MOSAIC_CELLS = 14
"""Number of mosaic tiles, each of one color, along the longer side of a damaged image."""
ImagesOf = Callable[[int], tuple[Image.Image, Image.Image]]
"""Function that returns the RGB images of A and B for a prompt index."""


def page_chunks(comparison: str, pairs: Sequence[Pair], images: ImagesOf) -> Iterator[str]:
    """Yield a page's HTML in parts, so that only one pair of images is in memory at a time."""
    before, after = TEMPLATE.read_text(encoding='utf-8').split('__DATA__')
    yield f'{before}{{"comparison":{_json(comparison)},"pairs":['
    for number, pair in enumerate(pairs):
        first, second = pair_images(pair, *images(pair.prompt))
        content = {'prompt': pair.text, 'width': first.width, 'height': first.height}
        content |= {'first': data_uri(first), 'second': data_uri(second)}
        yield (',' if number else '') + _json(content)
    yield f']}}{after}'


def pair_images(pair: Pair, a: Image.Image, b: Image.Image) -> tuple[Image.Image, Image.Image]:
    """Return the first and second image of a pair, at the same size."""
    a, b = at_one_size(a, b, where=f'prompt {pair.prompt + 1} ({pair.text[:60]!r})')
    if pair.a is not None:
        return (a, b) if pair.a == 'first' else (b, a)
    intact = a if pair.source == 'a' else b
    first, second = (damaged_copy(intact) if side == pair.damaged else intact for side in SIDES)
    return first, second


def at_one_size(a: Image.Image, b: Image.Image, *, where: str) -> tuple[Image.Image, Image.Image]:
    """Return both images at the size of the larger one; `where` is the pair's name for messages.

    Raises:
        UserError: The aspect ratios differ by more than MAX_ASPECT_RATIO_ERROR.
    """
    if abs(a.width * b.height / (a.height * b.width) - 1) > MAX_ASPECT_RATIO_ERROR:
        raise UserError(
            f'{where}: A has {a.width} x {a.height} pixels and B {b.width} x {b.height}; people would '
            'recognize the models by shape: crop the images to the same aspect ratio'
        )
    size = max(a.size, b.size, key=lambda sides: sides[0] * sides[1])
    # Different sizes would reveal which model made an image.
    enlarged = [each if each.size == size else each.resize(size, Image.Resampling.LANCZOS) for each in (a, b)]
    return enlarged[0], enlarged[1]


def damaged_copy(image: Image.Image) -> Image.Image:
    """Return a damaged image for an attention check: a coarse, noisy mosaic with a barely visible subject."""
    scale = MOSAIC_CELLS / max(image.size)
    cells = image.resize([max(1, round(side * scale)) for side in image.size], Image.Resampling.BOX)
    noise = np.random.default_rng(0).normal(0, 40, (cells.height, cells.width, 3))
    pixels = (np.asarray(cells) * 0.6 + 40 + noise).clip(0, 255).astype(np.uint8)
    return Image.fromarray(pixels).resize(image.size, Image.Resampling.NEAREST)


def data_uri(image: Image.Image) -> str:
    buffer = io.BytesIO()
    # Copy the pixels to a new image, since Pillow would also write the comment and color profile from `info`.
    Image.fromarray(np.asarray(image)).save(buffer, 'JPEG', quality=JPEG_QUALITY, subsampling=0)
    return 'data:image/jpeg;base64,' + base64.b64encode(buffer.getvalue()).decode()


def _json(content: object) -> str:
    """Return JSON that is safe inside a script element."""
    return json.dumps(content, separators=(',', ':')).replace('<', '\\u003c')
