"""GPUs and prices of gpus.yaml and of --gpus-file, and the GPUs that a build of torch has kernels for."""

import datetime
import importlib
import random

import pytest
import torch
from recipe_files import write_yaml

from diffusion.errors import UserError
from diffusion.planning.gpus import (
    STALE_DAYS,
    architectures_of,
    capability_of,
    find_gpu,
    has_kernels,
    installed_torch,
    load_gpus,
    missing_kernels,
    missing_kernels_message,
)
from tests.planning.recipes import GPUS

ONE = {'mine': {'peak_tflops': {'bf16': 1}, 'memory_gib': 24, 'price_usd_per_hour': 0.5, 'date': '2026-01-01'}}


@pytest.mark.parametrize(
    ('name', 'hint'),
    [
        ('h20', 'did you mean h200'),
        ('a100', 'did you mean a100-40gb or a100-80gb'),
        ('b20o', "did you mean 'b200'"),
        ('tpu', 'known: a100-40gb, '),
    ],
)
def test_unknown_name_suggests_the_nearest(name, hint):
    with pytest.raises(ValueError, match=f'--gpu: no GPU is called {name!r}; {hint}'):
        find_gpu(name, GPUS)
    assert find_gpu('A100_80GB', GPUS).name == 'a100-80gb'


def test_unsupported_precision_lists_the_supported_ones():
    with pytest.raises(ValueError, match=r'v100-32gb does not support bf16 \(supported: fp16, fp32\)'):
        GPUS['v100-32gb'].peak_flops('bf16')


def test_price_is_stale_after_180_days():
    gpu = load_gpus()['a100-80gb']
    assert gpu.date is not None
    day = datetime.date.fromisoformat(gpu.date)
    assert gpu.stale(day + datetime.timedelta(days=STALE_DAYS)) is None
    warning = gpu.stale(day + datetime.timedelta(days=STALE_DAYS + 1))
    assert warning is not None and '181 days old (2026-05-01); pass --price' in warning
    assert GPUS['b200'].stale(datetime.date(2100, 1, 1)) is None


def test_file_adds_gpus_and_replaces_shipped_ones(tmp_path):
    h200 = {'peak_tflops': {'bf16': 989}, 'memory_gib': 139.8, 'price_usd_per_hour': 9.0}
    found = load_gpus(write_yaml(tmp_path / 'gpus.yaml', ONE | {'h200': h200}))
    assert found['mine'].price_usd_per_hour == 0.5
    assert missing_kernels(found['mine'], '2.9') is None, 'its compute capability is unknown'
    assert found['h200'].price_usd_per_hour == 9.0
    assert found['a100-80gb'] == GPUS['a100-80gb']


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'memory_gb': 3}, 'mine.memory_gb: unknown key; did you mean'),
        ({'memory_gib': 'much'}, "mine.memory_gib: 'much' is not a number"),
        ({'memory_gib': 0}, 'mine.memory_gib: 0.0 is not positive'),
        ({'price_usd_per_hour': -1}, 'mine.price_usd_per_hour: -1 is not positive'),
        ({'compute_capability': 'new'}, "mine.compute_capability: 'new' is not a compute capability; use the form"),
        ({'date': 'May'}, "mine.date: 'May' is not a date; use the format 2026-05-01"),
        ({'peak_tflops': {'bf16': 0}}, 'mine.peak_tflops.bf16: 0.0 is not a positive number; use the dense peak in'),
        ({'peak_tflops': {'bf16': 'x'}}, 'mine.peak_tflops.bf16: '),
    ],
)
def test_error_in_a_file_names_the_key(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        load_gpus(write_yaml(tmp_path / 'gpus.yaml', {'mine': ONE['mine'] | change}))


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


def test_every_shipped_gpu_has_a_source_and_a_torch_that_runs_on_it():
    for gpu in GPUS.values():
        assert gpu.source and gpu.compute_capability is not None, gpu.name
        assert (gpu.price_usd_per_hour is None) == (gpu.date is None), gpu.name
        assert missing_kernels(gpu, '2.9') is None
    assert [name for name, gpu in GPUS.items() if missing_kernels(gpu, '2.7.0+cu126')] == ['b200']
    assert [name for name, gpu in GPUS.items() if missing_kernels(gpu, '2.14')] == ['v100-32gb', 'v100-16gb']


def test_message_names_the_command_that_installs_a_torch_with_kernels():
    assert 'make install STACK=resolvable;' in str(missing_kernels(GPUS['v100-32gb'], '2.14'))
    assert 'for no GPU); use torch 2.9 or' in str(missing_kernels_message('t4', (7, 5), (), '2.9+cpu')), 'Turing'


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


def test_installed_version_names_the_cuda_version():
    release = str(torch.__version__).split('+')[0]
    assert installed_torch() == (f'{release}+cu{CUDA_VERSION.replace(".", "")}' if CUDA_VERSION else release)


@pytest.mark.parametrize('version', ['', 'newest', '2', 'cu128', '2.7+cu', '2.9 '])
def test_unreadable_version_is_refused(version):
    with pytest.raises(UserError, match='is not a version of torch; use the format'):
        architectures_of(version)
