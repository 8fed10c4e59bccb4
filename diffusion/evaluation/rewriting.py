"""Rewrite prompts by a language model before images are generated for them, and keep the answers on disk."""

import json
import logging
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from diffusion.checkpointing.rank_agreement import from_rank_zero
from diffusion.config.language_model import RewriteConfig
from diffusion.config.language_model_checks import language_model_problems
from diffusion.config.prompt_files import PLACEHOLDER, load_prompt
from diffusion.errors import GaveUp, UserError
from diffusion.language_models.endpoint import Endpoint
from diffusion.language_models.engine import Question
from diffusion.storage.atomic import write_atomically
from diffusion.storage.caption_tables import plan_hash
from diffusion.storage.local_files import check_writable

log = logging.getLogger(__name__)

ASKED_AGAIN = ('refused_by_server', 'context_too_long')
"""Rejection rules that are not saved as a question's answer, since the server's settings may be the cause."""


@dataclass(frozen=True)
class GivenPrompts:
    """Prompts, and the texts that the image model gets: the same prompts, or rewritten by a language model."""

    prompts: Sequence[str]
    texts: Sequence[str]
    by: str = ''
    """Language model and instruction, such as `Qwen/Qwen3-4B, prompt rewrite version 1`; empty if not rewritten."""

    @property
    def note(self) -> str:
        """Text to add to a description of the prompts."""
        return f', rewritten by {self.by}' if self.by else ''

    def record(self, index: int | None = None) -> dict[str, str]:
        """Return what to record with an image, or with a sheet of all images, about the rewriting of its prompt."""
        if not self.by:
            return {}
        old, new = (json.dumps(each) if index is None else each[index] for each in (self.prompts, self.texts))
        return {'original_prompt': old, 'rewritten_prompt': new, 'rewritten_by': self.by}


class Rewriter:
    """Function that rewrites prompts; a collective call, in which rank 0 asks the language model once per text.

    Answers are kept in `~/.cache/diffusion/rewritten_prompts` by model, instruction, sampling settings and text. A
    prompt whose answer is rejected is used as it is, with a warning.

    Raises:
        UserError: A setting is wrong, the server refuses access, or no answer is usable.
        OSError: The server did not answer for `patience_seconds`; answers so far are kept.
    """

    def __init__(self, settings: RewriteConfig) -> None:
        for problem in language_model_problems({'rewrite': settings}, ''):
            raise UserError(str(problem))
        self.settings = settings
        self.prompt = load_prompt(settings.prompt, 'rewrite.prompt')
        if not self.prompt.with_caption:
            raise UserError(f'rewrite.prompt: {settings.prompt} has no {PLACEHOLDER}, where the prompt goes; add it')
        sampling = {name: getattr(settings, name) for name in ('max_tokens', 'temperature', 'seed', 'attempts')}
        self.plan = {'model': settings.model, 'prompt': self.prompt.plan(), 'sampling': sampling}
        cache = os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'
        self.by = f'{settings.model}, prompt {self.prompt.name} version {self.prompt.version}'
        self.folder = Path(cache, 'diffusion', 'rewritten_prompts')

    def __call__(self, prompts: Sequence[str]) -> GivenPrompts:
        return GivenPrompts(prompts, from_rank_zero(lambda: self._rewritten(prompts), 'rewrite'), self.by)

    def _rewritten(self, prompts: Sequence[str]) -> list[str]:
        check_writable(self.folder, 'rewrite: answers are kept below XDG_CACHE_HOME or ~/.cache')
        paths = {text: self.folder / f'{plan_hash({**self.plan, "text": text})}.json' for text in {*prompts}}
        answers = {text: json.loads(path.read_bytes()) for text, path in paths.items() if path.exists()}
        if missing := [text for text in dict.fromkeys(prompts) if text not in answers]:
            log.info('asking %s to rewrite %d prompts', self.settings.model, len(missing))
            questions = [Question(0, row, 'rewrite', self.prompt, caption=text) for row, text in enumerate(missing)]
            for answer in Endpoint(self.settings).answers(questions):
                if answer.rejected == 'no_answer':
                    raise GaveUp(f'rewrite: {self.settings.endpoint}: {answer.text}; start the same command again')
                # Tokenizers and files refuse surrogates, which JSON can contain.
                rewritten = ' '.join(answer.text.encode('utf-8', 'replace').decode().split())
                text, content = answer.question.caption, {'text': rewritten, 'rejected': answer.rejected}
                answers[text] = content
                if answer.rejected not in ASKED_AGAIN:
                    write_atomically(paths[text], json.dumps({'prompt': text, **content, 'made_with': self.plan}))
        rejected = {text: answer for text, answer in answers.items() if answer['rejected'] is not None}
        for text, answer in rejected.items():
            log.warning('the prompt %r is used as it is: %s (%.200s)', text, answer['rejected'], answer['text'])
        if prompts and len(rejected) == len(answers):
            why = next(f'{answer["rejected"]}: {answer["text"]:.200}' for answer in rejected.values())
            raise UserError(f'rewrite: no answer of {self.settings.model} is usable ({why}); check model and prompt')
        return [text if text in rejected else answers[text]['text'] for text in prompts]
