"""Result of a comparison: attention checks, text, JSON and figure."""

import json
import math
import random

import pytest
from evaluation.comparisons import answers_of, attentive, make_key, rater_name
from PIL import Image

from diffusion.errors import UserError
from diffusion.evaluation.comparison_result import analyze_answers, draw_result, result_json, result_text

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


def test_several_images_of_a_prompt_are_one_prompt():
    key = make_key(['a', 'a', 'b', 'b'], checks=0)
    result = analyze_answers(key, answers_of(key, 1) + answers_of(key, 2))
    assert (result.preferences['quality'].prompts, result.preferences['quality'].answers) == (2, 8)


@pytest.mark.parametrize(
    ('answers', 'message'),
    [
        ([], 'needs answers of at least 2 people; there are those of 0; collect more answers'),
        (answers_of(KEY, 1), 'at least 2 people; there are those of 1; collect'),
        (answers_of(KEY, 1) + answers_of(KEY, 2, damaged_first), r'those of 1 \(1 person failed attention checks\)'),
        (answers_of(KEY, 1, pairs=1) + answers_of(KEY, 2, pairs=1), 'at least 2 prompts; there are those of 1'),
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
        'persons_with_these_prompts': found.people_needed(0.05),
        'persons_and_prompts': {'persons': math.ceil(4 * factor), 'prompts': math.ceil(30 * factor)},
    }
    assert content['excluded'] == {rater_name(9): 1.0}
    alone = [each for each in answers if each.rater == rater_name(each.pair % 2)]  # no pair has answers of two people
    assert result_json(analyze_answers(KEY, alone), 0.05)['questions']['quality']['agreement'] is None


def test_figure_is_a_png(tmp_path):
    result = analyze_answers(KEY, answers_of(KEY, 1) + answers_of(KEY, 2, mixed))
    draw_result(result, tmp_path / 'figures' / 'result.png')
    with Image.open(tmp_path / 'figures' / 'result.png') as image:
        image.load()
        assert image.format == 'PNG' and image.width > 1000
