"""Private names of other packages: each is listed, exists, and is missed with a message that shows the way out."""

import ast
import contextlib
import functools
import importlib
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from commands import modules_of
from test_layers import FOREIGN, MODULES, layer

from diffusion.compatibility import private_names
from diffusion.compatibility.private_names import ATTRIBUTES, CHECKED_VERSIONS, IMPORTED, INHERITED, PrivateName
from diffusion.errors import UserError

ROOT = Path(__file__).parents[2]
MODULE = 'diffusion.compatibility.private_names'
PACKAGES = {'torch', 'torchvision', 'torchmetrics', 'composer', 'streaming', 'diffusers', 'transformers'}
STANDARD_LIBRARY = {'_replace', '_asdict', '_exit', '_actions', '_SubParsersAction', '_run_exitfuncs', '_shutdown'}
OMEGACONF = {'_resolvers'}
"""Private name that `config` uses, which may not import the module of names because that imports torch."""


@functools.cache
def nodes_of_package() -> dict[str, list[ast.AST]]:
    """Return the syntax nodes of each module of the package but the list of names."""
    paths = {name: path for name, path in MODULES.items() if f'diffusion.{name}' != MODULE}
    return {name: nodes_of(path) for name, path in paths.items()}


@functools.cache
def nodes_of_all() -> dict[str, list[ast.AST]]:
    return nodes_of_package() | {path.name: nodes_of(path) for path in sorted((ROOT / 'benchmarks').glob('*.py'))}


def nodes_of(path: Path) -> list[ast.AST]:
    return [*ast.walk(ast.parse(path.read_text(encoding='utf-8')))]


def is_name(node: ast.AST, name: str) -> bool:
    return isinstance(node, ast.Name) and node.id == name


def called_name(call: ast.Call) -> str:
    """Return the name of a called function or method; empty for other expressions."""
    function = call.func
    return (
        function.id if isinstance(function, ast.Name) else function.attr if isinstance(function, ast.Attribute) else ''
    )


def is_private(name: str) -> bool:
    return name.startswith('_') and not name.startswith('__')


def own_names(nodes: list[ast.AST]) -> set[str]:
    """Return the names of functions, classes, variables and attributes of `self` that a module defines."""
    found = set()
    for node in nodes:
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
            found.add(node.name)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_name(node.value, 'self'):
            found.add(node.attr)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            found.add(node.id)
    return found


def private_imports(nodes: list[ast.AST]) -> Iterator[str]:
    """Yield the private modules and names of other packages that a module imports or reaches by a dotted name."""
    roots = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
            roots |= {alias.asname or alias.name.partition('.')[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names = [f'{node.module}.{alias.name}' for alias in node.names]
            roots |= {
                alias.asname or alias.name for alias in node.names if str(node.module).partition('.')[0] in PACKAGES
            }
        else:
            continue
        for name in names:
            if name.partition('.')[0] in PACKAGES and any(map(is_private, name.split('.'))):
                yield name
    for node in nodes:
        if isinstance(node, ast.Attribute) and is_private(node.attr):
            root = ast.unparse(node.value).partition('.')[0]
            if root in roots - {'os', 'argparse', 'threading', 'atexit', 'sys'}:
                yield ast.unparse(node)


@pytest.mark.slow
def test_no_other_module_imports_a_private_name():
    found = [f'{where}: {name}' for where, nodes in nodes_of_all().items() for name in private_imports(nodes)]
    assert not found, f'list these in {MODULE} and import them from there'


@pytest.mark.slow
def test_private_attributes_of_other_packages_are_listed():
    own = {where: own_names(nodes) for where, nodes in nodes_of_package().items()}
    everywhere = set().union(*own.values())
    found = []
    for where, nodes in nodes_of_package().items():
        here = own[where] | STANDARD_LIBRARY | (OMEGACONF if where == 'config.interpolation' else set())
        imported = {alias.name for node in nodes if isinstance(node, ast.ImportFrom) for alias in node.names}
        for node in nodes:
            if not isinstance(node, ast.Attribute) or not is_private(node.attr):
                continue
            owner = ast.unparse(node.value)
            known = everywhere | INHERITED.keys() if owner in ('self', 'cls', 'super()') else here
            if owner == 'private_names' and 'private_names' in imported:
                known = known | IMPORTED.keys()
            if node.attr not in known:
                found.append(f'{where}:{node.lineno}: {owner}.{node.attr}')
    assert not found, f'list these in {MODULE} and use private_attribute()'


@pytest.mark.slow
def test_every_listed_name_is_used_and_every_used_name_is_listed():
    imported, read = set(), set()
    for nodes in nodes_of_all().values():
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module == MODULE:
                imported |= {alias.name for alias in node.names}
            elif isinstance(node, ast.Attribute) and is_name(node.value, 'private_names'):
                imported.add(node.attr)
            elif isinstance(node, ast.Call) and called_name(node).endswith('private_attribute'):
                assert isinstance(node.args[1], ast.Constant)
                read.add(node.args[1].value)
    assert imported - {'private_attribute', 'set_private_attribute'} == IMPORTED.keys()
    assert read == {name for _, name in ATTRIBUTES}


@pytest.mark.slow
def test_layer_one_takes_no_name_of_composer_or_streaming():
    for where, nodes in nodes_of_package().items():
        for node in nodes:
            if isinstance(node, ast.ImportFrom) and node.module == MODULE:
                for package in {IMPORTED[alias.name].where for alias in node.names if alias.name in IMPORTED}:
                    assert FOREIGN.get(package.partition('.')[0], 1) <= layer(where), where


@pytest.mark.parametrize('entry', IMPORTED.values(), ids=lambda entry: entry.name)
def test_installed_version_has_each_imported_name(entry):
    assert entry.load() is not None


@pytest.mark.parametrize('entry', [*ATTRIBUTES.values(), *INHERITED.values()], ids=lambda entry: entry.name)
def test_installed_version_has_each_attribute(entry):
    """Attributes that a constructor sets appear in the source of the class only."""
    with contextlib.suppress(UserError):
        entry.load()
        return
    module, _, owner = entry.where.partition(':')
    kinds = getattr(importlib.import_module(module), owner).__mro__[:-1]
    sources = [Path(str(sys.modules[kind.__module__].__file__)).read_text() for kind in kinds]
    assert any(re.search(rf'self\.{entry.name}\b', source) for source in sources)


def test_missing_name_says_which_versions_have_it_and_the_way_out(monkeypatch):
    gone = PrivateName('torch', 'torch.utils._pytree', 'gone', 'walks nested tensors')
    monkeypatch.setitem(IMPORTED, 'gone', gone)
    with pytest.raises(UserError) as error:
        private_names.gone  # noqa: B018
    message = str(error.value)
    assert 'it has no torch.utils._pytree.gone' in message and 'walks nested tensors' in message
    assert f'checked with torch {CHECKED_VERSIONS["torch"][0]} and ' in message
    assert 'make install' in message and 'docs/install.md' in message


def test_missing_attribute_says_the_same():
    class DataLoader:
        """A loader without the workers of the real one."""

    with pytest.raises(UserError, match=r'_MultiProcessingDataLoaderIter\._workers, which .* \(exit statuses'):
        private_names.private_attribute(DataLoader(), '_workers')
    with pytest.raises(UserError, match=r'_worker_pids_set'):
        private_names.set_private_attribute(DataLoader(), '_worker_pids_set', False)


def test_package_that_is_not_installed_stays_an_import_error():
    with pytest.raises(ModuleNotFoundError, match='no_such_package'):
        PrivateName('torch', 'no_such_package', 'name', 'a test').load()


def test_importing_the_list_imports_none_of_the_packages():
    assert not modules_of(f'import {MODULE}') & PACKAGES
