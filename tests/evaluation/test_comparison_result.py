"""Result of a comparison: attention checks, text, JSON and figure."""

import math
import random
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import pytest
from evaluation.comparisons import answers_of, attentive, make_key, rater_name
from golden import check_golden, figure_text, readable_json
from matplotlib.figure import Figure

from diffusion.errors import UserError
from diffusion.evaluation.comparison_result import (
    ComparisonResult,
    Preference,
    analyze_answers,
    analyze_preference,
    clustered_proportion,
    draw_result,
    krippendorff_alpha,
    result_json,
    result_text,
    wilson_interval,
)

RATERS, PROMPTS = 20, 50


def cells(raters=RATERS, prompts=PROMPTS) -> tuple[np.ndarray, np.ndarray]:
    """Return the person and the prompt of each answer if each person answers each prompt."""
    return np.repeat(np.arange(raters), prompts), np.tile(np.arange(prompts), raters)


def draw(random, base, by_rater, by_prompt, tie, *, raters=RATERS, prompts=PROMPTS) -> np.ndarray:
    """Draw answers: who prefers A by more than `tie` says so, with effects of people and prompts that are normal."""
    effects = base + by_rater * random.standard_normal((raters, 1)) + by_prompt * random.standard_normal((1, prompts))
    felt = effects + random.standard_normal((raters, prompts))
    return ((felt > tie) + 0.5 * (abs(felt) <= tie)).ravel()


def true_share(base, by_rater, by_prompt, tie) -> float:
    """Return the exact mean of the answers that `draw` draws."""
    felt = NormalDist(base, math.sqrt(by_rater**2 + by_prompt**2 + 1))
    return 1 - felt.cdf(tie) + 0.5 * (felt.cdf(tie) - felt.cdf(-tie))


@pytest.mark.parametrize(
    ('base', 'by_rater', 'by_prompt', 'tie'),
    [
        (0.2, 0.5, 0.5, 0.3),
        pytest.param(0.0, 0.3, 0.0, 1.0, marks=pytest.mark.slow),  # most answers are ties
        pytest.param(1.6, 0.5, 0.5, 0.3, marks=pytest.mark.slow),  # A is preferred in 90%
    ],
)
def test_interval_covers_the_true_preference_in_95_percent_of_simulations(base, by_rater, by_prompt, tie):
    random = np.random.default_rng(1)
    raters, prompts = cells()
    truth = true_share(base, by_rater, by_prompt, tie)
    found = [analyze_preference(draw(random, base, by_rater, by_prompt, tie), raters, prompts) for _ in range(1000)]
    covered = sum(each.low <= truth <= each.high for each in found) / len(found)
    assert 0.93 <= covered <= 0.97


def test_several_images_of_a_prompt_are_one_prompt():
    key = make_key(['a', 'a', 'b', 'b'], checks=0)
    result = analyze_answers(key, answers_of(key, 1) + answers_of(key, 2))
    assert (result.preferences['quality'].prompts, result.preferences['quality'].answers) == (2, 8)


def test_variance_equals_that_of_the_definition_with_dummy_matrices():
    random = np.random.default_rng(4)
    raters, prompts = cells(6, 9)
    values = draw(random, 0.3, 1.0, 1.0, 0.2, raters=6, prompts=9)
    found = analyze_preference(values, raters, prompts)
    errors = values - values.mean()
    same_rater, same_prompt = raters[:, None] == raters, prompts[:, None] == prompts
    products = np.outer(errors, errors)
    parts = [(products * same_rater).sum() * 6 / 5, (products * same_prompt).sum() * 9 / 8, (errors**2).sum() * 54 / 53]
    by_rater, by_prompt, single = (part / 54**2 for part in parts)
    assert found.by_rater == pytest.approx(by_rater - single)
    assert found.by_prompt == pytest.approx(by_prompt - single)
    assert found.by_answer == pytest.approx(single)
    assert (found.wins, found.ties) == ((values == 1).mean(), (values == 0.5).mean())
    ratio = (by_rater + by_prompt - single) / (found.share * (1 - found.share))
    assert (found.low, found.high) == pytest.approx(wilson_interval(found.share, ratio, 2.570582))  # t with 5


def test_wilson_interval_equals_published_values():
    # Newcombe 1998 (https://doi.org/10.1002/(SICI)1097-0258(19980430)17:8<857::AID-SIM777>3.0.CO;2-E), table I.
    for successes, trials, low, high in [(81, 263, 0.2553, 0.3662), (15, 148, 0.0624, 0.1605), (0, 20, 0.0, 0.1611)]:
        found = wilson_interval(successes / trials, 1 / trials, 1.96)
        assert found == pytest.approx((low, high), abs=1e-4)


def test_equal_answers_of_all_do_not_give_an_interval_of_width_zero():
    raters, prompts = cells(10, 20)
    found = analyze_preference([1.0] * 200, raters, prompts)
    assert found.share == found.high == 1 and found.by_answer == 0.25 / 10
    assert found.low == pytest.approx(wilson_interval(1, 1 / 10, 1.971957)[0])  # t with 199
    ties = analyze_preference([0.5] * 200, raters, prompts)
    assert ties.low < 0.4 and ties.high > 0.6 and not ties.differs
    needed = ties.people_needed(0.05)
    assert needed is not None and needed > 10


def test_proportion_of_few_clusters():
    few = [(([8.0, 1.0], [8.0, 8.0], 'ab'), (9 / 16, 7 / 9)), (([1.0, 0, 2], [1.0, 1, 2], 'abb'), (3 / 4, 1 / 4))]
    for (parts, wholes, labels), (mean, ratio) in few:  # the second one has no more information than 4 answers
        found = clustered_proportion(np.array(parts), np.array(wholes), [*labels])
        assert found == (mean, pytest.approx(wilson_interval(mean, ratio, 12.7062047)))  # t with 1
    assert clustered_proportion(np.ones(2), np.array([1.0, 2]), ['a', 'a']) == (2 / 3, (0, 1)), 'of one cluster'
    assert clustered_proportion(np.zeros(2), np.zeros(2), ['a', 'b']) == (0, (0, pytest.approx(0.9877637)))


def test_krippendorff_alpha_equals_published_value():
    # Krippendorff, Computing Krippendorff's Alpha-Reliability, 2011, example C: nominal data of four observers.
    table = {
        'A': [1, 2, 3, 3, 2, 1, 4, 1, 2, None, None, None],
        'B': [1, 2, 3, 3, 2, 2, 4, 1, 2, 5, None, 3],
        'C': [None, 3, 3, 3, 2, 3, 4, 2, 2, 5, 1, None],
        'D': [1, 2, 3, 3, 2, 4, 4, 1, 2, 5, 1, None],
    }
    cells = [(value, unit) for row in table.values() for unit, value in enumerate(row) if value is not None]
    values, units = np.array(cells).T
    assert krippendorff_alpha(values, units) == pytest.approx(0.743, abs=5e-4)


def test_agreement_is_one_zero_or_unknown():
    units = np.tile(np.arange(40), 10)
    assert krippendorff_alpha(np.tile(np.arange(40) % 2, 10), units) == 1
    chance = krippendorff_alpha(np.random.default_rng(8).integers(0, 2, 400), units)
    assert abs(chance) < 0.1
    assert math.isnan(krippendorff_alpha(np.ones(5), np.arange(5)))


KEY = make_key([f'prompt {index}' for index in range(30)], checks=6)


def careless(pair, question):
    return random.Random(f'{pair} {question}').choice(('first', 'second', 'tie'))


def damaged_first(pair, question):
    return pair.damaged or attentive(pair, question)


def test_preferences_follow_the_key_and_not_the_position():
    answers = [answer for number in range(5) for answer in answers_of(KEY, number)]
    result = analyze_answers(KEY, answers)
    quality, alignment = result.preferences['quality'], result.preferences['alignment']
    assert (quality.share, alignment.share) == (1, 0)
    assert quality.answers == 5 * 30, 'attention checks do not count'
    assert (quality.raters, quality.prompts, result.raters) == (5, 30, 5)
    assert quality.differs and alignment.differs


def test_people_who_fail_attention_checks_are_excluded():
    answers = [answer for number in range(5) for answer in answers_of(KEY, number)]
    answers += answers_of(KEY, 8, damaged_first) + answers_of(KEY, 9, careless)
    result = analyze_answers(KEY, answers)
    assert result.excluded.keys() == {rater_name(8), rater_name(9)}
    assert result.excluded[rater_name(8)] == 1
    assert result.preferences['quality'].share == 1, 'their answers do not count'


def test_one_slip_in_six_checks_does_not_exclude():
    slip = next(pair for pair in KEY.pairs if pair.damaged)
    answers = answers_of(KEY, 1) + answers_of(KEY, 2, lambda *each: 'tie' if each[0] is slip else attentive(*each))
    answers += answers_of(KEY, 3, lambda pair, question: 'tie' if pair.a else attentive(pair, question))
    result = analyze_answers(KEY, answers)
    assert result.excluded == {} and result.preferences['quality'].share == pytest.approx(2.5 / 3), 'a tie is a half'


def test_people_who_saw_no_check_count_and_are_counted():
    first_check = min(KEY.damaged())
    answers = answers_of(KEY, 1) + answers_of(KEY, 2, pairs=first_check)
    result = analyze_answers(KEY, answers)
    assert (result.raters, result.unchecked) == (2, 1)


@pytest.mark.parametrize(
    ('answers', 'message'),
    [
        ([], 'needs at least 2 people with answers; found 0; collect more answers'),
        (answers_of(KEY, 1) + answers_of(KEY, 2, damaged_first), r'found 1 \(1 person failed attention checks\)'),
        (answers_of(KEY, 1, pairs=1) + answers_of(KEY, 2, pairs=1), 'at least 2 prompts with answers; found 1'),
    ],
)
def test_too_few_answers_are_refused(answers, message):
    assert KEY.pairs[0].a is not None
    with pytest.raises(UserError, match=f'--analyze: image quality: .*{message}'):
        analyze_answers(KEY, answers)


def preference(**values) -> Preference:
    given: dict[str, Any] = {'by_rater': 0.0004, 'by_prompt': 0.0002, 'by_answer': 0.0003, 'agreement': 0.25}
    given |= {'share': 0.6, 'low': 0.52, 'high': 0.68, 'wins': 0.5, 'ties': 0.2}
    return Preference(**({'answers': 90, 'raters': 6, 'prompts': 30} | given | values))


UNCLEAR = preference(share=0.4, low=0.3, by_prompt=0.001, agreement=math.nan, wins=0.38, ties=0.04, answers=80)
BOTH = {'quality': preference(), 'alignment': UNCLEAR}
RESULT = ComparisonResult('runs/first', 'runs/second', BOTH, 6, {'r': 0.5, 's': 1.0}, 2)


def test_the_answers_needed_give_the_power():
    for found in (preference(), preference(by_answer=0.0), preference(by_rater=0.0, by_answer=0.001)):
        factor = found.factor_needed(0.05)
        variance = (found.by_rater + found.by_prompt) / factor + found.by_answer / factor**2
        assert (1.959964 + 0.841621) * math.sqrt(variance) == pytest.approx(0.05)
    enough = preference(by_rater=0.0001, by_prompt=0.0, by_answer=0.0001)
    assert enough.factor_needed(0.05) == 1 and enough.people_needed(0.2) == 2, 'one person has no interval'
    assert result_text(ComparisonResult('a', 'b', {'quality': enough}, 6, {}, 0), 0.05).endswith('answers are enough')


def test_figure_text_and_json_of_a_result_are_the_reviewed_ones(tmp_path, monkeypatch):
    figures, save = [], Figure.savefig
    monkeypatch.setattr(Figure, 'savefig', lambda *args, **options: figures.append(args[0]) or save(*args, **options))
    draw_result(RESULT, tmp_path / 'result.png')
    assert (tmp_path / 'result.png').exists()
    texts = {'figure.txt': figure_text(figures[0]), 'text.txt': result_text(RESULT, 0.05)}
    texts['json.txt'] = readable_json(result_json(RESULT, 0.05))
    check_golden(Path(__file__).parent / 'golden' / 'comparison', texts)
