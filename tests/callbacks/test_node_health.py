"""GPUs' health, by a made-up driver: what is asked of it, what is worst, and what is said aloud."""

import logging
import os
import threading
import time
from types import SimpleNamespace

import pytest
from composer.utils import dist
from ranks import free_port

from diffusion.callbacks import node_health
from diffusion.callbacks.node_health import NodeHealth, Xids, figures_of, worst_of_all
from diffusion.config.load import load
from diffusion.loggers.metrics_file import read_metrics
from diffusion.training.train import train
from tests.data.processes import Forked
from tests.nvml_driver import Driver, NotSupported, NVMLError


def test_figures_are_shares_degrees_and_counts():
    driver = Driver(free=20)
    gpu = driver.gpus[1]
    sound = figures_of(driver, gpu)
    assert sound == {
        'gpu_utilization': 0.97,
        'gpu_memory_used': 0.75,
        'gpu_temperature': 71,
        'gpu_clock': 0.75,
        'gpu_throttled': 0,
        'gpu_ecc_errors': 0,
        'gpu_remapped_rows': 0,
    }
    gpu |= {'throttle': 8 | 4, 'rows': (1, 2, False, False)}
    assert figures_of(driver, gpu) == sound | {'gpu_throttled': 1, 'gpu_remapped_rows': 3}
    gpu['rows'] = NotSupported()
    assert 'gpu_remapped_rows' not in figures_of(driver, gpu)


def test_faults_are_said_when_they_come(caplog):
    driver = Driver()
    health = NodeHealth(seconds=0.01)
    thread = threading.Thread(target=health._ask, args=(driver, 'GPU-1'))
    with caplog.at_level(logging.WARNING):
        thread.start()
        wait_for(lambda: health._latest)
        driver.gpus[1]['errors'] = 3
        driver.xids = [79]
        wait_for(lambda: health._latest['gpu_ecc_errors'] == 3 and health._latest['gpu_xid_errors'])
        health._done.set()
        thread.join()
    assert 'rank 0: gpu_ecc_errors went from 0 to 3' in caplog.text
    assert 'Xid 79 on the GPU of rank 0' in caplog.text


def wait_for(what, seconds=20.0):
    until = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < until
        time.sleep(0.005)


def test_a_driver_that_is_gone_is_said_and_not_asked_again(caplog):
    driver = Driver(temperature=NVMLError('GPU is lost'))
    NodeHealth(seconds=0.01)._ask(driver, 'GPU-1')
    assert 'GPU-1: GPU is lost; it is not asked again' in caplog.text


def test_a_container_that_may_not_listen_counts_no_xids(monkeypatch):
    driver = Driver()

    def refused(gpu, kinds, events):
        raise NotSupported

    monkeypatch.setattr(driver, 'nvmlDeviceRegisterEvents', refused)
    assert Xids(driver, driver.gpus[1]).wait(0.0, threading.Event()) == {}


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
