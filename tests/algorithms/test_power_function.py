"""Power functions: the paper's values, inner products against quadrature, mixtures against their target profiles."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusion.algorithms.power_function import WIDEST, Profile, beta, gamma_of_width, inner_products, mixture

WIDTHS = st.floats(0.005, WIDEST)
STEPS = st.integers(1, 10**6)


def kept(count: int, every: int = 10_000) -> list[Profile]:
    """Return the profiles of `count` snapshots of each of the paper's two widths."""
    return [Profile(every * (i + 1), gamma_of_width(width)) for i in range(count) for width in (0.05, 0.10)]


def density(profile: Profile, steps: np.ndarray) -> np.ndarray:
    value = (profile.gamma + 1) * (steps / profile.step) ** profile.gamma / profile.step
    return np.where(steps <= profile.step, value, 0.0)


@pytest.mark.parametrize(('width', 'gamma'), [(0.05, 16.97), (0.10, 6.94), (WIDEST, 0.0)])
def test_exponents_match_the_paper(width, gamma):
    assert gamma_of_width(width) == pytest.approx(gamma, abs=5e-3)


@settings(max_examples=40)
@given(st.floats(0.02, 0.28))
def test_width_is_the_standard_deviation_of_the_profile(width):
    steps = (np.arange(20_000) + 0.5) / 20_000
    weights = density(Profile(1, gamma_of_width(width)), steps) / len(steps)
    mean = weights @ steps
    assert np.sqrt(weights @ (steps - mean) ** 2) == pytest.approx(width, rel=1e-4)


@pytest.mark.parametrize('width', [0.0, -0.1, 0.29, 1.0])
def test_width_out_of_range_is_rejected(width):
    with pytest.raises(ValueError, match=rf'width={width:g} is not between 0 and 0\.2887'):
        gamma_of_width(width)


@settings(max_examples=40)
@given(st.integers(1, 400), st.floats(0, 60))
def test_updates_weight_each_step_by_the_integral_of_the_profile_over_it(last, gamma):
    """Eq. 2 equals eq. 1 for weights that are constant during a step."""
    shares = np.zeros(last)
    for step in range(1, last + 1):
        shares *= beta(step, gamma)
        shares[step - 1] += 1 - beta(step, gamma)
    integral = np.diff((np.arange(last + 1) / last) ** (gamma + 1))
    np.testing.assert_allclose(shares, integral, rtol=1e-9, atol=1e-14)


@settings(max_examples=40)
@given(STEPS, STEPS, st.floats(0, 60), st.floats(0, 60))
def test_inner_products_equal_quadrature(first, second, gamma, other_gamma):
    a, b = Profile(first, gamma), Profile(second, other_gamma)
    # Gauss-Legendre of 64 points is exact for polynomials up to degree 127; tau = u^2 tames fractional powers at 0.
    nodes, weights = np.polynomial.legendre.leggauss(64)
    roots = (nodes + 1) / 2
    end = min(first, second)
    taus = end * roots**2
    expected = (weights / 2 * 2 * roots * end) @ (density(a, taus) * density(b, taus))
    assert inner_products([a], [b]).item() == pytest.approx(expected, rel=1e-4, abs=1e-30)
    assert inner_products([b], [a]).item() == inner_products([a], [b]).item()


@pytest.mark.parametrize('count', [1, 6, 55])
def test_saved_profile_is_reconstructed_from_itself(count):
    for index in {0, 1, count, 2 * count - 1}:
        shares, error = mixture(kept(count), kept(count)[index])
        np.testing.assert_allclose(shares, np.eye(2 * count)[index], atol=1e-6)
        assert error < 1e-6


@pytest.mark.parametrize('width', [0.03, 0.07, 0.15, 0.25])
@pytest.mark.parametrize('count', [8, pytest.param(55, marks=pytest.mark.slow)])
def test_reported_error_is_that_of_the_mixed_profile(width, count):
    target = Profile(count * 10_000, gamma_of_width(width))
    shares, error = mixture(kept(count), target)
    assert shares.sum() == pytest.approx(1, abs=1e-9)
    steps = (np.arange(50_000) + 0.5) / 50_000 * target.step
    mixed = sum(share * density(profile, steps) for share, profile in zip(shares.tolist(), kept(count), strict=True))
    expected = np.linalg.norm(mixed - density(target, steps)) / np.linalg.norm(density(target, steps))
    assert error == pytest.approx(expected, rel=0.02, abs=1e-4)


@pytest.mark.parametrize(('count', 'widest_error'), [(25, 0.047), pytest.param(55, 0.018, marks=pytest.mark.slow)])
def test_two_widths_are_enough_for_a_range_of_widths(count, widest_error):
    """Check the figures in PostHocEMA's docstring."""
    end = count * 10_000
    errors = [mixture(kept(count), Profile(end, gamma_of_width(w)))[1] for w in np.linspace(0.03, 0.25, 45)]
    assert max(errors) < widest_error
    between = [mixture(kept(count), Profile(end, gamma_of_width(w)))[1] for w in np.linspace(0.05, 0.12, 15)]
    assert max(between) < 0.002


@settings(max_examples=40)
@given(WIDTHS, st.integers(1, 60))
def test_mixture_has_the_least_error(width, seed):
    """No nearby coefficients that sum to 1 have a smaller error."""
    profiles, target = kept(4), Profile(40_000, gamma_of_width(width))
    shares, error = mixture(profiles, target)
    rng = np.random.default_rng(seed)
    step = rng.normal(size=len(shares)) * 0.05
    other = shares + step - step.mean()
    norm = inner_products([target], [target]).item()
    cross, gram = inner_products(profiles, [target])[:, 0], inner_products(profiles, profiles)
    squared = 1 - 2 * cross @ other / norm + other @ gram @ other / norm
    assert squared >= error**2 - 1e-12
