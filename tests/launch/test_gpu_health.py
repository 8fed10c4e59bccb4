"""GPU health checks against a fake driver."""

from pathlib import Path
from types import SimpleNamespace

import pytest

from diffusion.launch import gpu_health
from diffusion.launch.gpu_health import check_gpus, findings_exit_status, findings_table
from tests.golden import check_golden
from tests.nvml_driver import Driver, NotSupported, NVMLError


@pytest.fixture(autouse=True)
def _without_waiting(monkeypatch):
    monkeypatch.setattr(gpu_health, 'RELEASE_SECONDS', 0.0)
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)


def bad(driver, kind='h100-sxm', count=2):
    return [finding for finding in check_gpus(driver, kind, count) if not finding.ok]


SMALL = {'name': 'NVIDIA A100-SXM4-40GB', 'total': 40, 'free': 36}
CASES = {
    'healthy': Driver(),
    'any GPU': (Driver(name='NVIDIA L4', recovery=None), 'any', 1),
    'rows failed': Driver(rows=(0, 2, 0, 1)),
    'rows pending': Driver(rows=(0, 2, 1, 0)),
    'errors': Driver(errors=3),
    'processes': Driver(processes=[4711, 4712]),
    **{f'recovery {action}': Driver(recovery=action) for action in range(1, 9)},
    'little memory': Driver(free=71),
    'lost': Driver(name=NVMLError('GPU is lost')),
    'missing': (Driver(), 'h100-sxm', 8),
    'no queries': Driver(rows=NotSupported(), errors=NotSupported(), recovery=None, free=72),
    'another model': (Driver(), 'a100-80gb', 2),
    'smaller model': (Driver(**SMALL), 'a100-80gb', 2),
    'this model': (Driver(**SMALL), 'a100-40gb', 2),
    'no driver': (None, 'any', 1),
    'no GPU needed': (None, 'none', 2),
}
"""Drivers, whose second GPU has a fault, with the required model and number of GPUs."""


def test_findings_are_as_reviewed():
    texts = []
    for name, case in CASES.items():
        found = [*check_gpus(*case)] if isinstance(case, tuple) else [*check_gpus(case, 'h100-sxm', 2)]
        shown = [each for each in found if not each.ok or name in ('healthy', 'any GPU', 'no queries')]
        texts.append(f'{name}: exit status {findings_exit_status(found)}\n{findings_table(shown)}\n')
    check_golden(Path(__file__).parent / 'golden' / 'gpu-health', {'findings.txt': '\n'.join(texts)})


def test_invisible_gpus_are_not_checked(monkeypatch):
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '0')
    assert not bad(Driver(processes=[4711]), count=1)
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '0,7')
    assert {finding.detail for finding in bad(Driver())} == {'1 of 2'}


def test_ending_process_is_waited_for(monkeypatch):
    monkeypatch.setattr(gpu_health, 'RELEASE_SECONDS', 10.0)
    driver = Driver(processes=[4711])
    remaining = iter([[SimpleNamespace(pid=4711)], [SimpleNamespace(pid=4711)], []])
    driver.nvmlDeviceGetComputeRunningProcesses = lambda gpu: next(remaining) if gpu['processes'] else []
    assert not bad(driver)
