"""Checks of the settings of a language model, without requests to an endpoint and without loading the model."""

import re
from collections.abc import Iterator, Mapping
from typing import Any
from urllib.parse import urlsplit

from diffusion.config.language_model import EndpointConfig, JudgeConfig, RewriteConfig, VisionLanguageConfig
from diffusion.config.prompt_files import load_prompt
from diffusion.config.schema import Gatherer, Problem, build_dataclass, join
from diffusion.config.weight_sources import COMMIT, revision_problem
from diffusion.errors import UserError

RANGES: dict[str, tuple[float, float]] = {
    'max_tokens': (1, 100_000),
    'temperature': (0, 2),
    'seed': (0, 2**31 - 2),
    'attempts': (1, 10),
    'batch_size': (1, 4096),
    'concurrency': (1, 4096),
    'timeout_seconds': (0.1, 3600),
    'patience_seconds': (0, 86_400),
}


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


def vision_problems(settings: VisionLanguageConfig) -> Iterator[Problem]:
    """Yield a problem for each wrong setting of a model that sees images; types must already be validated."""
    local = settings.engine == 'transformers'
    yield from (each for each in endpoint_problems(settings) if not local or each.where != 'endpoint')
    if not local:
        return
    for name in ('endpoint', 'token_variable', 'served_as'):
        if getattr(settings, name) is not None:
            yield Problem(name, 'is only for engine: endpoint; remove it')
    commit = settings.revision if COMMIT.fullmatch(settings.revision or '') else None
    if problem := revision_problem(settings.model, commit):
        what = 'is missing' if settings.revision is None else f'{settings.revision!r} is not a commit'
        yield Problem('revision', problem.replace('is missing', what).replace('model.pretrained=', 'model: '))


def language_model_problems(section: Mapping[str, Any], where: str) -> list[Problem]:
    """Return a problem for each wrong value of `rewrite` and `judge` in a section, except wrong types.

    Prompt files are not read, since they may be missing on a machine that only checks or displays the recipe.
    """
    found = []
    for key, kind in (('rewrite', RewriteConfig), ('judge', JudgeConfig)):
        if (value := section.get(key)) is None:
            continue
        gather, place = Gatherer(), join(where, key)
        settings = build_dataclass(kind, vars(value) if isinstance(value, kind) else value, '', gather)
        if gather.problems or gather.missing:
            continue
        if isinstance(settings, JudgeConfig):
            problems, prompts = vision_problems(settings), settings.instructions
        else:
            problems, prompts = endpoint_problems(settings), {'prompt': settings.prompt}
        found += [Problem(join(place, each.where), each.what) for each in problems]
        for name, prompt in prompts.items():
            if not prompt.endswith(('.yaml', '.yml')):
                try:
                    load_prompt(prompt, join(place, name))
                except UserError as error:
                    found.append(Problem('', str(error)))
    return found
