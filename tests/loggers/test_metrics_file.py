"""Smoothed loss curve."""

import numpy as np

from diffusion.loggers.metrics_file import smoothed


def test_smoothed_curve_is_a_weighted_mean_of_the_values_so_far():
    values = np.random.default_rng(0).exponential(size=400)
    keep = np.exp(-50 / 400)
    for count in (1, 2, 10, 400):
        weights = keep ** np.arange(count)[::-1]
        assert np.isclose(smoothed(values.tolist())[count - 1], np.average(values[:count], weights=weights))


def test_smoothed_curve_runs_through_a_falling_loss_from_the_start():
    """An average that starts at the first value lies above a falling curve for as long as it remembers."""
    noise = np.random.default_rng(0).normal(size=2000)
    losses = np.exp(-np.arange(2000) / 5) + 0.3 + 0.05 * noise
    start = np.asarray(smoothed(losses.tolist()))[20:60]
    assert np.abs(start - 0.3 - 0.05 * noise[:60].mean()).max() < 0.25
    assert np.allclose(smoothed([0.7] * 100), 0.7)
