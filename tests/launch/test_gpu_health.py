"""What the driver says of GPUs, by one that is made up."""

from types import SimpleNamespace

import pytest

from diffusion.exit_codes import BAD_HARDWARE, CONFIG_ERROR
from diffusion.launch import gpu_health
from diffusion.launch.findings import findings_exit_status
from diffusion.launch.gpu_health import check_gpus
from tests.nvml_driver import Driver, NotSupported, NVMLError


@pytest.fixture(autouse=True)
def _at_once(monkeypatch):
    monkeypatch.setattr(gpu_health, 'RELEASE_SECONDS', 0.0)
    monkeypatch.delenv('CUDA_VISIBLE_DEVICES', raising=False)


def bad(driver, kind='h100-sxm', count=2):
    return [finding for finding in check_gpus(driver, kind, count) if not finding.ok]


def test_sound_gpus_pass_and_say_what_they_are():
    found = list(check_gpus(Driver(), 'h100-sxm', 2))
    assert findings_exit_status(found) == 0
    assert 'gpu 1: NVIDIA H100 80GB HBM3' in {finding.detail for finding in found}


@pytest.mark.parametrize(
    ('second', 'check', 'told'),
    [
        ({'rows': (0, 2, 0, 1)}, 'gpu rows', 'gpu 1: rows could not be remapped; replace it'),
        ({'rows': (0, 2, 1, 0)}, 'gpu rows', 'gpu 1: a reset is due'),
        ({'errors': 3}, 'gpu ecc', 'gpu 1: 3 uncorrected errors'),
        ({'processes': [4711]}, 'gpu processes', 'gpu 1: process 4711 is on it; end it'),
        ({'recovery': 2}, 'gpu recovery', 'gpu 1: the driver asks for a reboot'),
        ({'free': 20}, 'gpu memory', 'gpu 1: 25% of 80 GiB free'),
        ({'name': NVMLError('GPU is lost')}, 'gpu', 'gpu 1: GPU is lost'),
    ],
)
def test_bad_hardware_is_named(second, check, told):
    (found,) = bad(Driver(**second))
    assert (found.check, found.status) == (check, BAD_HARDWARE)
    assert told in found.detail


def test_a_gpu_that_is_missing_is_counted():
    (found,) = bad(Driver(), count=8)
    assert (found.check, found.detail, found.status) == ('gpu count', '2 of 8', BAD_HARDWARE)


def test_another_kind_is_a_mistake_that_no_other_node_mends():
    found = bad(Driver(), kind='a100-80gb')
    assert {finding.status for finding in found} == {CONFIG_ERROR}
    assert 'NVIDIA H100 80GB HBM3, asked for a100-80gb' in found[0].detail


def test_what_a_gpu_does_not_support_is_not_asked_of_it():
    assert not bad(Driver(rows=NotSupported(), errors=NotSupported(), recovery=None))


def test_a_smaller_card_of_the_family_is_another_kind():
    driver = Driver(name='NVIDIA A100-SXM4-40GB', total=40, free=39)
    driver.gpus = driver.gpus[1:]
    (found,) = bad(driver, kind='a100-80gb', count=1)
    assert (found.status, found.detail) == (CONFIG_ERROR, 'gpu 0: 40 GiB of memory, a100-80gb has 79')
    assert not bad(driver, kind='a100-40gb', count=1)


def test_gpus_that_the_job_does_not_use_are_somebody_elses(monkeypatch):
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '0')
    assert not bad(Driver(processes=[4711]), count=1)
    monkeypatch.setenv('CUDA_VISIBLE_DEVICES', '0,7')
    assert {finding.detail for finding in bad(Driver())} == {'1 of 2'}


def test_without_a_driver():
    (found,) = bad(None)
    assert 'NVML does not answer' in found.detail
    assert not list(check_gpus(None, 'none', 2)), 'a CPU has none'


def test_a_process_that_is_just_leaving_is_waited_for(monkeypatch):
    monkeypatch.setattr(gpu_health, 'RELEASE_SECONDS', 10.0)
    driver = Driver(processes=[4711])
    left = iter([[4711], [4711], []])
    driver.nvmlDeviceGetComputeRunningProcesses = lambda gpu: [
        SimpleNamespace(pid=pid) for pid in (next(left) if gpu['processes'] else [])
    ]
    assert not [finding for finding in check_gpus(driver, 'h100-sxm', 2) if not finding.ok]
