"""Compute the distances in `diffusion.config.image_metrics`, and load the networks that metrics use.

Distances are computed on features, one row per image from a feature network: [N, D] of the images and [M, D] of the
references. They are computed in float64 on the device of their arguments, do not depend on row order, and raise
UserError if a set has too few images.
"""

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from diffusion.config.image_metrics import IMAGE_METRICS, NETWORKS
from diffusion.errors import ExternalError, UserError
from diffusion.evaluation.feature_networks import Clip, Dino, EfficientNetLite0, FeatureNetwork, Inception
from diffusion.evaluation.geneval import ColorClassifier, GenEval, ObjectDetector
from diffusion.evaluation.hpsv3 import HPSv3
from diffusion.evaluation.image_scores import (
    AestheticScore,
    HumanPreferenceScore,
    ImageReward,
    ImageScore,
    TextImageScore,
    split_source,
)
from diffusion.evaluation.rendered_text import TextReader

BLOCK_ROWS = 4096
"""Rows and columns per block when a matrix of distances or kernel values is computed: 134 MB per block."""
CMMD_SIGMA = 10.0
CMMD_SCALE = 1000.0
"""Factor by which CMMD's authors scale it, so that its values are about as large as those of FID."""
NEIGHBORS = 3
"""Number of nearest neighbors that define the manifold for precision and recall."""


def frechet_distance(images: Tensor, references: Tensor) -> float:
    """Return the squared Fréchet distance between two normal distributions: FID, if computed on Inception features.

    |m1 - m2|^2 + Tr(C1 + C2 - 2 (C1 C2)^(1/2)), equation 6 of Heusel et al., https://arxiv.org/abs/1706.08500. The
    trace of the square root equals that of the symmetric (C1^(1/2) C2 C1^(1/2))^(1/2), which has no negative
    eigenvalues.
    """
    for each in (images, references):
        if len(each) < 2:
            raise UserError(f'a Fréchet distance needs at least 2 images in each set; one has {len(each)}')
    (mean, first), (other_mean, second) = _mean_and_covariance(images), _mean_and_covariance(references)
    values, vectors = torch.linalg.eigh(first)
    root = vectors * values.clamp(min=0).sqrt() @ vectors.T
    trace_of_root = torch.linalg.eigvalsh(root @ second @ root).clamp(min=0).sqrt().sum()
    difference = (mean - other_mean).square().sum()
    return float(difference + first.trace() + second.trace() - 2 * trace_of_root)


def _mean_and_covariance(features: Tensor) -> tuple[Tensor, Tensor]:
    """Return the mean [D] and the unbiased covariance [D, D] of features [N, D], in float64."""
    rows, count = features.double(), len(features)
    mean = rows.sum(dim=0) / count
    return mean, (rows.T @ rows - count * torch.outer(mean, mean)) / (count - 1)


def kernel_distance(images: Tensor, references: Tensor) -> float:
    """Return the unbiased squared MMD with a cubic kernel: KID, if computed on Inception features.

    The kernel is (x y / D + 1)^3, as in Bińkowski et al., https://arxiv.org/abs/1801.01401. The authors average over
    random subsets, as the matrices for all images were too large. Here, they are computed in blocks, which avoids the
    error of subsets. The estimate has mean 0 for two sets from the same distribution, so it can be negative.
    """
    if min(len(images), len(references)) < 2:
        what = f'a kernel distance needs at least 2 images in each set; they have {len(images)} and {len(references)}'
        raise UserError(what)

    def kernel(products: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return (products / images.shape[1] + 1) ** 3

    def diagonal(rows: Tensor) -> Tensor:
        return (rows.double().square().sum(dim=1) / images.shape[1] + 1).pow(3).sum()

    within = [
        (_kernel_sum(rows, rows, kernel) - diagonal(rows)) / (len(rows) * (len(rows) - 1))
        for rows in (images, references)
    ]
    between = _kernel_sum(images, references, kernel) / (len(images) * len(references))
    return float(within[0] + within[1] - 2 * between)


def gaussian_distance(images: Tensor, references: Tensor) -> float:
    """Return the squared MMD with a Gaussian kernel, times 1000: CMMD, if computed on CLIP embeddings.

    Features are scaled to length 1, the kernel is exp(-|x - y|^2 / (2 * 10^2)), and the estimate is biased, as in
    Jayasumana et al., https://arxiv.org/abs/2401.09603.
    """
    if not len(images) or not len(references):
        raise UserError(f'CMMD needs images in each set; they have {len(images)} and {len(references)}')
    rows, others = (torch.nn.functional.normalize(each.double(), dim=1) for each in (images, references))

    def kernel(products: Tensor, first: Tensor, second: Tensor) -> Tensor:
        squares = first.square().sum(dim=1)[:, None] + second.square().sum(dim=1) - 2 * products
        return torch.exp(squares / (-2 * CMMD_SIGMA**2))

    within = [_kernel_sum(each, each, kernel) / len(each) ** 2 for each in (rows, others)]
    between = _kernel_sum(rows, others, kernel) / (len(rows) * len(others))
    return float(CMMD_SCALE * (within[0] + within[1] - 2 * between))


def precision_and_recall(images: Tensor, references: Tensor) -> tuple[float, float]:
    """Return the fraction of images that are realistic, and the fraction of references that the images cover.

    Precision is the fraction of images in the manifold of the references: no farther from some reference than that
    reference's k-th nearest neighbor among the references, where k is `NEIGHBORS`. Recall is the same with the sets
    swapped (Kynkäänniemi et al., https://arxiv.org/abs/1904.06991, equations 1 to 3).
    """
    if min(len(images), len(references)) <= NEIGHBORS:
        raise UserError(
            f'precision and recall need more than {NEIGHBORS} images in each set; they have {len(images)} and '
            f'{len(references)}'
        )
    rows, others = images.double(), references.double()
    return _fraction_inside(rows, others), _fraction_inside(others, rows)


def _kernel_sum(first: Tensor, second: Tensor, kernel: Callable[[Tensor, Tensor, Tensor], Tensor]) -> Tensor:
    """Return the sum of kernel(inner products [n, m], rows [n, D], rows [m, D]) over all pairs, computed in blocks."""
    total = torch.zeros((), dtype=torch.float64, device=first.device)
    for rows in first.double().split(BLOCK_ROWS):
        for columns in second.double().split(BLOCK_ROWS):
            total += kernel(rows @ columns.T, rows, columns).sum()
    return total


def _fraction_inside(points: Tensor, centers: Tensor) -> float:
    """Return the fraction of points no farther from some center than its `NEIGHBORS`-th nearest other center is."""
    # Ask for one more neighbor, because each center is its own nearest neighbor.
    radii = torch.cat(
        [_distances(rows, centers).kthvalue(NEIGHBORS + 1, dim=1).values for rows in centers.split(BLOCK_ROWS)]
    )
    inside = [(_distances(rows, centers) <= radii).any(dim=1) for rows in points.split(BLOCK_ROWS)]
    return float(torch.cat(inside).double().mean())


def _distances(first: Tensor, second: Tensor) -> Tensor:
    """Return Euclidean distances between rows, [N, M]; the distance of equal rows is exactly 0."""
    return torch.cdist(first, second, compute_mode='donot_use_mm_for_euclid_dist')


Distance = Callable[[Tensor, Tensor], float]
"""Function that returns a metric for features of generated images [N, D] and reference images [M, D]."""


DISTANCES: dict[str, Distance] = {
    'fid': frechet_distance,
    'kid': kernel_distance,
    'clip_fid': frechet_distance,
    'cmmd': gaussian_distance,
    'dino_mmd': gaussian_distance,
    'precision': lambda images, references: precision_and_recall(images, references)[0],
    'recall': lambda images, references: precision_and_recall(images, references)[1],
    'efficientnet_distance': frechet_distance,
}
"""Metrics computed on features; all other metrics are means of per-image scores."""
MetricNetwork = FeatureNetwork | ImageScore | GenEval | TextReader


def build_network(name: str, sources: Mapping[str, str]) -> MetricNetwork:
    """Load a network of `NETWORKS`; `sources` overrides the defaults by name, as a local path or `ORG/NAME@COMMIT`.

    `aesthetic` and `geneval_hf` also load the network `clip_score`, and `hpsv3` reads parts of `qwen2_vl`.

    Raises:
        UserError: The network cannot be loaded; the message names the recipe key.
        ExternalError: The network cannot be downloaded.
    """
    source = sources.get(name, NETWORKS[name])
    try:
        if name == 'inception':
            return Inception(source)
        if name == 'efficientnet':
            return EfficientNetLite0()
        if name == 'rapidocr':
            return TextReader()
        if source is None:
            raise UserError("has no default; set it to a folder, or to a repository's ORG/NAME@COMMIT")
        if name == 'hpsv2':
            return HumanPreferenceScore(source)
        if name == 'hpsv3':
            return HPSv3(source, *split_source(sources.get('qwen2_vl', str(NETWORKS['qwen2_vl']))))
        if name == 'image_reward':
            return ImageReward(source)
        if name == 'aesthetic':
            return AestheticScore(source, _clip(sources))
        repository, revision = split_source(source)
        if name == 'geneval_hf':
            return GenEval(ObjectDetector(repository, revision), ColorClassifier(_clip(sources)))
        if name == 'clip_score' or name == 'pick_score':
            return TextImageScore(repository, revision, kind=name)
        if name == 'dino':
            return Dino(repository, revision)
        return Clip(repository, revision, resize='clean' if name == 'clip_fid' else 'bicubic')
    except (UserError, ExternalError) as error:
        what = f'networks.{name}: {error}. To use a copy of this network: --network {name}=PATH'
        raise (UserError if isinstance(error, UserError) else ExternalError)(what) from error


def build_networks(metrics: Sequence[str], sources: Mapping[str, str]) -> dict[str, MetricNetwork]:
    """Load the networks of some metrics, by name; `sources` is as in `build_network`.

    Raises:
        UserError: Networks cannot be loaded; the message has the metrics that need them, and how to leave these out.
        ExternalError: The same, if a network cannot be downloaded.
    """
    built: dict[str, MetricNetwork] = {}
    errors: dict[str, UserError | ExternalError] = {}
    for name in dict.fromkeys(IMAGE_METRICS[metric].network for metric in metrics):
        try:
            built[name] = build_network(name, sources)
        except (UserError, ExternalError) as error:
            errors[name] = error
            if isinstance(error, ExternalError):  # do not wait minutes for each further download
                break
    if not errors:
        return built
    lines, without = [], [metric for metric in metrics if IMAGE_METRICS[metric].network not in errors]
    for name, reason in errors.items():
        needing = ', '.join(metric for metric in metrics if IMAGE_METRICS[metric].network == name)
        lines.append(f'{needing} cannot be computed: {reason}')
    if without:
        lines.append(f'To compute the other metrics only: --metrics {",".join(without)}')
    last = list(errors.values())[-1]
    raise type(last)('\n  '.join(lines)) from last


def _clip(sources: Mapping[str, str]) -> TextImageScore:
    return TextImageScore(*split_source(sources.get('clip_score', str(NETWORKS['clip_score']))))
