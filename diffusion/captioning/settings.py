"""Settings of `diffusion caption`, from a YAML file, checked without reading images or loading a model."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from diffusion.config.language_model import VisionLanguageConfig
from diffusion.config.language_model_checks import vision_problems
from diffusion.config.load import RecipeError
from diffusion.config.prompt_files import Prompt, load_prompt
from diffusion.config.schema import Gatherer, Problem, build_dataclass
from diffusion.config.secrets import secret_problems
from diffusion.config.yaml_files import UnreadableYAML, merge_and_resolve, read_chain
from diffusion.errors import UserError
from diffusion.storage.caption_tables import ORIGINAL

COLUMN_NAME = re.compile('[A-Za-z0-9][A-Za-z0-9_.-]{0,99}')


@dataclass(frozen=True, kw_only=True)
class CaptionSettings(VisionLanguageConfig):
    """Model, prompts and engine that caption a dataset."""

    columns: dict[str, str]
    """Column of captions to write: its name, as in `dataset.caption_weights`, and its prompt. A prompt is short, long,
    text or tags, or the path of a YAML file."""

    @cached_property
    def prompts(self) -> dict[str, Prompt]:
        """The prompt of each column."""
        return {column: load_prompt(prompt, f'columns.{column}') for column, prompt in self.columns.items()}

    def plan(self, column: str) -> dict[str, Any]:
        """Return all settings that decide the captions of a column, as JSON types; others may change on resume."""
        return json.loads(json.dumps({**self.made_with, 'prompt': self.prompts[column].plan()}))


def load_settings(path: str | Path, overrides: Sequence[str] = ()) -> CaptionSettings:
    """Load settings from a YAML file, from the files that it extends, and from `key=value` overrides.

    Raises:
        RecipeError: The settings are invalid; the message lists all mistakes.
    """
    try:
        values = merge_and_resolve(read_chain(path), overrides).values
    except UnreadableYAML as error:
        raise RecipeError([Problem('', str(error))], path) from error
    gather = Gatherer()
    settings = build_dataclass(CaptionSettings, values, '', gather)
    problems = secret_problems(values) + gather.problems + gather.missing
    if not problems:
        for column, prompt in settings.columns.items():
            if prompt.endswith(('.yaml', '.yml')):
                settings.columns[column] = str(Path(path).parent / prompt)
        _check(settings, gather)
        problems = gather.problems
    if problems:
        raise RecipeError(problems, path)
    return settings


def _check(settings: CaptionSettings, gather: Gatherer) -> None:
    if not settings.columns:
        gather.problem('columns', 'is empty; name a column and its prompt, such as {qwen3vl_long: long}')
    for column in settings.columns:
        if not COLUMN_NAME.fullmatch(column) or column == ORIGINAL:
            why = 'means the captions in the shards' if column == ORIGINAL else 'is not of letters, digits, _, . and -'
            gather.problem(f'columns.{column}', f'{column!r} {why}; use a name such as qwen3vl_long')
    try:
        _ = settings.prompts
    except UserError as error:
        gather.problem('', str(error))
    gather.problems += vision_problems(settings)
