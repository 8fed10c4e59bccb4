"""Which of a picture's captions is used."""

from typing import Any, Literal

from diffusion.data.bad_samples import BadSample

CaptionChoice = Literal['first', 'random', 'longest']


def captions_of(sample: dict[str, Any], where: str) -> list[str]:
    """The captions of a sample: its `captions`, a list, or its `caption`, a string.

    Raises:
        BadSample: There is none, or it is not text.
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
    """One of the captions; `draw`, in [0, 1), decides for the rule `random`."""
    return captions[choose_caption_index(captions, rule, draw)]


def choose_caption_index(captions: list[str], rule: CaptionChoice, draw: float) -> int:
    """The place of the caption that `choose_caption` takes."""
    if rule == 'random':
        return int(draw * len(captions))
    return max(range(len(captions)), key=lambda index: len(captions[index])) if rule == 'longest' else 0
