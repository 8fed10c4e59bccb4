"""GPUs and prices of gpus.yaml and of --gpus-file, and errors in either."""

import datetime

import pytest
import yaml

from diffusion.planning.gpus import STALE_DAYS, find_gpu, load_gpus
from tests.planning.recipes import GPUS

ONE = {'mine': {'peak_tflops': {'bf16': 100}, 'memory_gib': 24, 'price_usd_per_hour': 0.5, 'date': '2026-01-01'}}


@pytest.fixture
def write(tmp_path):
    def write_file(content):
        path = tmp_path / 'gpus.yaml'
        path.write_text(yaml.safe_dump(content), encoding='utf-8')
        return path

    return write_file


def test_every_shipped_price_has_a_date_and_a_source():
    for gpu in GPUS.values():
        assert gpu.source, gpu.name
        assert (gpu.price_usd_per_hour is None) == (gpu.date is None), gpu.name
        assert gpu.memory_gb_per_second, gpu.name


@pytest.mark.parametrize(('name', 'tflops'), [('a100-80gb', 312), ('h100-sxm', 989), ('h200', 989), ('v100-32gb', 125)])
def test_peaks_are_dense(name, tflops):
    precision = 'fp16' if name.startswith('v100') else 'bf16'
    assert GPUS[name].peak_flops(precision) == tflops * 1e12


@pytest.mark.parametrize('name', ['H200', 'a100_80gb', 'A100-80GB'])
def test_case_and_underscores_do_not_matter(name):
    assert find_gpu(name, GPUS).name == name.lower().replace('_', '-')


@pytest.mark.parametrize(
    ('name', 'hint'),
    [
        ('h20', 'did you mean h200'),
        ('a100', 'did you mean a100-40gb or a100-80gb'),
        ('l40', 'did you mean l40s'),
        ('b20o', "did you mean 'b200'"),
        ('tpu', 'known: a100-40gb, '),
        ('', 'known: a100-40gb, '),
    ],
)
def test_unknown_name_suggests_the_nearest(name, hint):
    with pytest.raises(ValueError, match=f'--gpu: no GPU is called {name!r}; {hint}'):
        find_gpu(name, GPUS)


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


def test_file_adds_gpus_and_replaces_shipped_ones(write):
    path = write(ONE | {'h200': {'peak_tflops': {'bf16': 989}, 'memory_gib': 139.8, 'price_usd_per_hour': 9.0}})
    found = load_gpus(path)
    assert found['mine'].price_usd_per_hour == 0.5
    assert found['h200'].price_usd_per_hour == 9.0
    assert found['a100-80gb'] == GPUS['a100-80gb']


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        ({'memory_gb': 3}, 'mine.memory_gb: unknown key; did you mean'),
        ({'memory_gib': 'much'}, "mine.memory_gib: 'much' is not a number"),
        ({'memory_gib': 0}, 'mine.memory_gib: 0.0 is not positive'),
        ({'price_usd_per_hour': -1}, 'mine.price_usd_per_hour: -1 is not positive'),
        ({'date': 'May'}, "mine.date: 'May' is not a date; use the format 2026-05-01"),
        (
            {'peak_tflops': {'bf16': 0}},
            'mine.peak_tflops.bf16: 0.0 is not a positive number; use the dense peak in TFLOP/s',
        ),
        ({'peak_tflops': {'bf16': 'x'}}, 'mine.peak_tflops.bf16: '),
    ],
)
def test_error_in_a_file_names_the_key(write, change, message):
    with pytest.raises(ValueError, match=message):
        load_gpus(write({'mine': ONE['mine'] | change}))


def test_missing_file_is_an_error(tmp_path):
    with pytest.raises(ValueError, match=r'--gpus-file: .*none\.yaml cannot be read'):
        load_gpus(tmp_path / 'none.yaml')
