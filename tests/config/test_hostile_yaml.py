"""Recipes and other YAML files that were written to harm: each is an error within a second, and none runs code."""

import contextlib
import json
import os
import time

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusion.config.load import RecipeError, load
from diffusion.config.yaml_files import UnreadableYAML, merge, merge_and_resolve, read_chain, read_yaml
from diffusion.errors import UserError
from diffusion.launch.job_checks import load_job_spec
from diffusion.planning.gpus import load_gpus
from diffusion.prepare.settings import load_settings

SECONDS = 5.0
"""Limit for a file that takes a few milliseconds on an idle machine; the files below would take hours, or never end."""


def powers(first, line, levels):
    """Return YAML of a first line and further levels; `line` makes each from its own and the previous letter."""
    return first + ''.join(line(chr(98 + level), chr(97 + level)) for level in range(levels))


HOSTILE = {
    'lists of aliases': (
        powers(
            'a: &a [x, x, x, x, x, x, x, x, x]\n', lambda new, old: f'{new}: &{new} [{", ".join([f"*{old}"] * 9)}]\n', 9
        ),
        'more than 10000 values, aliases included',
    ),
    'mappings of aliases': (
        powers('a: &a {x: 1}\n', lambda new, old: f'{new}: &{new} {{p: *{old}, q: *{old}, r: *{old}}}\n', 20),
        'more than 10000 values, aliases included',
    ),
    'deep list': ('a: ' + '[' * 10000 + ']' * 10000, 'nested more than 40 levels deep'),
    'deep mapping': ('a: ' + '{a: ' * 5000 + '1' + '}' * 5000, 'nested more than 40 levels deep'),
    'deep blocks': ('a:\n  ' + '- ' * 3000 + 'x', 'nested more than 40 levels deep'),
    'list in itself': ('a: &a [*a]', r'\*a refers to itself'),
    'mapping in itself': ('a: &a\n  b: *a', r'\*a refers to itself'),
    'large file': ('a: ' + 'x' * 600_000, 'has 600003 bytes, the limit is 524288'),
    'merge key': ('a: &a {x: 1}\nb: {<<: *a}', r'merge keys \(<<\) are not supported'),
    'duplicate key': ('a: 1\na: 2', "duplicate key 'a', first in line 1"),
    'duplicate number': ('1: 1\n1: 2', 'duplicate key 1'),
    'python tag': (
        'a: !!python/object/apply:os.system ["touch pwned"]',
        'python/object/apply:os.system. is not supported',
    ),
    'binary tag': ('a: !!binary aGk=', 'binary. is not supported'),
    'set tag': ('a: !!set {b}', 'set. is not supported'),
    'own tag': ('a: !foo x', "tag '!foo' is not supported"),
    'wrong integer': ('a: !!int x', "'x' is not a valid int"),
    'wrong number': ('a: !!float x', "'x' is not a valid float"),
    'integer of 100,000 digits': ('a: ' + '9' * 100_000, r"'9{40}\.\.\.' is not a valid int"),
    'integer of 30 digits': ('a: ' + '9' * 30, '9{30} does not fit into 64 bits'),
    'hexadecimal integer': ('a: 0x' + 'f' * 50_000, 'does not fit into 64 bits'),
    'base 60 integer': ('a: !!int ' + ':'.join(['59'] * 10_000), 'is not a valid int'),
    'number above the range': ('a: 1e999999', '1e999999 is too large for a number'),
    'empty key': ('? \n: 1', 'a key must be text or a number'),
    'list as key': ('? [a, b]\n: 1', 'a key must be text or a number'),
    'control character': ('a: b\x01', r'character U\+0001 at offset 4 is not allowed'),
    'NUL': ('a: b\0', r'character U\+0000 at offset 4 is not allowed'),
    'escaped NUL': ('a: "b\\0"', r'contains U\+0000'),
    'half a surrogate pair': ('a: "\\ud800"', r'contains U\+D800'),
    'list': ('- a', 'is not a mapping of sections'),
    'nothing': ('', 'is not a mapping of sections'),
}


@pytest.mark.parametrize('name', HOSTILE)
def test_hostile_yaml_is_an_error_at_once(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, message = HOSTILE[name]
    path = tmp_path / 'r.yaml'
    path.write_text(text)
    began = time.monotonic()
    with pytest.raises(UnreadableYAML, match=message):
        read_yaml(path)
    assert time.monotonic() - began < SECONDS
    assert os.listdir(tmp_path) == ['r.yaml'], 'code of the file ran'


def references(count, times, first):
    """Return an interpolation bomb: each of `count` texts repeats the previous one."""
    return [first, *(''.join([f'${{a.{index}}}'] * times) for index in range(count))]


INTERPOLATIONS = {
    'two that refer to each other': ({'a': '${b}', 'b': '${a}'}, 'a: circular interpolation: a -> b -> a'),
    'itself': ({'a': 'x${a}'}, 'circular interpolation: a -> a'),
    'its section': ({'a': {'b': '${a}'}}, 'circular interpolation: a -> a.b -> a'),
    'texts that double': ({'a': references(40, 2, 'x' * 50)}, 'produce more than 4194304 characters'),
    'texts of many references': ({'a': references(9, 99, 'x' * 50)}, 'produce more than 4194304 characters'),
    'sections that double': (
        {'a0': {'x': 1}} | {f'a{i + 1}': {'x': f'${{a{i}}}', 'y': f'${{a{i}}}'} for i in range(30)},
        'produce more than 10000 values',
    ),
    'a chain of 2000': ({'a': [f'${{a.{index + 1}}}' for index in range(2000)] + ['x']}, 'too many interpolations'),
    'nested 3000 deep': ({'a': '${' * 3000 + 'b' + '}' * 3000}, 'has at most 10000 characters and 200 interpolations'),
    'nested 150 deep': ({'a': '${' * 150 + 'b' + '}' * 150}, 'too many interpolations refer to each other|not found'),
    'a long text': ({'a': '${b}' * 10_000, 'b': 1}, 'has at most 10000 characters'),
    'decoding itself': ({'a': '${oc.decode:${a}}'}, 'circular interpolation'),
    'decoding a deep list': ({'a': "${oc.decode:'" + '[' * 500 + ']' * 500 + "'}"}, 'too many interpolations'),
    'decoding a long number': ({'a': '${oc.decode:' + '9' * 6000 + '}'}, 'a: cannot be resolved'),
    'a module': ({'a': '${oc.coerce:payload.x,1}'}, r'oc\.coerce:\.\.\.} with 2 arguments is not supported'),
    'a module by a computed name': (
        {'a': '${oc.${b}:payload.x,1}', 'b': 'coerce'},
        r'oc\.coerce:\.\.\.} with 2 arguments is not supported',
    ),
    'an unknown resolver': ({'a': '${shell:ls}'}, 'is not supported; use'),
    'an unclosed brace': ({'a': '${'}, r'write \\\$\{ for a literal'),
}


@pytest.mark.parametrize('name', INTERPOLATIONS)
def test_hostile_interpolation_is_an_error_at_once(name, tmp_path, monkeypatch):
    # A module of the working directory, which `${oc.coerce:payload.x,1}` of OmegaConf would import.
    (tmp_path / 'payload.py').write_text("open('pwned', 'w')\nx = int\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    content, message = INTERPOLATIONS[name]
    began = time.monotonic()
    with pytest.raises(UnreadableYAML, match=message):
        merge([content], [])
    assert time.monotonic() - began < SECONDS
    assert not (tmp_path / 'pwned').exists()


def test_hostile_text_is_an_error_in_every_kind_of_yaml_file(tmp_path):
    path = tmp_path / 'r.yaml'
    for text, message in (HOSTILE['lists of aliases'], HOSTILE['deep list'], HOSTILE['python tag'], HOSTILE['NUL']):
        path.write_text(text)
        for read in (load, load_job_spec, load_settings, load_gpus):
            with pytest.raises(UserError, match=message):
                read(path)


@pytest.mark.parametrize('kind', ['pipe', 'folder', 'device', 'absent', 'loop of links', 'not UTF-8'])
def test_path_that_is_no_text_file_is_refused_without_waiting(kind, tmp_path):
    path = tmp_path / 'r.yaml'
    if kind == 'pipe':
        os.mkfifo(path)
    elif kind == 'folder':
        path.mkdir()
    elif kind == 'device':
        path.symlink_to('/dev/zero')
    elif kind == 'loop of links':
        path.symlink_to(path)
    elif kind == 'not UTF-8':
        path.write_bytes(b'a: \xff')
    with pytest.raises(RecipeError, match='cannot be read|not UTF-8 text'):
        load(path)


def test_long_chain_of_extends_is_refused(tmp_path):
    for index in range(30):
        (tmp_path / f'{index}.yaml').write_text(f'extends: {index + 1}.yaml')
    with pytest.raises(UnreadableYAML, match='more than 20 files extend each other'):
        read_chain(tmp_path / '0.yaml')


def test_extends_of_a_pipe_is_refused_without_waiting(tmp_path):
    os.mkfifo(tmp_path / 'pipe.yaml')
    (tmp_path / 'r.yaml').write_text('extends: pipe.yaml')
    with pytest.raises(UnreadableYAML, match=r'pipe\.yaml cannot be read \(it is a pipe or device\)'):
        read_chain(tmp_path / 'r.yaml')


@pytest.mark.parametrize(
    'name', ['..', '.', '.git', 'a/b', '/abs', '', 'a' * 129, '-x', '--help', 'a\\b', ' x', 'a\n', 'a\x1b[2J', '名']
)
def test_name_that_cannot_name_a_folder_is_refused_with_the_rule(name):
    with pytest.raises(RecipeError, match='name: .* cannot name a folder; use letters, digits, underscores'):
        load('yamls/quickstart.yaml', [f'name={json.dumps(name)}'])


@pytest.mark.parametrize('batch', [2**31 + 1, 2**62, 1_000_000_000_007])
def test_huge_batch_is_refused_at_once(batch):
    with pytest.raises(RecipeError, match=f'global_batch: {batch} is more than'):
        load('yamls/quickstart.yaml', [f'global_batch={batch}', 'device_train_microbatch_size=3'])


@pytest.mark.parametrize(
    'override', ['a.' * 50 + 'b=1', 'a..b=1', '.a=1', 'l[5]=1', 'l[-1]=1', 'l.x=1', 'a=[' + '[' * 99]
)
def test_hostile_override_is_an_error(override):
    with pytest.raises(UnreadableYAML):
        merge([{'l': [1], 'a': 1}], [override])


def test_override_changes_an_item_of_a_list():
    assert merge([{'l': [1, {'a': 2}]}], ['l[1].a=3', 'l.0=4']) == {'l': [4, {'a': 3}]}


@given(text=st.text('${}:.,oc[]ab\'"\\ ', max_size=25))
@settings(max_examples=80, deadline=None)
def test_any_text_is_read_or_refused(text):
    with contextlib.suppress(UnreadableYAML):
        merge_and_resolve([{'a': text, 'b': {'c': 'x'}}], [], {})
