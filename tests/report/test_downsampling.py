"""Downsampled curves: the extremes, the ends and the averages stay."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusion.report.metric_reader import averages, downsample

curves = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=300)


@settings(max_examples=200, deadline=None)
@given(curves, st.integers(4, 80))
def test_extremes_and_ends_stay_and_the_limit_holds(values, limit):
    steps = [3 * index for index in range(len(values))]
    x, y = downsample(steps, values, limit)
    assert len(x) <= max(limit, 4)
    assert x == sorted({*x})
    assert all(values[step // 3] == value for step, value in zip(x, y, strict=True)), 'points are those of the curve'
    assert (min(y), max(y)) == (min(values), max(values))
    assert (x[0], x[-1]) == (steps[0], steps[-1])


@settings(max_examples=100, deadline=None)
@given(curves, st.integers(1, 50))
def test_averages_of_equal_parts_have_the_average_of_the_curve(values, count):
    x, y = averages(range(len(values)), values, count)
    assert len(x) == min(count, len(values)) and x == sorted({*x})
    if len(values) % len(y) == 0:
        assert sum(y) / len(y) == pytest.approx(sum(values) / len(values), abs=1e-3)


def test_a_spike_of_one_batch_among_a_million_stays():
    values = [0.1] * 1_000_000
    values[654_321] = 50.0
    x, y = downsample(range(1_000_000), values, 2000)
    assert len(x) <= 2000
    assert y[x.index(654_321)] == 50.0
