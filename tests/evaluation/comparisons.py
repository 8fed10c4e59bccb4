"""Small comparisons for tests: their keys, images, pages and answers."""

import random
from collections.abc import Callable, Sequence

from PIL import Image, ImageDraw

from diffusion.evaluation.comparison_answers import QUESTIONS, Answer, answers_json
from diffusion.evaluation.comparison_page import ComparisonKey, Pair, make_pairs

PROMPTS = ('a red circle', 'a <b>bold</b> & "quoted" prompt </script>', 'two cats', 'an old photograph of a fox')
COMPARISON = 'c0ffee0123456789'


def make_key(prompts: Sequence[str] = PROMPTS, checks: int = 2) -> ComparisonKey:
    """Return a key of the models `runs/first/ba10` and `runs/second/ba20`."""
    pairs = make_pairs(prompts, checks, random.Random(0))
    about = [{'source': f'runs/{name}, ema weights'} for name in ('first/ba10', 'second/ba20')]
    return ComparisonKey(COMPARISON, about[0], about[1], 'prompts.txt', pairs, token='the-token')


def draw_images(prompt: int) -> tuple[Image.Image, Image.Image]:
    """Draw images of A, a circle, and of B, a square, in colors that depend on the prompt."""
    images = []
    for shape in ('ellipse', 'rectangle'):
        image = Image.new('RGB', (64, 64), (40 * prompt % 256, 90, 160))
        getattr(ImageDraw.Draw(image), shape)((16, 16, 48, 48), fill=(250, 210, 60))
        images.append(image)
    return images[0], images[1]


def rater_name(number: int) -> str:
    return f'{number:016x}'


def attentive(pair: Pair, question: str) -> str:
    """Return the choice of a person who prefers A in quality and B in alignment, and passes attention checks."""
    if pair.a is None:
        return 'second' if pair.damaged == 'first' else 'first'
    return pair.a if question == 'quality' else ('second' if pair.a == 'first' else 'first')


def answers_of(
    key: ComparisonKey, number: int, choose: Callable[[Pair, str], str] = attentive, *, pairs: int | None = None
) -> list[Answer]:
    """Return the answers of a person to the first pairs of a comparison."""
    count = len(key.pairs) if pairs is None else pairs
    return [
        Answer(index, question, choose(pair, question), rater_name(number))
        for index, pair in enumerate(key.pairs[:count])
        for question in QUESTIONS
    ]


def answers_text(key: ComparisonKey, number: int, choose: Callable[[Pair, str], str] = attentive, **options) -> str:
    return answers_json(key.comparison, rater_name(number), answers_of(key, number, choose, **options))
