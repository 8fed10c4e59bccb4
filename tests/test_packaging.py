"""Packaging: version bounds, pins, declared dependencies, package data, Docker image and Makefile."""

import ast
import importlib
import json
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from importlib.metadata import packages_distributions
from importlib.util import find_spec
from pathlib import Path

import pytest
import tomli
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

from diffusion.compatibility.private_names import CHECKED_VERSIONS

ROOT = Path(__file__).parents[1]
PYTHONS = ('3.10', '3.11', '3.12', '3.13')

project = tomli.loads((ROOT / 'pyproject.toml').read_text())['project']
extras: dict[str, list[str]] = project['optional-dependencies']
everything = [Requirement(line) for line in [*project['dependencies'], *(r for rs in extras.values() for r in rs)]]


def pins(python: str, file: str = 'constraints.txt') -> dict[NormalizedName, str]:
    """Return the versions that a file pins under a Python version, by package name."""
    lines = (ROOT / file).read_text().splitlines()
    found = [Requirement(line) for line in lines if not line.startswith('#')]
    environment = {**default_environment(), 'python_version': python, 'python_full_version': f'{python}.0'}
    applying = [r for r in found if r.marker is None or r.marker.evaluate(environment)]
    versions = {canonicalize_name(r.name): str(r.specifier).removeprefix('==') for r in applying}
    assert len(versions) == len(applying), 'a package is pinned twice'
    return versions


def imported_packages(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files of a folder with each top-level package that they import, also inside functions."""
    for path in sorted(folder.rglob('*.py')):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((path, alias.name.split('.')[0]) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                yield path, node.module.split('.')[0]


@pytest.mark.parametrize('python', PYTHONS)
def test_every_pin_is_within_its_bounds(python: str):
    pinned = pins(python)
    found = {requirement: pinned.get(canonicalize_name(requirement.name), 'not pinned') for requirement in everything}
    outside = [f'{wanted}: {pin}' for wanted, pin in found.items() if not wanted.specifier.contains(pin)]
    assert outside == []


def test_every_requirement_has_a_lower_and_an_upper_bound():
    operators = {str(each): {specifier.operator for specifier in each.specifier} for each in everything}
    assert [each for each, found in operators.items() if found != {'>=', '<'}] == []


@pytest.mark.parametrize('python', PYTHONS)
def test_newest_pins_differ_only_in_what_torch_needs(python: str):
    tested, newest = pins(python), pins(python, 'constraints-newest.txt')
    needs = re.compile(r'torch|torchvision|triton|setuptools|(nvidia|cuda)-.*')
    others = {name for name in tested.keys() | newest.keys() if not needs.fullmatch(name) or name == 'nvidia-ml-py'}
    assert {name: tested.get(name) for name in others} == {name: newest.get(name) for name in others}
    overridden = [
        Requirement(line) for line in (ROOT / 'overrides-newest.txt').read_text().splitlines() if line[0] != '#'
    ]
    assert {each.name for each in overridden} == {'torch', 'torchvision'}
    for each in overridden:
        assert newest[canonicalize_name(each.name)] == str(each.specifier).removeprefix('==')


def test_newest_torch_is_a_checked_version():
    assert pins('3.11', 'constraints-newest.txt')[canonicalize_name('torch')] in CHECKED_VERSIONS['torch']
    for name, versions in CHECKED_VERSIONS.items():
        assert pins('3.11')[canonicalize_name(name)] in versions


@pytest.mark.parametrize('file', ['constraints.txt', 'constraints-newest.txt'])
def test_constraints_are_plain_pins(file: str):
    lines = [line for line in (ROOT / file).read_text().splitlines() if not line.startswith('#')]
    pin = r"[a-z0-9-]+==[\w.]+( ; python_full_version (<|>=) '3\.1[0-3]')?"
    assert [line for line in lines if not re.fullmatch(pin, line)] == []


def test_every_imported_package_is_declared():
    declared = {canonicalize_name(Requirement(r).name) for r in project['dependencies'] + extras['quickstart']}
    optional = [line for name in ('eval', 'formats', 'kubernetes', 'mcli', 'ray') for line in extras[name]]
    declared |= {canonicalize_name(Requirement(line).name) for line in optional}
    providers = packages_distributions()
    ours = set(sys.stdlib_module_names) | {'diffusion'}
    undeclared = {
        f'{path.relative_to(ROOT)}: {package}'
        for path, package in imported_packages(ROOT / 'diffusion')
        if package not in ours and declared.isdisjoint(map(canonicalize_name, providers.get(package, [])))
    }
    assert undeclared == set()


def test_wheel_contains_every_file_of_the_package(tmp_path: Path):
    build = [sys.executable, '-m', 'hatchling', 'build', '--target', 'wheel', '--directory', str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob('*.whl')
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if '.dist-info/' not in name}
    files = (path for path in (ROOT / 'diffusion').rglob('*') if path.is_file() and '__pycache__' not in path.parts)
    assert packed == {path.relative_to(ROOT).as_posix() for path in files}


def test_commands_of_the_image_are_existing_modules():
    dockerfile = (ROOT / 'docker' / 'Dockerfile').read_text()
    commands = [json.loads(words) for words in re.findall(r'CMD (\[.*\])$', dockerfile, re.MULTILINE)]
    assert len(commands) == 2, 'the health check and the default command'
    for python, option, module in commands:
        assert (python, option) == ('python', '-m') and find_spec(module), module


def test_console_script_exists():
    module, function = project['scripts']['diffusion'].split(':')
    assert callable(getattr(importlib.import_module(module), function))


def test_make_without_a_usable_python_fails_with_a_message(tmp_path: Path):
    for name in ('Makefile', 'pyproject.toml', 'constraints.txt'):
        shutil.copy(ROOT / name, tmp_path)
    run = subprocess.run(['make', 'test', 'PYTHON=no-such-python'], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode != 0
    assert 'none of no-such-python is a Python from 3.10 to 3.13' in run.stderr
    assert not (tmp_path / '.venv').exists()


def test_tests_of_the_newest_torch_exist():
    run = subprocess.run(['make', '--dry-run', 'test-slice'], cwd=ROOT, capture_output=True, text=True, check=True)
    (named,) = re.findall(r"echo 'running (.*)'", run.stdout)
    assert [path for path in named.split() if not (ROOT / path).exists()] == []
