"""Computation of the metrics of `diffusion.config.image_metrics`, and loading of their networks."""

from collections.abc import Callable, Mapping
from pathlib import Path

from torch import Tensor

from diffusion.config.image_metrics import NETWORKS
from diffusion.config.weight_sources import COMMIT
from diffusion.errors import UserError
from diffusion.evaluation.distances import (
    Moments,
    frechet_distance,
    gaussian_distance,
    kernel_distance,
    precision_and_recall,
)
from diffusion.evaluation.feature_networks import Clip, Dino, EfficientNetLite0, FeatureNetwork, Inception
from diffusion.evaluation.text_image_scores import TextImageScore

Distance = Callable[[Tensor, Tensor], float]
"""Function of the features of generated images [N, D] and of reference images [M, D]."""


def _frechet(images: Tensor, references: Tensor) -> float:
    return frechet_distance(Moments.of(images), Moments.of(references))


DISTANCES: dict[str, Distance] = {
    'fid': _frechet,
    'kid': kernel_distance,
    'clip_fid': _frechet,
    'cmmd': gaussian_distance,
    'dino_mmd': gaussian_distance,
    'precision': lambda images, references: precision_and_recall(images, references)[0],
    'recall': lambda images, references: precision_and_recall(images, references)[1],
    'efficientnet_distance': _frechet,
}
"""Metrics of features; the others are means of the scores of single images."""


def build_network(name: str, sources: Mapping[str, str]) -> FeatureNetwork | TextImageScore:
    """Load a network of `NETWORKS`.

    Args:
        sources: Sources that replace the defaults, by name: a local path, or `ORG/NAME@COMMIT`.

    Raises:
        UserError: It cannot be loaded; the message names the key.
        ExternalError: It cannot be downloaded.
    """
    where = f'networks.{name}'
    source = sources.get(name, NETWORKS[name])
    try:
        if name == 'inception':
            return Inception(source)
        if name == 'efficientnet':
            return EfficientNetLite0()
        if source is None:
            raise UserError("has no default; set it to a folder, or to a repository's ORG/NAME@COMMIT")
        repository, revision = _split(source)
        if name == 'clip_score' or name == 'pick_score':
            return TextImageScore(repository, revision, kind=name)
        if name == 'dino':
            return Dino(repository, revision)
        return Clip(repository, revision, resize='clean' if name == 'clip_fid' else 'bicubic')
    except UserError as error:
        raise UserError(f'{where}: {error}') from error


def _split(source: str) -> tuple[str, str | None]:
    """Return the folder or repository, and the commit of a repository, that a source names."""
    if Path(source).is_dir():
        return source, None
    repository, _, revision = source.partition('@')
    if not COMMIT.fullmatch(revision):
        raise UserError(
            f'{source} is neither a folder nor a repository with a commit, ORG/NAME@COMMIT of 40 hex digits; '
            'pinning it keeps the metric comparable'
        )
    return repository, revision
