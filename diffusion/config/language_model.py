"""Settings of a language model behind OpenAI's API, which captions images or rewrites prompts, and their checks."""

import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

from diffusion.config.prompt_files import load_prompt
from diffusion.config.schema import Gatherer, Problem, build_dataclass, join
from diffusion.errors import UserError

RANGES: dict[str, tuple[float, float]] = {
    'max_tokens': (1, 100_000),
    'temperature': (0, 2),
    'seed': (0, 2**31 - 2),
    'attempts': (1, 10),
    'concurrency': (1, 4096),
    'timeout_seconds': (0.1, 3600),
    'patience_seconds': (0, 86_400),
    'batch_size': (1, 4096),
}


@dataclass(kw_only=True)
class EndpointConfig:
    """A language model behind an endpoint, and how to ask it."""

    model: str
    """Name of the model, as the endpoint calls it."""
    endpoint: str | None = None
    """URL of the API, such as http://localhost:8000/v1."""
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

    @property
    def token(self) -> str | None:
        """The endpoint's token; None if `token_variable` is None. Raises UserError if the variable is not set."""
        if self.token_variable is None:
            return None
        if not (token := os.environ.get(self.token_variable)):
            raise UserError(f'token_variable: the environment variable {self.token_variable} is not set; set it')
        return token


@dataclass(kw_only=True)
class RewriteConfig(EndpointConfig):
    """The `rewrite` section: the language model that rewrites prompts before images are generated for them."""

    prompt: str = 'rewrite'
    """The instruction: `rewrite`, which asks for a long caption, or the path of a prompt file of one's own, in which
    {caption} stands for the prompt to rewrite."""


def endpoint_problems(settings: EndpointConfig) -> Iterator[Problem]:
    """Yield a problem for each wrong setting of an endpoint; types must already be validated."""
    for name, (low, high) in RANGES.items():
        if not low <= (value := getattr(settings, name, low)) <= high:
            yield Problem(name, f'{value} is out of range; give {low} to {high}')
    parts = urlsplit(settings.endpoint or '')
    if parts.scheme not in ('http', 'https') or not parts.netloc:
        given = 'is missing' if settings.endpoint is None else f'{settings.endpoint!r} is not a URL'
        yield Problem('endpoint', f'{given}; give the base of the API, such as http://localhost:8000/v1')
    elif parts.path.rstrip('/').endswith('/chat/completions'):
        yield Problem('endpoint', 'must not contain /chat/completions; give the part before it')
    variable = settings.token_variable
    if variable is not None and not re.fullmatch('[A-Za-z_][A-Za-z0-9_]{0,63}', variable):
        yield Problem('token_variable', 'is not the name of an environment variable; use a name such as VLM_TOKEN')


def rewrite_problems(section: Mapping[str, Any], where: str) -> list[Problem]:
    """Return a problem for each wrong value of `rewrite` in a section, except wrong types; read no prompt files."""
    gather, rewrite, where = Gatherer(), section.get('rewrite'), join(where, 'rewrite')
    values = vars(rewrite) if isinstance(rewrite, RewriteConfig) else rewrite
    settings = build_dataclass(RewriteConfig, values, '', gather)
    if rewrite is None or gather.problems or gather.missing:
        return []
    found = [Problem(join(where, each.where), each.what) for each in endpoint_problems(settings)]
    if not settings.prompt.endswith(('.yaml', '.yml')):  # a file may be missing where the recipe is only read
        try:
            load_prompt(settings.prompt, join(where, 'prompt'))
        except UserError as error:
            found.append(Problem('', str(error)))
    return found
