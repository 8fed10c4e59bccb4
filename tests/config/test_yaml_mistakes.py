"""Mistakes in YAML files, interpolations and overrides: each is an error that names it, and none runs code."""

import contextlib
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from golden import check_transcripts
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusion.config.load import RecipeError, load
from diffusion.config.yaml_files import UnreadableYAML, merge, merge_and_resolve, read_yaml
from diffusion.errors import UserError
from diffusion.launch.job_checks import load_job_spec
from diffusion.planning.gpus import load_gpus
from diffusion.prepare.settings import load_settings

SPACE = re.compile(r' (?=[\w.\[\]]*=)')  # between overrides


def test_contents_and_mistakes_of_files_interpolations_and_overrides(tmp_path, monkeypatch):
    """The lines of the files are, as JSON, the text of a file, or a mapping with interpolations; or overrides."""
    # A module of the working directory, which `${oc.coerce:payload.x,1}` of OmegaConf would import.
    (tmp_path / 'payload.py').write_text("open('pwned', 'w')\nx = int\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    path, content = Path('r.yaml'), dict[Any, Any]({'l': [1], 'x': 1, 7: 'a'})

    def outcome(line):
        try:
            if line.startswith('"'):
                path.write_text(json.loads(line), encoding='utf-8', errors='surrogatepass')
                return [read_yaml(path)]
            if line.startswith('{'):
                return [merge([json.loads(line)], [])]
            return [merge([content], SPACE.split(line))]
        except UnreadableYAML as error:
            return str(error).splitlines()

    check_transcripts(Path(__file__).parent / 'golden' / 'yaml', outcome)
    assert sorted(os.listdir()) == ['payload.py', 'r.yaml'], 'code of a file ran'


def test_integer_of_many_digits_is_an_error_that_quotes_the_first_ones(tmp_path):
    path = tmp_path / 'r.yaml'
    path.write_text('a: ' + '9' * 100_000)
    with pytest.raises(UnreadableYAML, match=r"'9{40}\.\.\.' is not a valid int"):
        read_yaml(path)


def test_mistake_is_an_error_in_every_kind_of_yaml_file(tmp_path):
    path = tmp_path / 'r.yaml'
    mistakes = {'a: !!python/name:os.system': 'tag', 'a: 1\na: 2': "duplicate key 'a'", 'a: b\0': r'U\+0000'}
    for text, message in mistakes.items():
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


@given(text=st.text('${}:.,oc[]ab\'"\\ ', max_size=25))
@settings(max_examples=80, deadline=None)
def test_any_text_is_read_or_refused(text):
    with contextlib.suppress(UnreadableYAML):
        merge_and_resolve([{'a': text, 'b': {'c': 'x'}}], [], {})
