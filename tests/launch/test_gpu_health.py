"""GPU health checks against a fake driver."""

from types import SimpleNamespace

import pytest

from diffusion.exit_codes import BAD_HARDWARE, CONFIG_ERROR
from diffusion.launch import gpu_health
from diffusion.launch.gpu_health import check_gpus, findings_exit_status
from tests.nvml_driver import Driver, NotSupported, NVMLError


@pytest.fixture(autouse=True)
def _without_waiting(monkeypatch):
    monkeypatch.setattr(gpu_health, 'RELEASE_SECONDS', 0.0)
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)


def bad(driver, kind='h100-sxm', count=2):
    return [finding for finding in check_gpus(driver, kind, count) if not finding.ok]


def test_healthy_gpus_pass_and_are_named():
    found = list(check_gpus(Driver(), 'h100-sxm', 2))
    assert findings_exit_status(found) == 0
    assert 'gpu 1: NVIDIA H100 80GB HBM3' in {finding.detail for finding in found}


@pytest.mark.parametrize(
    ('driver', 'count', 'check', 'message'),
    [
        (Driver(rows=(0, 2, 0, 1)), 2, 'gpu rows', 'gpu 1: row remapping failed; replace the GPU'),
        (Driver(rows=(0, 2, 1, 0)), 2, 'gpu rows', 'gpu 1: row remapping pending; reset the GPU'),
        (Driver(errors=3), 2, 'gpu ecc', 'gpu 1: 3 uncorrected errors'),
        (Driver(processes=[4711]), 2, 'gpu processes', 'gpu 1: in use by process 4711; stop it'),
        (Driver(recovery=2), 2, 'gpu recovery', 'gpu 1: driver requests a node reboot'),
        (Driver(free=20), 2, 'gpu memory', 'gpu 1: 25% of 80 GiB free'),
        (Driver(name=NVMLError('GPU is lost')), 2, 'gpu', 'gpu 1: GPU is lost'),
        (Driver(), 8, 'gpu count', '2 of 8'),
    ],
)
def test_bad_hardware_is_reported(driver, count, check, message):
    (found,) = bad(driver, count=count)
    assert (found.check, found.status) == (check, BAD_HARDWARE)
    assert message in found.detail


def test_unsupported_queries_are_skipped():
    assert not bad(Driver(rows=NotSupported(), errors=NotSupported(), recovery=None, free=72))


def test_wrong_or_smaller_gpu_model_is_a_user_error():
    found = bad(Driver(), kind='a100-80gb')
    assert {finding.status for finding in found} == {CONFIG_ERROR}
    assert 'NVIDIA H100 80GB HBM3, expected a100-80gb' in found[0].detail
    driver = Driver(name='NVIDIA A100-SXM4-40GB', total=40, free=39)
    driver.gpus = driver.gpus[1:]
    (smaller,) = bad(driver, kind='a100-80gb', count=1)
    assert (smaller.status, smaller.detail) == (CONFIG_ERROR, 'gpu 0: 40 GiB of memory, a100-80gb has 79')
    assert not bad(driver, kind='a100-40gb', count=1)


def test_invisible_gpus_are_not_checked(monkeypatch):
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '0')
    assert not bad(Driver(processes=[4711]), count=1)
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '0,7')
    assert {finding.detail for finding in bad(Driver())} == {'1 of 2'}


def test_missing_driver_is_reported():
    (found,) = bad(None)
    assert 'NVML does not respond' in found.detail
    assert not list(check_gpus(None, 'none', 2)), 'no GPU is required'


def test_ending_process_is_waited_for(monkeypatch):
    monkeypatch.setattr(gpu_health, 'RELEASE_SECONDS', 10.0)
    driver = Driver(processes=[4711])
    remaining = iter([[SimpleNamespace(pid=4711)], [SimpleNamespace(pid=4711)], []])
    driver.nvmlDeviceGetComputeRunningProcesses = lambda gpu: next(remaining) if gpu['processes'] else []
    assert not bad(driver)
