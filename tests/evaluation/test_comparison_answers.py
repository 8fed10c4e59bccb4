"""Reading of answers: files of other comparisons, tampered, duplicate and contradicting ones are refused."""

import json

import pytest
from evaluation.comparisons import COMPARISON, answers_of, answers_text, make_key, rater_name

from diffusion.errors import UserError
from diffusion.evaluation.comparison_answers import MAX_BYTES, answers_json, checksum, read_answers

KEY = make_key()
PAIRS = len(KEY.pairs)


@pytest.fixture
def write(tmp_path):
    def write_file(name, text):
        (tmp_path / name).write_bytes(text if isinstance(text, bytes) else text.encode())
        return tmp_path / name

    return write_file


def changed(**changes: object) -> str:
    """Return answers whose content, but not whose checksum, was changed."""
    return json.dumps(json.loads(answers_text(KEY, 1)) | changes)


def resealed(**changes: object) -> str:
    """Return answers that were changed by somebody who recomputes the checksum."""
    content = json.loads(answers_text(KEY, 1)) | changes
    lines = [f'{each["pair"]} {each["question"]} {each["choice"]}' for each in content['answers']]
    text = '\n'.join([content['comparison'], str(content['rater']), *lines])
    return json.dumps(content | {'checksum': checksum(text)})


def test_checksum_equals_published_values():
    # http://www.isthe.com/chongo/src/fnv/test_fnv.c
    assert checksum('') == 'cbf29ce484222325'
    assert checksum('foobar') == '85944171f73967e8'


def test_answers_are_read_as_they_were_given(write):
    files = [write(f'{number}.json', answers_text(KEY, number)) for number in (1, 2)]
    assert read_answers(files, COMPARISON, PAIRS) == answers_of(KEY, 1) + answers_of(KEY, 2)


ROW = {'pair': 0, 'question': 'quality', 'choice': 'first'}


@pytest.mark.parametrize(
    ('text', 'message'),
    [
        ('', r'is not an answer file as written by the page \(JSONDecodeError\); ask its author'),
        (b'\x89PNG\r\n\x1a\n\xff', 'is not an answer file'),
        ('[' * 100_000, 'is not an answer file'),
        ('{"comparison": "c0ffee0123456789"}', r'is not an answer file .*KeyError'),
        (changed(answers=[ROW]), 'was modified after the page wrote it; ask its author for the original'),
        (resealed(rater='../../../etc/passwd'), "its rater '../../../etc/passwd' is not an identifier"),
        (resealed(answers=[ROW, ROW]), 'answers the quality of pair 0 twice'),
        (resealed(answers=[ROW | {'pair': PAIRS}]), f"answers 'quality' of pair {PAIRS} by 'first', which the page"),
        (resealed(answers=[ROW | {'pair': True}]), 'of pair True by'),
        (resealed(answers=[ROW | {'choice': 'left'}]), "by 'left', which"),
        (resealed(answers=[ROW | {'question': ['quality']}]), 'which the page does not ask'),
        ('x' * (MAX_BYTES + 1), f'has more than {MAX_BYTES} bytes'),
    ],
)
def test_file_that_the_page_did_not_write_is_refused_by_name(write, text, message):
    file = write('hers.json', text)
    with pytest.raises(UserError, match=f'hers.json: .*{message}'):
        read_answers([file], COMPARISON, PAIRS)


def test_file_that_cannot_be_read_is_refused(tmp_path):
    for path, message in ((tmp_path / 'none.json', 'No such file'), (tmp_path, 'Is a directory')):
        with pytest.raises(UserError, match=f'{path}: cannot be read .{message}'):
            read_answers([path], COMPARISON, PAIRS)


def test_two_files_of_one_person_count_once_and_must_agree(write, caplog):
    files = [write('early.json', answers_text(KEY, 1, pairs=2)), write('late.json', answers_text(KEY, 1))]
    for order in (files, files[::-1], [*files, files[1]]):
        assert read_answers(order, COMPARISON, PAIRS) == answers_of(KEY, 1)
    assert 'are from the same person; the longer one counts' in caplog.text
    other = write('other.json', answers_text(KEY, 1, lambda *_: 'tie'))
    with pytest.raises(UserError, match=r'late.json and .*other.json: have different answers from the same person'):
        read_answers([files[1], other], COMPARISON, PAIRS)


def test_file_without_answers_is_named(write, caplog):
    assert read_answers([write('none.json', answers_json(COMPARISON, rater_name(1), []))], COMPARISON, PAIRS) == []
    assert 'none.json: has no answers' in caplog.text
