"""GPUs' health, by a made-up driver: what is asked of it, what is worst, and what is said aloud."""

import logging
import os
import threading
from types import SimpleNamespace

import pytest
from composer.utils import dist
from ranks import free_port

from diffusion.callbacks import node_health
from diffusion.callbacks.node_health import NodeHealth, Xids, figures_of, worst_of_all
from diffusion.config import load
from diffusion.loggers.metrics_file import read_metrics
from diffusion.train import train
from tests.data.processes import Forked


class NVMLError(Exception):
    pass


class NotSupported(NVMLError):
    pass


class TimedOut(NVMLError):
    pass


class Driver:
    """A GPU that is busy, warm and sound."""

    NVMLError, NVMLError_NotSupported, NVMLError_Timeout = NVMLError, NotSupported, TimedOut
    NVML_TEMPERATURE_GPU, NVML_CLOCK_SM = 0, 1
    NVML_MEMORY_ERROR_TYPE_UNCORRECTED, NVML_VOLATILE_ECC = 1, 0
    nvmlClocksThrottleReasonHwSlowdown, nvmlClocksThrottleReasonSwThermalSlowdown = 8, 32
    nvmlEventTypeXidCriticalError = 8

    def __init__(self):
        self.errors, self.throttle, self.xids = 0, 4, []
        self.rows: tuple[int, int, bool, bool] | None = (0, 0, False, False)

    def nvmlDeviceGetHandleByUUID(self, uuid):
        return uuid

    def nvmlDeviceGetUtilizationRates(self, gpu):
        return SimpleNamespace(gpu=97)

    def nvmlDeviceGetMemoryInfo(self, gpu):
        return SimpleNamespace(used=60, total=80)

    def nvmlDeviceGetTemperature(self, gpu, kind):
        return 71

    def nvmlDeviceGetClockInfo(self, gpu, kind):
        return 1485

    def nvmlDeviceGetMaxClockInfo(self, gpu, kind):
        return 1980

    def nvmlDeviceGetCurrentClocksThrottleReasons(self, gpu):
        return self.throttle

    def nvmlDeviceGetTotalEccErrors(self, gpu, kind, since):
        return self.errors

    def nvmlDeviceGetRemappedRows(self, gpu):
        if self.rows is None:
            raise NotSupported
        return self.rows

    def nvmlEventSetCreate(self):
        return 'events'

    def nvmlDeviceRegisterEvents(self, gpu, kinds, events):
        pass

    def nvmlEventSetWait_v2(self, events, milliseconds):
        if not self.xids:
            raise TimedOut
        return SimpleNamespace(eventData=self.xids.pop())


def test_figures_are_shares_degrees_and_counts():
    driver = Driver()
    sound = figures_of(driver, 'gpu')
    assert sound == {
        'gpu_utilization': 0.97,
        'gpu_memory_used': 0.75,
        'gpu_temperature': 71,
        'gpu_clock': 0.75,
        'gpu_throttled': 0,
        'gpu_ecc_errors': 0,
        'gpu_remapped_rows': 0,
    }
    driver.throttle, driver.rows = 8 | 4, (1, 2, False, False)
    assert figures_of(driver, 'gpu') == sound | {'gpu_throttled': 1, 'gpu_remapped_rows': 3}
    driver.rows = None
    assert 'gpu_remapped_rows' not in figures_of(driver, 'gpu')


def test_faults_are_said_when_they_come(caplog):
    driver = Driver()
    health = NodeHealth(seconds=0.01)
    thread = threading.Thread(target=health._ask, args=(driver, 'GPU-1'))
    with caplog.at_level(logging.WARNING):
        thread.start()
        while not health._latest:
            pass
        driver.errors = 3
        driver.xids = [79]
        while health._latest.get('gpu_ecc_errors') != 3 or not health._latest['gpu_xid_errors']:
            pass
        health._done.set()
        thread.join()
    assert 'rank 0: gpu_ecc_errors went from 0 to 3' in caplog.text
    assert 'Xid 79 on the GPU of rank 0' in caplog.text


def test_a_driver_that_is_gone_is_said_and_not_asked_again(caplog):
    driver = Driver()

    def gone(gpu, kind):
        raise NVMLError('GPU is lost')

    health = NodeHealth(seconds=0.01)
    driver.nvmlDeviceGetTemperature = gone
    health._ask(driver, 'GPU-1')
    assert 'GPU-1: GPU is lost; it is not asked again' in caplog.text


def test_a_container_that_may_not_listen_counts_no_xids():
    driver = Driver()

    def refused(gpu, kinds, events):
        raise NotSupported

    driver.nvmlDeviceRegisterEvents = refused
    assert Xids(driver, 'gpu').wait(0.0, threading.Event()) == {}


@pytest.mark.dist
def test_the_worst_of_two_ranks_is_named():
    port = free_port()
    own = [{'gpu_temperature': 60, 'gpu_utilization': 0.9}, {'gpu_temperature': 85, 'gpu_utilization': 0.99}]

    def work(rank):
        os.environ |= {'RANK': str(rank), 'WORLD_SIZE': '2', 'LOCAL_RANK': str(rank), 'LOCAL_WORLD_SIZE': '2'}
        os.environ |= {'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(port), 'NODE_RANK': '0'}
        dist.initialize_dist('cpu', timeout=60)
        state = SimpleNamespace(device=SimpleNamespace(tensor_to_device=lambda tensor: tensor))
        found = worst_of_all(own[rank], state)  # type: ignore[arg-type]
        dist.barrier()
        dist.barrier()
        assert found == {
            'health/gpu_temperature': 85.0,
            'health/gpu_temperature_rank': 1.0,
            'health/gpu_utilization': 0.9,
            'health/gpu_utilization_rank': 0.0,
        }

    processes = [Forked(lambda rank=rank: work(rank)) for rank in range(2)]
    assert [process.wait() for process in processes] == [0, 0]


def test_a_run_without_gpus_logs_no_health_and_goes_on(write_recipe):
    recipe = load(write_recipe(callbacks={'node_health': {'every': 1}}, loggers={'metrics_file': {}}))
    train(recipe)
    names = read_metrics(recipe.run_dir / 'metrics.jsonl')
    assert 'loss/train/total' in names and not [name for name in names if name.startswith('health/')]


@pytest.mark.parametrize('settings', [{'every': 0}, {'seconds': 0.0}])
def test_settings_that_make_no_sense_are_refused(settings):
    with pytest.raises(ValueError, match='node_health: .* must be positive'):
        node_health.NodeHealth(**settings)
