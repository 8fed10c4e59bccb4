"""Settings of `diffusion caption`, from a YAML file, and the checks that need neither images nor a model."""

import json
import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal
from urllib.parse import urlsplit

from diffusion.captioning.prompts import Prompt, load_prompt
from diffusion.config.load import RecipeError
from diffusion.config.schema import Gatherer, Problem, build_dataclass
from diffusion.config.secrets import secret_problems
from diffusion.config.weight_sources import revision_problem
from diffusion.config.yaml_files import UnreadableYAML, merge_and_resolve, read_chain
from diffusion.errors import UserError
from diffusion.storage.caption_tables import ORIGINAL

COLUMN_NAME = re.compile('[A-Za-z0-9][A-Za-z0-9_.-]{0,99}')


@dataclass
class CaptionSettings:
    """Model, prompts and engine that caption a dataset."""

    model: str
    """Name of the model: as the endpoint calls it, or a Hub repository or a folder for `engine: transformers`."""
    columns: dict[str, str]
    """Column of captions to write: its name, as in `dataset.caption_weights`, and its prompt. A prompt is short, long,
    text or tags, or the path of a YAML file."""
    revision: str | None = None
    """Commit of the model on the Hub, recorded with each caption; required for a Hub repository with transformers."""
    engine: Literal['endpoint', 'transformers'] = 'endpoint'
    """endpoint: a server with the OpenAI API, such as vLLM or SGLang. transformers: load the model in this process."""
    endpoint: str | None = None
    """URL of the API, such as http://localhost:8000/v1; required for `engine: endpoint`."""
    token_variable: str | None = None
    """Name of the environment variable with the token of the endpoint (None: send no token)."""
    served_as: str | None = None
    """Name of the model in the server's answers, if it differs from `model`; an answer of another model is refused."""
    max_tokens: int = 400
    """Maximum number of tokens of an answer; longer ones are rejected as cut_off."""
    temperature: float = 0.0
    """Temperature of sampling; 0 takes the most likely token."""
    seed: int = 17
    """Seed of sampling."""
    attempts: int = 2
    """Number of answers to ask an endpoint for if rules reject them; after the first, at a temperature of 0.7 or more.
    The last answer decides."""
    concurrency: int = 256
    """Maximum number of requests in flight; fewer are sent if the server is overloaded."""
    timeout_seconds: float = 120.0
    """Time within which the server must answer a request."""
    patience_seconds: float = 600.0
    """Time without any answer after which the command ends; run it again to resume."""
    batch_size: int = 8
    """Images per batch with transformers."""
    dtype: Literal['bfloat16', 'float16', 'float32'] = 'bfloat16'
    """Data type of the weights with transformers."""
    directory: Path = field(default_factory=Path, repr=False)  # a field without repr is not a key of the file
    """Folder of the YAML file, from which paths of prompts are relative; set by `load_settings`."""

    @cached_property
    def prompts(self) -> dict[str, Prompt]:
        """The prompt of each column."""
        found = {}
        for column, prompt in self.columns.items():
            is_path = prompt.endswith(('.yaml', '.yml'))
            found[column] = load_prompt(str(self.directory / prompt) if is_path else prompt, f'columns.{column}')
        return found

    @property
    def token(self) -> str | None:
        """The endpoint's token; None if `token_variable` is None. Raises UserError if the variable is not set."""
        if self.token_variable is None:
            return None
        if not (token := os.environ.get(self.token_variable)):
            raise UserError(f'token_variable: the environment variable {self.token_variable} is not set; set it')
        return token

    def plan(self, column: str) -> dict[str, Any]:
        """Return all settings that decide the captions of a column, as JSON types; others may change on resume."""
        sampling = {name: getattr(self, name) for name in ('max_tokens', 'temperature', 'seed')}
        sampling |= {'attempts': self.attempts} if self.engine == 'endpoint' else {'dtype': self.dtype}
        values = {'model': self.model, 'revision': self.revision, 'engine': self.engine}
        return json.loads(json.dumps(values | {'prompt': self.prompts[column].plan(), 'sampling': sampling}))


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
        settings.directory = Path(path).parent
        problems = check_settings(settings)
    if problems:
        raise RecipeError(problems, path)
    return settings


def check_settings(settings: CaptionSettings) -> list[Problem]:
    """Return all mistakes in the settings; types must already be validated."""
    gather = Gatherer()
    _check_columns(settings, gather)
    _check_engine(settings, gather)
    ranges: dict[str, tuple[float, float]] = {
        'max_tokens': (1, 100_000),
        'temperature': (0, 2),
        'seed': (0, 2**31 - 2),
        'attempts': (1, 10),
        'concurrency': (1, 4096),
        'timeout_seconds': (0.1, 3600),
        'patience_seconds': (0, 86_400),
        'batch_size': (1, 4096),
    }
    for name, (low, high) in ranges.items():
        value = getattr(settings, name)
        if not low <= value <= high:
            gather.problem(name, f'{value} is out of range; give {low} to {high}')
    return gather.problems


def _check_columns(settings: CaptionSettings, gather: Gatherer) -> None:
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


def _check_engine(settings: CaptionSettings, gather: Gatherer) -> None:
    if settings.engine == 'transformers':
        for name in ('endpoint', 'token_variable', 'served_as'):
            if getattr(settings, name) is not None:
                gather.problem(name, 'is only for engine: endpoint; remove it')
        if problem := revision_problem(settings.model, settings.revision):
            gather.problem('revision', problem.replace('model.pretrained=', 'model: '))
        return
    parts = urlsplit(settings.endpoint or '')
    if parts.scheme not in ('http', 'https') or not parts.netloc:
        given = 'is missing' if settings.endpoint is None else f'{settings.endpoint!r} is not a URL'
        gather.problem('endpoint', f'{given}; give the base of the API, such as http://localhost:8000/v1')
    elif parts.path.rstrip('/').endswith('/chat/completions'):
        gather.problem('endpoint', 'must not contain /chat/completions; give the part before it')
    variable = settings.token_variable
    if variable is not None and not re.fullmatch('[A-Za-z_][A-Za-z0-9_]{0,63}', variable):
        gather.problem('token_variable', 'is not the name of an environment variable; use a name such as VLM_TOKEN')
