"""Power-function averages: their exponents and widths, and any profile out of the few that were kept.

Karras, Aittala, Lehtinen, Hellsten, Aila and Laine 2024, "Analyzing and Improving the Training Dynamics of Diffusion
Models" (arXiv 2312.02696), section 3 and appendix C. The average at training step t weighs the weights of step tau by
the profile p(tau) = (gamma + 1) tau^gamma / t^(gamma + 1), which is 0 at the first step and grows with the run (eq. 1).
Its width is its standard deviation as a share of t, sigma_rel in the paper.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diffusion.errors import UserError

WIDEST = 12**-0.5
"""The width at gamma = 0, where all steps weigh the same."""


@dataclass(frozen=True)
class Profile:
    """How an average at a step weighs the steps before it.

    Attributes:
        step: t, at which the profile ends; steps count from 1.
        gamma: Of the power.
    """

    step: float
    gamma: float


def gamma_of_width(width: float) -> float:
    """The exponent whose profile has a width.

    (gamma + 2)^2 (gamma + 3) width^2 = gamma + 1 is a cubic in gamma with one root that is not negative.

    Raises:
        UserError: No exponent from 0 up has that width.
    """
    if not 0 < width <= WIDEST:
        raise UserError(f'width={width:g} is not between 0 and {WIDEST:.4f}, where all steps weigh the same')
    roots = np.roots([1, 7, 16 - width**-2, 12 - width**-2])
    return max(float(roots.real.max()), 0.0)  # all three are real; 0 comes out as -1e-16


def width_of_gamma(gamma: float) -> float:
    """Standard deviation of the profile as a share of t (section 3.1)."""
    return (gamma + 1) ** 0.5 / ((gamma + 2) * (gamma + 3) ** 0.5)


def beta(step: int, gamma: float) -> float:
    """The share of the average that the update after a step keeps (eq. 2); 0 at the first step."""
    return (1 - 1 / step) ** (gamma + 1)


def inner_products(some: Sequence[Profile], others: Sequence[Profile]) -> NDArray[np.float64]:
    """Integrals of the products of profiles [len(some), len(others)], in closed form (appendix C).

    Of a that ends first and b that ends last, (gamma_a + 1) (gamma_b + 1) / (gamma_a + gamma_b + 1)
    (t_a / t_b)^gamma_b / t_b: a ratio of steps, so that nothing overflows.
    """
    step_a, gamma_a = _columns(some)
    step_b, gamma_b = (row.T for row in _columns(others))
    last = np.maximum(step_a, step_b)
    gamma_of_last = np.where(step_a <= step_b, gamma_b, gamma_a)
    factor = (gamma_a + 1) * (gamma_b + 1) / (gamma_a + gamma_b + 1)
    return factor * (np.minimum(step_a, step_b) / last) ** gamma_of_last / last


def mixture(kept: Sequence[Profile], target: Profile) -> tuple[NDArray[np.float64], float]:
    """The mixture of kept profiles that is closest to another one.

    Minimises |target - sum x_i kept_i|^2 (appendix C), here over shares that sum to 1. The paper's A x = b leaves their
    sum free: with 6 snapshots of widths 0.05 and 0.10 it is 1.003 for a width of 0.07, and scales all weights by
    that, which networks without the paper's normalised weights are not indifferent to. Unlike the sum, the error is
    hardly another (2.12 % instead of 2.11 %).

    Returns:
        The shares x, and the error |target - sum x_i kept_i| / |target|.
    """
    norms = np.sqrt(np.diag(inner_products(kept, kept)))
    target_norm = float(np.sqrt(inner_products([target], [target]).item()))
    # Of unit norm, profiles of early and late snapshots count alike: the condition number of 55 snapshots is 1e5.
    cosines = inner_products(kept, kept) / np.outer(norms, norms)
    towards = inner_products(kept, [target])[:, 0] / (norms * target_norm)
    sizes = target_norm / norms  # x = sizes * y
    # With the multiplier of the constraint sizes @ y = 1 as the last unknown.
    system = np.block([[cosines, sizes[:, None]], [sizes[None, :], np.zeros((1, 1))]])
    # lstsq: snapshots of one profile twice make the system singular, and share its weight.
    y = np.linalg.lstsq(system, np.append(towards, 1.0), rcond=None)[0][:-1]
    error = 1 - 2 * towards @ y + y @ cosines @ y
    return sizes * y, float(np.sqrt(max(error, 0.0)))


def _columns(profiles: Sequence[Profile]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    steps = np.array([[profile.step] for profile in profiles], dtype=np.float64)
    return steps, np.array([[profile.gamma] for profile in profiles], dtype=np.float64)
