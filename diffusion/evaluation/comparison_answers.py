"""Read, validate and merge the answer files saved by a comparison page."""

import json
import logging
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion.errors import UserError
from diffusion.evaluation.comparison_page import SIDES

log = logging.getLogger(__name__)

QUESTIONS = {'quality': 'image quality', 'alignment': 'prompt alignment'}
"""Questions about each pair of images, keyed by the name used in answers."""
CHOICES = (*SIDES, 'tie')
MAX_FAILED_CHECKS = 0.2
"""Raters who fail a larger fraction of attention checks are excluded."""
MAX_BYTES = 2**22
"""Maximum size of an answer file: 4 MiB, enough for thousands of pairs."""
_RATER = re.compile(r'[0-9a-f]{16}')
_MASK = 2**64 - 1


@dataclass(frozen=True)
class Answer:
    """A rater's answer about a pair of images: `pair` is its index, and `question` is a key of `QUESTIONS`.

    Args:
        choice: `first` or `second` for the image's position in the stored pair (not its side on the screen), or `tie`.
        rater: Identifier of the person, 16 hex digits.
    """

    pair: int
    question: str
    choice: str
    rater: str


def checksum(text: str) -> str:
    """Return the 64-bit FNV-1a hash of a text in UTF-8 as 16 hex digits; the page computes the same hash.

    It detects files that were edited or truncated, but does not protect against deliberate manipulation.
    """
    value = 0xCBF29CE484222325
    for byte in text.encode():
        value = ((value ^ byte) * 0x100000001B3) & _MASK
    return f'{value:016x}'


def answers_json(comparison: str, rater: str, answers: Iterable[Answer]) -> str:
    rows = [{'pair': each.pair, 'question': each.question, 'choice': each.choice} for each in answers]
    content = {'comparison': comparison, 'rater': rater, 'answers': rows}
    return json.dumps(content | {'checksum': checksum(_canonical(content))}, indent=1) + '\n'


def _canonical(content: Mapping[str, Any]) -> str:
    """Return the text that the checksum covers: comparison, rater and answers, in this order."""
    lines = [str(content['comparison']), str(content['rater'])]
    lines += [f'{each["pair"]} {each["question"]} {each["choice"]}' for each in content['answers']]
    return '\n'.join(lines)


def parse_answers(text: str | bytes, where: str, comparison: str, pairs: int) -> list[Answer]:
    """Parse an answer file; `where` is its name for messages, `pairs` the page's number of pairs and attention checks.

    Raises:
        UserError: The file is not an answer file, belongs to another comparison, was modified, or answers a question
            twice.
    """
    try:
        content = json.loads(text)
        rater, rows = content['rater'], content['answers']
        found = [Answer(each['pair'], each['question'], each['choice'], rater) for each in rows]
        own, stated, expected = content['comparison'], content['checksum'], checksum(_canonical(content))
    except (ValueError, KeyError, TypeError, RecursionError) as error:
        raise UserError(
            f'{where}: is not an answer file as written by the page ({type(error).__name__}); ask its author for the '
            'original'
        ) from error
    if own != comparison:
        what = f'{where}: answers comparison {str(own)[:40]!r}, not {comparison!r}; give the key of that comparison'
        raise UserError(what)
    if stated != expected:
        raise UserError(f'{where}: was modified after the page wrote it; ask its author for the original')
    if not isinstance(rater, str) or not _RATER.fullmatch(rater):
        raise UserError(f'{where}: its rater {str(rater)[:40]!r} is not an identifier from the page; remove the file')
    seen = set()
    for answer in found:
        # Check types, because JSON may contain true or 1.0, which compare equal to 1 in Python.
        known = type(answer.pair) is int and type(answer.question) is str and type(answer.choice) is str
        known = known and answer.question in QUESTIONS and answer.choice in CHOICES
        if not known or not 0 <= answer.pair < pairs:
            asked = f'{str(answer.question)[:40]!r} of pair {str(answer.pair)[:40]} by {str(answer.choice)[:40]!r}'
            raise UserError(f'{where}: answers {asked}, which the page does not ask; remove the file')
        if (answer.pair, answer.question) in seen:
            raise UserError(f'{where}: answers the {answer.question} of pair {answer.pair} twice; remove the file')
        seen.add((answer.pair, answer.question))
    return found


def read_answers(files: Sequence[Path], comparison: str, pairs: int) -> list[Answer]:
    """Read answer files; if a rater has two, the longer one is used and must contain the other one's answers."""
    by_rater: dict[str, tuple[Path, set[Answer]]] = {}
    for file in files:
        try:
            if file.stat().st_size > MAX_BYTES:
                raise UserError(f'{file}: has more than {MAX_BYTES} bytes, so it is not an answer file; remove it')
            found = set(parse_answers(file.read_bytes(), str(file), comparison, pairs))
        except OSError as error:
            raise UserError(f'{file}: cannot be read ({error.strerror}); give answer files') from error
        if not found:
            log.warning('%s: has no answers', file)
            continue
        rater = next(iter(found)).rater
        other, earlier = by_rater.get(rater, (file, set()))
        if not (earlier <= found or found <= earlier):
            raise UserError(f'{other} and {file}: have different answers from the same person; remove the older one')
        if earlier:
            log.warning('%s and %s: are from the same person; the longer one counts', other, file)
        by_rater[rater] = (file, found) if len(found) >= len(earlier) else (other, earlier)
    questions = list(QUESTIONS)
    return [
        answer
        for _, found in by_rater.values()
        for answer in sorted(found, key=lambda each: (each.pair, questions.index(each.question)))
    ]


def failed_checks(answers: Iterable[Answer], damaged: Mapping[int, str]) -> dict[str, float]:
    """Return the fraction of attention checks that each rater failed, for raters who saw any.

    Raters fail a check unless they choose the undamaged image for quality. `damaged` maps the pair index of each
    attention check to the position of its damaged image, `first` or `second`.
    """
    seen: dict[str, list[bool]] = {}
    for answer in answers:
        if answer.pair in damaged and answer.question == 'quality':
            good = 'second' if damaged[answer.pair] == 'first' else 'first'
            seen.setdefault(answer.rater, []).append(answer.choice != good)
    return {rater: sum(failed) / len(failed) for rater, failed in seen.items()}
