"""Power-function averages: exponents, widths, and the mixture of saved profiles closest to any target profile.

Karras, Aittala, Lehtinen, Hellsten, Aila and Laine 2024, "Analyzing and Improving the Training Dynamics of Diffusion
Models" (arXiv 2312.02696), section 3 and appendix C. The average at training step t weights the parameters of step tau
by its profile p(tau) = (gamma + 1) tau^gamma / t^(gamma + 1), which is 0 at step 0 and increases (eq. 1). The width of
a profile is its standard deviation as a fraction of t, sigma_rel in the paper.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from diffusion.errors import UserError

SNAPSHOT_FOLDER = 'post_hoc_ema'
"""Name of the folder of snapshots in the run's folder."""
WIDEST = 12**-0.5
"""Largest possible width, about 0.2887: at gamma = 0, all steps have the same weight."""


@dataclass(frozen=True)
class Profile:
    """Profile of a power-function average: the weight that the average gives to each training step so far.

    Attributes:
        step: t, the step at which the profile ends, counted from 1.
        gamma: Exponent of the power function.
    """

    step: float
    gamma: float


def gamma_of_width(width: float) -> float:
    """Return the exponent gamma of the power-function average with a given width.

    Gamma is the only root >= 0 of (gamma + 2)^2 (gamma + 3) width^2 = gamma + 1. UserError unless 0 < width <= WIDEST.
    """
    if not 0 < width <= WIDEST:
        raise UserError(f'width={width:g} is not between 0 and {WIDEST:.4f}, the width of a uniform average')
    roots = np.roots([1, 7, 16 - width**-2, 12 - width**-2])
    # All three roots are real. At the widest width the largest is 0, which np.roots returns as about -1e-16.
    return max(float(roots.real.max()), 0.0)


def beta(step: int, gamma: float) -> float:
    """Return the fraction of an average that a step's update keeps, 0 for step 1 (Karras et al. 2024, eq. 2)."""
    return (1 - 1 / step) ** (gamma + 1)


def inner_products(some: Sequence[Profile], others: Sequence[Profile]) -> NDArray[np.float64]:
    """Return the integrals of the pairwise products of profiles, [len(some), len(others)] (appendix C).

    If profile a ends before profile b, the integral is
    (gamma_a + 1) (gamma_b + 1) / (gamma_a + gamma_b + 1) (t_a / t_b)^gamma_b / t_b.
    """
    # Use the ratio of steps, whose powers are in [0, 1]; t^gamma alone overflows at the step counts of a long run.
    step_a, gamma_a = _columns(some)
    step_b, gamma_b = (row.T for row in _columns(others))
    last = np.maximum(step_a, step_b)
    gamma_of_last = np.where(step_a <= step_b, gamma_b, gamma_a)
    factor = (gamma_a + 1) * (gamma_b + 1) / (gamma_a + gamma_b + 1)
    return factor * (np.minimum(step_a, step_b) / last) ** gamma_of_last / last


def mixture(kept: Sequence[Profile], target: Profile) -> tuple[NDArray[np.float64], float]:
    """Return the coefficients of the mixture of saved profiles that is closest to a target profile, and its error.

    A profile is the weight that a power-function average gives to each training step. The coefficients x sum to 1 and
    minimize |target - sum x_i kept_i|^2 (Karras et al. 2024, appendix C). The second value is the relative error
    |target - sum x_i kept_i| / |target|.
    """
    # The paper's A x = b does not constrain the sum of x. With 6 snapshots of widths 0.05 and 0.10 the sum is 1.003 for
    # a width of 0.07. This rescales all parameters, which changes the output of networks without the paper's weight
    # normalization. The constraint costs little: the error becomes 2.12% instead of 2.11%.
    norms = np.sqrt(np.diag(inner_products(kept, kept)))
    target_norm = float(np.sqrt(inner_products([target], [target]).item()))
    # Normalize the profiles so that early and late snapshots have the same scale. With 55 snapshots, the condition
    # number of the system is then 1e5.
    cosines = inner_products(kept, kept) / np.outer(norms, norms)
    towards = inner_products(kept, [target])[:, 0] / (norms * target_norm)
    sizes = target_norm / norms  # solve for y, with x = sizes * y
    # The last unknown is the Lagrange multiplier of the constraint sizes @ y = 1.
    system = np.block([[cosines, sizes[:, None]], [sizes[None, :], np.zeros((1, 1))]])
    # Two snapshots with the same profile make the system singular: solve would fail, while lstsq splits the weight
    # between them.
    y = np.linalg.lstsq(system, np.append(towards, 1.0), rcond=None)[0][:-1]
    error = 1 - 2 * towards @ y + y @ cosines @ y
    return sizes * y, float(np.sqrt(max(error, 0.0)))


def _columns(profiles: Sequence[Profile]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Return the steps and the exponents of profiles as columns [len(profiles), 1]."""
    steps = np.array([[profile.step] for profile in profiles], dtype=np.float64)
    return steps, np.array([[profile.gamma] for profile in profiles], dtype=np.float64)
