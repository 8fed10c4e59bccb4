"""Key of a comparison by people: the model of each image of the page, which the page itself does not reveal."""

import json
import random
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

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
