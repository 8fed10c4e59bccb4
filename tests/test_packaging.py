"""Packaging: version bounds, pins, declared dependencies, package data, Docker image, Makefile and `.ci/run`."""

import ast
import fnmatch
import functools
import importlib
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable, Iterator
from importlib.metadata import packages_distributions, requires
from importlib.util import find_spec
from pathlib import Path

import pytest
import tomli
from docs_shell import make_overlay
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import NormalizedName, canonicalize_name

from diffusion.compatibility import DIFFUSERS_BOUNDS
from diffusion.compatibility.private_names import CHECKED_VERSIONS

ROOT = Path(__file__).parents[1]
PYTHONS = ('3.10', '3.11', '3.12', '3.13')
STACKS = ('current', 'resolvable')

project = tomli.loads((ROOT / 'pyproject.toml').read_text())['project']
extras: dict[str, list[str]] = project['optional-dependencies']
declared = [Requirement(line) for line in [*project['dependencies'], *(r for rs in extras.values() for r in rs)]]
everything = [*declared, Requirement(f'diffusers{DIFFUSERS_BOUNDS}')]


@functools.cache
def pins(python: str, stack: str) -> dict[NormalizedName, str]:
    applying = applicable(lines_of(f'constraints-{stack}.txt'), python)
    versions = {canonicalize_name(r.name): str(r.specifier).removeprefix('==') for r in applying}
    assert len(versions) == len(applying), 'a package is pinned twice'
    return versions


def lines_of(file: str) -> list[str]:
    """Return the lines of a requirements file without comments."""
    return [line for line in (ROOT / file).read_text().splitlines() if not line.startswith('#')]


def applicable(lines: Iterable[str], python: str) -> list[Requirement]:
    """Return the requirements that apply under a Python version, without those of extras."""
    environment = {**default_environment(), 'python_version': python, 'python_full_version': f'{python}.0', 'extra': ''}
    return [each for each in map(Requirement, lines) if each.marker is None or each.marker.evaluate(environment)]


def outside(pinned: dict[NormalizedName, str], bounds: Iterable[Requirement]) -> dict[NormalizedName, str]:
    """Return the bounds that the pinned versions violate, by package name."""
    found = {canonicalize_name(each.name): each for each in bounds}
    wrong = {name: each for name, each in found.items() if not each.specifier.contains(pinned.get(name, 'not pinned'))}
    return {name: f'{each}: {pinned.get(name, "not pinned")}' for name, each in wrong.items()}


def imported_packages(folder: Path) -> Iterator[tuple[Path, str]]:
    """Yield the files of a folder with each top-level package that they import, also inside functions."""
    for path in sorted(folder.rglob('*.py')):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Import):
                yield from ((path, alias.name.split('.')[0]) for alias in node.names)
            elif isinstance(node, ast.ImportFrom) and node.level == 0 and node.module:
                yield path, node.module.split('.')[0]


@pytest.mark.parametrize('stack', STACKS)
@pytest.mark.parametrize('python', PYTHONS)
def test_every_direct_dependency_is_pinned_within_its_bounds(python: str, stack: str):
    pinned = pins(python, stack)
    for requirement in everything:
        assert outside(pinned, [requirement]) == {}


@pytest.mark.parametrize('package', ['mosaicml', 'mosaicml-streaming'])
@pytest.mark.parametrize('python', PYTHONS)
def test_only_current_pins_that_are_overridden_are_outside_the_bounds_of_composer(python: str, package: str):
    bounds = applicable(requires(package) or [], python)
    assert outside(pins(python, 'resolvable'), bounds) == {}
    overrides = applicable(lines_of('overrides-current.txt'), python)
    overridden = {canonicalize_name(each.name) for each in overrides}
    excluded = outside(pins(python, 'current'), bounds)
    assert excluded and excluded.keys() <= overridden
    assert outside(pins(python, 'current'), overrides) == {}


def test_every_requirement_but_diffusers_has_a_lower_and_an_upper_bound():
    operators = {str(each): {specifier.operator for specifier in each.specifier} for each in declared}
    assert {each for each, found in operators.items() if found != {'>=', '<'}} == {'diffusers'}


@pytest.mark.parametrize('name', CHECKED_VERSIONS)
def test_checked_versions_are_those_of_both_sets(name: str):
    assert {pins('3.11', stack)[canonicalize_name(name)] for stack in STACKS} == {*CHECKED_VERSIONS[name]}


@pytest.mark.parametrize('stack', STACKS)
def test_constraints_are_plain_pins(stack: str):
    condition = r"python_full_version (<|>=) '3\.1[0-3]'|python_full_version == '3\.1[0-3]\.\*'"
    pin = rf'[a-z0-9-]+==[\w.]+( ; ({condition}))?'
    assert [line for line in lines_of(f'constraints-{stack}.txt') if not re.fullmatch(pin, line)] == []


def test_documented_versions_are_the_pins():
    page = (ROOT / 'docs' / 'install.md').read_text()
    rows = re.findall(r'^\| `([\w-]+)` \| ([\d.]+) \| ([\d.]+) \| ([\d.]+) \|$', page, re.MULTILINE)
    assert len(rows) > 8
    for name, *shown in rows:
        for python in PYTHONS:
            expected = shown[python == '3.10'], shown[2]
            assert tuple(pins(python, stack)[canonicalize_name(name)] for stack in STACKS) == expected, (name, python)


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason='Python 3.10 does not know the modules of most packages')
def test_every_imported_package_is_declared():
    declared = {canonicalize_name(Requirement(r).name) for r in project['dependencies'] + extras['quickstart']}
    optional = [
        line for name in ('caption', 'eval', 'formats', 'kubernetes', 'mcli', 'ocr', 'ray') for line in extras[name]
    ]
    declared |= {canonicalize_name(Requirement(line).name) for line in optional}
    providers = packages_distributions()
    ours = set(sys.stdlib_module_names) | {'diffusion'}
    undeclared = {
        f'{path.relative_to(ROOT)}: {package}'
        for path, package in imported_packages(ROOT / 'diffusion')
        if package not in ours and declared.isdisjoint(map(canonicalize_name, providers.get(package, [])))
    }
    assert undeclared == set()


def test_commands_of_the_image_are_existing_modules():
    dockerfile = (ROOT / 'docker' / 'Dockerfile').read_text()
    commands = [json.loads(words) for words in re.findall(r'CMD (\[.*\])$', dockerfile, re.MULTILINE)]
    assert len(commands) == 2, 'the health check and the default command'
    for python, option, module in commands:
        assert (python, option) == ('python', '-m') and find_spec(module), module


def test_console_script_exists():
    module, function = project['scripts']['diffusion'].split(':')
    assert callable(getattr(importlib.import_module(module), function))


# -- the image --

UV = """#!/bin/bash
echo "$*" >> "$ROOT/uv.log"
if [[ "$*" == *--editable* ]]; then
  exec "$PYTHON" -m pip --python "$OVERLAY" install --quiet --no-deps --no-index --no-build-isolation --editable .
fi
while [ $# -gt 0 ]; do
  case "$1" in
    --constraint | --override | --requirement) test -f "$2" || exit 2; shift 2 ;;
    *) shift ;;
  esac
done
"""
"""Stand-in for uv, which installs this package alone and checks that the other files it is given exist."""


def last_stage(dockerfile: Path) -> list[tuple[str, str]]:
    """Return the name and the arguments of each instruction of the last stage of a Dockerfile."""
    text = re.sub(r'^ *#.*\n', '', dockerfile.read_text(), flags=re.MULTILINE).replace('\\\n', '')
    found = [(line.split()[0], line.split(maxsplit=1)[1]) for line in text.splitlines() if line.strip()]
    start = max(index for index, (name, _) in enumerate(found) if name == 'FROM')
    return found[start + 1 :]


def copy_build_context(folder: Path) -> None:
    *patterns, caches = [line for line in (ROOT / '.dockerignore').read_text().splitlines() if line[0] != '#']
    assert caches == '**/__pycache__'
    for path in ROOT.iterdir():
        matching = [pattern for pattern in patterns if fnmatch.fnmatch(path.name, pattern.removeprefix('!'))]
        if matching[-1].startswith('!'):
            copy_into(path, folder / path.name)


def copy_into(source: Path, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    if source.is_dir():
        shutil.copytree(source, target, dirs_exist_ok=True, ignore=shutil.ignore_patterns('__pycache__'))
    else:
        shutil.copy(source, target)


def build_image(root: Path) -> subprocess.CompletedProcess[str]:
    """Execute COPY and RUN of the Dockerfile's last stage in a folder, with stand-ins for what needs root or a network.

    Return the first command that failed, else the last one; `root` gets `overlay`, an environment, and `uv.log`.
    """
    programs, context = root / 'programs', root / 'context'
    programs.mkdir(parents=True)
    for name, script in {'uv': UV, 'chown': '#!/bin/sh\n', 'mkdir': '#!/bin/sh\n'}.items():
        (programs / name).write_text(script)
        (programs / name).chmod(0o755)
    copy_build_context(context)
    folder, environment = root, dict(os.environ)
    environment |= {'PATH': f'{programs}:{os.environ["PATH"]}', 'PYTHON': sys.executable, 'ROOT': str(root)}
    environment |= {'OVERLAY': str(make_overlay(root / 'overlay'))}
    done = None
    for name, words in last_stage(ROOT / 'docker' / 'Dockerfile'):
        if name == 'WORKDIR':
            folder = root / words.lstrip('/')
            folder.mkdir(parents=True)
        elif name == 'ARG':
            argument, _, default = words.partition('=')
            environment[argument] = default
        elif name == 'COPY':
            *patterns, target = words.split()
            for pattern in patterns:
                sources = [*context.glob(pattern)]
                assert sources, f'{pattern} is not in the build context'
                for source in sources:
                    copy_into(source, folder / target / source.name if target == './' else folder / target)
        elif name == 'RUN':
            command = re.sub(r'^(--mount=\S+ +)*', '', words)
            done = subprocess.run(
                ['sh', '-c', command], cwd=folder, env=environment, capture_output=True, text=True, check=False
            )
            if done.returncode != 0:
                return done
    assert done is not None
    return done


@pytest.mark.slow
def test_image_installs_the_packages_and_this_package(tmp_path: Path):
    done = build_image(tmp_path)
    assert done.returncode == 0, done.stderr
    dependencies, package = (tmp_path / 'uv.log').read_text().splitlines()
    files = '--constraint constraints-current.txt --override overrides-current.txt'
    assert dependencies == f'pip install --compile-bytecode {files} --requirement pyproject.toml --extra eval'
    assert package == 'pip install --no-deps --editable .'
    workspace = tmp_path / 'workspace'
    for words, expected in {
        ('-c', 'import diffusion; print(diffusion.__file__)'): str(workspace / 'diffusion' / '__init__.py'),
        ('-m', 'diffusion', 'check', 'yamls/quickstart.yaml', '--quiet'): 'data/openmoji/64px',
    }.items():
        environment = {name: value for name, value in os.environ.items() if name != 'PYTHONPATH'}
        python = tmp_path / 'overlay' / 'bin' / 'python'
        run = subprocess.run(
            [python, *words], cwd=workspace, env=environment, capture_output=True, text=True, check=False
        )
        assert expected in run.stdout, run.stderr


# -- make and .ci/run --


def test_make_without_a_usable_python_fails_with_a_message(tmp_path: Path):
    for name in ('Makefile', 'pyproject.toml', 'constraints-current.txt'):
        shutil.copy(ROOT / name, tmp_path)
    environment = {name: value for name, value in os.environ.items() if name not in ('MAKEFLAGS', 'MFLAGS')}
    command = ['make', 'test', 'PYTHON=no-such-python']
    run = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert run.returncode != 0
    assert 'none of no-such-python is a Python from 3.10 to 3.13' in run.stderr
    assert not (tmp_path / '.venv').exists()


@pytest.fixture
def ci(tmp_path: Path):
    """Function that runs `.ci/run` in a repository of its own and returns the commands that it gave to make."""
    repository, programs = tmp_path / 'repository', tmp_path / 'programs'
    programs.mkdir()
    for name in ('make', 'slurmctld', 'chromium'):
        (programs / name).write_text('#!/bin/sh\necho "$*" >> ../make.log; [ "$1" != "$FAILING" ]\n')
        (programs / name).chmod(0o755)
    (repository / '.ci').mkdir(parents=True)
    shutil.copy(ROOT / '.ci' / 'run', repository / '.ci')
    commit = ['-c', 'user.name=test', '-c', 'user.email=test@example.com', 'commit', '--quiet', '--message', 'Add it']
    for words in (['init', '--quiet'], ['add', '.'], commit):
        subprocess.run(['git', *words], cwd=repository, check=True)

    def run(failing: str = '') -> list[str]:
        environment = os.environ | {'PATH': f'{programs}:{os.environ["PATH"]}', 'FAILING': failing}
        subprocess.run(['.ci/run'], cwd=repository, env=environment, check=True, capture_output=True)
        return (tmp_path / 'make.log').read_text().splitlines()

    return run


def test_ci_runs_one_part_of_the_slow_tests_and_of_those_of_the_resolvable_set(ci):
    *_, tests, again = [command for command in ci() if command.startswith('test-')]
    assert tests.startswith('test-all') and again.startswith('test-resolvable')
    parts = {re.findall(r'--part=([0-3])/4', command)[0] for command in (tests, again)}
    assert len(parts) == 1


@pytest.mark.parametrize('failing', ['install', 'lint', 'docs', 'test-all', 'test-resolvable'])
def test_ci_fails_if_one_of_its_parts_fails(ci, failing: str):
    with pytest.raises(subprocess.CalledProcessError):
        ci(failing)
