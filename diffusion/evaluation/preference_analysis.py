"""Statistics of a comparison by people: preference with confidence interval, agreement, and answers still needed.

An answer prefers A (1), B (0) or neither (0.5). Answers of one person are correlated, and so are answers about one
prompt. The interval therefore counts both people and prompts as drawn at random: it holds for other people and other
prompts of the same kind.
"""

import math
from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit

from diffusion.errors import UserError

CONFIDENCE = 0.95
POWER = 0.8
"""Statistical power: probability that a sufficient number of answers finds a difference."""


@dataclass(frozen=True)
class Preference:
    """Preference for A over B.

    Args:
        share: Mean of the answers, from 0 (always B) to 1 (always A).
        low: Lower end of the 95% confidence interval.
        high: Upper end.
        wins: Fraction of answers that prefer A.
        ties: Fraction of answers without preference.
        agreement: Krippendorff's alpha: 1 if all people agree, 0 for as much agreement as by chance; NaN if no prompt
            has answers of two people.
        by_rater: Part of the variance of `share` that comes from the choice of people.
        by_prompt: Part that comes from the choice of prompts.
        by_answer: Part that comes from single answers.
    """

    share: float
    low: float
    high: float
    answers: int
    raters: int
    prompts: int
    wins: float
    ties: float
    agreement: float
    by_rater: float
    by_prompt: float
    by_answer: float

    @property
    def losses(self) -> float:
        """Fraction of answers that prefer B."""
        return max(0.0, 1 - self.wins - self.ties)

    @property
    def differs(self) -> bool:
        """True if the interval excludes one half."""
        return not self.low <= 0.5 <= self.high

    def sentence(self, subject: str, a: str = 'A', b: str = 'B') -> str:
        """Return a sentence that says whether A and B differ.

        Args:
            subject: Question, such as `image quality`.
        """
        interval = f'Preference for {a} is {self.share:.1%} (95% interval {self.low:.1%} to {self.high:.1%}).'
        if not self.differs:
            return f'{subject}: {a} and {b} do not differ significantly. {interval}'
        return f'{subject}: {a} and {b} differ; people prefer {a if self.share > 0.5 else b}. {interval}'

    def people_needed(self, difference: float) -> int | None:
        """Return the number of people needed to show a difference with these prompts and a power of 80%.

        Args:
            difference: Distance of the true preference from one half, such as 0.05 for 55%.

        Returns: The number, at least 2; None if these prompts are too few for any number of people.
        """
        left = _variance_needed(difference) - self.by_prompt
        if left <= 0:
            return None
        return max(2, math.ceil(self.raters * (self.by_rater + self.by_answer) / left))

    def factor_needed(self, difference: float) -> float:
        """Return the factor for both people and prompts that is needed to show a difference with a power of 80%.

        If k times the people each answer k times the prompts, there are k^2 times the answers.

        Args:
            difference: Distance of the true preference from one half, such as 0.05 for 55%.
        """
        variance = _variance_needed(difference)
        # v = c / k + d / k^2 is a quadratic equation in 1 / k.
        clustered, single = self.by_rater + self.by_prompt, self.by_answer
        if clustered + single <= variance:
            return 1.0
        if single <= 0:
            return clustered / variance
        return 2 * single / (math.sqrt(clustered**2 + 4 * single * variance) - clustered)


def _variance_needed(difference: float) -> float:
    """Return the largest variance of a mean at which a difference is significant with the probability `POWER`."""
    normal = NormalDist()
    return (difference / (normal.inv_cdf((1 + CONFIDENCE) / 2) + normal.inv_cdf(POWER))) ** 2


def analyze_preference(values: ArrayLike, raters: ArrayLike, prompts: ArrayLike) -> Preference:
    """Return the preference for A over B, with a confidence interval clustered by person and by prompt.

    The variance of the mean is V(person) + V(prompt) - V(answer), each with the correction G / (G - 1) of its G
    clusters; all answers of a person about a prompt are one cluster of V(answer) (Cameron, Gelbach and Miller 2011,
    https://doi.org/10.1198/jbes.2010.07136). It is at least V(answer), that of independent answers. The interval is
    that of Wilson (1927) for as many independent answers as have this variance (Dean and Pagano 2015,
    https://doi.org/10.1093/jssam/smv024), with a quantile of Student's t with min(people, prompts) - 1 degrees of
    freedom. Unlike mean +- t x standard error, it holds near 0 and 1 too.

    Args:
        values: Answers [N]: 1 prefers A, 0 prefers B, 0.5 neither.
        raters: Person of each answer [N].
        prompts: Prompt of each answer [N].

    Raises:
        UserError: There are fewer than two people or two prompts.
    """
    rows, row_of = np.unique(np.asarray(raters), return_inverse=True)
    columns, column_of = np.unique(np.asarray(prompts), return_inverse=True)
    for name, count in (('people', len(rows)), ('prompts', len(columns))):
        if count < 2:
            raise UserError(f'a confidence interval needs answers of at least 2 {name}; there are those of {count}')
    answers = np.asarray(values, dtype=float)
    count, mean, clusters = len(answers), float(answers.mean()), min(len(rows), len(columns))
    errors = answers - mean
    # A person gives several answers about one prompt if it has several images.
    cells, cell_of = np.unique(row_of * len(columns) + column_of, return_inverse=True)
    by_rater, by_prompt = _variance(errors, row_of, len(rows)), _variance(errors, column_of, len(columns))
    single = _variance(errors, cell_of, len(cells))
    # If people and prompts differ by chance only, the difference may be smaller than the variance of independent
    # answers, or negative.
    clustered = by_rater + by_prompt - single
    variance, freedom = (clustered, clusters - 1) if clustered > single else (single, len(cells) - 1)
    if single > 0:
        ratio = variance / (mean * (1 - mean))
    else:
        # All answers are equal, so that their variance is unknown: count each person, or prompt, as one answer.
        ratio, single = 1 / clusters, 0.25 / clusters
    low, high = wilson_interval(mean, ratio, float(stdtrit(freedom, (1 + CONFIDENCE) / 2)))
    return Preference(
        mean,
        low,
        high,
        answers=count,
        raters=len(rows),
        prompts=len(columns),
        wins=float((answers == 1).mean()),
        ties=float((answers == 0.5).mean()),
        agreement=krippendorff_alpha(answers, column_of),
        by_rater=max(0.0, by_rater - single),
        by_prompt=max(0.0, by_prompt - single),
        by_answer=single,
    )


def _variance(errors: np.ndarray, cluster_of: np.ndarray, clusters: int) -> float:
    """Return the variance of the mean of errors [N] that are correlated within clusters [N], numbered from 0."""
    totals = np.bincount(cluster_of, errors, clusters)
    return float((totals**2).sum()) / len(errors) ** 2 * clusters / (clusters - 1)


def wilson_interval(mean: float, ratio: float, quantile: float) -> tuple[float, float]:
    """Return the values p with |mean - p| <= quantile sqrt(ratio p (1 - p)): Wilson's interval of a proportion.

    Args:
        mean: Observed proportion.
        ratio: Inverse of the number of independent answers.
        quantile: Quantile of the standardized error.
    """
    width = quantile**2 * ratio
    middle = (mean + width / 2) / (1 + width)
    reach = math.sqrt(width * mean * (1 - mean) + width**2 / 4) / (1 + width)
    return max(0.0, middle - reach), min(1.0, middle + reach)


def krippendorff_alpha(values: np.ndarray, units: np.ndarray) -> float:
    """Return Krippendorff's alpha for nominal values (Content Analysis, 2004, chapter 11).

    Args:
        values: Values [N] of single answers.
        units: Index of the prompt of each answer [N]; prompts with a single answer are ignored.

    Returns:
        1 for full agreement, 0 for that by chance; NaN if there is nothing to compare.
    """
    kinds, kind_of = np.unique(values, return_inverse=True)
    counts = np.zeros((int(units.max()) + 1, len(kinds)))
    np.add.at(counts, (units, kind_of), 1)
    counts = counts[counts.sum(axis=1) >= 2]
    total = counts.sum()
    if total == 0:
        return math.nan
    sizes = counts.sum(axis=1, keepdims=True)
    # Count pairs of different values within a unit, each unit weighted by its number of answers.
    observed = ((sizes**2 - (counts**2).sum(axis=1, keepdims=True)) / (sizes - 1)).sum() / total
    overall = counts.sum(axis=0)
    expected = (total**2 - (overall**2).sum()) / (total * (total - 1))
    return 1.0 if expected == 0 else float(1 - observed / expected)
