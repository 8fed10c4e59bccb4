"""Result of a comparison: attention checks, text, JSON and figure."""

import json
import math
import random
from statistics import NormalDist

import numpy as np
import pytest
from evaluation.comparisons import answers_of, attentive, make_key, rater_name

from diffusion.errors import UserError
from diffusion.evaluation.comparison_result import (
    analyze_answers,
    analyze_preference,
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


def test_answers_of_one_person_and_one_prompt_do_not_count_as_independent():
    random = np.random.default_rng(3)
    raters, prompts = cells()
    widths = {}
    for effects in [(0.0, 0.0), (1.0, 0.0), (0.0, 1.0)]:
        found = [analyze_preference(draw(random, 0.0, *effects, 0.0), raters, prompts) for _ in range(50)]
        widths[effects] = np.mean([each.high - each.low for each in found])
    assert widths[1.0, 0.0] > 3 * widths[0.0, 0.0] and widths[0.0, 1.0] > 2 * widths[0.0, 0.0]


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
    assert found.share == found.high == 1
    assert 0.6 < found.low < 0.8
    ties = analyze_preference([0.5] * 200, raters, prompts)
    assert ties.low < 0.4 and ties.high > 0.6 and not ties.differs
    needed = ties.people_needed(0.05)
    assert needed is not None and needed > 10


def test_more_people_do_not_help_where_prompts_are_too_few():
    random = np.random.default_rng(7)
    found = analyze_preference(draw(random, 0.0, 0.2, 1.0, 0.0), *cells())
    assert found.people_needed(0.02) is None
    assert found.people_needed(0.3) is not None
    people_differ = analyze_preference(draw(random, 0.0, 1.0, 0.0, 0.0), *cells())
    needed = people_differ.people_needed(0.05)
    assert needed is not None and needed > RATERS


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
    text = result_text(result, 0.05)
    assert f'Excluded for failed attention checks: {rater_name(8)} (100% failed), {rater_name(9)}' in text


def test_one_slip_in_six_checks_does_not_exclude():
    slip = next(pair for pair in KEY.pairs if pair.damaged)
    answers = answers_of(KEY, 1) + answers_of(KEY, 2, lambda *each: 'tie' if each[0] is slip else attentive(*each))
    assert analyze_answers(KEY, answers).excluded == {}


def test_people_who_saw_no_check_count_and_are_counted():
    first_check = min(KEY.damaged())
    answers = answers_of(KEY, 1) + answers_of(KEY, 2, pairs=first_check)
    result = analyze_answers(KEY, answers)
    assert (result.raters, result.unchecked) == (2, 1)
    assert '1 person stopped before an attention check; their answers count.' in result_text(result, 0.05)


@pytest.mark.parametrize(
    ('answers', 'message'),
    [
        ([], 'needs at least 2 people with answers; found 0; collect more answers'),
        (answers_of(KEY, 1), 'at least 2 people with answers; found 1; collect'),
        (answers_of(KEY, 1) + answers_of(KEY, 2, damaged_first), r'found 1 \(1 person failed attention checks\)'),
        (answers_of(KEY, 1, pairs=1) + answers_of(KEY, 2, pairs=1), 'at least 2 prompts with answers; found 1'),
    ],
)
def test_too_few_answers_are_refused(answers, message):
    assert KEY.pairs[0].a is not None
    with pytest.raises(UserError, match=f'--analyze: image quality: .*{message}'):
        analyze_answers(KEY, answers)


def mixed(pair, question):
    return (
        random.Random(f'{pair.prompt} {question}').choice(('first', 'second', 'tie'))
        if pair.a
        else attentive(pair, question)
    )


def test_text_has_a_table_and_a_sentence_per_question():
    answers = [answer for number in range(6) for answer in answers_of(KEY, number, mixed)]
    answers += [answer for number in range(6, 9) for answer in answers_of(KEY, number)]
    text = result_text(analyze_answers(KEY, answers), 0.05)
    assert text.startswith('A: runs/first/ba10, ema weights\nB: runs/second/ba20, ema weights\n')
    for line in ('image quality  ', 'prompt alignment  ', 'Image quality: A and B d', 'Prompt alignment: A and B d'):
        assert f'\n{line}' in text
    assert 'Needed to show a preference of 55% with a power of 80%:' in text
    assert 'people' in text.split('Needed')[1]
    assert max(map(len, text.splitlines())) <= 120


def test_json_has_the_numbers_of_the_text():
    answers = [answer for number in range(4) for answer in answers_of(KEY, number)]
    result = analyze_answers(KEY, [*answers, *answers_of(KEY, 9, damaged_first)])
    content = json.loads(json.dumps(result_json(result, 0.05), allow_nan=False))
    quality = content['questions']['quality']
    assert quality['share'] == 1 and quality['differs'] and quality['agreement'] == 1
    found = result.preferences['quality']
    factor = found.factor_needed(0.05)
    assert quality['needed'] == {
        'difference': 0.05,
        'people_with_these_prompts': found.people_needed(0.05),
        'people_and_prompts': {'people': math.ceil(4 * factor), 'prompts': math.ceil(30 * factor)},
    }
    assert content['excluded'] == {rater_name(9): 1.0}
    alone = [each for each in answers if each.rater == rater_name(each.pair % 2)]  # no pair has answers of two people
    assert result_json(analyze_answers(KEY, alone), 0.05)['questions']['quality']['agreement'] is None
