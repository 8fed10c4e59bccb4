"""Result of a comparison by people: who is excluded, the preference per question, as text, JSON and figure."""

import logging
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from diffusion.errors import UserError
from diffusion.evaluation.comparison_answers import MAX_FAILED_CHECKS, QUESTIONS, Answer, failed_checks
from diffusion.evaluation.comparison_key import ComparisonKey
from diffusion.evaluation.preference_analysis import Preference, analyze_preference
from diffusion.storage.atomic import atomic_file

log = logging.getLogger(__name__)

COLORS = {'A': '#2b50cc', 'neither': '#d3d8e0', 'B': '#c2570c'}
"""Colors of the figure: blue and orange, which people who are color-blind can tell apart."""


@dataclass(frozen=True)
class ComparisonResult:
    """Result of a comparison by people.

    Args:
        preferences: Preference for A over B for each question, by the keys of `QUESTIONS`.
        raters: Number of people who count.
        excluded: Fraction of attention checks that each excluded person has failed.
        unchecked: Number of people who count without having seen an attention check.
    """

    a: str
    b: str
    preferences: dict[str, Preference]
    raters: int
    excluded: dict[str, float]
    unchecked: int


def analyze_answers(key: ComparisonKey, answers: Sequence[Answer]) -> ComparisonResult:
    """Return the result of a comparison; people who fail more than a fifth of their attention checks are excluded.

    Args:
        answers: Answers of all people, attention checks included.

    Raises:
        UserError: Too few people or prompts are left for a confidence interval.
    """
    failed = failed_checks(answers, key.damaged())
    excluded = {rater: fraction for rater, fraction in sorted(failed.items()) if fraction > MAX_FAILED_CHECKS}
    # Attention checks do not compare A with B.
    counting = [each for each in answers if each.rater not in excluded and key.pairs[each.pair].a is not None]
    raters = {each.rater for each in counting}
    preferences = {}
    # A prompt may be in the file several times, for several images each.
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
    """Return the result as a table and sentences for a terminal.

    Args:
        difference: Preference to detect, as its distance from one half, such as 0.05 for 55%.
    """
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
    """Return the cells of a question in the table."""
    shares = [f'{share:.1%}' for share in (found.wins, found.ties, found.losses)]
    interval = f'{found.share:.1%} [{found.low:.1%}, {found.high:.1%}]'
    agreement = 'unknown' if math.isnan(found.agreement) else f'{found.agreement:.2f}'
    return (*shares, interval, f'{found.answers:,}', f'{found.raters:,}', f'{found.prompts:,}', agreement)


def _needed(found: Preference, difference: float) -> str:
    """Return the answers that would show a difference."""
    people, factor = found.people_needed(difference), found.factor_needed(difference)
    if people is not None and people <= found.raters:
        return 'these answers are enough'
    both = f'{math.ceil(factor * found.raters):,} people and {math.ceil(factor * found.prompts):,} prompts'
    if people is None:
        return f'{both}; with these prompts, no number of people is enough'
    more = math.ceil((people - found.raters) * found.answers / found.raters)
    return f'{people:,} people with these prompts ({more:,} more answers), or {both}'


def result_json(result: ComparisonResult, difference: float) -> dict[str, Any]:
    """Return the result as JSON types; agreement that is unknown is null.

    Args:
        difference: As for `result_text`.
    """
    questions = {}
    for question, found in result.preferences.items():
        values = asdict(found)
        values['agreement'] = None if math.isnan(found.agreement) else found.agreement
        people, factor = found.people_needed(difference), found.factor_needed(difference)
        both = {'persons': math.ceil(factor * found.raters), 'prompts': math.ceil(factor * found.prompts)}
        values['needed'] = {
            'difference': difference,
            'persons_with_these_prompts': people,
            'persons_and_prompts': both,
        }
        questions[question] = values | {'differs': found.differs, 'sentence': found.sentence(QUESTIONS[question])}
    about = {'a': result.a, 'b': result.b, 'raters': result.raters}
    return {**about, 'excluded': result.excluded, 'unchecked': result.unchecked, 'questions': questions}


def draw_result(result: ComparisonResult, path: Path) -> None:
    """Draw the answers to each question and the preference with its 95% interval to a PNG file."""
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
    """Return a number with its noun: `1 person`, `3 people`."""
    return f'{count} {"person" if count == 1 else "people"}'


def _capitalized(text: str) -> str:
    return text[:1].upper() + text[1:]
