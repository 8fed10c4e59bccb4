"""Mistakes in YAML files, interpolations and overrides: each is an error that names it, and none runs code."""

import contextlib
import json
import os

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusion.config.load import RecipeError, load
from diffusion.config.yaml_files import UnreadableYAML, merge, merge_and_resolve, read_yaml
from diffusion.errors import UserError
from diffusion.launch.job_checks import load_job_spec
from diffusion.planning.gpus import load_gpus
from diffusion.prepare.settings import load_settings

MISTAKES = {
    'merge key': ('a: &a {x: 1}\nb: {<<: *a}', r'merge keys \(<<\) are not supported'),
    'duplicate key': ('a: 1\na: 2', "duplicate key 'a', first in line 1"),
    'python tag': ('a: !!python/object/apply:os.system ["touch pwned"]', 'python/object/apply:os.system. is not'),
    'own tag': ('a: !foo x', "tag '!foo' is not supported"),
    'wrong integer': ('a: !!int ' + 'x' * 40, "'x{40}' is not a valid int"),
    'integer of 100,000 digits': ('a: ' + '9' * 100_000, r"'9{40}\.\.\.' is not a valid int"),
    'integer of 41 digits': ('a: ' + '9' * 41, r'9{40}\.\.\. does not fit into 64 bits'),
    'integer of 64 bits': ('a: 9223372036854775808', '9223372036854775808 does not fit into 64 bits'),
    'number above the range': ('a: 1e999999', '1e999999 is too large for a number'),
    'empty key': ('? \n: 1', 'a key must be text or a number'),
    'control character': ('a: b\x01', r'character U\+0001 at offset 4 is not allowed'),
    'NUL': ('a: b\0', r'character U\+0000 at offset 4 is not allowed'),
    'escaped NUL': ('a: "b\\0"', r'contains U\+0000'),
    'list': ('- a', 'is a list; write a mapping of sections'),
}


@pytest.mark.parametrize('name', MISTAKES)
def test_mistake_in_yaml_is_an_error_that_names_it(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    text, message = MISTAKES[name]
    path = tmp_path / 'r.yaml'
    path.write_text(text)
    with pytest.raises(UnreadableYAML, match=message):
        read_yaml(path)
    assert os.listdir(tmp_path) == ['r.yaml'], 'code of the file ran'


INTERPOLATIONS = {
    'two that refer to each other': ({'a': '${b}', 'b': '${a}'}, 'a: Recursive interpolation'),
    'itself': ({'a': 'x${a}'}, 'a: Recursive interpolation'),
    'sections that refer to each other': ({'a': {'b': '${c}'}, 'c': {'d': '${a}'}}, 'refer to each other in a circle'),
    'decoding itself': ({'a': '${oc.decode:${a}}'}, 'a: Recursive interpolation'),
    'a value that is not set': ({'a': ['${b}'], 'b': '???'}, r'a\[0\]: Missing mandatory value: b; correct'),
    'a key above the file': ({'a': '${..b}'}, r"a: .*'..b'; correct the interpolation"),
    'a module': ({'a': '${oc.coerce:payload.x,1}'}, 'a: Unsupported interpolation type oc.coerce; use oc.env'),
    'a computed module': (
        {'a': '${oc.${b}:payload.x,1}', 'b': 'coerce'},
        'Unsupported interpolation type oc.coerce; use',
    ),
    'an unknown resolver': ({'a': '${shell:ls}'}, 'a: Unsupported interpolation type shell; use oc.env'),
    'no variable': ({'a': '${oc.env:}'}, "a: oc.env takes the name of an environment variable and one default, not ''"),
    'two defaults': (
        {'a': '${oc.env:A,b,c}'},
        "a: oc.env takes the name of an environment variable and one default, not 'A'",
    ),
    'a backslash': ({'a': r'${oc.env:A,${oc.env:B}\\\\x}'}, 'must not contain backslashes or both kinds of quotes'),
    'an unclosed brace': ({'a': '${'}, r'a: .*write \\\$\{ for a literal'),
}


@pytest.mark.parametrize('name', INTERPOLATIONS)
def test_mistake_in_interpolation_is_an_error_that_names_it(name, tmp_path, monkeypatch):
    # A module of the working directory, which `${oc.coerce:payload.x,1}` of OmegaConf would import.
    (tmp_path / 'payload.py').write_text("open('pwned', 'w')\nx = int\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    content, message = INTERPOLATIONS[name]
    with pytest.raises(UnreadableYAML, match=message):
        merge([content], [])
    assert not (tmp_path / 'pwned').exists()


def test_mistake_is_an_error_in_every_kind_of_yaml_file(tmp_path):
    path = tmp_path / 'r.yaml'
    for text, message in (MISTAKES['python tag'], MISTAKES['duplicate key'], MISTAKES['NUL']):
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
    with pytest.raises(RecipeError, match='cannot be read|does not exist|not UTF-8 text'):
        load(path)


@pytest.mark.parametrize('name', ['..', '.', '.git', 'a/b', '/abs', '', 'a' * 129, '-x', '--help', 'a\\b', 'a\n', '名'])
def test_name_that_cannot_name_a_folder_is_refused_with_the_rule(name):
    with pytest.raises(RecipeError, match='name: .* cannot name a folder; use letters, digits, underscores'):
        load('yamls/quickstart.yaml', [f'name={json.dumps(name)}'])


@pytest.mark.parametrize('batch', [2**31 + 1, 2**62, 1_000_000_000_007])
def test_huge_batch_is_refused_at_once(batch):
    with pytest.raises(RecipeError, match=f'global_batch: {batch} is more than'):
        load('yamls/quickstart.yaml', [f'global_batch={batch}', 'device_train_microbatch_size=3'])


@given(text=st.text('${}:.,oc[]ab\'"\\ ', max_size=25))
@settings(max_examples=80, deadline=None)
def test_any_text_is_read_or_refused(text):
    with contextlib.suppress(UnreadableYAML):
        merge_and_resolve([{'a': text, 'b': {'c': 'x'}}], [], {})
