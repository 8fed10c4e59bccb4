"""Layers of modules: a module imports only its own layer and lower ones, without cycles; its folder sets the layer."""

import ast
import functools
from pathlib import Path

import pytest
from commands import modules_of

PACKAGE = Path(__file__).parents[1] / 'diffusion'
LAYERS = [
    # Standard library and omegaconf; no torch.
    {'config', 'storage', 'language_models', 'planning', 'runs', 'launch', 'errors', 'exit_codes'},
    {'compatibility', 'models'},  # torch, diffusers, transformers; no Composer
    {'data', 'algorithms', 'callbacks', 'loggers', 'checkpointing', 'evaluation', 'profiling', 'training'},  # Composer
    {'tasks', 'prepare', 'captioning', 'inspection', 'preflight', 'report', 'cli', '__main__', '__init__'},  # programs
]
COMPOSER_MODELS = {'models.latent_diffusion', 'models.autoencoder'}  # on layer 2, in the folder of their parts
FOREIGN = {'torch': 1, 'torchvision': 1, 'diffusers': 1, 'transformers': 1, 'open_clip': 1, 'peft': 1}
FOREIGN |= {'composer': 2, 'streaming': 2}
"""Lowest layer that may import each third-party package."""

MODULES = {
    '.'.join(path.relative_to(PACKAGE).with_suffix('').parts).removesuffix('.__init__'): path
    for path in sorted(PACKAGE.rglob('*.py'))
}


def layer(module: str) -> int:
    if module in COMPOSER_MODELS or (module.startswith('models.families.') and module.endswith('.builder')):
        return 2
    return next(number for number, folders in enumerate(LAYERS) if module.partition('.')[0] in folders)


@functools.cache
def imports(module: str) -> set[str]:
    """Return the modules and packages that a module imports, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(MODULES[module].read_text(encoding='utf-8'))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f'{module}: relative import; use an absolute one'
            members = {f'{node.module}.{alias.name}' for alias in node.names}
            submodules = {name for name in members if name.removeprefix('diffusion.') in MODULES}
            found |= submodules if submodules == members else {str(node.module), *submodules}
    return found


def own_imports(module: str) -> set[str]:
    return {name.removeprefix('diffusion.') for name in imports(module)} & MODULES.keys()


def test_a_module_imports_only_its_own_layer_or_lower():
    upwards = [
        f'{module} -> {name}' for module in MODULES for name in own_imports(module) if layer(name) > layer(module)
    ]
    foreign = [
        f'{module} -> {name}'
        for module in MODULES
        for name in imports(module)
        if FOREIGN.get(name.partition('.')[0], 0) > layer(module)
    ]
    assert not upwards + foreign


def test_only_programs_import_launch():
    users = {'launch', 'tasks', 'preflight', 'cli'}
    others = [
        f'{module} -> {name}'
        for module in MODULES
        for name in own_imports(module)
        if name.startswith('launch') and module.partition('.')[0] not in users
    ]
    assert not others


@pytest.mark.parametrize('depth', [1, 9], ids=['packages', 'modules'])
def test_imports_form_no_cycle(depth):
    edges: dict[str, set[str]] = {}
    for module in MODULES.keys() - {'__init__'}:
        start = '.'.join(module.split('.')[:depth])
        edges.setdefault(start, set()).update('.'.join(name.split('.')[:depth]) for name in own_imports(module))
    edges = {name: needs - {name} for name, needs in edges.items()}
    while edges:
        leaves = {name for name, needs in edges.items() if not needs & edges.keys()}
        assert leaves, f'a cycle among {sorted(edges)}'
        edges = {name: needs for name, needs in edges.items() if name not in leaves}


@pytest.mark.slow
def test_layer_zero_runs_without_torch():
    modules = [f'diffusion.{name}' for name in MODULES if layer(name) == 0]
    assert not modules_of('import ' + ', '.join(modules)) & FOREIGN.keys()


@pytest.mark.slow
def test_layer_one_runs_without_composer():
    modules = [f'diffusion.{name}' for name in MODULES if layer(name) == 1]
    assert not modules_of('import ' + ', '.join(modules)) & {'composer', 'streaming'}


def test_check_runs_without_torch_and_the_report():
    recipe = str(PACKAGE.parent / 'yamls' / 'phase2.yaml')
    loaded = modules_of(f'from diffusion.cli import main\nassert main(["check", {recipe!r}]) == 0')
    assert 'omegaconf' in loaded and 'PIL' not in loaded
    assert not loaded & FOREIGN.keys()
    assert not [name for name in loaded if name.startswith('diffusion.report')]


def test_import_diffusion_loads_nothing_else():
    assert not modules_of('import diffusion') & {*FOREIGN, 'omegaconf', 'yaml', 'numpy'}


def test_public_names_and_their_modules_agree():
    """Type checkers read the imports under TYPE_CHECKING; at run time, `_MODULES` is used."""
    import diffusion

    tree = ast.parse((PACKAGE / '__init__.py').read_text(encoding='utf-8'))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    statements = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert {alias.name: node.module for node in statements for alias in node.names} == diffusion._MODULES
    assert sorted(diffusion._MODULES) == sorted(diffusion.__all__)
    assert set(diffusion.__all__) <= set(dir(diffusion))
