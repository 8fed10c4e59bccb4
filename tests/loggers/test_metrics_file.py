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


def test_smoothed_curve_runs_through_the_middle_of_a_falling_loss():
    batches = np.arange(2000)
    noise = np.random.default_rng(0).normal(size=2000)
    losses = np.exp(-batches / 300) + 0.1 + 0.05 * noise
    curve = np.asarray(smoothed(losses.tolist()))
    for start in range(0, 2000, 100):
        above = np.mean(curve[start : start + 100] > losses[start : start + 100])
        assert 0.3 < above < 0.7, f'{above:.0%} of the points from {start} on are below the curve'
    assert np.allclose(smoothed([0.7] * 100), 0.7)
