"""What an installation gets: bounds, pins, declared imports, package data, image and CI."""

import ast
import json
import os
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

ROOT = Path(__file__).parents[1]
PYTHONS = ('3.10', '3.11', '3.12')

project = tomli.loads((ROOT / 'pyproject.toml').read_text())['project']
extras: dict[str, list[str]] = project['optional-dependencies']
everything = [Requirement(line) for line in [*project['dependencies'], *(r for rs in extras.values() for r in rs)]]


def pins(python: str) -> dict[NormalizedName, str]:
    """Name -> version of constraints.txt under one Python."""
    lines = (ROOT / 'constraints.txt').read_text().splitlines()
    found = [Requirement(line) for line in lines if not line.startswith('#')]
    under = {**default_environment(), 'python_version': python, 'python_full_version': f'{python}.0'}
    applying = [r for r in found if r.marker is None or r.marker.evaluate(under)]
    versions = {canonicalize_name(r.name): str(r.specifier).removeprefix('==') for r in applying}
    assert len(versions) == len(applying), 'a package is pinned twice'
    return versions


def imported_packages(folder: Path) -> Iterator[tuple[Path, str]]:
    """Top-level packages that the files of a folder import, wherever in the file."""
    for path in sorted(folder.rglob('*.py')):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((path, alias.name.split('.')[0]) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                yield path, node.module.split('.')[0]


@pytest.mark.parametrize('python', PYTHONS)
@pytest.mark.parametrize('requirement', everything, ids=lambda r: r.name)
def test_pin_lies_within_its_bounds(requirement: Requirement, python: str):
    assert pins(python)[canonicalize_name(requirement.name)] in requirement.specifier


@pytest.mark.parametrize('requirement', everything, ids=lambda r: r.name)
def test_every_requirement_has_a_lower_and_an_upper_bound(requirement: Requirement):
    assert {specifier.operator for specifier in requirement.specifier} == {'>=', '<'}


def test_constraints_are_plain_pins():
    lines = [line for line in (ROOT / 'constraints.txt').read_text().splitlines() if not line.startswith('#')]
    pin = r"[a-z0-9-]+==[\w.]+( ; python_full_version (<|>=) '3\.1[0-3]')?"
    assert [line for line in lines if not re.fullmatch(pin, line)] == []


def test_every_package_imported_is_declared():
    declared = {canonicalize_name(Requirement(r).name) for r in project['dependencies'] + extras['quickstart']}
    optional = [line for name in ('eval', 'kubernetes', 'mcli', 'ray') for line in extras[name]]
    declared |= {canonicalize_name(Requirement(line).name) for line in optional}
    providers = packages_distributions()
    ours = set(sys.stdlib_module_names) | {'diffusion'}
    undeclared = {
        f'{path.relative_to(ROOT)}: {package}'
        for path, package in imported_packages(ROOT / 'diffusion')
        if package not in ours and declared.isdisjoint(map(canonicalize_name, providers.get(package, [])))
    }
    assert undeclared == set()


def test_wheel_holds_every_file_of_the_package(tmp_path: Path):
    build = [sys.executable, '-m', 'hatchling', 'build', '--target', 'wheel', '--directory', str(tmp_path)]
    subprocess.run(build, cwd=ROOT, check=True, capture_output=True)
    (wheel,) = tmp_path.glob('*.whl')
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if '.dist-info/' not in name}
    files = (path for path in (ROOT / 'diffusion').rglob('*') if path.is_file() and '__pycache__' not in path.parts)
    assert packed == {path.relative_to(ROOT).as_posix() for path in files}


def test_image_is_built_from_the_constraints_and_runs_as_nobody_special():
    dockerfile = (ROOT / 'docker' / 'Dockerfile').read_text()
    last = dict(re.findall(r'^([A-Z]+) (.*)$', dockerfile, re.MULTILINE))
    assert re.search(r'^FROM nvidia/cuda:12\.6\.\d+-base-ubuntu22\.04 AS base$', dockerfile, re.MULTILINE)
    assert last['FROM'] == '${FABRIC}' and 'ARG FABRIC=infiniband' in dockerfile
    assert 'FROM base AS infiniband' in dockerfile and 'FROM base AS efa' in dockerfile
    assert '--constraint constraints.txt' in dockerfile
    assert last['USER'] == '${USER_ID}' and 'ARG USER_ID=1000' in dockerfile


def test_image_runs_the_node_entry_point_under_an_init_and_has_a_health_check():
    dockerfile = (ROOT / 'docker' / 'Dockerfile').read_text()
    assert 'ENTRYPOINT ["/usr/bin/tini", "--"]' in dockerfile
    health, command = (json.loads(words) for words in re.findall(r'CMD (\[.*\])$', dockerfile, re.MULTILINE))
    assert health == ['python', '-m', 'diffusion.launch.liveness'] and 'HEALTHCHECK' in dockerfile
    assert command == ['python', '-m', 'diffusion.launch.node']
    assert all(find_spec(words[-1]) for words in (health, command))


def test_ci_lints_and_tests():
    script = ROOT / '.ci' / 'run'
    assert os.access(script, os.X_OK)
    commands = [line.split()[:2] for line in script.read_text().splitlines()]
    assert commands.index(['make', 'lint']) < commands.index(['make', 'test'])


def test_makefile_names_its_targets():
    said = subprocess.run(['make'], cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert all(f'make {target} ' in said for target in ('quickstart', 'test', 'lint', 'format', 'clean'))


def test_make_without_a_usable_python_says_what_it_wants(tmp_path: Path):
    for name in ('Makefile', 'pyproject.toml', 'constraints.txt'):
        shutil.copy(ROOT / name, tmp_path)
    run = subprocess.run(['make', 'test', 'PYTHON=no-such-python'], cwd=tmp_path, capture_output=True, text=True)
    assert run.returncode != 0
    assert 'none of no-such-python is a Python from 3.10 to 3.12' in run.stderr
    assert not (tmp_path / '.venv').exists()
