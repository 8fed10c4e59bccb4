"""Values of `${oc.env:...}`: the program uses them, and everything that is saved or printed has the name instead."""

import re
from pathlib import Path

import pytest
from commands import output_of, refusal
from golden import check_transcripts
from hypothesis import given, settings
from hypothesis import strategies as st
from recipe_files import all_values

from diffusion.cli import main
from diffusion.config.load import RecipeError, hide_environment, load, to_yaml
from diffusion.config.yaml_files import UnreadableYAML, dump, merge, merge_and_resolve, parse_yaml
from diffusion.prepare.settings import load_settings

SECRET = 'vq8-Z1-not-to-be-seen'
RECIPE = 'yamls/quickstart.yaml'


@pytest.fixture(autouse=True)
def _variables(monkeypatch):
    monkeypatch.setenv('KEY', SECRET)
    monkeypatch.setenv('NUMBER', '7')
    monkeypatch.setenv('SIX', 'sesame')
    monkeypatch.delenv('ABSENT', raising=False)


def wandb(**keywords):
    """Return the override of a recipe that gives a logger these keywords."""
    items = ', '.join(f'{key}: "{value}"' for key, value in keywords.items())
    return f'loggers.wandb.init_kwargs={{{items}}}'


FORMS = {
    'the value': ('${oc.env:KEY}', SECRET),
    'part of a text': (r'a-${oc.env:KEY}-\\${b}', f'a-{SECRET}-${{b}}'),
    'with a default': ('${oc.env:KEY,other}', SECRET),
    'a default that is used': ("${oc.env:ABSENT,'a b'}", 'a b'),
    'a default from a variable': ('${oc.env:ABSENT,${oc.env:KEY}}', SECRET),
    'decoded in a text': ("${oc.decode:'[${oc.env:NUMBER}, 2]'}", [7, 2]),
    'a reference': ('${loggers.wandb.init_kwargs.first}', SECRET),
    'a reference to a reference': ('x${loggers.wandb.init_kwargs.second}', f'x{SECRET}'),
    'a computed resolver': ('${oc.${.resolver}:KEY}', SECRET),
    'the default of a selected value': ('${oc.select:absent,${oc.env:KEY}}', SECRET),
}
FAST_FORMS = {*('part of a text', 'a default from a variable', 'decoded in a text', 'a reference to a reference')}


@pytest.mark.parametrize(
    'form', [form if form in FAST_FORMS else pytest.param(form, marks=pytest.mark.slow) for form in FORMS]
)
def test_program_gets_the_value_and_saved_recipe_has_the_name(form, tmp_path):
    text, value = FORMS[form]
    recipe = load(RECIPE, [wandb(resolver='env', first='${oc.env:KEY}', second='${.first}', form=text)])
    assert recipe.loggers['wandb'].kwargs['init_kwargs']['form'] == value
    saved = to_yaml(recipe)
    assert SECRET not in saved
    assert 'first: ${oc.env:KEY}' in saved
    # What was saved reads back to the same values and text, also with another value of the variable.
    path = tmp_path / 'recipe.yaml'
    path.write_text(saved)
    assert all_values(load(path)) == all_values(recipe)
    assert to_yaml(load(path)) == saved


def test_item_of_list_and_reference_to_section_with_variable_are_saved_by_name():
    recipe = load(RECIPE, ["generate.prompts=['a cat', '${oc.env:KEY}']"])
    assert '- ${oc.env:KEY}' in to_yaml(recipe)
    assert recipe.generate.prompts == ['a cat', SECRET]
    trainer = 'trainer={max_duration: 1ba, save_filename: "${oc.env:KEY}"}'
    recipe = load(RECIPE, [trainer, 'loggers.wandb.init_kwargs=${trainer}', 'trainer.save_folder=x'])
    assert recipe.loggers['wandb'].kwargs['init_kwargs']['save_filename'] == SECRET
    assert SECRET not in to_yaml(recipe)


def test_component_that_is_a_variable_is_saved_by_name(monkeypatch):
    monkeypatch.setenv('WANDB', f'{{init_kwargs: {{tags: [{SECRET}]}}}}')
    recipe = load(RECIPE, ['loggers.wandb=${oc.decode:${oc.env:WANDB}}'])
    assert recipe.loggers['wandb'].kwargs == {'init_kwargs': {'tags': [SECRET]}}
    assert hide_environment(recipe, f'no {SECRET}') == 'no ${oc.decode:${oc.env:WANDB}}'
    assert 'wandb: ${oc.decode:${oc.env:WANDB}}' in to_yaml(recipe)
    assert SECRET not in to_yaml(recipe)


def test_error_messages_have_the_name_instead_of_the_value(monkeypatch, shipped_components):
    """The lines of the file are overrides."""
    for number, value in enumerate((f"'a'{SECRET}", f'${{{SECRET}:1}}', f'[{SECRET}', f'${{{SECRET}')):
        monkeypatch.setenv(f'BAD{number}', value)

    def outcome(line):
        with pytest.raises(RecipeError) as raised:
            load(RECIPE, [line])
        assert SECRET not in str(raised.value)
        return raised.value.problems

    check_transcripts(Path(__file__).parent / 'golden' / 'environment', outcome)


def test_later_message_has_the_name_instead_of_the_value():
    recipe = load(RECIPE, ['init_from=${oc.env:KEY}/ba7', wandb(name='${oc.env:NUMBER}', id='${oc.env:SIX}')])
    hidden = 'checkpoint: ${oc.env:KEY}/ba7 of ${oc.env:SIX} is not a checkpoint; 7 were found'
    assert hide_environment(recipe, f'checkpoint: {SECRET}/ba7 of sesame is not a checkpoint; 7 were found') == hidden


def test_check_prints_the_name_instead_of_the_value(capsys):
    assert main(['check', RECIPE, 'loggers.wandb.entity=${oc.env:KEY}']) == 0
    printed = capsys.readouterr()
    assert 'entity: ${oc.env:KEY}' in printed.out
    assert SECRET not in printed.out + printed.err


def test_variable_that_is_not_set_is_an_error_that_names_it(capsys):
    override = 'loggers.wandb.entity=${oc.env:ABSENT}'
    message = 'loggers.wandb.entity: needs the environment variable ABSENT, which is not set; export it, or give'
    with pytest.raises(RecipeError, match=re.escape(message)):
        load(RECIPE, [override])
    assert message in output_of(capsys, 'check', RECIPE, override), 'complete but for the variable'
    assert message in refusal(capsys, 'check', RECIPE, override, '--strict')
    with pytest.raises(
        UnreadableYAML, match='x: needs the environment variables ABSENT and GONE, .* not set; export them'
    ):
        merge([{'x': '${oc.env:ABSENT}${oc.env:GONE}'}], [])


def test_saved_recipe_is_usable_without_variables_of_sections_that_a_task_does_not_read(tmp_path, monkeypatch):
    overrides = ['loggers.wandb.entity=${oc.env:KEY}', 'trainer.max_duration=${oc.env:LENGTH}']
    overrides += ['callbacks.image_grid.every=${oc.decode:${oc.env:NUMBER}}ba', 'runs_dir=${oc.env:KEY}/runs']
    monkeypatch.setenv('LENGTH', '9ba')
    path = tmp_path / 'recipe.yaml'
    path.write_text(to_yaml(load(RECIPE, overrides)))
    for name in ('KEY', 'NUMBER', 'LENGTH'):
        monkeypatch.delenv(name)
    recipe = load(path, task='generate')
    assert recipe.trainer['max_duration'] == '${oc.env:LENGTH}'
    assert to_yaml(recipe) == path.read_text()
    for task in (None, 'evaluate'):
        with pytest.raises(RecipeError, match='needs the environment variable KEY'):
            load(path, task=task)
    path.write_text(path.read_text().replace('resolution: 64', 'resolution: ${oc.decode:${oc.env:SIDE}}', 1))
    with pytest.raises(RecipeError, match='needs the environment variable SIDE'):
        load(path, task='generate')


def test_preparation_recipe_refuses_variables(tmp_path):
    path = tmp_path / 'p.yaml'
    path.write_text('source: {kind: folder, location: "${oc.env:KEY}"}\nout: x\nsizes: [64]\n')
    with pytest.raises(RecipeError, match=r'source.location: cannot use an environment variable') as raised:
        load_settings(path)
    assert SECRET not in str(raised.value)


pieces = st.lists(
    st.sampled_from(
        ['${oc.env:KEY}', '${oc.env:ABSENT,"d"}', '${b}', 'text', '\\', '\\${', '$', '{', '}', ' ', "'", '"']
    ),
    max_size=6,
).map(''.join)


@given(text=pieces)
@settings(max_examples=15, deadline=None)
def test_any_text_with_variables_is_saved_without_their_values(text):
    environ = {'KEY': SECRET}
    try:
        found = merge_and_resolve([{'a': text, 'b': r'\${c} and ${oc.env:KEY}'}], [], environ)
    except UnreadableYAML:
        return
    saved = dump(found.values | {str(path[0]): expression for path, expression in found.from_environment.items()})
    assert SECRET not in saved
    again = merge_and_resolve([parse_yaml(saved)], [], environ)
    assert (again.values, again.from_environment) == (found.values, found.from_environment)
    assert SECRET not in str(merge_and_resolve([parse_yaml(saved)], [], {'KEY': 'changed'}).values)
