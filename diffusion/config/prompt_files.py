"""Prompts for a language model: YAML files with a text, a version, and rules that reject answers."""

import hashlib
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from diffusion.config.schema import Gatherer, build_dataclass, did_you_mean
from diffusion.config.yaml_files import UnreadableYAML, read_yaml
from diffusion.errors import UserError

SHIPPED = Path(__file__).with_name('prompts')
PLACEHOLDER = '{caption}'


@dataclass(frozen=True)
class Prompt:
    """Content of a prompt file. Increase `version` when you change the text: tables of captions record both."""

    name: str
    """Name of the prompt, recorded with each caption."""
    version: int
    """Number of this version of the text, from 1."""
    text: str
    """Instruction for the model; {caption} is replaced by the first stored caption of the image, or by the prompt to
    rewrite."""
    with_caption: bool = False
    """True if the text must contain {caption}. Images without a caption get an empty text in its place."""
    script: Literal['latin', 'any'] = 'latin'
    """latin: reject an answer if more than a quarter of its letters outside quotation marks are not Latin."""
    min_words: int = 1
    """Minimum number of words of an answer; shorter answers are rejected as too_short."""
    max_words: int | None = None
    """Maximum number of words of an answer; longer answers are rejected as too_long (None: no limit)."""
    reject: dict[str, str] = field(default_factory=dict)
    """Additional rules, by name: an answer is rejected if a search finds the rule's regular expression in it."""
    answer: str | None = None
    """Regular expression whose first group is the result in an answer, such as a rating. The last match counts. An
    answer without one is rejected as not_as_asked, and no other rule applies (None: the whole answer counts)."""
    scale: list[float] | None = None
    """Lowest and highest rating, with `answer`; an answer with another number is rejected as not_as_asked."""

    def parsed(self, answer: str) -> str | None:
        """Return the result in an answer, found by the expression `answer`; None if it is missing or out of `scale`."""
        assert self.answer is not None
        # Skip the thoughts that a reasoning model may write before its answer.
        found = next(reversed([match[1] for match in re.finditer(self.answer, answer.rpartition('</think>')[2])]), None)
        try:
            in_range = found is None or self.scale is None or self.scale[0] <= float(found) <= self.scale[1]
        except ValueError:
            in_range = False
        return found if in_range else None

    def filled(self, caption: str) -> str:
        """Return the instruction with {caption} replaced by the image's first stored caption, '' if it has none."""
        return self.text.replace(PLACEHOLDER, caption).strip()

    def plan(self) -> dict[str, Any]:
        """Return the prompt's name, version, text hash and rules, which a table of captions records."""
        rules = {'script': self.script, 'min_words': self.min_words, 'max_words': self.max_words, 'reject': self.reject}
        rules |= {name: value for name in ('answer', 'scale') if (value := getattr(self, name)) is not None}
        digest = hashlib.sha256(self.text.encode()).hexdigest()[:16]
        return {'name': self.name, 'version': self.version, 'text_sha256': digest, 'rules': rules}


def load_prompt(prompt: str, where: str) -> Prompt:
    """Read a shipped prompt by name, such as `long`, or a prompt file by path, such as `prompts/birds.yaml`.

    Args:
        where: Key of the setting that names the prompt, for messages.

    Raises:
        UserError: There is no such prompt, or its file has mistakes.
    """
    shipped = {path.stem: path for path in SHIPPED.glob('*.yaml')}
    if not prompt.endswith(('.yaml', '.yml')) and prompt not in shipped:
        hint = did_you_mean(prompt, shipped)
        raise UserError(f'{where}: there is no prompt {prompt!r}, and it is not the path of a .yaml file; {hint}')
    path = shipped.get(prompt, Path(prompt))
    gather = Gatherer()
    try:
        found = build_dataclass(Prompt, read_yaml(path), '', gather)
    except UnreadableYAML as error:
        raise UserError(f'{where}: {error}') from error
    problems = [str(each) for each in gather.problems + gather.missing] or _problems(found)
    if problems:
        raise UserError(f'{where}: {path}: ' + '\n  '.join(problems))
    return found


def _problems(prompt: Prompt) -> list[str]:
    problems = []
    if prompt.version < 1:
        problems.append(f'version: {prompt.version} is out of range; count versions from 1')
    unknown = sorted(set(re.findall(r'\{\w+\}', prompt.text)) - {PLACEHOLDER})
    if unknown:
        problems.append(f'text: {", ".join(unknown)} is not a placeholder; the only one is {PLACEHOLDER}')
    if prompt.with_caption != (PLACEHOLDER in prompt.text):
        missing = f'text: has no {PLACEHOLDER}; add it, or remove with_caption'
        problems.append(missing if prompt.with_caption else f'text: has {PLACEHOLDER}; add with_caption: true')
    if not prompt.text.strip():
        problems.append('text: is empty; write the instruction for the model')
    patterns = {f'reject.{name}': pattern for name, pattern in prompt.reject.items()}
    for name, pattern in (patterns | ({} if prompt.answer is None else {'answer': prompt.answer})).items():
        try:
            groups = re.compile(pattern).groups
        except re.error as error:
            problems.append(f'{name}: {pattern!r} is not a regular expression ({error})')
            continue
        if name == 'answer' and groups < 1:
            problems.append(f'answer: {pattern!r} has no group; put parentheses around what counts')
    if prompt.scale is not None and (len(prompt.scale) != 2 or prompt.scale[0] >= prompt.scale[1]):
        problems.append(f'scale: {prompt.scale} is not the lowest and the highest rating; write for example [1, 10]')
    if prompt.scale is not None and prompt.answer is None:
        problems.append('answer: is missing, but scale needs it; write a regular expression that finds the rating')
    return problems
