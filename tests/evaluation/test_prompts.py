"""Prompt sets: published files, files with mistakes, and the package's own prompts."""

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusion.errors import UserError
from diffusion.evaluation.prompts import Prompt, categories, own_prompts, read_prompts

# Lines as in the published files, with their columns.
PUBLISHED = {
    'drawbench.csv': 'Prompts,Category\nA red colored car.,Colors\n"A sign, that says ""Hello"".",Text\n',
    'parti.tsv': (
        'Prompt\tCategory\tChallenge\tNote\n'
        'A red colored car.\tColors\tBasic\t\nA sign, that says "Hello".\tText\tWriting & Symbols\tx\n'
    ),
    'geneval.jsonl': (
        '{"tag": "colors", "include": [{"class": "car", "count": 1}], "prompt": "A red colored car."}\n'
        '{"tag": "text", "prompt": "A sign, that says \\"Hello\\"."}\n'
    ),
    'prompts.txt': '\ufeffA red colored car.\r\n\r\nA sign, that says "Hello".\n',
}


@pytest.mark.parametrize('name', PUBLISHED)
def test_published_files_are_read(tmp_path, name):
    file = tmp_path / name
    file.write_bytes(PUBLISHED[name].encode())
    prompts = read_prompts(file)
    assert [each.text for each in prompts] == ['A red colored car.', 'A sign, that says "Hello".']
    if name in ('drawbench.csv', 'parti.tsv'):
        assert [each.category for each in prompts] == ['Colors', 'Text']
    if name == 'geneval.jsonl':
        assert [each.category for each in prompts] == ['colors', 'text']
    assert (prompts[0].metadata.get('tag') == 'colors') == (name == 'geneval.jsonl')


def test_own_prompts_are_120_different_ones_in_12_categories():
    prompts = own_prompts()
    assert len({each.text for each in prompts}) == len(prompts) == 120
    assert {len(indices) for indices in categories(prompts).values()} == {10}
    assert len(categories(prompts)) == 12


def test_column_can_be_named(tmp_path):
    file = tmp_path / 'pairs.csv'
    file.write_text('short,prompt,category\na cat,a cat on a chair\n')  # the category is missing
    assert read_prompts(file) == [Prompt('a cat on a chair')]
    assert read_prompts(file, 'short') == [Prompt('a cat')]


@pytest.mark.parametrize(
    ('name', 'content', 'column', 'message'),
    [
        ('a.csv', 'title,url\nx,y\n', None, 'a.csv line 2: has no column prompt or .*, only title, url; name'),
        ('a.csv', 'prompt\nx\n', 'text', "a.csv line 2: has no column 'text', only prompt"),
        ('a.csv', 'prompt,category\nx,\n ,colors\n', None, "a.csv line 3: its prompt is ' ', not a prompt"),
        ('a.csv', 'prompt,category\nx\n,y,z\n', None, 'a.csv line 3: has 3 cells, more than the 2 columns'),
        ('a.txt', 'a\0 \0c\0', None, 'a.txt line 1: its prompt .* is not UTF-8 text'),
        ('a.txt', '\n \n', None, 'a.txt: has no prompts'),
        ('a.jsonl', '{"prompt": "x"}\n{"prompt"', None, 'a.jsonl line 2: is not JSON'),
        ('a.jsonl', '{"prompt": 7}', None, 'a.jsonl line 1: its prompt is 7, not a prompt'),
        ('a.parquet', 'PAR1', None, 'a.parquet: is not a .txt, .csv, .tsv, .jsonl or .json'),
        ('a.json', '["a cat"]', None, 'a.json: has no list of prompts, also not under "data_list"'),
        ('a.json', '{"question": 1}', None, 'a.json: has no list of prompts, also not under'),
        ('a.json', '{', None, 'a.json: is not JSON'),
        ('latin.txt', 'caf\xe9', None, 'latin.txt: is not UTF-8'),
        ('none.txt', None, None, 'none.txt: does not exist'),
    ],
)
def test_mistakes_are_named(tmp_path, name, content, column, message):
    if content is not None:
        (tmp_path / name).write_text(content, encoding='latin-1')
    with pytest.raises(UserError, match=message):
        read_prompts(tmp_path / name, column)


@pytest.fixture(scope='module')
def any_file(tmp_path_factory) -> Path:
    return tmp_path_factory.mktemp('prompts') / 'any'


@settings(max_examples=200, deadline=None)
@given(st.binary(max_size=60), st.sampled_from(['.txt', '.csv', '.tsv', '.jsonl']))
def test_any_bytes_are_prompts_or_a_user_error(any_file, content, suffix):
    file = any_file.with_suffix(suffix)
    file.write_bytes(content)
    try:
        prompts = read_prompts(file)
    except UserError:
        return
    assert prompts
    assert all(each.text.strip() for each in prompts)
