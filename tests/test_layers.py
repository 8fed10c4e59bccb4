"""The floors of the package: a module imports only its own floor or lower, and no circle inside a floor."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parents[1] / 'diffusion'
FLOORS = [
    # 0: the standard library, omegaconf and yaml
    'checks cli config data.buckets data.byte_sizes data.order exits files launch '
    'opportunities planning recipe registry schema signatures speed_parts yaml_files models.sd2_config',
    # 1: torch, diffusers, transformers; no Composer, no Streaming
    'data.batch_memory data.captions data.keys data.transforms '
    'models.flops models.noise models.norms models.objective models.parts models.sampler models.tokens',
    # 2: Composer and Streaming
    'algorithms building callbacks checkpointing copy_ahead data '
    'evaluation loggers models parallelism preflight speed syncs timeline',
    # 3: programs
    'evaluate export generate inspection precompute prepare profile programs train uploaded_shards',
]
FLOOR_OF = {name: floor for floor, names in enumerate(FLOORS) for name in names.split()}
FOREIGN = {
    'torch': 1,
    'torchvision': 1,
    'diffusers': 1,
    'transformers': 1,
    'open_clip': 1,
    'composer': 2,
    'streaming': 2,
}
"""The lowest floor that may import a package."""
UPWARDS = {'cli', 'programs', ''}
"""Modules whose functions import what is above them when they run; `` is diffusion/__init__.py."""

MODULES = {
    '.'.join(path.relative_to(PACKAGE).with_suffix('').parts).removesuffix('__init__').rstrip('.'): path
    for path in sorted(PACKAGE.rglob('*.py'))
}


def floor(module: str) -> int:
    """The floor of a module: its own, or else that of its package; the package itself is on the lowest."""
    while module and module not in FLOOR_OF:
        module = module.rpartition('.')[0]
    return FLOOR_OF[module] if module else 0


def imports(module: str, *, deferred: bool) -> set[str]:
    """What a module imports when it is imported, or also (deferred) when its functions run."""
    found: set[str] = set()
    todo: list[ast.AST] = list(ast.parse(MODULES[module].read_text(encoding='utf-8')).body)
    while todo:
        node = todo.pop()
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f'{module}: relative import; write it out'
            # `from package import module` imports the module.
            found |= {
                f'{node.module}.{alias.name}' if _is_ours(f'{node.module}.{alias.name}') else str(node.module)
                for alias in node.names
            }
        elif isinstance(node, ast.If) and 'TYPE_CHECKING' in ast.unparse(node.test):
            todo += node.orelse
        elif deferred or not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            todo += ast.iter_child_nodes(node)
    return found


def _is_ours(name: str) -> bool:
    return name.removeprefix('diffusion.') in MODULES and name.startswith('diffusion.')


def ours(module: str, *, deferred: bool = False) -> set[str]:
    return {name.removeprefix('diffusion.') for name in imports(module, deferred=deferred) if _is_ours(name)}


@pytest.mark.parametrize('module', MODULES)
def test_a_module_imports_only_its_own_floor_or_lower(module):
    deferred = module not in UPWARDS
    above = {name for name in ours(module, deferred=deferred) if floor(name) > floor(module)}
    # `diffusion check` says which arguments `prepare` takes; that module is as light as floor 0 (see below).
    assert above <= ({'prepare.cli'} if module == 'cli' else set())
    packages = {name.partition('.')[0] for name in imports(module, deferred=deferred)}
    assert not {name for name in packages if FOREIGN.get(name, 0) > floor(module)}


@pytest.mark.parametrize('module', MODULES)
def test_every_module_has_a_floor(module):
    names = {module.rsplit('.', depth)[0] for depth in range(module.count('.') + 1)} | {module}
    assert not module or names & FLOOR_OF.keys(), f'{module}: name its floor in the table above'


def test_no_circle():
    edges = {module: ours(module) - {module} for module in MODULES}
    while edges:
        leaves = {module for module, needs in edges.items() if not needs & edges.keys()}
        assert leaves, f'imports go round in a circle among {sorted(edges)}'
        edges = {module: needs for module, needs in edges.items() if module not in leaves}


def loaded_after(code: str) -> set[str]:
    """Top-level packages in memory after running code in a fresh process."""
    program = f'import sys\n{code}\nprint(*{{name.partition(".")[0] for name in sys.modules}}, file=sys.stderr)'
    result = subprocess.run([sys.executable, '-c', program], capture_output=True, text=True, check=True)
    return set(result.stderr.split())


def test_floor_zero_runs_without_torch():
    modules = [name for name in MODULES if floor(name) == 0]
    assert not loaded_after('import ' + ', '.join(f'diffusion.{name}'.rstrip('.') for name in modules)) & FOREIGN.keys()


def test_check_runs_without_torch():
    recipe = str(PACKAGE.parent / 'yamls' / 'phase2.yaml')
    loaded = loaded_after(f'from diffusion.cli import main\nassert main(["check", {recipe!r}]) == 0')
    assert 'omegaconf' in loaded
    assert not loaded & FOREIGN.keys()


def test_import_diffusion_costs_nothing():
    assert not loaded_after('import diffusion') & {*FOREIGN, 'omegaconf', 'yaml', 'numpy'}


def test_public_names_and_their_homes_agree():
    """Type checkers read one table, Python the other."""
    import diffusion

    tree = ast.parse((PACKAGE / '__init__.py').read_text(encoding='utf-8'))
    block = next(node for node in tree.body if isinstance(node, ast.If))
    statements = [node for node in block.body if isinstance(node, ast.ImportFrom)]
    assert {alias.name: node.module for node in statements for alias in node.names} == diffusion._HOMES
    assert sorted(diffusion._HOMES) == sorted(diffusion.__all__)
    assert set(diffusion.__all__) <= set(dir(diffusion))


def test_a_name_that_is_not_public_is_an_attribute_error():
    import diffusion

    with pytest.raises(AttributeError, match="module 'diffusion' has no attribute 'sd3'"):
        diffusion.sd3  # noqa: B018
