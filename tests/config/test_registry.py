"""Registered components: signatures parsed from source equal those of the imported objects; checks of keywords."""

import ast
import functools
import importlib
import inspect
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import pytest
from commands import modules_of
from golden import check_transcripts

from diffusion.config import families, registry
from diffusion.config.families import Family
from diffusion.config.recipe import Component
from diffusion.config.registry import build, check_keywords, register, resolve, signature
from diffusion.config.schema import fits
from diffusion.config.signatures import simple_type
from tests.prepare.drawn import write_files

EVERY_NAME = [(kind, name) for kind in registry.TARGETS for name in registry.names(kind)]
PARTS = """
from dataclasses import dataclass
from typing import Literal, Optional

Direction = Literal['up', 'down']


@dataclass
class Options:
    speed: float
    direction: Direction = 'up'


class Base:
    def __init__(self, depth: int, name: Optional[str] = None, *, wide: bool = False) -> None: ...


class Derived(Base): ...


class Bare: ...


def anything(size: int = 1, **others: object) -> None: ...


FIRST = 'down'
COMMON = defaults(width=9)


class Wide(TypedDict):
    width: Annotated[int, Default(8), AtLeast(1)]
    '''Width in pixels.'''


class Shared(Wide, total=False):
    height: Annotated[int, Default(7), NotArchitecture()]
    color: Annotated[str, fixed_on_resume('the color')]
    size: int


@other
@COMMON
def shared(path: Path = Path('x'), *, mode: Direction = FIRST, depth: int, **rest: Unpack[Shared]) -> None: ...
"""


@pytest.fixture(autouse=True)
def registered(monkeypatch):
    for kind, table in registry.TARGETS.items():
        monkeypatch.setitem(registry.TARGETS, kind, dict(table))


def problems(kind, name, kwargs, **options):
    return [str(problem) for problem in check_keywords('here', kind, name, kwargs, **options)]


@pytest.mark.slow
def test_signature_from_source_equals_that_of_the_imported_object(subtests):
    unnamed = (inspect.Parameter.VAR_KEYWORD, inspect.Parameter.VAR_POSITIONAL)
    for kind, name in EVERY_NAME:
        with subtests.test(kind=kind, name=name):
            imported = [p for p in inspect.signature(resolve(kind, name)).parameters.values() if p.kind not in unnamed]
            read = signature(kind, name).parameters
            assert [(p.name, p.required) for p in read] == [(p.name, p.default is p.empty) for p in imported]


def test_every_name_has_a_signature_without_heavy_imports():
    program = 'from diffusion.config import registry\n'
    program += '[registry.signature(kind, name) for kind in registry.TARGETS for name in registry.names(kind)]'
    assert not modules_of(program) & {'torch', 'composer', 'diffusers', 'streaming'}


def test_keywords_are_checked_against_the_source(tmp_path, monkeypatch):
    """The lines of the file are keywords of a class or function. Importing its package fails: it is only read."""
    write_files(tmp_path / 'parts_package', {'__init__.py': "raise RuntimeError('imported')\n", 'parts.py': PARTS})
    monkeypatch.syspath_prepend(tmp_path)

    def outcome(line: str) -> list[str]:
        name, _, keywords = line.partition(' ')
        registry.TARGETS['model'][name] = f'parts_package.parts:{name}'
        return problems('model', name, ast.literal_eval(keywords)) or ['accepted']

    check_transcripts(Path(__file__).parent / 'golden' / 'keywords', outcome)


def test_keywords_of_a_typed_dict_have_the_defaults_of_the_decorator(tmp_path, monkeypatch):
    write_files(tmp_path / 'shared_package', {'__init__.py': '', 'parts.py': PARTS})
    monkeypatch.syspath_prepend(tmp_path)
    register('model', 'part', 'shared_package.parts:shared')
    found = signature('model', 'part')
    assert [(each.name, each.annotation, each.required, each.default, each.doc) for each in found.parameters] == [
        ('path', 'Path', False, "Path('x')", ''),
        ('mode', "Literal['up', 'down']", False, 'down', ''),
        ('depth', 'int', True, None, ''),
        ('width', 'int', False, 9, 'Width in pixels.'),
        ('height', 'int', False, 7, ''),
        ('color', 'str', True, None, ''),
        ('size', 'int', True, None, ''),
    ]
    assert [each.changes_architecture for each in found.parameters] == [True, True, True, True, False, True, True]
    assert [each.on_resume and each.on_resume.reason for each in found.parameters][4:] == [None, 'the color', None]
    assert problems('model', 'part', {'depth': 1, 'color': 'x', 'size': 2, 'width': 0, 'height': 0}) == [
        'here.width: 0 is less than 1; use 1 or more'
    ]


@pytest.mark.parametrize(
    ('target', 'message'),
    [
        ('no_such_package.parts:Foo', r'no_such_package.parts: the package no_such_package cannot be found; install'),
        ('diffusion.models.nothing:Foo', r'diffusion.models.nothing: .*nothing.py does not exist; register it'),
    ],
)
def test_registering_an_address_in_a_missing_module_is_an_error(target, message):
    with pytest.raises(ValueError, match=f"^register: model 'lost': {message}"):
        register('model', 'lost', target)


def test_missing_attribute_of_a_module_is_reported_as_a_problem():
    register('model', 'lost', 'diffusion.models.families.sd2.builder:Foo')
    with pytest.raises(ValueError, match=r'diffusion.models.families.sd2.builder defines no Foo'):
        signature('model', 'lost')
    assert problems('model', 'lost', {})[0].startswith('here: ')


def test_family_without_addresses_is_an_error():
    cases: list[tuple[dict[str, Any], str]] = [({'models': {'zz': 'a.b'}}, 'zz: '), ({'adapter': 'a.b'}, 'adapter: ')]
    for values, where in cases:
        with pytest.raises(ValueError, match=f"^Family: {where}'a.b' is not an address; write 'module:name'"):
            Family(**values)


def test_unknown_name_error_suggests_the_nearest():
    with pytest.raises(ValueError, match="no model is called 'sd22'; did you mean 'sd2'?"):
        resolve('model', 'sd22')
    with pytest.raises(ValueError, match="no kind of component is called 'modle'; did you mean 'model'?"):
        resolve('modle', 'sd2')


@dataclass
class Shape:
    side: int
    kind: str = 'square'


class Drawing:
    def __init__(self, color: Literal['red', 'blue'], shape: 'Shape | None' = None, *, device: str = 'cpu') -> None:
        self.color, self.shape, self.device = color, shape, device


def test_registered_objects_are_checked_and_built():
    register('callback', 'drawing', Drawing)
    assert registry.contract_problem('callback', 'drawing') == 'drawing is not a subclass of composer.Callback'
    register('model', 'drawing', Drawing)
    assert problems('model', 'drawing', {'color': 'green'}) == ["here.color: 'green' is not one of red, blue"]
    drawing = build('model', Component('drawing', {'color': 'red', 'shape': {'side': 3}}), device='gpu')
    assert (drawing.color, drawing.shape, drawing.device) == ('red', Shape(3), 'gpu')
    assert build('model', Component('drawing', {'color': 'red', 'shape': None})).shape is None
    with pytest.raises(ValueError, match='model drawing: device is set by the program; remove it from the recipe'):
        build('model', Component('drawing', {'color': 'red', 'device': 'gpu'}), device='cpu')


def test_offered_values_are_used_if_accepted_and_not_in_the_recipe():
    register('model', 'drawing', Drawing)
    offered = {'device': 'gpu', 'folder': 'runs/a'}
    assert build('model', Component('drawing', {'color': 'red'}), offered=offered).device == 'gpu'
    assert build('model', Component('drawing', {'color': 'red', 'device': 'tpu'}), offered=offered).device == 'tpu'
    with pytest.raises(TypeError, match='folder'):
        build('model', Component('drawing', {'color': 'red'}), folder='runs/a')


def test_settings_are_those_of_components_of_this_package_with_their_defaults():
    model = Component('tiny_prx', {'depth': 3, 'representation_alignment': {'encoder': 'x'}})
    settings = registry.settings_of('model', model)
    assert (settings['depth'], settings['posterior']) == (3, 'sample')
    assert registry.settings_of('model', model, 'representation_alignment')['block'] == 7
    assert registry.settings_of('model', model, 'objective')['path'] == 'diffusion'
    assert registry.settings_of('model', Component('autoencoder'), 'objective') == {}
    assert registry.settings_of('optimizer', Component('decoupled_adamw')) == {}
    assert registry.settings_of('model', '???') == {}


@pytest.mark.parametrize('target', ['parts.Mine', 'parts:', 7, Shape(3), functools.partial(int)])
def test_registering_something_else_than_a_component_is_an_error(target):
    with pytest.raises(ValueError, match=r"register: callback 'own': .* is not a component; pass the class"):
        register('callback', 'own', target)


NO_DATASETS = {
    'of torch': ('class Mine(Dataset): ...', 'Mine is not a subclass of diffusion.BucketedDataset: the con'),
    'without item': ('class Mine(BucketedDataset): ...', r'no method item\(sample, index\): the constructor takes'),
    'own arguments': (
        'class Mine(BucketedDataset):\n    def __init__(self, root, batch_size=1): ...\n    def item(self): ...',
        r'Mine does not take buckets, tokenizers, seed, \*\*streaming: the con.* item\(sample, index\) returns',
    ),
}


@pytest.mark.parametrize('case', NO_DATASETS)
@pytest.mark.parametrize('loaded', [True, False])
def test_dataset_that_the_loader_cannot_build_is_refused_with_the_contract(tmp_path, monkeypatch, case, loaded):
    source, message = NO_DATASETS[case]
    bases = 'class Dataset: ...\nclass BucketedDataset:\n    def __init__(self, **a): ...\n    def item(self): ...\n'
    module = f'own_data_{len(case)}_{loaded}'
    (tmp_path / f'{module}.py').write_text(bases + source)
    monkeypatch.syspath_prepend(tmp_path)
    register('dataset', 'Mine', f'{module}:Mine')
    if loaded:
        importlib.import_module(module)
        assert re.search(message, registry.contract_problem('dataset', 'Mine') or '')
    else:  # only the keywords can be checked
        assert bool(registry.contract_problem('dataset', 'Mine')) == (case != 'without item')
    assert registry.contract_problem('dataset', 'image_text') is None


def test_registering_without_a_name_or_a_family_is_an_error():
    with pytest.raises(ValueError, match='^register: 5 cannot be the name of a component; pass a string$'):
        register('callback', 5, Drawing)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^register_family: 'x' is not a family; pass diffusion.Family\(...\)$"):
        registry.register_family('x')  # type: ignore[arg-type]


def test_family_that_was_added_last_comes_first(monkeypatch):
    monkeypatch.setattr(families, '_registered', [])
    one, two = Family(u_net=True), Family(image_sizes=True)
    for family in (one, two, one):
        families.add(family)
    assert families.families() == [two, one, *families.built_in()]


def test_registering_another_component_under_a_used_name_is_an_error():
    register('model', 'drawing', Drawing)
    register('model', 'drawing', Drawing)
    with pytest.raises(ValueError, match=r"register: model 'drawing' is already .*Drawing.*; choose another name"):
        register('model', 'drawing', Shape)


VALUES = (1, 1.5, True, None, 'a', '1', [], [1], ['a'], [1.5], {}, {'a': 1})


def test_annotations_are_types_of_values():
    """The lines of the file are annotations; those that are no types of YAML's values are not checked."""

    def outcome(line: str) -> list[str]:
        kind = simple_type(line.removeprefix('annotation: '))
        return ['not checked' if kind is None else ', '.join(repr(value) for value in VALUES if fits(kind, value))]

    check_transcripts(Path(__file__).parent / 'golden' / 'annotations', outcome)
