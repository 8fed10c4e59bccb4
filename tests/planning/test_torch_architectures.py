"""Which GPUs a build of torch has kernels for."""

import importlib
import random
import subprocess
import sys

import pytest
import torch

from diffusion.errors import UserError
from diffusion.planning.gpus import load_gpus
from diffusion.planning.torch_architectures import (
    architectures_of,
    capability_of,
    has_kernels,
    installed_torch,
    missing_kernels,
)

GPUS = load_gpus()
CUDA_VERSION: str | None = importlib.import_module('torch.version').cuda
CAPABILITIES = [(major, minor) for major in range(5, 13) for minor in range(10)]
BLACKWELL = ('10.0', '10.3', '12.0', '12.1')


def runs_on(name: str) -> set[tuple[int, int]]:
    """Return all capabilities on which code for one architecture runs, by listing them."""
    kind, _, number = name.partition('_')
    number, suffix = number.rstrip('af'), number[len(number.rstrip('af')) :]
    own = (int(number) // 10, int(number) % 10)
    start = CAPABILITIES.index(own)
    if suffix == 'a':
        return {own}
    newer = CAPABILITIES[start:]
    if kind == 'compute' and not suffix:
        return set(newer)
    return set(newer[: 10 - own[1]])


def test_compatibility_equals_brute_force_over_all_capabilities():
    names = [f'{kind}_{10 * major + minor}{suffix}' for kind in ('sm', 'compute') for major, minor in CAPABILITIES
             for suffix in ('', 'a', 'f')]  # fmt: skip
    draw = random.Random(0)
    lists = [[name] for name in names] + [draw.sample(names, draw.randrange(6)) for _ in range(500)]
    for architectures in lists:
        expected = set().union(*(runs_on(name) for name in architectures))
        assert {each for each in CAPABILITIES if has_kernels(each, architectures)} == expected, architectures


@pytest.mark.parametrize(
    ('capability', 'architecture', 'runs'),
    [
        ('8.9', 'sm_86', True),
        ('8.6', 'sm_80', True),
        ('8.0', 'sm_86', False),
        ('10.0', 'sm_90', False),
        ('10.3', 'sm_100', True),
        ('12.0', 'sm_100', False),
        ('12.0', 'compute_90', True),
        ('10.0', 'compute_90a', False),
        ('9.0', 'gfx942', False),
    ],
)
def test_binary_code_runs_within_a_major_version_and_ptx_on_newer_gpus(capability, architecture, runs):
    assert has_kernels(capability_of(capability), [architecture]) is runs


def test_every_shipped_gpu_has_a_capability_and_a_torch_that_runs_on_it():
    for gpu in GPUS.values():
        assert gpu.compute_capability is not None
        assert missing_kernels(gpu, '2.9') is None
    assert [name for name, gpu in GPUS.items() if missing_kernels(gpu, '2.7.0+cu126')] == ['b200']
    assert [name for name, gpu in GPUS.items() if missing_kernels(gpu, '2.14')] == ['v100-32gb', 'v100-16gb']


@pytest.mark.parametrize(
    ('gpu', 'version', 'command'),
    [('b200', '2.7.0', 'make install;'), ('v100-32gb', '2.14', 'make install STACK=resolvable;')],
)
def test_message_names_the_command_that_installs_a_torch_with_kernels(gpu, version, command):
    assert command in str(missing_kernels(GPUS[gpu], version))


@pytest.mark.parametrize('capability', BLACKWELL)
@pytest.mark.parametrize(('version', 'runs'), [('2.7.0', False), ('2.7.0+cu128', True), ('2.14', True)])
def test_blackwell_needs_cuda_12_8(capability, version, runs):
    assert has_kernels(capability_of(capability), architectures_of(version)) is runs


def test_table_agrees_with_the_installed_torch():
    flags = torch._C._cuda_getArchFlags() if CUDA_VERSION else None
    if not flags:
        pytest.skip('this torch is built without CUDA')
    version = installed_torch()
    assert version is not None
    expected = {each for each in CAPABILITIES if has_kernels(each, flags.split())}
    assert {each for each in CAPABILITIES if has_kernels(each, architectures_of(version))} == expected


def test_installed_version_is_read_without_importing_torch():
    code = 'import sys; from diffusion.planning.torch_architectures import installed_torch\n'
    code += 'print(installed_torch(), "torch" in sys.modules)'
    found = subprocess.run([sys.executable, '-c', code], capture_output=True, text=True, check=True).stdout.split()
    cuda = CUDA_VERSION
    release = str(torch.__version__).split('+')[0]
    assert found == [f'{release}+cu{cuda.replace(".", "")}' if cuda else release, 'False']


@pytest.mark.parametrize('version', ['', 'newest', '2', 'cu128', '2.7+cu', '2.9 '])
def test_unreadable_version_is_refused(version):
    with pytest.raises(UserError, match='is not a version of torch; use the format'):
        architectures_of(version)
