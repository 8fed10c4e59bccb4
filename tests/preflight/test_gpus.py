"""What the driver says of GPUs, by one that is made up."""

import os
from types import SimpleNamespace

import pytest

from diffusion.exits import BAD_HARDWARE, CONFIG_ERROR
from diffusion.preflight.findings import status_of
from diffusion.preflight.gpus import check_gpus


class NVMLError(Exception):
    pass


class NotSupported(NVMLError):
    pass


class Driver:
    """Two sound H100s, unless a GPU's entry says otherwise."""

    NVMLError, NVMLError_NotSupported = NVMLError, NotSupported
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0

    def __init__(self, **second) -> None:
        sound = {'name': 'NVIDIA H100 80GB HBM3', 'free': 79, 'processes': [], 'rows': (0, 0, 0, 0), 'errors': 0}
        self.gpus = [sound, sound | second]

    def get(self, gpu, key):
        value = gpu[key]
        if isinstance(value, Exception):
            raise value
        return value

    def nvmlDeviceGetCount(self):
        return len(self.gpus)

    def nvmlDeviceGetHandleByIndex(self, index):
        return self.gpus[index]

    def nvmlDeviceGetName(self, gpu):
        return self.get(gpu, 'name')

    def nvmlDeviceGetMemoryInfo(self, gpu):
        return SimpleNamespace(total=80 * 2**30, free=self.get(gpu, 'free') * 2**30)

    def nvmlDeviceGetComputeRunningProcesses(self, gpu):
        return [SimpleNamespace(pid=pid) for pid in self.get(gpu, 'processes')]

    def nvmlDeviceGetRemappedRows(self, gpu):
        return self.get(gpu, 'rows')

    def nvmlDeviceGetTotalEccErrors(self, gpu, kind, counter):
        assert (kind, counter) == (1, 0)
        return self.get(gpu, 'errors')


def bad(driver, kind='h100-sxm', count=2):
    return [finding for finding in check_gpus(driver, kind, count) if not finding.ok]


def test_sound_gpus_pass_and_say_what_they_are():
    found = list(check_gpus(Driver(processes=[os.getpid()]), 'h100-sxm', 2))
    assert status_of(found) == 0
    assert 'gpu 1: NVIDIA H100 80GB HBM3' in {finding.detail for finding in found}


@pytest.mark.parametrize(
    ('second', 'check', 'told'),
    [
        ({'rows': (0, 2, 0, 1)}, 'gpu rows', 'gpu 1: rows could not be remapped'),
        ({'rows': (0, 2, 1, 0)}, 'gpu rows', 'gpu 1: a reset is due'),
        ({'errors': 3}, 'gpu ecc', 'gpu 1: 3 uncorrected errors'),
        ({'processes': [4711]}, 'gpu processes', 'gpu 1: 4711 on it'),
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
    assert not bad(Driver(rows=NotSupported(), errors=NotSupported()))


def test_without_a_driver():
    (found,) = bad(None)
    assert 'NVML does not answer' in found.detail
    assert not list(check_gpus(None, 'none', 2)), 'a CPU has none'
