"""Captioned OpenMoji images with a held-out split of unseen combinations, for benchmarks.

Many names combine a subject with an attribute: "firefighter medium skin tone", "green circle". The subject is the
name without its skin tone or, if it has none, without its first color. Flags are named by their country and have no
attribute. The splits:

- `drawings`: the families (variants of one drawing) that `diffusion prepare openmoji --split heldout` selects, 1 of 16;
- `combinations`: 1 of 8 pairs of family and attribute, with all genders, if training has both the subject with another
  attribute or none, and the attribute with other subjects;
- `train`: everything else.

Names with two skin tones are left out, because there are hundreds of images of a few drawings.
"""

import hashlib
import re
from collections import Counter
from collections.abc import Sequence
from typing import NamedTuple

from diffusion.prepare.openmoji import Emoji, all_emoji

TONES = ('medium-light skin tone', 'medium-dark skin tone', 'light skin tone', 'medium skin tone', 'dark skin tone')
COLORS = ('red', 'orange', 'yellow', 'green', 'light blue', 'blue', 'purple', 'brown', 'black', 'white', 'pink', 'grey')
SPLITS = ('train', 'combinations', 'drawings')
_TONE = re.compile(rf' ({"|".join(TONES)})')
_COLOR = re.compile(rf'\b({"|".join(COLORS)})\b')


class Name(NamedTuple):
    """A name divided into subject and attribute; the attribute is empty if there is none."""

    subject: str
    attribute: str


def divide(name: str) -> Name:
    """Divide a name into its subject and its skin tone or color."""
    found = _TONE.search(name) or _COLOR.search(name.lower())
    if found is None:
        return Name(name, '')
    rest = name[: found.start()] + name[found.end() :]
    return Name(' '.join(rest.split()), found.group(1))


def split(emojis: Sequence[Emoji]) -> dict[str, list[Emoji]]:
    """Divide emoji into the splits in `SPLITS`; their order is shuffled, the same each time."""
    ordered = sorted(emojis, key=lambda emoji: _digest(emoji.hexcode))
    named = [emoji for emoji in ordered if emoji.names and len(_TONE.findall(emoji.names[0])) < 2]
    found: dict[str, list[Emoji]] = {each: [] for each in SPLITS}
    found['drawings'] = [emoji for emoji in named if emoji.is_heldout]
    rest = [emoji for emoji in named if not emoji.is_heldout]
    names = {emoji.hexcode: divide(emoji.names[0]) for emoji in rest}
    chosen = {emoji.hexcode for emoji in rest if _is_chosen(emoji, names[emoji.hexcode])}
    kept = [names[emoji.hexcode] for emoji in rest if emoji.hexcode not in chosen]
    subjects, attributes = Counter(name.subject for name in kept), Counter(name.attribute for name in kept)
    for emoji in rest:
        name = names[emoji.hexcode]
        unseen = emoji.hexcode in chosen and subjects[name.subject] > 0 and attributes[name.attribute] > 0
        found['combinations' if unseen else 'train'].append(emoji)
    return found


def load_split() -> dict[str, list[Emoji]]:
    """Return the emoji of the installed package by split."""
    return split(all_emoji())


def _is_chosen(emoji: Emoji, name: Name) -> bool:
    """Return True for 1 of 8 pairs of family and attribute."""
    # Split by family, which has all genders of a drawing: they differ by little more than the hair.
    family = divide(emoji.names[0]).subject if name.attribute in COLORS else emoji.family
    return bool(name.attribute) and _digest(f'{family} {name.attribute}') % 8 == 0


def _digest(text: str) -> int:
    return int(hashlib.sha256(text.encode()).hexdigest(), 16)
