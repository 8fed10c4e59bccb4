"""Comparison of two recipes on resume: every key has a rule, and only what differs in effect is a change."""

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from golden import check_transcripts

from diffusion.config import registry
from diffusion.config.checks import NAMED_COMPONENT_SECTIONS, SET_IN_OTHER_SECTIONS, SUPPLIED
from diffusion.config.load import load, read_values, to_yaml
from diffusion.config.recipe import LoaderConfig, Recipe, StreamConfig
from diffusion.config.resume_rules import (
    UNKNOWN_KEY,
    Effect,
    changes,
    format_value,
    recipe_values,
    refused,
    rule_of,
    rule_of_key,
    rules,
)
from diffusion.config.yaml_files import parse_yaml

YAMLS = Path(__file__).parents[2] / 'yamls'
REMOTES = ['streams.laion.remote=s3://bucket/a', 'eval_streams.coco.remote=s3://bucket/b']
SPACE = re.compile(r' (?=[\w.]+=)')  # between overrides
RECIPES = {'phase1': REMOTES, 'phase2': REMOTES, 'quickstart': [], 'tiny_vae': []}


@functools.cache
def values(name: str, *overrides: str):
    found = recipe_values(parse_yaml(to_yaml(load(YAMLS / f'{name}.yaml', [*RECIPES[name], *overrides]))))
    assert not found.unknown
    return found.values


def leaves(values: Mapping[str, Any], where: str = '') -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and value of every entry of nested mappings; an empty mapping is a value."""
    for key, value in values.items():
        path = f'{where}.{key}' if where else key
        if isinstance(value, Mapping) and value:
            yield from leaves(value, path)
        else:
            yield path, value


def keys_of_components(kind: str, section: str):
    """Return the path of each keyword of each component of this package and of Composer, as the rules name them."""
    names = registry.TARGETS.get(kind, {})
    for name in names:
        signature = registry.signature(kind, name)
        for parameter in signature.parameters:
            if parameter.name in SUPPLIED.get(kind, ()):
                continue
            where = f'{section}.{name}' if section in NAMED_COMPONENT_SECTIONS else section
            nested = [target for text, target in signature.nested.items() if text in parameter.annotation]
            if nested:
                module, attribute = nested[0].split(':')
                from diffusion.config.signatures import of_source

                yield from (f'{where}.{parameter.name}.{each}' for each in of_source(module, attribute).names())
            else:
                yield f'{where}.{parameter.name}'


BY_NAME = [
    *keys_of_components('model', 'model'),
    *keys_of_components('optimizer', 'optimizer'),
    *keys_of_components('algorithm', 'algorithms'),
    *(f'algorithms.{name}' for name in registry.TARGETS['algorithm']),
    *(f'loader.{field.name}' for field in dataclasses.fields(LoaderConfig)),
    *(f'streams.*.{field.name}' for field in dataclasses.fields(StreamConfig)),
    *(
        f'trainer.{parameter.name}'
        for parameter in registry.signature('trainer', 'composer').parameters
        if parameter.name not in {*SET_IN_OTHER_SECTIONS, 'model'}
    ),
]
"""Keys that need a rule of their own: a rule for all keys of the section would be a guess."""


def test_every_key_that_affects_training_is_named_in_one_rule():
    scalars = {field.name for field in dataclasses.fields(Recipe) if field.default_factory is dataclasses.MISSING}
    sections = {'model', 'scheduler', 'eval_dataset', 'missing'}
    keys = {*BY_NAME, *(scalars - sections)}
    assert len(keys) > 120
    assert sorted(keys - rule_of_key().keys()) == [], 'declare beside the keyword if it may change'
    named = [key for rule in rules() for key in rule.keys]
    assert len(named) == len(set(named))


@pytest.mark.parametrize('name', RECIPES)
def test_every_value_of_the_shipped_recipes_has_a_rule(name):
    paths = [path for path, _ in leaves(values(name))]
    assert len(paths) > 90
    assert [path for path in paths if rule_of(path) is UNKNOWN_KEY] == []


def test_keys_of_other_peoples_components_are_fixed_if_they_train_and_applied_if_they_observe():
    for key in ('model.depth', 'optimizer.dampening', 'algorithms.freeze.layers', 'algorithms.freeze'):
        assert rule_of(key).effect is Effect.FIXED
    for key in ('callbacks.mine.every', 'callbacks.mine', 'loggers.wandb.init_kwargs.tags', 'trainer.profiler.skip'):
        assert rule_of(key).effect is Effect.APPLIED


@pytest.mark.parametrize('name', RECIPES)
def test_writing_defaults_explicitly_is_no_change(name):
    """Neither is leaving them out: every other section has its defaults written, then the others."""
    plain = parse_yaml(to_yaml(load(YAMLS / f'{name}.yaml', RECIPES[name])))
    full = recipe_values(plain).values
    sections = [*full]
    for written in (sections[::2], sections[1::2]):
        explicit = plain | {key: full[key] for key in written}
        assert changes(full, recipe_values(explicit).values) == []
    short = read_values(YAMLS / f'{name}.yaml', RECIPES[name]).values
    assert changes(full, recipe_values(short).values) == []


def test_keys_that_a_later_version_adds_are_no_change_and_those_it_drops_are_listed():
    now = parse_yaml(to_yaml(load(YAMLS / 'quickstart.yaml')))
    before = {key: value for key, value in now.items() if key not in ('parallelism', 'generate', 'seed')}
    before['loader'] = {'num_workers': 0, 'prefetch': 3}
    before['model'] = before['model'] | {'conditioning': 'text'}
    before['algorithms'] = {**before['algorithms'], 'swa': {'start': '3ba'}}
    before['sharding'] = {'kind': 'zero3'}
    saved = recipe_values(before)
    assert saved.unknown == ['model.conditioning', 'loader.prefetch', 'sharding']
    names = ('guidance_scale', 'noise_scheduler', 'num_inference_steps', 'prompts')
    generate = {f'generate.{name}' for name in names}
    found = [each for each in changes(saved.values, recipe_values(now).values) if each.key not in saved.unknown]
    assert {each.key for each in found} == {'algorithms.swa', *generate}


def change(name: str, *overrides: str):
    found = changes(values(name), values(name, *overrides))
    assert len(found) == 1
    return found[0]


def test_changes_are_described_with_both_values_the_effect_and_the_reason():
    """The lines of the file are overrides of a recipe."""

    def outcome(line):
        now = recipe_values(read_values(YAMLS / 'quickstart.yaml', SPACE.split(line)).values)
        found = changes(values('quickstart'), now.values)
        return [f'{each}: {each.rule.effect.value}, {each.rule.reason}' for each in found] or [
            f'no change, unknown: {now.unknown}'
        ]

    check_transcripts(Path(__file__).parent / 'golden' / 'changes', outcome)


def test_start_of_averaging_is_fixed_once_there_are_averages():
    found = [change('quickstart', 'algorithms.ema.ema_start=9ba'), change('quickstart', 'algorithms.ema=false')]
    assert refused(found, averaging=False) == []
    assert refused(found, averaging=True) == found


def test_component_under_the_key_of_another_one_is_a_removal_and_an_addition():
    before, now = (values('quickstart') | {'algorithms': {'x': each}} for each in ({'name': 'ema'}, {'name': 'swa'}))
    assert [(each.key, each.saved, each.now, each.rule.effect) for each in changes(before, now)] == [
        ('algorithms.x', {'name': 'ema'}, None, Effect.BEFORE_AVERAGING),
        ('algorithms.x', None, {'name': 'swa'}, Effect.FIXED),
    ]


def test_values_are_formatted_on_one_line():
    shown = [format_value(each) for each in (None, True, 0.01, 1e-8, 'adamw', 'two words', 'a\nb\u2028', [1, 'a'])]
    assert shown == ['null', 'true', '0.01', '1e-08', 'adamw', '"two words"', '"a\\nb\\u2028"', '[1, "a"]']


def test_short_and_long_form_of_init_from_are_the_same():
    short, whole = (recipe_values({'init_from': each}).values for each in ('runs/a', {'from': 'runs/a'}))
    assert changes(short, whole) == []
    assert [each.key for each in changes(short, recipe_values({'init_from': 'runs/b'}).values)] == ['init_from.from']
    pinned = recipe_values({'init_from': {'from': 'runs/a', 'revision': 'f' * 40, 'resize': True}}).values
    assert [each.key for each in changes(short, pinned)] == ['init_from.revision', 'init_from.resize']
    earlier = recipe_values({'init_from': {'from': 'runs/a', 'weights': 'training'}}).values
    assert changes(earlier, short) == [], 'saved by a version without the other keys'
