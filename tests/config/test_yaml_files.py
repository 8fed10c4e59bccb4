"""Reading, merging and writing of YAML files."""

import pytest
import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusion.config.yaml_files import UnreadableYAML, dump, dump_inline, merge, read_chain, read_yaml

AMBIGUOUS = r'1e-4 1e4 .5 08 yes null 2024-01-01 ${a} \${a} \\${ 12:30 ._ ~'
# Exclude control characters and Unicode line breaks such as U+0085, which PyYAML folds.
text = st.text(st.characters(blacklist_categories=['Cs', 'Cc', 'Zl', 'Zp']), max_size=12) | st.sampled_from(
    [*AMBIGUOUS.split(), '', 'two\nlines', '- a', 'a: b']
)
scalars = st.none() | st.booleans() | st.integers(-(2**63) + 1, 2**63 - 1) | st.floats(allow_nan=False) | text
values = st.recursive(
    scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text('abc', min_size=1), inner, max_size=3)
)


@given(content=st.dictionaries(st.text('abcdef', min_size=1), values, max_size=4))
@settings(max_examples=25, deadline=None)
def test_dumped_values_are_read_back_unchanged(tmp_path_factory, content):
    path = tmp_path_factory.mktemp('dump') / 'a.yaml'
    path.write_text(dump(content), encoding='utf-8', newline='')
    read = merge([read_yaml(path)], [])
    assert read == content
    assert repr(read) == repr(content)  # repr distinguishes 1, 1.0 and True


@given(value=values | st.text(st.characters(blacklist_categories=['Cs'], blacklist_characters='\0'), max_size=12))
@settings(max_examples=60, deadline=None)
def test_override_from_dump_inline_restores_the_value(value):
    written = dump_inline(value)
    assert '\n' not in written
    assert repr(merge([{}], [f'key={written}'])['key']) == repr(value)


@pytest.fixture
def files(tmp_path):
    def write(**contents):
        for name, content in contents.items():
            (tmp_path / f'{name}.yaml').write_text(content)
        return tmp_path

    return write


def test_written_yaml_is_readable():
    assert dump({'b': ['ä', {'c': ''}], 'a': None}) == "b:\n- ä\n- c: ''\na: null\n"
    words = ' '.join(['word'] * 60)
    assert dump_inline({'b': ['ä', words], 'a': None}) == f'{{b: [ä, {words}], a: null}}'


def test_later_files_change_mappings_and_replace_lists(files):
    folder = files(
        a='x: {one: 1, two: 2}\nl: [1, 2]', b='extends: a.yaml\nx: {two: 3}\nl: [4]', c='extends: b.yaml\nx: {one: 0}'
    )
    assert merge(read_chain(folder / 'c.yaml'), ['x.three=5']) == {'x': {'one': 0, 'two': 3, 'three': 5}, 'l': [4]}
    assert merge([{'l': [1, {'a': 2}]}], ['l[1].a=${oc.select:z,3}', 'l.0=4']) == {'l': [4, {'a': 3}]}


def test_component_with_another_name_does_not_inherit_keywords(files):
    folder = files(
        a='name: a\nmodel: {name: sd2, vae: x}\noptimizer: {name: adamw, lr: 1}\ncallbacks: {grid: {every: 1ba}}',
        b='extends: a.yaml\nname: b\nmodel: {name: tiny}\noptimizer: {name: adamw, eps: 2}\n'
        'callbacks: {grid: {name: other}}',
    )
    assert merge(read_chain(folder / 'b.yaml'), []) == {
        'name': 'b',
        'model': {'name': 'tiny'},
        'optimizer': {'name': 'adamw', 'lr': 1, 'eps': 2},
        'callbacks': {'grid': {'name': 'other'}},
    }


def test_circular_extends_error_shows_the_chain(files):
    folder = files(a='extends: b.yaml', b='extends: a.yaml', c='extends: deep/../c.yaml')
    (folder / 'deep').mkdir()
    with pytest.raises(UnreadableYAML, match=r'circular reference: .*a\.yaml -> .*b\.yaml -> .*a\.yaml'):
        read_chain(folder / 'a.yaml')
    with pytest.raises(UnreadableYAML, match='circular reference'):
        read_chain(folder / 'c.yaml')
    (folder / 'd.yaml').write_text('extends: deep/nowhere.yaml')
    with pytest.raises(UnreadableYAML, match=r'd\.yaml: extends: .*nowhere\.yaml does not exist; the path is relative'):
        read_chain(folder / 'd.yaml')


@pytest.mark.parametrize('text', ['yes', 'no', 'on', 'off', '010', '00e5', '1:30', '2024-01-01', 'true'])
def test_text_is_written_so_that_readers_of_yaml_1_1_keep_it(text):
    for written in (dump({'key': text}), f'key: {dump_inline(text)}'):
        content = yaml.load(written, yaml.SafeLoader)
        assert str(content['key']) == text
        assert merge([{}], [f'key={dump_inline(text)}']) == {'key': text}
