"""Settings of a language model that captions images, rewrites prompts, or judges images."""

import os
import re
from dataclasses import dataclass
from typing import Any, Literal

from diffusion.errors import UserError


@dataclass(frozen=True, kw_only=True)
class EndpointConfig:
    """Settings of a language model behind an HTTP endpoint, and of the requests to it."""

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
    """Maximum number of requests to an endpoint per question: a rejected answer is requested again at a temperature of
    0.7 or more. The last answer decides."""
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


@dataclass(frozen=True, kw_only=True)
class RewriteConfig(EndpointConfig):
    """The `rewrite` section: the language model that rewrites prompts before images are generated for them."""

    prompt: str = 'rewrite'
    """The instruction: `rewrite`, which asks for a long caption, or the path of a prompt file of one's own, in which
    {caption} stands for the prompt to rewrite."""


@dataclass(frozen=True, kw_only=True)
class VisionLanguageConfig(EndpointConfig):
    """A language model that sees images: behind an endpoint, or in this process."""

    model: str
    """Name of the model: as the endpoint calls it, or a Hub repository or a folder for `engine: transformers`."""
    revision: str | None = None
    """Commit of the model on the Hub, recorded with each answer; required for a Hub repository with transformers."""
    engine: Literal['endpoint', 'transformers'] = 'endpoint'
    """endpoint: a server with the OpenAI API, such as vLLM or SGLang. transformers: load the model in this process."""
    batch_size: int = 8
    """Images per batch with transformers."""
    dtype: Literal['bfloat16', 'float16', 'float32'] = 'bfloat16'
    """Data type of the weights with transformers."""

    @property
    def made_with(self) -> dict[str, Any]:
        """All settings that decide the answer to a question, as JSON types."""
        sampling = {name: getattr(self, name) for name in ('max_tokens', 'temperature', 'seed')}
        sampling |= {'attempts': self.attempts} if self.engine == 'endpoint' else {'dtype': self.dtype}
        return {'model': self.model, 'revision': self.revision, 'engine': self.engine, 'sampling': sampling}


@dataclass(frozen=True, kw_only=True)
class JudgeConfig(VisionLanguageConfig):
    """The `judge` section: the language model that answers a benchmark's questions about generated images."""

    scales: list[str] | None = None
    """Instructions of `judge_score`, each of which gives a rating: `alignment`, `aesthetics`, or the path of a prompt
    file of one's own with `answer` and `scale`, in which {caption} stands for the prompt of the image. Null: the first
    two."""

    @property
    def instructions(self) -> dict[str, str]:
        """Names or paths of the prompts with which `judge_score` asks for ratings, by key, such as `scales[0]`."""
        scales = ['alignment', 'aesthetics'] if self.scales is None else self.scales
        return {f'scales[{number}]': each for number, each in enumerate(scales)}

    @property
    def label(self) -> str:
        """The model's name and revision, which are appended to the names of its metrics."""
        name = metric_part(self.model.rstrip('/').rpartition('/')[2])
        return name if self.revision is None else f'{name}/{metric_part(self.revision[:7])}'


def metric_part(text: str) -> str:
    """Replace characters that some loggers do not allow in a metric's name."""
    return re.sub(r'[^A-Za-z0-9_.-]+', '-', text)
