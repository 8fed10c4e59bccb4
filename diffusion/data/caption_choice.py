"""Choose one of an image's captions: the first, the longest, or a random one (uniform or weighted)."""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any, Literal

from diffusion.data.bad_samples import BadSample
from diffusion.errors import UserError

CaptionChoice = Literal['first', 'random', 'longest']
CAPTION_COLUMNS = 'caption_columns'
"""Column that lists, for each caption, the column it came from; only in datasets with captions from several columns."""


def captions_of(sample: dict[str, Any], where: str) -> list[str]:
    """Return a sample's captions, from its column `captions` (a list) or `caption`; raise BadSample if it has none."""
    value = sample.get('captions', sample.get('caption'))
    captions = [value] if isinstance(value, str) else value
    if not isinstance(captions, list) or not captions or not all(isinstance(text, str) for text in captions):
        raise BadSample(
            f'{where}: its caption is {value!r}; a sample needs `captions`, a non-empty list of strings, '
            'or `caption`, a string'
        )
    return captions


def choose_caption_index(captions: list[str], rule: CaptionChoice, draw: float, chances: Sequence[float] = ()) -> int:
    """Return the index of the chosen caption; the index also selects data stored per caption, such as text embeddings.

    Only the rule `random` uses `draw`, a uniform random number in [0, 1), and `chances`, the probability of each
    caption; if `chances` is empty, all captions are equally likely.
    """
    if rule == 'longest':
        return max(range(len(captions)), key=lambda index: len(captions[index]))
    if rule == 'first':
        return 0
    if not chances:
        return int(draw * len(captions))
    # Rounding may leave the sum below 1: draws above it choose the last caption with a nonzero probability.
    last = max(index for index, chance in enumerate(chances) if chance > 0)
    return next((index for index, end in enumerate(accumulate(chances)) if draw < end), last)


def caption_chances(sample: Mapping[str, Any], weights: Mapping[str, float]) -> list[float]:
    """Return the probability of each caption of a sample, given the weight of each source column.

    The weights are normalized over the columns in which the sample has captions; captions from one column share its
    weight. The result is empty if the dataset does not record the columns. Raises BadSample if no column has a weight.
    """
    columns = sample.get(CAPTION_COLUMNS)
    if not columns:
        return []
    counts = Counter(columns)
    total = sum(weights.get(name, 0.0) for name in counts)
    if total <= 0:
        raise BadSample(
            f'its captions are from {", ".join(counts)}, but dataset.caption_weights has {", ".join(weights)}; '
            'add a weight for one of the columns of its captions'
        )
    return [weights.get(name, 0.0) / (total * counts[name]) for name in columns]


def check_caption_weights(weights: Mapping[str, float] | None, rule: CaptionChoice) -> None:
    """Raise UserError unless `weights` is None, or all weights are positive and captions are chosen at random."""
    if weights is None:
        return
    if rule != 'random':
        raise UserError(f'dataset.caption_weights: has no effect with caption_choice: {rule}; use random, or remove it')
    wrong = [name for name, value in weights.items() if not (isinstance(value, int | float) and 0 < value < math.inf)]
    if wrong or not weights:
        raise UserError(
            f'dataset.caption_weights: {dict(weights)} must give columns positive weights, such as '
            '{original: 0.3, recaptioned: 0.7}; leave out unused columns'
        )
