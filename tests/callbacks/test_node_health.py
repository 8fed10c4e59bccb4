"""NodeHealth with a fake driver: queried metrics, the worst value over ranks, warnings; the slowest rank is logged."""

import contextlib
import logging
import math
import socket
import threading
from collections.abc import Iterator
from unittest.mock import Mock

import pytest
import torch
from torch import nn
from waiting import wait_until

from diffusion.callbacks import node_health, stragglers
from diffusion.callbacks.node_health import NodeHealth, Xids, query_metrics, worst_of_rows
from diffusion.callbacks.stragglers import slowest
from diffusion.config.load import load
from diffusion.data.loader import BucketedLoader
from diffusion.exit_codes import BAD_HARDWARE
from diffusion.loggers.metrics_file import read_metrics
from diffusion.tasks import run_recipe
from diffusion.training.train import train
from tests.nvml_driver import Driver, NotSupported, NVMLError


def test_metrics_are_fractions_degrees_and_counts():
    driver = Driver(free=20)
    gpu = driver.gpus[1]
    healthy = query_metrics(driver, gpu)
    assert healthy == {
        **{'gpu_utilization': 0.97, 'gpu_memory_used': 0.75, 'gpu_temperature': 71, 'gpu_clock': 0.75},
        **{'gpu_throttled': 0, 'gpu_ecc_errors': 0, 'gpu_remapped_rows': 0},
    }
    gpu |= {'throttle': 8 | 4, 'rows': (1, 2, True, False)}
    assert query_metrics(driver, gpu) == healthy | {'gpu_throttled': 1, 'gpu_remapped_rows': 3}
    gpu['rows'] = NotSupported()
    assert 'gpu_remapped_rows' not in query_metrics(driver, gpu)


@contextlib.contextmanager
def polling(driver: Driver) -> Iterator[NodeHealth]:
    health = NodeHealth(seconds=0.01)
    thread = threading.Thread(target=health._poll, args=(driver, 'GPU-1'))
    thread.start()
    yield health
    health._done.set()
    thread.join()


def test_new_faults_are_logged(caplog):
    driver = Driver()
    with caplog.at_level(logging.WARNING), polling(driver) as health:
        wait_until(lambda: health._latest)
        driver.gpus[1]['errors'] = 3
        driver.xids = [79]
        wait_until(lambda: health._latest['gpu_ecc_errors'] == 3 and health._latest['gpu_xid_errors'] == 1)
        driver.gpus[1]['rows'] = (0, 2, False, False)
        wait_until(lambda: health._latest['gpu_remapped_rows'] == 2)
    assert 'rank 0: uncorrected memory errors rose from 0 to 3' in caplog.text
    assert 'rank 0: remapped memory rows rose from 0 to 2' in caplog.text
    assert 'Xid 79 on the GPU of rank 0' in caplog.text


@pytest.mark.parametrize(
    ('second', 'xids', 'fault'),
    [
        ({}, [13, 31, 43], ''),  # errors of a program
        ({}, [79], 'Xid 79 (GPU has fallen off the bus)'),
        ({'rows': (0, 1, True, False)}, [], 'row remapping is pending until a reset'),
        ({'rows': (0, 8, True, True)}, [], 'row remapping failed'),
        ({'errors': 3}, [], ''),  # before the run
    ],
)
def test_only_hardware_faults_count_as_faults(second, xids, fault, caplog):
    driver = Driver(**second)
    driver.xids = list(xids)
    with polling(driver) as health:
        wait_until(lambda: health._latest and not driver.xids and (health._fault or not fault))
    assert health._fault == fault
    assert sum(each.message.endswith(f' rank 0: {fault}') for each in caplog.records) == bool(fault), 'logged once'


def test_xids_of_hardware_are_those_of_nvidias_catalog():
    driver, faults = Driver(), ''
    driver.xids, counter = [*range(150, 0, -1)], Xids(driver, None)
    while driver.xids:
        counter.fault = ''
        counter.wait(0.0, threading.Event())
        faults += counter.fault.partition('(')[0]
    assert faults == 'Xid 48 Xid 62 Xid 64 Xid 74 Xid 79 Xid 94 Xid 95 Xid 119 Xid 120 Xid 140 '


def test_gpu_far_slower_than_the_others_for_minutes_counts_as_a_fault(monkeypatch):
    now = [0.0]
    monkeypatch.setattr(node_health.time, 'monotonic', lambda: now[0])
    health = NodeHealth()
    for second, clock in [(0, 0.6), (200, 0.6), (250, 0.9), (260, 0.6), (559, 0.6)]:
        now[0] = float(second)
        health._check_clock([clock, 0.95, 0.95, math.nan])
        assert not health._fault
    now[0] = 560.0
    health._check_clock([0.6, 0.95, 0.95, math.nan])
    assert health._fault == 'clock at 60% of its maximum for 5 min, the median GPU at 95%'


@pytest.mark.parametrize('action', [pytest.param('log', marks=pytest.mark.slow), 'leave'])
def test_fault_saves_and_ends_with_bad_hardware_if_told_to_leave(write_recipe, tmp_path, monkeypatch, capfd, action):
    driver, queries = Driver(), []
    # From the second query on, the GPU has errors.
    monkeypatch.setattr(driver, 'nvmlDeviceGetTotalEccErrors', lambda *_: queries.append(0) or 2 * (len(queries) > 1))
    monkeypatch.setattr(node_health, 'current_gpu', lambda: (driver, 'GPU-1'))
    monkeypatch.setenv('DIFFUSION_ATTEMPT_FOLDER', str(tmp_path))
    monkeypatch.setattr(run_recipe.heartbeats, 'write_stacks_on_signal', lambda: None)  # its file stays open
    settings = {'every': 2, 'seconds': 0.001, 'action': action}
    status = run_recipe.main([str(write_recipe(callbacks={'node_health': settings}, small=True))])
    folders = {path.name for path in (tmp_path / 'runs' / 'run').glob('ba*')}
    if action == 'log':
        assert (status, folders) == (0, {'ba4', 'ba8'})
    else:
        assert status == BAD_HARDWARE
        (saved,) = folders
        error = capfd.readouterr().err
        assert f'({socket.gethostname()}: rank 0: uncorrected memory errors rose from 0 to 2)' in error
        assert f'{saved} is saved, the same command resumes from it' in error
        assert (tmp_path / 'hardware-fault.txt').read_text().endswith('memory errors rose from 0 to 2')
    wait_until(lambda: not [each for each in threading.enumerate() if '(_poll)' in each.name], 5)
    assert read_metrics(tmp_path / 'runs/run/metrics.jsonl')['health/gpu_temperature'][2] == 71


def test_lost_gpu_is_logged_and_not_queried_again(caplog):
    driver = Driver(temperature=NVMLError('GPU is lost'))
    NodeHealth(seconds=0.01)._poll(driver, 'GPU-1')
    assert 'GPU-1: GPU is lost; monitoring stopped' in caplog.text


def test_xids_are_not_counted_without_permission_for_events(monkeypatch):
    driver = Driver()
    monkeypatch.setattr(driver, 'nvmlDeviceRegisterEvents', Mock(side_effect=NotSupported))
    assert Xids(driver, driver.gpus[1]).wait(0.0, threading.Event()) == {}


def test_worst_value_of_the_ranks_is_reported_with_its_rank():
    rows = [{'gpu_temperature': 60.0, 'gpu_utilization': 0.9}, {'gpu_temperature': 85.0, 'gpu_utilization': 0.99}]
    unknown = dict.fromkeys(node_health.WORST, math.nan)
    assert worst_of_rows([unknown | row for row in rows]) == {
        'health/gpu_temperature': 85.0,
        'health/gpu_temperature_rank': 1.0,
        'health/gpu_utilization': 0.9,
        'health/gpu_utilization_rank': 0.0,
    }


@pytest.mark.parametrize(
    ('settings', 'message'),
    [({'every': 0}, '.* positive'), ({'seconds': 0.0}, '.* positive'), ({'action': 'quit'}, "action='quit'")],
)
def test_invalid_settings_are_refused(settings, message):
    with pytest.raises(ValueError, match=f'node_health: {message}'):
        NodeHealth(**settings)


def test_run_without_gpus_logs_no_health(write_recipe):
    settings = {'every': 1, 'action': 'leave'}
    recipe = load(write_recipe(callbacks={'node_health': settings}, small=True), ['trainer.max_duration=2ba'])
    train(recipe)
    names = read_metrics(recipe.run_dir / 'metrics.jsonl')
    assert 'loss/train/total' in names and not [name for name in names if name.startswith('health/')]


def test_slowest_rank_is_compared_with_the_median():
    found = [slowest(seconds) for seconds in ([2.0, 2.0, 6.0, 2.0], [2.0, 1.0], [0.0, 0.0])]
    assert found == [(2, 3.0), (0, 2.0), (0, 1.0)]


def test_time_without_waiting_for_others_is_compared_at_intervals(monkeypatch):
    """The first batch does not count. Batch n takes n seconds up to the first sharded module, and its data 0.25 s."""
    now, loader, sharded = [0.0], Mock(spec=BucketedLoader, wait_seconds=9.0), nn.Identity()
    monkeypatch.setattr(stragglers, 'fsdp_modules', lambda model: [sharded])
    monkeypatch.setattr(stragglers, 'EVERY', 2)
    monkeypatch.setattr(stragglers.time, 'perf_counter', lambda: now[0])
    monkeypatch.setattr(stragglers.dist, 'get_world_size', lambda: 2)
    monkeypatch.setattr(stragglers.dist, 'all_gather', lambda own: [own, torch.tensor([3.0])])
    callback, state, logger = stragglers.Stragglers(), Mock(train_dataloader=loader), Mock()
    state.device.tensor_to_device = lambda tensor: tensor
    callback.fit_start(state, logger)
    for batch in range(1, 6):
        state.timestamp.batch.value = batch
        callback.before_forward(state, logger)
        now[0] += batch
        if batch != 3:  # in which no module is sharded
            sharded(now)
            now[0] += 100
        callback.after_forward(state, logger)
        callback.fit_start(state, logger)  # a second call of fit() keeps the times
        loader.wait_seconds += 0.25
        callback.batch_end(state, logger)
    expected = [(1.0, 3 / 2.25), (0.0, 7.5 / 3)]
    assert [tuple(each.args[0].values()) for each in logger.log_metrics.mock_calls] == expected
    assert [*logger.log_metrics.mock_calls[0].args[0]] == ['straggler/slowest_rank', 'straggler/slowest_factor']


def test_gpu_timer_sums_the_milliseconds_between_events_and_waits_for_the_last(monkeypatch):
    events: list[Mock] = []
    make = lambda *, enable_timing: events.append(Mock(timed=enable_timing)) or events[-1]  # noqa: E731
    monkeypatch.setattr(torch.cuda, 'Event', make)
    timer = stragglers.CudaTimer()
    timer.stop()
    for milliseconds in (250.0, 500.0):
        timer.start()
        timer.stop()
        timer.stop()
        events[-2].elapsed_time.side_effect = {events[-1]: milliseconds}.__getitem__
    assert timer.take() == 0.75 and timer.take() == 0
    assert [each.timed and each.record.call_count for each in events] == [1] * 4
    assert [each.synchronize.call_count for each in events] == [0, 0, 0, 1]


def test_gpu_is_monitored_if_there_is_one_and_its_driver_is_found(monkeypatch, caplog):
    assert node_health.current_gpu() is None and not caplog.text
    driver, cuda = Driver(), Mock(current_device=lambda: 3, get_device_properties=lambda index: Mock(uuid=index))
    monkeypatch.setattr(torch, 'cuda', cuda)
    monkeypatch.setattr(node_health, 'load_nvml', Mock(side_effect=[driver, None]))
    assert [node_health.current_gpu() for _ in range(2)] == [(driver, 'GPU-3'), None]
    assert "NVML is not available; this GPU's health is not monitored" in caplog.text


@pytest.mark.slow
def test_slow_rank_is_logged(ranks, write_recipe, tmp_path):
    # Under FSDP2 the ranks would wait for the slow one in every block, so only the time before the first one counts.
    ranks.run(2, write_recipe(imports=['tests.slow_rank'], parallelism={'strategy': 'fsdp2'}))
    metrics = read_metrics(tmp_path / 'runs' / 'run' / 'metrics.jsonl')
    assert list(metrics['straggler/slowest_rank']) == [4, 8]
    assert metrics['straggler/slowest_rank'][8] == 1.0
    assert metrics['straggler/slowest_factor'][8] > 1.2
