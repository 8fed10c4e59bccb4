"""Benchmarks of questions about images: their files, the answers that count, and the scores with their intervals.

DPG-Bench (Hu et al. 2024, ELLA, https://arxiv.org/abs/2403.05135) follows the authors' `compute_dpg_bench.py`
(https://github.com/TencentQQGYLab/ELLA, commit 025f650). TIFA (Hu et al. 2023, https://arxiv.org/abs/2303.11897)
follows the authors' `tifa_score.py` (https://github.com/Yushi-Hu/tifa, commit eb3a0fb).
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from diffusion.config.prompt_files import PLACEHOLDER
from diffusion.config.prompt_files import Prompt as Instruction
from diffusion.errors import UserError
from diffusion.evaluation.comparison_result import BenchmarkScore, clustered_proportion

YES_OR_NO = ('yes', 'no')


@dataclass(frozen=True)
class BenchmarkQuestion:
    """Question about an image, the answers to choose from, and the right one.

    Args:
        category: Category of the question: the broad one of DPG-Bench, such as `entity`, or the element type of TIFA.
        number: Number of the question within its prompt.
        parents: Numbers of the questions on which this one depends: its answer counts only if theirs do.
    """

    text: str
    choices: tuple[str, ...]
    answer: str
    category: str
    number: int
    parents: tuple[int, ...] = ()

    @property
    def instruction(self) -> Instruction:
        """The instruction for a language model that sees the image; the question replaces {caption}.

        An answer that is another number, such as 1.5 or -1, or names a second choice, as in yes and no, is unusable.
        """
        pattern = '|'.join(re.escape(each) for each in sorted(self.choices, key=len, reverse=True))
        other = rf'(?!\1(?!\w))(?:{pattern})'
        both = rf'\W+(?:(?:and|or)\W+{other}(?!\w)|{other}\W*\Z)'
        return Instruction(
            name='choice',
            version=1,
            text=f'{PLACEHOLDER}\nAnswer with one of these choices only: {", ".join(self.choices)}',
            with_caption=True,
            script='any',
            answer=rf'(?i)\A\W*(?<![-\u2212](?=\d))({pattern})(?!\w|[.,:/-]\d|{both})',
        )

    def is_right(self, answer: str | None) -> bool:
        """Return True for the right answer; None is an answer without one of the choices."""
        return answer is not None and answer.lower() == self.answer.lower()


def has_questions(row: Mapping[str, Any]) -> bool:
    """Return True if a row of a file has a question of DPG-Bench or TIFA."""
    return 'question_natural_language' in row or {'question', 'choices'} <= row.keys()


def item_and_question(where: str, row: Mapping[str, Any]) -> tuple[str, BenchmarkQuestion]:
    """Return the prompt's identifier and the question in a row of `dpg_bench.csv` or TIFA's JSON; `where` names it."""
    try:
        if 'question_natural_language' in row:
            parents = tuple(int(each) for each in row['dependency'].split(','))
            category = row['tuple'].partition('(')[0].partition('-')[0].strip()  # as the authors' script derives it
            found = BenchmarkQuestion(
                row['question_natural_language'].strip(),
                YES_OR_NO,
                'yes',
                category,
                int(row['proposition_id']),
                parents,
            )
            return row['item_id'], found
        choices = tuple(str(each).strip() for each in row['choices'])
        answer, category = str(row['answer']).strip(), str(row['element_type'])
        if answer not in choices:
            raise UserError(
                f'{where}: its answer {answer!r} is not one of the choices {", ".join(choices)}; correct it'
            )
        return str(row['id']), BenchmarkQuestion(row['question'].strip(), choices, answer, category, 0)
    except (KeyError, ValueError, AttributeError, TypeError) as error:
        what = f'{type(error).__name__}: {error}'
        raise UserError(f"{where}: is not a question of DPG-Bench or TIFA ({what}); use the authors' file") from error


def counting(questions: Sequence[BenchmarkQuestion], right: Sequence[bool]) -> list[bool]:
    """Return True for each question with a right answer whose parents count too, processed in the given order.

    Parents that are not among the questions, such as 0, are ignored.
    """
    counts: dict[int, bool] = {each.number: answer for each, answer in zip(questions, right, strict=True)}
    for each in questions:
        counts[each.number] &= all(counts.get(parent, True) for parent in each.parents)
    return [counts[each.number] for each in questions]


def image_scores(questions: Sequence[Sequence[BenchmarkQuestion]], right: Sequence[Sequence[bool]]) -> np.ndarray:
    """Return the fraction of each image's questions whose answers are right and count, [N]."""
    return np.array([np.mean(counting(*each)) for each in zip(questions, right, strict=True)])


def question_score(
    images: np.ndarray,
    questions: Sequence[Sequence[BenchmarkQuestion]],
    right: Sequence[Sequence[bool]],
    prompt_of: np.ndarray,
) -> BenchmarkScore:
    """Return the score from 0 to 1: the mean over prompts of the mean over their images.

    A category's score is the fraction of right answers to its questions, whether they count or not, as in both
    published scripts.

    Args:
        images: Scores of the images, [N].
        questions: Questions about each image.
        right: True for each right answer, by image and question.
        prompt_of: Index of each image's prompt, from 0, int [N].
    """
    rows: dict[str, list[tuple[bool, int]]] = {}
    for asked, answers, prompt in zip(questions, right, prompt_of.tolist(), strict=True):
        for question, answer in zip(asked, answers, strict=True):
            rows.setdefault(question.category, []).append((answer, prompt))
    kinds = {}
    for kind, found in rows.items():
        answers, prompts = np.array(found, float).T
        kinds[kind] = clustered_proportion(answers, np.ones(len(found)), prompts)
    return BenchmarkScore(*_prompt_mean(images, prompt_of, answers=sum(map(len, right))), kinds)


def rating_score(
    ratings: np.ndarray, scale: tuple[float, float], kinds: Mapping[str, Sequence[int]], prompt_of: np.ndarray
) -> BenchmarkScore:
    """Return the mean over prompts of the mean rating of their images; ratings are [N].

    Args:
        scale: Lowest and highest rating.
        kinds: Indices of the images of each category of prompts.
        prompt_of: Index of each image's prompt, from 0, int [N].
    """
    low, steps = scale[0], scale[1] - scale[0]

    def mean(images: Sequence[int]) -> tuple[float, tuple[float, float]]:
        prompts = np.unique(prompt_of[images], return_inverse=True)[1]
        # For the interval, a prompt's mean rating counts as the mean of `steps` answers of 0 or 1.
        return _prompt_mean((ratings[images] - low) / steps, prompts, answers=steps * (prompts.max() + 1))

    score = BenchmarkScore(*mean(range(len(ratings))), {kind: mean(images) for kind, images in kinds.items()})
    return score.scaled(steps, low)


def _prompt_mean(values: np.ndarray, prompt_of: np.ndarray, *, answers: float) -> tuple[float, tuple[float, float]]:
    """Return the mean over prompts of their images' mean value, from 0 to 1, and its 95% interval; values are [N].

    Args:
        answers: Total number of the answers, each 0 or 1, that were averaged to get the values.
    """
    means = np.bincount(prompt_of, values) / np.bincount(prompt_of)
    each = answers / len(means)
    return clustered_proportion(means * each, np.full(len(means), each), np.arange(len(means)))
