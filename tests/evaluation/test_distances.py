"""Distances between sets of features, against torchmetrics, NumPy and the formulas of the papers."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchmetrics.image.fid import _compute_fid
from torchmetrics.image.kid import poly_mmd

from diffusion.errors import UserError
from diffusion.evaluation import metrics
from diffusion.evaluation.metrics import frechet_distance, gaussian_distance, kernel_distance, precision_and_recall


def features(count: int, width: int = 16, *, seed: int = 0, shift: float = 0.0, scale: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(width, width, generator=torch.Generator().manual_seed(99))
    return torch.randn(count, width, generator=generator) @ mixing * scale + shift


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 40), st.integers(2, 40), st.integers(2, 12), st.floats(0, 3))
def test_frechet_distance_equals_torchmetrics(count, others, width, shift):
    """Use fewer images than features too, where the covariances are singular."""
    one, two = features(count, width), features(others, width, seed=1, shift=shift, scale=1.5)
    expected = _compute_fid(one.double().mean(0), one.double().T.cov(), two.double().mean(0), two.double().T.cov())
    # The root of an eigenvalue of 1e-16 is 1e-8.
    assert frechet_distance(one, two) == pytest.approx(float(expected), rel=1e-5, abs=1e-5)


@pytest.mark.parametrize('block', [3, 4096])
def test_kernel_distance_equals_torchmetrics_on_one_full_subset(monkeypatch, block):
    monkeypatch.setattr(metrics, 'BLOCK_ROWS', block)
    one, two = features(20), features(20, seed=1, shift=0.3)
    expected = poly_mmd(two.double(), one.double())
    assert kernel_distance(one, two) == pytest.approx(float(expected), rel=1e-10)


def test_kernel_distance_of_sets_of_different_sizes_is_the_mean_over_pairs():
    one, two = features(7, 5).double().numpy(), features(2, 5, seed=1).double().numpy()

    def kernel(x, y):
        return (np.dot(x, y) / 5 + 1) ** 3

    within = [
        np.mean([kernel(x, y) for i, x in enumerate(rows) for j, y in enumerate(rows) if i != j]) for rows in (one, two)
    ]
    expected = within[0] + within[1] - 2 * np.mean([kernel(x, y) for x in one for y in two])
    assert kernel_distance(torch.tensor(one), torch.tensor(two)) == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize('block', [3, 4096])
def test_gaussian_distance_is_that_of_the_paper(monkeypatch, block):
    monkeypatch.setattr(metrics, 'BLOCK_ROWS', block)
    one, two = features(9), features(6, seed=1, shift=1.0)

    def mean(first, second):
        first, second = (each / np.linalg.norm(each, axis=1, keepdims=True) for each in (first, second))
        return np.mean([[np.exp(-np.sum((x - y) ** 2) / 200) for y in second] for x in first])

    x, y = one.double().numpy(), two.double().numpy()
    expected = 1000 * (mean(x, x) + mean(y, y) - 2 * mean(x, y))
    assert gaussian_distance(one, two) == pytest.approx(expected, rel=1e-9)
    assert gaussian_distance(one, one) == pytest.approx(0, abs=1e-9)


@pytest.mark.parametrize('block', [3, 4096])
def test_precision_and_recall_are_those_of_the_paper(monkeypatch, block):
    monkeypatch.setattr(metrics, 'BLOCK_ROWS', block)
    images, references = features(23, 3, scale=0.6), features(17, 3, seed=1, shift=0.2)

    def inside(points, centers):
        radii = [sorted(np.linalg.norm(centers - center, axis=1))[3] for center in centers]
        return np.mean(
            [
                any(np.linalg.norm(point - center) <= radius for center, radius in zip(centers, radii, strict=True))
                for point in points
            ]
        )

    x, y = images.double().numpy(), references.double().numpy()
    expected = inside(x, y), inside(y, x)
    assert min(expected) > 0 and min(expected) < 1
    found = tuple(metrics.DISTANCES[name](images, references) for name in ('precision', 'recall'))
    assert found == pytest.approx(expected)
    assert precision_and_recall(images, images) == (1, 1)


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (lambda one: frechet_distance(one[:1], one), 'at least 2 images .* one has 1'),
        (lambda one: kernel_distance(one, one[:1]), 'at least 2 images in each set; they have 5 and 1'),
        (lambda one: gaussian_distance(one[:0], one), 'they have 0 and 5'),
        (lambda one: precision_and_recall(one, one[:3]), 'more than 3 images .* 5 and 3'),
    ],
)
def test_too_few_images(call, message):
    with pytest.raises(UserError, match=message):
        call(features(5))
