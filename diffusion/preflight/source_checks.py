"""Check of a node that it can get the pretrained models and initial weights that a recipe names: Hub or local files.

Configurations and tokenizers are downloaded, which is a few megabytes. Of weights on the Hub, only the size is
requested, which needs the same access as their download; weights in local folders are not read.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from diffusion.checkpointing.checkpoint_lookup import find_checkpoint
from diffusion.config import registry
from diffusion.config.byte_sizes import bytes_text
from diffusion.config.model_checks import PIXELS
from diffusion.config.path_checks import reads_initial_weights
from diffusion.config.recipe import Component, InitFrom, Recipe
from diffusion.config.weight_sources import hub_repository, is_diffusers_folder, is_original_file, path_problem
from diffusion.errors import ExternalError, UserError, exit_status
from diffusion.launch.gpu_health import Finding
from diffusion.storage.retry import RetryPolicy

CHECK = 'weights'
"""Name of the check."""
POLICY = RetryPolicy(tries=3, timeout_seconds=10.0)
"""Tries of a request to the Hub, which is reported as unreachable after 40 seconds; a run tries for three minutes."""
EXTRAS = ('representation_alignment', 'perceptual_losses')
"""Keywords of models that name further pretrained networks."""


@dataclass(frozen=True)
class Source:
    """One key of a recipe that names pretrained weights."""

    where: str
    """Path of the key in the recipe."""
    value: str
    check: Callable[[], str]
    """Function that returns where the weights are, or raises UserError or ExternalError if they cannot be had."""


def check_sources(recipe: Recipe) -> list[Finding]:
    """Check every source of pretrained weights that a recipe names.

    Returns:
        One finding per source, until the Hub does not answer; empty if the recipe names none, or if its model is not of
        this package.
    """
    if not registry.is_own('model', recipe.model.name):
        return []
    sources = _sources(recipe)
    if not sources:
        return []
    # Imported here: it takes many seconds, and most nodes of a job without such weights need none of it.
    from diffusion.models import hub_files
    from diffusion.models.pretrained import checking_weights

    findings = []
    with hub_files.retrying(POLICY), checking_weights() as checked, torch.device('meta'):
        for source in sources:
            checked.clear()
            try:
                place = source.check()
            except UserError as error:
                findings.append(Finding(CHECK, False, f'{source.where}: {error}', exit_status(error)))
            except ExternalError as error:
                findings.append(Finding(CHECK, False, f'{source.where}: {error}', error.exit_status))
                break  # the other sources would wait for the same Hub
            else:
                places = ', '.join(checked) or place
                findings.append(Finding(CHECK, True, f'{source.where}: {source.value} ({places})'))
    return findings


def _sources(recipe: Recipe) -> list[Source]:
    """Return the keys of a recipe that name pretrained weights, those that are never on the Hub first."""
    kwargs = registry.settings_of('model', recipe.model)
    model = _Model({key: each for key, each in recipe.model.kwargs.items() if key not in EXTRAS}, recipe.model.name)
    sources = []
    backbone = (kwargs.get('perceptual_losses') or {}).get('lpips_backbone')
    if backbone:
        where = 'model.perceptual_losses.lpips_backbone'
        sources.append(Source(where, str(backbone), partial(_check_file, str(backbone))))
    named = {key: kwargs[key] for key in ('pretrained', 'vae') if kwargs.get(key) not in (None, PIXELS)}
    if named:
        # Building the model asks for exactly the parts that it needs.
        where = ', '.join(f'model.{key}' for key in named)
        sources.append(Source(where, ', '.join(map(str, named.values())), model.check))
    for key in EXTRAS:
        settings = kwargs.get(key) or {}
        if settings.get('encoder'):
            where = f'model.{key}.encoder'
            sources.append(Source(where, settings['encoder'], partial(_check_encoder, where, settings)))
    start = recipe.initial_weights if reads_initial_weights(recipe) else None
    if start is not None:
        sources.append(Source('init_from', start.source, partial(_check_initial_weights, model, start)))
    return sources


class _Model:
    """Model of a recipe on the meta device, built once."""

    def __init__(self, kwargs: Mapping[str, Any], name: str) -> None:
        self._component = Component(name, dict(kwargs))
        self._built: Any = None

    def build(self) -> Any:
        """Return the model; raise as its builder does."""
        if self._built is None:
            self._built = registry.build('model', self._component)
        return self._built

    def check(self) -> str:
        self.build()
        return ''  # `checking_weights` lists the parts

    def denoiser(self, source: str) -> Any:
        """Return the model's denoiser; raise UserError if it has none that could start from published weights."""
        denoiser = getattr(self.build(), 'denoiser', None)
        if denoiser is None:
            raise UserError(f'{source}: only a model with a denoiser can start from it; use a checkpoint of a run')
        return denoiser


def _check_encoder(where: str, settings: Mapping[str, Any]) -> str:
    from diffusion.models.representation_alignment import load_feature_encoder

    load_feature_encoder(settings['encoder'], settings.get('revision'), where=where)
    return ''


def _check_file(path: str) -> str:
    if not Path(path).is_file():
        raise UserError(f'{path} does not exist on this machine; copy it there, or correct the path')
    return 'found'


def _check_initial_weights(model: _Model, start: InitFrom) -> str:
    """Check the source of `init_from`: a repository, a file, a folder of diffusers, or a run with a checkpoint."""
    from diffusion.models.diffusers_weights import check_hub_denoiser, check_local_denoiser
    from diffusion.training.initial_weights import has_checkpoint

    if (problem := path_problem(start)) is not None:
        raise UserError(problem)
    repository, path = hub_repository(start), Path(start.source)
    if repository is not None:
        assert start.revision is not None, 'the check of the recipe requires a revision'
        size = check_hub_denoiser(model.denoiser(start.source), repository, start.revision)
        return f'{bytes_text(size)} to download' if size else 'in the cache'
    if is_original_file(start.source):
        return _check_file(start.source)
    if is_diffusers_folder(path) and not has_checkpoint(path):
        check_local_denoiser(model.denoiser(start.source), path)
        return 'found'
    return str(find_checkpoint(path))
