"""Ask a vision-language model about generated images, keep its answers beside them, and compute scores.

The answers to the questions about `000012.png` are in `000012.judge.json`, written after each answer. A killed
evaluation asks again only the questions in flight, and scores can be computed again without the model.
"""

import itertools
import json
import logging
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from composer.utils import dist

from diffusion.config.language_model import JudgeConfig, metric_part
from diffusion.config.language_model_checks import language_model_problems
from diffusion.config.prompt_files import Prompt as Instruction
from diffusion.config.prompt_files import load_prompt
from diffusion.errors import ExternalError, GaveUp, UserError
from diffusion.evaluation.comparison_result import BenchmarkScore
from diffusion.evaluation.evaluated_checkpoint import EvaluatedCheckpoint
from diffusion.evaluation.generated_images import GeneratedImages, kept_answer
from diffusion.evaluation.prompts import Prompt, categories
from diffusion.evaluation.question_rules import BenchmarkQuestion, image_scores, question_score, rating_score
from diffusion.evaluation.rewriting import ASKED_AGAIN
from diffusion.language_models.endpoint import Endpoint
from diffusion.language_models.engine import Answer, Engine, Question
from diffusion.loggers import status_line
from diffusion.models.vision_language_model import LocalModel
from diffusion.storage.atomic import write_atomically
from diffusion.storage.caption_tables import plan_hash

log = logging.getLogger(__name__)

ANSWER_SUFFIX = '.judge.json'
"""Suffix of the JSON file beside each image that has the answers about it, by hash of question and judge."""
BATCHES_PER_ROUND = 8
"""Batches per rank after which the ranks synchronize: often enough that none waits until a timeout."""
PERFECT = {'dpg': 100.0, 'tifa': 1.0}
"""Metrics whose questions are in the prompt file, with the highest possible score as papers print it."""


class JudgedScore(NamedTuple):
    """Score of a metric and of each image, number of answers, and number of unusable ones, which count as the worst."""

    score: BenchmarkScore
    images: list[float]
    answers: int
    unusable: int


class Judge:
    """Language model that answers questions about images.

    An endpoint is asked up to `attempts` times for an answer with one of the choices, or a rating. If none has one,
    the question counts as answered wrong, or with the lowest rating; so does a question that the server refuses.

    Args:
        settings: The `judge` section of the evaluator.
        metrics: Those of `dpg`, `tifa` and `judge_score` to compute.

    Raises:
        UserError: A setting is wrong.
    """

    def __init__(self, settings: JudgeConfig, metrics: Sequence[str]) -> None:
        for problem in language_model_problems({'judge': settings}, ''):
            raise UserError(str(problem))
        self.settings, self.benchmarks = settings, [name for name in PERFECT if name in metrics]
        self.scales: dict[str, Instruction] = {}
        for key, each in settings.instructions.items() if 'judge_score' in metrics else ():
            prompt = load_prompt(each, f'judge.{key}')
            if prompt.scale is None:
                raise UserError(f'judge.{key}: {each} has no scale; give a prompt file with answer and scale')
            if (name := f'judge_score/{metric_part(f"{prompt.name}-{prompt.version}")}') in self.scales:
                raise UserError(f'judge.{key}: {each} has the name and version of another scale; change one of them')
            self.scales[name] = prompt

    def check(self, prompts: Iterable[Prompt]) -> None:
        """Raise UserError if a metric needs questions that a prompt does not have, or if a token is missing."""
        if self.settings.engine == 'endpoint':
            _ = self.settings.token
        for metric, prompt in itertools.product(self.benchmarks, prompts):
            if not prompt.questions:
                what = 'dpg_bench.csv of DPG-Bench' if metric == 'dpg' else "TIFA's questions as .json"
                raise UserError(f'{metric}: the prompt {prompt.text!r} has no questions; give {what} as prompts')

    def questions(self, index: int, prompt: Prompt) -> list[Question]:
        """Return the questions about an image of a prompt, without its pixels: for ratings, then for the benchmarks."""
        asked = [(name, each, prompt.text if each.with_caption else '') for name, each in self.scales.items()]
        asked += [(name, each.instruction, each.text) for name in self.benchmarks for each in prompt.questions]
        return [Question(index, row, *each[:2], caption=each[2]) for row, each in enumerate(asked)]

    def scores(
        self, checkpoint: EvaluatedCheckpoint, images: GeneratedImages, prompts: Sequence[Prompt], per_prompt: int
    ) -> dict[str, JudgedScore]:
        """Return the scores by name of metric and judge, such as `dpg/Qwen3-VL-8B-Instruct`; a collective call.

        Args:
            images: The images; this rank's batches exist on this node.
            prompts: One prompt per image.
            per_prompt: Number of consecutive images of the same prompt.

        Raises:
            OSError: The server did not answer for `patience_seconds`; answers so far are kept.
        """
        batches, world, rank = images.batches(), dist.get_world_size(), dist.get_global_rank()
        parsed: dict[int, list[str | None]] = {}
        engine: Engine | None = None
        for first in range(0, len(batches), world * BATCHES_PER_ROUND):
            with checkpoint.raise_together('judge'):
                own = itertools.chain(*batches[first : first + world * BATCHES_PER_ROUND][rank::world])
                kept = {index: kept_answer(_path(images, index), {}) or {} for index in own}
                asked = {index: self.questions(index, prompts[index]) for index in kept}
                by_key = {(index, self._key(each)): each for index, own in asked.items() for each in own}
                questions = [each for (index, key), each in by_key.items() if key not in kept[index]]
                if questions:
                    kind = Endpoint if self.settings.engine == 'endpoint' else LocalModel
                    engine = engine or kind(self.settings)
                    self._ask(engine, questions, images, kept, checkpoint)
                for index, answers in kept.items():
                    found = [(each, answers.get(self._key(each))) for each in asked[index]]
                    parsed[index] = [answer and each.prompt.parsed(answer['answer']) for each, answer in found]
        gathered = {index: row for rows in dist.all_gather_object(parsed) for index, row in rows.items()}
        rows = [gathered[index] for index in range(len(prompts))]
        scores = self._scores(prompts, rows, np.arange(len(prompts)) // per_prompt)
        for name, each in scores.items():
            if each.unusable and rank == 0:
                what = '%s: %d of %d answers were not as asked, and count as the worst one'
                log.warning(what, name, each.unusable, each.answers)
        return scores

    def _key(self, question: Question) -> str:
        # Leave out the rule that parses an answer: if the rule is corrected, kept answers are only parsed again.
        return plan_hash({**self.settings.made_with, 'question': question.instruction})

    def _ask(
        self,
        engine: Engine,
        questions: Sequence[Question],
        images: GeneratedImages,
        kept: Mapping[int, dict[str, Any]],
        checkpoint: EvaluatedCheckpoint,
    ) -> None:
        """Ask questions, and add the answers to `kept` and to the files beside the images.

        Raises:
            GaveUp: The server does not answer a question, though it answers others.
        """
        failed: Answer | None = None
        with_images = (
            replace(each, image=file, media_type='image/png')
            for index, group in itertools.groupby(questions, lambda each: each.shard)
            for file in [images.path(index).read_bytes()]
            for each in group
        )
        for number, answer in enumerate(engine.answers(with_images), 1):
            status_line.show(f'{self.settings.label} answered {number} of {len(questions)} questions')
            question, path = answer.question, _path(images, answer.question.shard)
            if answer.rejected == 'no_answer':
                failed = answer
            elif answer.rejected in ASKED_AGAIN:
                log.warning('%s: %s: %s (%.200s)', path, question.caption, answer.rejected, answer.text)
            else:
                kept[question.shard][self._key(question)] = {
                    'question': question.instruction,
                    'answer': answer.text,
                    'parsed': question.prompt.parsed(answer.text),
                    'made_with': self.settings.made_with,
                }
                write_atomically(path, json.dumps(kept[question.shard], indent=1) + '\n')
            checkpoint.on_progress()
            if checkpoint.should_stop():
                raise ExternalError('stopped by a signal while the judge answers; answers so far are kept')
        status_line.show('')
        if failed is not None:
            raise GaveUp(f'judge: {self.settings.endpoint}: {failed.text}; start the same command again')

    def _scores(
        self, prompts: Sequence[Prompt], parsed: Sequence[Sequence[str | None]], prompt_of: np.ndarray
    ) -> dict[str, JudgedScore]:
        """Return the scores; `parsed` has each image's parsed answers in the order of `questions`, None if unusable."""
        scores = {}
        for column, (name, instruction) in enumerate(self.scales.items()):
            assert instruction.scale is not None
            low, high = instruction.scale
            rated = [row[column] for row in parsed]
            values = np.array([low if each is None else float(each) for each in rated])
            score = rating_score(values, (low, high), categories(prompts), prompt_of)
            scores[f'{name}/{self.settings.label}'] = JudgedScore(score, values.tolist(), len(rated), rated.count(None))
        for benchmark in self.benchmarks:
            questions, rows = [each.questions for each in prompts], [row[len(self.scales) :] for row in parsed]
            right = [[*map(BenchmarkQuestion.is_right, *each)] for each in zip(questions, rows, strict=True)]
            values, factor = image_scores(questions, right), PERFECT[benchmark]
            score = question_score(values, questions, right, prompt_of).scaled(factor)
            count, unusable = sum(map(len, rows)), sum(row.count(None) for row in rows)
            judged = JudgedScore(score, (values * factor).tolist(), count, unusable)
            scores[f'{benchmark}/{self.settings.label}'] = judged
        return scores


def _path(images: GeneratedImages, index: int) -> Path:
    """Return the file with the answers about an image."""
    return images.path(index).with_suffix(ANSWER_SUFFIX)
