"""Loading of recipes, and the error messages for mistakes in them."""

import re
from pathlib import Path

import pytest
import yaml
from golden import check_transcripts
from hypothesis import example, given, settings
from hypothesis import strategies as st
from recipe_files import all_values

from diffusion.config import registry
from diffusion.config.checks import SINGLE_COMPONENT_SECTIONS, SUPPLIED, check_recipe
from diffusion.config.load import (
    Component,
    Recipe,
    RecipeError,
    StreamConfig,
    check_devices,
    check_paths,
    load,
    to_yaml,
)
from diffusion.config.schema import Problem
from diffusion.config.yaml_files import dump, parse_yaml

ROOT = Path(__file__).parents[2]
YAMLS = sorted((ROOT / 'yamls').glob('*.yaml'))

VALID = {
    'name': 'run',
    'global_batch': 8,
    'model': {'name': 'tiny', 'resolution': 64},
    'streams': {'a': {'local': 'data/a', 'resolution': 64}},
    'trainer': {'max_duration': '8ba'},
}


@pytest.fixture
def write(tmp_path):
    def write_file(content, name='recipe.yaml'):
        path = tmp_path / name
        path.write_text(content if isinstance(content, str) else yaml.safe_dump(VALID | content, sort_keys=False))
        return path

    return write_file


@pytest.mark.parametrize('path', YAMLS, ids=lambda path: path.name)
def test_shipped_recipe_loads_and_reads_back_equal_after_it_was_saved(path, tmp_path):
    recipe = load(path, allow_missing=True)
    assert recipe.name == path.stem and recipe.not_inherited == []
    head = path.read_text().split('\n\n')[0]
    assert all(f'# {word}:' in head for word in ('Cost', 'Result', 'Command'))
    if 'pretrained' in registry.signature('model', recipe.model.name).names():
        assert '# License' in head, 'the licenses of the pretrained weights'
    given_values = [f'{problem.where}=s3://bucket/{index}' for index, problem in enumerate(recipe.missing)]
    complete, saved = load(path, given_values), tmp_path / 'recipe.yaml'
    assert complete.missing == []
    saved.write_text(to_yaml(complete))
    assert all_values(load(saved)) == all_values(complete)
    assert to_yaml(load(saved)) == saved.read_text()


characters = st.characters(blacklist_categories=['Cs'], blacklist_characters='\0')
names = st.text('abcdefghij_', min_size=1, max_size=8)


@example(batch=1, lr=1.0, streams={'if': 64}, prompts=['1e100', '-', '\x85', 'a\u2028b', '1_0', 'on', '2024-01-01'])
@given(
    batch=st.integers(1, 10**6),
    lr=st.floats(1e-9, 1.0),
    streams=st.dictionaries(names, st.sampled_from([64, 256, 512]), min_size=1, max_size=4),
    prompts=st.lists(st.text(characters, max_size=20), max_size=3),
)
@settings(max_examples=5, deadline=None)
def test_random_recipe_round_trips_through_yaml(tmp_path_factory, batch, lr, streams, prompts):
    first, second = (tmp_path_factory.mktemp('recipes') / name for name in ('a.yaml', 'b.yaml'))
    content = VALID | {
        'global_batch': batch,
        'optimizer': {'name': 'adamw', 'lr': lr},
        'streams': {name: {'remote': f's3://b/{name}', 'resolution': side} for name, side in streams.items()},
        'generate': {'prompts': [prompt for prompt in prompts if prompt != '???' and '${' not in prompt]},
    }
    first.write_text(dump(content), encoding='utf-8')
    recipe = load(first)
    assert recipe.generate.prompts == content['generate']['prompts']
    second.write_text(to_yaml(recipe), encoding='utf-8')
    assert all_values(load(second)) == all_values(recipe)


def test_phase_two_changes_only_some_settings_of_phase_one():
    remotes = ['streams.laion.remote=s3://b/a', 'eval_streams.coco.remote=s3://b/c']
    one, two = (load(ROOT / f'yamls/phase{number}.yaml', remotes) for number in (1, 2))
    assert two.init_from == 'runs/phase1'
    assert two.algorithms['ema'] == Component('ema', {'ema_start': '800000ba', 'smoothing': 0.9999})
    assert two.model.kwargs == one.model.kwargs | {'resolution': 512}
    assert (one.trainer['max_duration'], two.trainer['max_duration']) == ('550000ba', '850000ba')
    assert two.optimizer == one.optimizer == Component('adamw', {'lr': 1e-4, 'weight_decay': 0.01})
    assert (one.global_batch, one.device_train_microbatch_size) == (2048, 16)
    assert one.scheduler == Component('constant_with_warmup', {'t_warmup': '10000ba'})
    assert not one.parallelism.reshard_after_forward


REQUIRED = {
    **{f'{name}_with_warmup': {'t_warmup': '1ba'} for name in ('constant', 'linear', 'cosine')},
    'multi_step_with_warmup': {'t_warmup': '1ba', 'milestones': ['2ba']},
    'gradient_clipping': {'clipping_type': 'norm', 'clipping_threshold': 1.0},
    'ema': {'half_life': '1ba'},
    'image_grid': {'prompts': ['a house']},
    'prometheus_file': {'path': 'metrics.prom'},
    **{name: {'revision': '0123456789' * 4} for name in ('prx', 'mmdit', 'i1')},
}
"""Keywords without which a component cannot be loaded."""
OTHERS: dict[str, dict] = {
    'diffusion_dpo': {'dataset': {'name': 'preference_pairs'}, 'init_from': 'runs/base/ba1'},
    'preference_pairs': {'algorithms': {'diffusion_dpo': None}, 'init_from': 'runs/base/ba1'},
}
"""Sections without which a component cannot be used."""


@pytest.mark.parametrize('kind', sorted(registry.TARGETS.keys() - {'trainer', 'guidance'}))
def test_saved_recipe_has_the_defaults_of_each_component_and_loads(kind, write, tmp_path):
    section, saved = kind if kind in SINGLE_COMPONENT_SECTIONS else f'{kind}s', tmp_path / 'saved.yaml'
    shipped = [name for name in registry.names(kind) if isinstance(registry.TARGETS[kind][name], str)]
    for name in shipped:
        component = {'name': name} | REQUIRED.get(name, {})
        model = {'model': {'name': 'tiny_prx'}} if kind == 'algorithm' else {}
        path = write(model | OTHERS.get(name, {}) | {section: component if section == kind else {'any': component}})
        saved.write_text(to_yaml(load(path)))
        found = parse_yaml(saved.read_text())[section]
        found = found if section == kind else found['any']
        defaults = registry.signature(kind, name).defaults()
        left_out = {*SUPPLIED.get(kind, ()), *registry.PROGRAM_DEFAULTS.get(kind, ())}
        assert found.keys() == component.keys() | {
            key for key, value in defaults.items() if value is not None and key not in left_out
        }
        assert [*found][: len(component)] == [*component], 'given values come first'
        assert to_yaml(load(saved)) == saved.read_text()


def test_saved_recipe_has_the_defaults_inside_a_keyword(write, tmp_path):
    path = write({'model': {'name': 'tiny', 'objective': {'prediction_type': 'sample'}}})
    objective = parse_yaml(to_yaml(load(path)))['model']['objective']
    assert [*objective][:2] == ['prediction_type', 'path'] and objective['num_train_timesteps'] == 1000
    assert load(path).optimizer == Component('adamw', {'lr': 1e-4, 'weight_decay': 0.01})
    assert 'min_snr_gamma' not in objective, 'null by default'


def test_saved_recipe_has_no_defaults_of_components_that_users_register(write, monkeypatch):
    def mine(folder: str = 'runs', every: int = 3) -> None: ...

    monkeypatch.setitem(registry.TARGETS['callback'], 'mine', mine)
    assert parse_yaml(to_yaml(load(write({'callbacks': {'mine': None}}))))['callbacks'] == {'mine': {}}


def test_mappings_merge_and_false_removes_an_entry(write):
    base = write({'callbacks': {'lr_monitor': None, 'nan_monitor': None}}, 'base.yaml')
    child = write('extends: base.yaml\nname: child\ncallbacks: {lr_monitor: false, speed_monitor: {window_size: 5}}\n')
    recipe = load(child)
    assert set(load(base).callbacks) == {'lr_monitor', 'nan_monitor'}
    assert recipe.callbacks['speed_monitor'].kwargs == {'window_size': 5}
    assert set(recipe.callbacks) == {'nan_monitor', 'speed_monitor'}
    assert set(load(child, ['callbacks.speed_monitor=false']).callbacks) == {'nan_monitor'}
    streams = [f'precompute.streams.{name}={{local: x, resolution: 32}}' for name in 'ab']
    streams.append('precompute.streams.a=false')
    assert set(load(child, streams).precompute.streams) == {'b'}


COMMIT = '0123456789abcdef' * 2 + '01234567'
CASE = r'(.*?)(?: on (?:(\d+) x )?(\d+) devices)?$'
SPACE = re.compile(r' (?=[\w.\[\]]+=)')  # between overrides


def test_mistakes_are_reported_with_path_cause_and_way_out(write, shipped_components):
    """The lines of the files are sections of a recipe, or overrides."""
    base = write({}, 'base.yaml')

    def outcome(line):
        text, nodes, devices = re.findall(CASE, line)[0]
        sections = yaml.safe_load(f'{{{text}}}') if re.match(r'\w+: ', text) else {}
        try:
            recipe = load(write(sections) if sections else base, [] if sections else SPACE.split(text))
        except RecipeError as error:
            return error.problems
        world, per_node = int(nodes or 1) * int(devices or 1), int(devices) if nodes else None
        return [*(check_devices(recipe, world, per_node) if devices else [])] or ['accepted']

    check_transcripts(Path(__file__).parent / 'golden' / 'mistakes', outcome)


@given(batch=st.integers(1, 200), microbatch=st.integers(1, 200))
@settings(max_examples=100, deadline=None)
def test_microbatch_is_refused_if_it_fits_no_number_of_devices(batch, microbatch):
    recipe = Recipe('a', batch, Component('tiny'), device_train_microbatch_size=microbatch)
    recipe.streams, recipe.trainer = {'a': StreamConfig(64, local='x')}, {'max_duration': '1ba'}
    fits = any(batch % devices == 0 and batch // devices % microbatch == 0 for devices in range(1, batch + 1))
    problems = check_recipe(recipe)
    assert [problem.where for problem in problems] == ([] if fits else ['device_train_microbatch_size'])
    for problem in problems:
        found = re.search(r'use (\d+), or a global_batch of ([\d or]+)$', problem.what)
        assert found is not None
        assert batch % int(found[1]) == 0
        assert all(int(choice) % microbatch == 0 for choice in found[2].split(' or '))


def test_all_mistakes_are_reported_in_one_error(write):
    path = write({'trainr': 1, 'seed': 'x', 'loader': {'shufle': True}, 'streams': {'a': {'resolution': '???'}}})
    with pytest.raises(RecipeError) as error:
        load(path)
    found = [problem.where for problem in error.value.problems]
    assert found == ['trainr', 'seed', 'loader.shufle', 'streams.a.resolution']
    assert str(error.value).startswith(f'{path} has 4 mistakes:\n  trainr: ')
    one, two = Problem('', 'a.yaml is empty'), Problem('seed', 'is wrong')
    assert str(RecipeError([one], 'a.yaml')) == 'a.yaml is empty'
    assert str(RecipeError([one, two], 'a.yaml')) == 'a.yaml has 2 mistakes:\n  a.yaml is empty\n  seed: is wrong'
    assert str(RecipeError([two], 'a.yaml')) == 'a.yaml has a mistake:\n  seed: is wrong'
    assert str(RecipeError([two])) == 'the recipe has a mistake:\n  seed: is wrong'


def test_imports_register_custom_components(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setitem(registry.TARGETS, 'model', {**registry.TARGETS['model']})  # other tests list all models
    (tmp_path / 'my_models.py').write_text(
        'from diffusion.config.registry import register\n'
        'def enormous(resolution: int = 64, *, depth: int): ...\n'
        "register('model', 'enormous', 'my_models:enormous')\n"
    )
    content = {'imports': ['my_models'], 'model': {'name': 'enormous', 'depth': 5}}
    assert load(write(content)).model.kwargs == {'depth': 5}
    with pytest.raises(RecipeError, match="model.dpth: unknown key; did you mean 'depth'"):
        load(write({'imports': ['my_models'], 'model': {'name': 'enormous', 'dpth': 5, 'depth': 1}}))


def test_local_path_and_repository_of_one_name_are_ambiguous(write, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'org' / 'name').mkdir(parents=True)

    def problems(start):
        return {each.where: each.what for each in check_paths(load(write({'init_from': start})))}

    stream = {'streams.a.local': problems('org/name')['streams.a.local']}
    missing = 'does not exist; give a checkpoint or the folder of a run, a folder of diffusers or a file'
    ambiguous = (
        'org/name is a local path, but revision is for a repository on the Hub; remove revision, or write hf://org/name'
    )
    assert problems({'from': 'org/name', 'revision': COMMIT}) == stream | {'init_from.from': ambiguous}
    for start in ({'from': 'hf://org/name', 'revision': COMMIT}, f'org/absent@{COMMIT}', 'org/name', 's3://b/run'):
        assert problems(start) == stream
    repository = f'org/other {missing}; for the repository org/other on the Hub, set revision'
    assert problems('org/other') == stream | {'init_from': repository}
    load(write({'model': {'name': 'prx', 'pretrained': 'org/name'}}))  # it is a folder
    evaluation = load(write({}), ['task=generate', 'generate.prompts=[a]', 'checkpoint=gone'])
    missing_checkpoint = 'checkpoint: gone does not exist; give a checkpoint or the folder of a run'
    assert [str(each) for each in check_paths(evaluation)] == [missing_checkpoint]
    assert problems({'from': './other'}) == stream | {'init_from.from': f'./other {missing}'}
    (tmp_path / 'runs/run/latest').mkdir(parents=True)
    assert problems('org/other') == stream, 'the run resumes from its own checkpoint'
