"""Choice of one of an image's captions: the first, the longest, or a random one."""

from typing import Any, Literal

from diffusion.data.bad_samples import BadSample

CaptionChoice = Literal['first', 'random', 'longest']


def captions_of(sample: dict[str, Any], where: str) -> list[str]:
    """Return the captions of a dataset sample as a list, from its column `captions` (a list) or `caption` (a string).

    Args:
        sample: A sample of an MDS shard.
        where: Stream and row of the sample, to start the error message.

    Raises:
        BadSample: The sample has no captions, or they are not strings.
    """
    value = sample.get('captions', sample.get('caption'))
    captions = [value] if isinstance(value, str) else value
    if not isinstance(captions, list) or not captions or not all(isinstance(text, str) for text in captions):
        raise BadSample(
            f'{where}: its caption is {value!r}; a sample needs `captions`, a non-empty list of strings, '
            'or `caption`, a string'
        )
    return captions


def choose_caption(captions: list[str], rule: CaptionChoice, draw: float) -> str:
    """Return one caption by `rule` (first, longest or random); `random` uses `draw`, a uniform number in [0, 1)."""
    return captions[choose_caption_index(captions, rule, draw)]


def choose_caption_index(captions: list[str], rule: CaptionChoice, draw: float) -> int:
    """Return the index of the caption chosen by `rule`, to select data stored per caption, such as text embeddings."""
    if rule == 'random':
        return int(draw * len(captions))
    return max(range(len(captions)), key=lambda index: len(captions[index])) if rule == 'longest' else 0
