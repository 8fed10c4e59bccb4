"""Smoothed loss curve."""

import numpy as np
import pytest

from diffusion.loggers.metrics_file import smoothed


@pytest.mark.parametrize('count', [1, 2, 50, 400])
def test_smoothed_curve_is_the_weighted_mean_of_the_values_around(count):
    values = np.random.default_rng(0).exponential(size=count)
    distances = np.abs(np.arange(count)[:, None] - np.arange(count))
    weights = np.exp(-100 / max(100, count)) ** distances
    expected = weights @ values / weights.sum(axis=1)
    assert np.allclose(smoothed(values.tolist()), expected)
