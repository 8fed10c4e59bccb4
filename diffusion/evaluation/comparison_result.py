"""Results of a human comparison: excluded raters and the preference per question, as text, JSON and figure."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
from numpy.typing import ArrayLike
from scipy.special import stdtrit

from diffusion.errors import UserError
from diffusion.evaluation.comparison_answers import MAX_FAILED_CHECKS, QUESTIONS, Answer, failed_checks
from diffusion.evaluation.comparison_page import ComparisonKey
from diffusion.storage.atomic import atomic_file

CONFIDENCE = 0.95
POWER = 0.8
"""Statistical power: probability of finding a true difference with the recommended number of answers."""


@dataclass(frozen=True)
class Preference:
    """Preference for A over B; `low` and `high` are the ends of its 95% confidence interval.

    Args:
        share: Mean of the answers, from 0 (always B) to 1 (always A).
        wins: Fraction of answers that prefer A.
        ties: Fraction of answers without preference.
        agreement: Krippendorff's alpha: 1 if all raters agree, 0 if agreement is at chance level; NaN if no prompt was
            answered by two raters.
        by_rater: Part of the variance of `share` due to the choice of raters.
        by_prompt: Part due to the choice of prompts.
        by_answer: Part due to individual answers.
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
        return max(0.0, 1 - self.wins - self.ties)

    @property
    def differs(self) -> bool:
        """True if the confidence interval excludes 0.5."""
        return not self.low <= 0.5 <= self.high

    def sentence(self, subject: str) -> str:
        """Return a sentence on the preference and its significance, for a question such as `image quality`."""
        interval = f'Preference for A is {self.share:.1%} (95% interval {self.low:.1%} to {self.high:.1%}).'
        if not self.differs:
            return f'{subject}: A and B do not differ significantly. {interval}'
        return f'{subject}: A and B differ; people prefer {"A" if self.share > 0.5 else "B"}. {interval}'

    def people_needed(self, difference: float) -> int | None:
        """Return the number of raters, at least 2, needed to show a difference with these prompts and a power of 80%.

        Args:
            difference: Distance of the true preference from 50%, such as 0.05 for 55%.

        Returns: None if no number of raters is enough with so few prompts.
        """
        left = _variance_needed(difference) - self.by_prompt
        if left <= 0:
            return None
        return max(2, math.ceil(self.raters * (self.by_rater + self.by_answer) / left))

    def factor_needed(self, difference: float) -> float:
        """Return the factor by which raters and prompts must both grow to show a difference with a power of 80%.

        If k times the raters each answer k times the prompts, there are k^2 times the answers.
        """
        variance = _variance_needed(difference)
        # Solve variance = clustered / k + single / k^2, a quadratic equation in 1 / k.
        clustered, single = self.by_rater + self.by_prompt, self.by_answer
        if clustered + single <= variance:
            return 1.0
        if single <= 0:
            return clustered / variance
        return 2 * single / (math.sqrt(clustered**2 + 4 * single * variance) - clustered)


def _variance_needed(difference: float) -> float:
    """Return the largest variance of a mean at which a true `difference` is found with probability `POWER`."""
    normal = NormalDist()
    return (difference / (normal.inv_cdf((1 + CONFIDENCE) / 2) + normal.inv_cdf(POWER))) ** 2


def analyze_preference(values: ArrayLike, raters: ArrayLike, prompts: ArrayLike) -> Preference:
    """Return the preference for A over B, with a confidence interval clustered by rater and by prompt.

    The variance of the mean is V(rater) + V(prompt) - V(answer), each corrected by G / (G - 1) for its G clusters; in
    V(answer), all answers of a rater to a prompt are one cluster (Cameron, Gelbach and Miller 2011,
    https://doi.org/10.1198/jbes.2010.07136). If this is less than V(answer), the variance for independent answers,
    V(answer) is used instead. The interval is Wilson's (1927) for as many independent answers as give this variance
    (Dean and Pagano 2015, https://doi.org/10.1093/jssam/smv024), with a quantile of Student's t. Its degrees of freedom
    are min(raters, prompts) - 1 or, if V(answer) is used, the number of its clusters - 1. Unlike mean +- t x standard
    error, the interval is also valid near 0 and 1.

    Args:
        values: Answers [N]: 1 for A, 0 for B, 0.5 for no preference; each has a rater [N] and a prompt [N].

    Raises:
        UserError: There are fewer than two raters or fewer than two prompts.
    """
    rows, row_of = np.unique(np.asarray(raters), return_inverse=True)
    columns, column_of = np.unique(np.asarray(prompts), return_inverse=True)
    for name, count in (('people', len(rows)), ('prompts', len(columns))):
        if count < 2:
            raise UserError(f'a confidence interval needs at least 2 {name} with answers; found {count}')
    answers = np.asarray(values, dtype=float)
    count, mean, clusters = len(answers), float(answers.mean()), min(len(rows), len(columns))
    errors = answers - mean
    # Cluster a rater's answers to the same prompt: there are several if the prompt has several images.
    cells, cell_of = np.unique(row_of * len(columns) + column_of, return_inverse=True)
    by_rater, by_prompt = (
        clustered_variance(errors, row_of, len(rows)),
        clustered_variance(errors, column_of, len(columns)),
    )
    single = clustered_variance(errors, cell_of, len(cells))
    # If raters and prompts differ only by chance, this may be negative or too small: use `single` as a lower bound.
    clustered = by_rater + by_prompt - single
    variance, freedom = (clustered, clusters - 1) if clustered > single else (single, len(cells) - 1)
    if single > 0:
        ratio = variance / (mean * (1 - mean))
    else:
        # All answers are equal, so their variance is unknown: count each rater (or prompt) as one answer.
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


def clustered_variance(errors: np.ndarray, cluster_of: np.ndarray, clusters: int) -> float:
    """Return the variance of the mean of errors [N] that are correlated within clusters (indices [N] from 0)."""
    totals = np.bincount(cluster_of, errors, clusters)
    return float((totals**2).sum()) / len(errors) ** 2 * clusters / (clusters - 1)


def wilson_interval(mean: float, ratio: float, quantile: float) -> tuple[float, float]:
    """Return Wilson's interval for a proportion: all p with |mean - p| <= quantile sqrt(ratio p (1 - p)).

    `ratio` is 1 / number of independent answers; `quantile` is the quantile of the standardized error.
    """
    width = quantile**2 * ratio
    middle = (mean + width / 2) / (1 + width)
    reach = math.sqrt(width * mean * (1 - mean) + width**2 / 4) / (1 + width)
    return max(0.0, middle - reach), min(1.0, middle + reach)


def clustered_proportion(parts: np.ndarray, wholes: np.ndarray, labels: ArrayLike) -> tuple[float, tuple[float, float]]:
    """Return the proportion sum(parts) / sum(wholes) and its 95% interval.

    Args:
        parts: Counts [N], each at most the count in `wholes` [N], such as right answers and all answers.
        labels: Cluster of each count; counts are correlated within a cluster.
    """
    whole, cluster_of = float(wholes.sum()), np.unique(labels, return_inverse=True)[1]
    mean, clusters = float(parts.sum()) / max(whole, 1.0), int(cluster_of.max()) + 1
    if clusters == 1:
        return mean, (0.0, 1.0)
    ratio = 1 / clusters  # if all numbers are equal, their variance is unknown: count each cluster as one
    if 0 < mean < 1:
        errors = (parts - mean * wholes) * (len(wholes) / whole)
        ratio = max(1 / whole, clustered_variance(errors, cluster_of, clusters) / (mean * (1 - mean)))
    return mean, wilson_interval(mean, ratio, float(stdtrit(clusters - 1, (1 + CONFIDENCE) / 2)))


@dataclass(frozen=True)
class BenchmarkScore:
    """Score of a benchmark, and of each category (`kinds`) of its prompts or questions, with 95% intervals."""

    score: float
    interval: tuple[float, float]
    kinds: dict[str, tuple[float, tuple[float, float]]]

    def scaled(self, factor: float, offset: float = 0.0) -> 'BenchmarkScore':
        def ends(interval: tuple[float, float]) -> tuple[float, float]:
            return interval[0] * factor + offset, interval[1] * factor + offset

        kinds = {kind: (mean * factor + offset, ends(interval)) for kind, (mean, interval) in self.kinds.items()}
        return BenchmarkScore(self.score * factor + offset, ends(self.interval), kinds)


def krippendorff_alpha(values: np.ndarray, units: np.ndarray) -> float:
    """Return Krippendorff's alpha for nominal values [N] (Content Analysis, 2004, chapter 11).

    It is 1 for full agreement, 0 for agreement at chance level, and NaN if no prompt has two answers. `units` are the
    prompt indices [N] of the answers; prompts with only one answer are ignored.
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


COLORS = {'A': '#2b50cc', 'neither': '#d3d8e0', 'B': '#c2570c'}
"""Colors of the figure: blue and orange, which color-blind people can tell apart."""


@dataclass(frozen=True)
class ComparisonResult:
    """Result of a human comparison.

    Args:
        preferences: Preference for A over B for each question, by the keys of `QUESTIONS`.
        raters: Number of raters whose answers count.
        excluded: Fraction of their attention checks that excluded raters failed, by rater ID.
        unchecked: Number of raters whose answers count although they saw no attention check.
    """

    a: str
    b: str
    preferences: dict[str, Preference]
    raters: int
    excluded: dict[str, float]
    unchecked: int


def analyze_answers(key: ComparisonKey, answers: Sequence[Answer]) -> ComparisonResult:
    """Return a comparison's result; raters who fail more than 20% of their attention checks are excluded.

    Raises:
        UserError: Too few raters or prompts are left for a confidence interval.
    """
    failed = failed_checks(answers, key.damaged())
    excluded = {rater: fraction for rater, fraction in sorted(failed.items()) if fraction > MAX_FAILED_CHECKS}
    # Leave out attention checks: they do not compare A with B.
    counting = [each for each in answers if each.rater not in excluded and key.pairs[each.pair].a is not None]
    raters = {each.rater for each in counting}
    preferences = {}
    # Tell prompts apart by text: a prompt may occur several times in the file, to compare several images for it.
    for question, subject in QUESTIONS.items():
        own = [each for each in counting if each.question == question]
        values = [0.5 if each.choice == 'tie' else float(each.choice == key.pairs[each.pair].a) for each in own]
        try:
            preferences[question] = analyze_preference(
                values, [each.rater for each in own], [key.pairs[each.pair].text for each in own]
            )
        except UserError as error:
            without = f' ({counted_people(len(excluded))} failed attention checks)' if excluded else ''
            raise UserError(f'--analyze: {subject}: {error}{without}; collect more answers') from error
    a, b = (str(side['source']) for side in (key.a, key.b))
    return ComparisonResult(a, b, preferences, len(raters), excluded, len(raters - failed.keys()))


def result_text(result: ComparisonResult, difference: float) -> str:
    """Return the result as text, with the raters and prompts needed to show a preference of 0.5 + `difference`."""
    header = ('prefer A', 'neither', 'prefer B', 'preference for A', 'answers', 'people', 'prompts', 'agreement')
    rows = {QUESTIONS[question]: _row(found) for question, found in result.preferences.items()}
    lines = [f'A: {result.a}', f'B: {result.b}', '']
    for title, row in {'': header, **rows}.items():
        cells = [f'{cell:>{width}}' for cell, width in zip(row, (9, 8, 9, 22, 9, 8, 8, 10), strict=True)]
        lines.append(f'{title:18}{" ".join(cells)}')
    lines += ['', 'Preference for A: ties count half; 95% confidence interval, clustered by person and by prompt.']
    lines += ["Agreement of people: Krippendorff's alpha, 1 for full agreement, 0 for chance.", '']
    lines += [_capitalized(found.sentence(QUESTIONS[question])) for question, found in result.preferences.items()]
    lines += ['', f'Needed to show a preference of {50 + 100 * difference:g}% with a power of 80%:']
    lines += [
        f'  {QUESTIONS[question]:18}{_needed(found, difference)}' for question, found in result.preferences.items()
    ]
    if result.excluded:
        names = ', '.join(f'{rater} ({fraction:.0%} failed)' for rater, fraction in result.excluded.items())
        lines += ['', f'Excluded for failed attention checks: {names}.']
    if result.unchecked:
        lines += ['', f'{counted_people(result.unchecked)} stopped before an attention check; their answers count.']
    return '\n'.join(lines)


def _row(found: Preference) -> tuple[str, ...]:
    shares = [f'{share:.1%}' for share in (found.wins, found.ties, found.losses)]
    interval = f'{found.share:.1%} [{found.low:.1%}, {found.high:.1%}]'
    agreement = 'unknown' if math.isnan(found.agreement) else f'{found.agreement:.2f}'
    return (*shares, interval, f'{found.answers:,}', f'{found.raters:,}', f'{found.prompts:,}', agreement)


def _needed(found: Preference, difference: float) -> str:
    people, factor = found.people_needed(difference), found.factor_needed(difference)
    if people is not None and people <= found.raters:
        return 'these answers are enough'
    both = f'{math.ceil(factor * found.raters):,} people and {math.ceil(factor * found.prompts):,} prompts'
    if people is None:
        return f'{both}; with these prompts, no number of people is enough'
    more = math.ceil((people - found.raters) * found.answers / found.raters)
    return f'{people:,} people with these prompts ({more:,} more answers), or {both}'


def result_json(result: ComparisonResult, difference: float) -> dict[str, Any]:
    """Return the result as JSON types; null means that agreement is unknown, or that no number of people is enough."""
    questions = {}
    for question, found in result.preferences.items():
        values = asdict(found)
        values['agreement'] = None if math.isnan(found.agreement) else found.agreement
        people, factor = found.people_needed(difference), found.factor_needed(difference)
        both = {'people': math.ceil(factor * found.raters), 'prompts': math.ceil(factor * found.prompts)}
        values['needed'] = {'difference': difference, 'people_with_these_prompts': people, 'people_and_prompts': both}
        questions[question] = values | {'differs': found.differs, 'sentence': found.sentence(QUESTIONS[question])}
    about = {'a': result.a, 'b': result.b, 'raters': result.raters}
    return {**about, 'excluded': result.excluded, 'unchecked': result.unchecked, 'questions': questions}


def draw_result(result: ComparisonResult, path: Path) -> None:
    """Plot the answers to each question, and the preference with its 95% interval, to a PNG file."""
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(8, 1.6 + 1.3 * len(result.preferences)), layout='constrained')
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for row, found in enumerate(result.preferences.values()):
        left = 0.0
        for name, share in (('A', found.wins), ('neither', found.ties), ('B', found.losses)):
            axes.barh(row + 0.22, share, 0.3, left, color=COLORS[name], label=f'prefer {name}' if row == 0 else None)
            if share > 0.05:
                style = {'color': 'black' if name == 'neither' else 'white', 'fontsize': 9}
                axes.text(left + share / 2, row + 0.22, f'{share:.0%}', ha='center', va='center', **style)
            left += share
        reach = [[found.share - found.low], [found.high - found.share]]
        axes.errorbar(found.share, row - 0.1, xerr=reach, fmt='o', color='black', capsize=5, markersize=7)
        text = f'{found.share:.1%} [{found.low:.1%}, {found.high:.1%}]'
        middle = min(0.85, max(0.15, found.share))
        axes.text(middle, row - 0.32, text, ha='center', va='center', fontsize=10, backgroundcolor='white')
    axes.axvline(0.5, color='#888', linewidth=1, linestyle='--', zorder=0)
    names = [_capitalized(QUESTIONS[question]) for question in result.preferences]
    axes.set_yticks(range(len(names)), names, fontsize=11)
    axes.set_xticks([0, 0.25, 0.5, 0.75, 1], ['0%', '25%', '50%', '75%', '100%'])
    axes.set(xlim=(0, 1), ylim=(len(names) - 0.55, -0.5))
    for side in ('top', 'right', 'left'):
        axes.spines[side].set_visible(False)
    axes.tick_params(left=False)
    axes.set_xlabel('preference for A (ties count half) with 95% interval', fontsize=9)
    largest = max(result.preferences.values(), key=lambda each: each.answers)
    figure.suptitle(f'A: {result.a}\nB: {result.b}', fontsize=10, ha='left', x=0.01)
    axes.set_title(f'{largest.raters} people, {largest.prompts} prompts', fontsize=9, loc='right', color='#555')
    figure.legend(loc='outside lower center', ncols=3, frameon=False, fontsize=9)
    with atomic_file(path) as unfinished:
        figure.savefig(unfinished, format='png', dpi=150)


def counted_people(count: int) -> str:
    return f'{count} {"person" if count == 1 else "people"}'


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]
