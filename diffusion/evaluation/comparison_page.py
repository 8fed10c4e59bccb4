"""Builder of the comparison page: one HTML file with all images, which does not tell the model of an image.

Images of both models are re-encoded in the same way from their pixels alone, at one size per pair: no metadata, file
name or file format is left that would tell them apart.
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
"""Name of the file of a key."""
Side = Literal['first', 'second']
"""Image of a pair, as stored in the page, which shows it on the left or right at random for each person."""
SIDES: tuple[Side, Side] = ('first', 'second')


@dataclass(frozen=True)
class Pair:
    """Two images for one prompt.

    Args:
        prompt: Index of the prompt.
        text: The prompt.
        a: Image that is from A; None for an attention check, which has an image and a damaged copy of it.
        source: Model, `a` or `b`, of the image of an attention check; else None.
        damaged: Image of an attention check that is damaged; else None.
    """

    prompt: int
    text: str
    a: Side | None
    source: Literal['a', 'b'] | None = None
    damaged: Side | None = None


@dataclass(frozen=True)
class ComparisonKey:
    """Key of a comparison.

    Args:
        comparison: Random identifier of the comparison, 16 hex digits, which the page and its answers carry.
        a: Description of A: its `source`, and how its images were generated.
        b: Description of B.
        prompts: Source of the prompts.
        pairs: Pairs, in the page's order.
        token: Secret of the server's address.
    """

    comparison: str
    a: Mapping[str, Any]
    b: Mapping[str, Any]
    prompts: str
    pairs: Sequence[Pair]
    token: str = field(default_factory=lambda: secrets.token_urlsafe(16))

    def damaged(self) -> dict[int, str]:
        """Return the damaged image of each pair that is an attention check."""
        return {index: pair.damaged for index, pair in enumerate(self.pairs) if pair.damaged is not None}

    def to_json(self) -> str:
        """Return the content of the key's file."""
        return json.dumps(asdict(self), indent=1, ensure_ascii=False) + '\n'


def make_pairs(prompts: Sequence[str], checks: int, rng: random.Random) -> list[Pair]:
    """Return a pair per prompt and attention checks, in random order and with random sides.

    Args:
        checks: Number of attention checks, at most that of prompts.
        rng: Source of randomness; `secrets.SystemRandom()` cannot be predicted from the page.
    """
    pairs = [Pair(index, text, rng.choice(SIDES)) for index, text in enumerate(prompts)]
    # Use as many checks with images of A as of B, so that seeing images a second time favors neither.
    for number, index in enumerate(rng.sample(range(len(prompts)), checks)):
        pairs.append(Pair(index, prompts[index], None, 'ab'[number % 2], rng.choice(SIDES)))  # type: ignore[arg-type]
    rng.shuffle(pairs)
    return pairs


def new_comparison() -> str:
    """Return a random identifier of a comparison."""
    return secrets.token_hex(8)


def read_key(path: Path) -> ComparisonKey:
    """Read the file of a key.

    Raises:
        UserError: The file does not exist, or is not a key.
    """
    try:
        content = json.loads(path.read_text(encoding='utf-8'))
        pairs = [Pair(**each) for each in content.pop('pairs')]
        return ComparisonKey(**content, pairs=pairs)
    except FileNotFoundError as error:
        raise UserError(f'{path}: does not exist; give the {KEY} beside the page') from error
    except (IsADirectoryError, NotADirectoryError, PermissionError) as error:
        raise UserError(f'{path}: cannot be read ({error.strerror}); give the {KEY} beside the page') from error
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UserError(f'{path}: is not the {KEY} that diffusion compare wrote ({type(error).__name__})') from error


TEMPLATE = Path(__file__).parent / 'assets' / 'comparison.html'
PAGE = 'index.html'
"""Name of the page's file."""
JPEG_QUALITY = 92
"""JPEG quality of the images of both models; colors are not subsampled."""
MAX_ASPECT_RATIO_ERROR = 0.02
"""Relative difference of the aspect ratios of two images that are stretched to one size."""
MOSAIC_CELLS = 14
"""Cells along the longer side of a damaged image."""

ImagesOf = Callable[[int], tuple[Image.Image, Image.Image]]
"""Function from the index of a prompt to the RGB images of A and B."""


def page_chunks(comparison: str, pairs: Sequence[Pair], images: ImagesOf) -> Iterator[str]:
    """Yield the HTML of a page in parts, so that only the images of one pair are in memory.

    Args:
        comparison: Identifier of the comparison.
        pairs: Pairs of images, in the page's order.

    Raises:
        UserError: The two images of a prompt have different aspect ratios.
    """
    before, after = TEMPLATE.read_text(encoding='utf-8').split('__DATA__')
    yield f'{before}{{"comparison":{_json(comparison)},"pairs":['
    for number, pair in enumerate(pairs):
        first, second = pair_images(pair, *images(pair.prompt))
        content = {'prompt': pair.text, 'width': first.width, 'height': first.height}
        content |= {'first': data_uri(first), 'second': data_uri(second)}
        yield (',' if number else '') + _json(content)
    yield f']}}{after}'


def pair_images(pair: Pair, a: Image.Image, b: Image.Image) -> tuple[Image.Image, Image.Image]:
    """Return the first and the second image of a pair, of one size."""
    a, b = at_one_size(a, b, where=f'prompt {pair.prompt + 1} ({pair.text[:60]!r})')
    if pair.a is not None:
        return (a, b) if pair.a == 'first' else (b, a)
    intact = a if pair.source == 'a' else b
    first, second = (damaged_copy(intact) if side == pair.damaged else intact for side in SIDES)
    return first, second


def at_one_size(a: Image.Image, b: Image.Image, *, where: str) -> tuple[Image.Image, Image.Image]:
    """Enlarge the smaller of two images to the size of the other one.

    Raises:
        UserError: They have different aspect ratios.
    """
    if abs(a.width * b.height / (a.height * b.width) - 1) > MAX_ASPECT_RATIO_ERROR:
        raise UserError(
            f'{where}: A has {a.width} x {a.height} pixels and B {b.width} x {b.height}; people would tell them by '
            'their shape: crop the images to one aspect ratio'
        )
    size = max(a.size, b.size, key=lambda sides: sides[0] * sides[1])
    # Different sizes would reveal the model of an image.
    enlarged = [each if each.size == size else each.resize(size, Image.Resampling.LANCZOS) for each in (a, b)]
    return enlarged[0], enlarged[1]


def damaged_copy(image: Image.Image) -> Image.Image:
    """Return an image for an attention check: a coarse mosaic with noise that leaves the motif barely visible."""
    scale = MOSAIC_CELLS / max(image.size)
    cells = image.resize([max(1, round(side * scale)) for side in image.size], Image.Resampling.BOX)
    noise = np.random.default_rng(0).normal(0, 40, (cells.height, cells.width, 3))
    pixels = (np.asarray(cells) * 0.6 + 40 + noise).clip(0, 255).astype(np.uint8)
    return Image.fromarray(pixels).resize(image.size, Image.Resampling.NEAREST)


def data_uri(image: Image.Image) -> str:
    """Return an RGB image as the data URI of a JPEG without metadata."""
    buffer = io.BytesIO()
    # Make a new image, since Pillow would write the comment and the profile in `info`.
    Image.fromarray(np.asarray(image)).save(buffer, 'JPEG', quality=JPEG_QUALITY, subsampling=0)
    return 'data:image/jpeg;base64,' + base64.b64encode(buffer.getvalue()).decode()


def _json(content: object) -> str:
    """Return JSON that can stand inside of a script element."""
    return json.dumps(content, separators=(',', ':')).replace('<', '\\u003c')
