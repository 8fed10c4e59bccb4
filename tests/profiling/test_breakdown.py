"""Breakdown of step time: fractions sum to the step, and each stage measures what its name says."""

import itertools
import logging
import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from composer import Trainer
from composer.callbacks import CheckpointSaver
from composer.core import Callback, State
from composer.loggers import InMemoryLogger
from torch.utils.data import DataLoader

from diffusion.algorithms.ema import EMA
from diffusion.callbacks.image_grid import ImageGrid
from diffusion.models import batch_keys, stage_hooks
from diffusion.profiling.breakdown import (
    STAGES,
    WAITS,
    Breakdown,
    BreakdownReport,
    Recorder,
    Timeline,
    hooks_of,
    shares_of,
    stage_of,
)

SLEEP_SECONDS = 0.04


def samples(count: int) -> Any:
    generator = torch.Generator().manual_seed(0)
    sample = {batch_keys.IMAGE: torch.randint(0, 256, (3, 32, 32), dtype=torch.uint8, generator=generator)}
    sample |= dict.fromkeys((batch_keys.EPOCH, batch_keys.BATCH_INDEX), torch.tensor(0))
    sample |= {batch_keys.INPUT_IDS: torch.full((1, 16), 320)}
    return [sample | {batch_keys.SAMPLE_ID: torch.tensor(i)} for i in range(count)]


class SlowData(list[Any]):
    def __getitem__(self, index: Any) -> Any:
        time.sleep(0.01)
        return super().__getitem__(index)


class Slow(Callback):
    def batch_start(self, state: State, logger: Any) -> None:
        time.sleep(SLEEP_SECONDS)

    after_loss = after_train_batch = batch_end = eval_batch_end = batch_start


class Wall(Callback):
    """Callback that measures steps independently."""

    def __init__(self) -> None:
        self.ends: list[float] = []

    def batch_end(self, state: State, logger: Any) -> None:
        self.ends.append(time.perf_counter())


@pytest.fixture(scope='module')
def fit(make_model: Callable[..., Any]) -> Callable[..., Trainer]:
    def run(*callbacks: Callback, batches: int = 2, data: Any = None, **more: Any) -> Trainer:
        model = make_model(train_text_encoder=False, layers_per_block=0)
        trainer = Trainer(
            model=model,
            train_dataloader=DataLoader(data or samples(8 * batches), batch_size=8),
            optimizers=torch.optim.AdamW([w for w in model.parameters() if w.requires_grad]),
            max_duration=f'{batches}ba',
            device_train_microbatch_size=4,
            callbacks=list(callbacks),
            progress_bar=False,
            device='cpu',
            **more,
        )
        trainer.fit()
        trainer.close()
        return trainer

    return run


@dataclass
class Measured:
    """A run of eight batches: one that is skipped, two windows of three, and an incomplete one."""

    trainer: Trainer
    report: BreakdownReport
    """The report of the second window."""
    step_seconds: float
    """Seconds per step of the second window, measured independently."""
    recorded: InMemoryLogger
    lines: list[str]


@pytest.fixture(scope='module')
def measured(fit) -> Measured:
    breakdown, wall, recorded = Breakdown(window=3, peak_tflops=0.001), Wall(), InMemoryLogger()
    log, lines = logging.getLogger('diffusion.profiling.breakdown'), []
    handler = logging.Handler()
    handler.emit = lambda record: lines.append(record.getMessage())
    level = log.level
    log.addHandler(handler)
    log.setLevel(logging.INFO)
    try:
        trainer = fit(breakdown, wall, batches=8, loggers=[recorded], algorithms=[EMA()])
    finally:
        log.removeHandler(handler)
        log.setLevel(level)
    return Measured(trainer, report_of(breakdown), (wall.ends[6] - wall.ends[3]) / 3, recorded, lines)


def report_of(breakdown: Breakdown) -> BreakdownReport:
    assert breakdown.report is not None
    return breakdown.report


def test_stages_sum_to_an_independently_measured_step(measured):
    report = measured.report
    stages = sum(report.shares.values()) * report.step_seconds
    assert stages == pytest.approx(measured.step_seconds, rel=0.05)
    assert sum(report.shares.values()) == pytest.approx(1, abs=1e-9)
    assert set(report.shares) == set(STAGES)
    assert (report.batches, report.samples) == (3, 24)
    batch = next(iter(DataLoader(samples(8), batch_size=8)))
    assert report.flops == 3 * measured.trainer.state.model.flops_per_batch(batch)
    assert report.samples_per_second == pytest.approx(8 / measured.step_seconds, rel=0.05)
    for stage in ('encode', 'forward', 'backward', 'optimizer'):
        assert report.shares[stage] > 0.01, stage


def test_every_window_is_reported_as_metrics_and_log_line(measured):
    logged = measured.recorded.data
    assert len(logged['time_share/backward']) == 2, 'the first batch is skipped, and the last window is incomplete'
    metrics = {name: values[-1][1] for name, values in logged.items()}
    assert sum(metrics[f'time_share/{stage}'] for stage in STAGES) == pytest.approx(1)
    assert metrics['throughput/samples_per_sec'] == pytest.approx(8 * metrics['throughput/batches_per_sec'])
    assert metrics['throughput/device/mfu'] == pytest.approx(metrics['throughput/device/flops_per_sec'] / 1e9)
    first, _ = [line for line in measured.lines if 'images/s' in line]
    assert first.startswith('batch 4: ') and 'MFU' in first and 'backward' in first and 'per device' not in first


def test_wrappers_and_listener_are_removed_after_fit(measured):
    assert 'log_metrics' not in vars(measured.recorded)
    assert measured.trainer.state.algorithms
    assert not any('apply' in vars(algorithm) for algorithm in measured.trainer.state.algorithms)
    assert stage_hooks._listener is None


def test_only_methods_of_callbacks_that_do_something_are_timed_each_in_its_stage():
    class Everything(InMemoryLogger):
        def run_event(self, event: Any, state: State, logger: Any) -> None:
            pass

        batch_end: Any = run_event

    assert hooks_of(Slow()) == ['batch_start', 'after_loss', 'after_train_batch', 'batch_end', 'eval_batch_end']
    hooks = ['log_metrics', 'log_hyperparameters']
    assert hooks_of(InMemoryLogger()) == hooks and hooks_of(Everything()) == ['run_event', *hooks]
    kinds = (Slow, ImageGrid, CheckpointSaver)
    assert [stage_of(kind.__new__(kind)) for kind in kinds] == ['logging', 'evaluation', 'checkpoint']


def test_time_of_callbacks_data_averages_and_checkpoints_is_counted(fit, tmp_path, monkeypatch):
    update = EMA.update

    def slow_update(self: EMA) -> None:
        time.sleep(SLEEP_SECONDS)
        update(self)

    monkeypatch.setattr(EMA, 'update', slow_update)
    breakdown = Breakdown(window=2)
    settings = {'eval_dataloader': DataLoader(samples(4), batch_size=4), 'eval_interval': '1ba'}
    settings |= {'save_folder': str(tmp_path / 'saved'), 'save_interval': '1ba'}
    fit(breakdown, Slow(), batches=3, data=SlowData(samples(24)), algorithms=[EMA()], **settings)
    report = report_of(breakdown)
    seconds_per_batch = report.step_seconds / (1 - report.shares['evaluation'])
    seconds = {stage: share * seconds_per_batch for stage, share in report.shares.items()}
    calls = 5  # batch_start, after_loss of two microbatches, after_train_batch and batch_end
    assert seconds['logging'] >= calls * SLEEP_SECONDS
    assert seconds['evaluation'] >= SLEEP_SECONDS
    assert seconds['data_wait'] > 8 * 0.01
    assert seconds['ema'] > SLEEP_SECONDS
    assert report.shares['checkpoint'] > 0


def test_losses_with_a_breakdown_of_a_run_shorter_than_a_window_are_those_without(fit):
    def losses(*callbacks: Callback) -> list[float]:
        recorded = InMemoryLogger()
        fit(*callbacks, loggers=[recorded])
        return [loss for _, loss in recorded.data['loss/train/total']]

    breakdown = Breakdown(window=50)
    assert losses() == losses(breakdown)
    assert report_of(breakdown).batches == 1


@pytest.mark.parametrize('name', ['window', 'skip', 'sampled'])
def test_setting_of_zero_batches_is_an_error(name):
    with pytest.raises(ValueError, match=f'callbacks.breakdown.{name}: 0 batches; use at least 1'):
        Breakdown(**{name: 0})


class Tick:
    """Fake CUDA event whose time is its number; the GPU has completed the events before number `done`."""

    clock = itertools.count()
    done = 0.0

    def record(self) -> None:
        self.at = next(Tick.clock)

    def query(self) -> bool:
        return self.at < Tick.done

    def elapsed_time(self, other: 'Tick') -> float:
        return 1e3 * (other.at - self.at)


def test_recorder_reads_completed_stages_without_waiting():
    Tick.clock, Tick.done = itertools.count(), 0
    recorder = Recorder(Tick)
    timeline = Timeline(recorder)
    timeline.switch('forward')
    assert recorder.read() == {}, 'not recording yet'
    recorder.start()
    timeline.switch('backward')
    timeline.switch('optimizer')
    timeline.switch('forward')
    assert recorder.read() == {}, 'the GPU has not completed any event'
    Tick.done = 3
    assert recorder.read() == {'forward': 1, 'backward': 1}
    Tick.done = 4
    assert recorder.read() == {'optimizer': 1}
    recorder.stop()
    timeline.switch('backward')
    assert recorder.read() == {}
    recorder.start()
    timeline.switch('forward')
    Tick.done = math.inf
    assert recorder.read() == {'backward': 1}, 'time between two recordings belongs to no stage'


@pytest.mark.parametrize(('sampled', 'expected'), [(1, 'FFTFFTF'), (3, 'TTTTTTT')])
def test_gpu_times_the_last_batches_of_each_window(monkeypatch, sampled, expected):
    Tick.clock, Tick.done = itertools.count(), math.inf
    event = Mock(side_effect=lambda *, enable_timing: Tick())
    monkeypatch.setattr(torch.cuda, 'Event', event)
    monkeypatch.setattr(torch.cuda, 'max_memory_allocated', lambda: 3 * 2**29)
    state: Any = Mock(algorithms=[], callbacks=[], optimizers=[], model=torch.nn.Identity())
    state.device.name, state.timestamp.sample.value = 'gpu', 0
    breakdown, recording = Breakdown(window=3, sampled=sampled, peak_tflops=1.0), ''
    breakdown.fit_start(state, Mock())
    for _ in range(1 + 2 * 3):  # the first batch is skipped
        breakdown.before_forward(state, Mock())
        breakdown.batch_end(state, Mock())
        recorder = breakdown.timeline.recorder
        recording += 'T' if recorder is not None and recorder.on else 'F'
    breakdown.fit_end(state, Mock())
    assert recording == expected and event.call_args.kwargs == {'enable_timing': True}
    assert (report_of(breakdown).peak_gib, report_of(breakdown).peak_flops_per_second) == (1.5, 1e12)
    assert stage_hooks._listener is None
    breakdown.fit_start(state, Mock())
    breakdown.close(state, Mock())
    assert stage_hooks._listener is None, 'after an exception, only close is called'


def test_host_times_waits_and_gpu_times_the_other_stages():
    assert shares_of({}, None) == dict.fromkeys(STAGES, 0.0)
    host = {'data_wait': 1.0, 'evaluation': 2.0, 'forward': 0.1, 'backward': 0.1, 'optimizer': 0.8}
    device = {'data_wait': 9.0, 'forward': 1.0, 'backward': 3.0}
    shares = shares_of(host, device)
    expected = {'data_wait': 4 / 16, 'evaluation': 8 / 16, 'forward': 1 / 16, 'backward': 3 / 16}
    assert shares == pytest.approx(dict.fromkeys(shares, 0) | expected)
    assert set(WAITS) < set(shares)


def test_nested_stages_of_an_evaluation_count_as_evaluation():
    timeline = Timeline()
    timeline.switch('evaluation')
    with timeline.stage('encode'):
        time.sleep(0.002)
    with pytest.raises(RuntimeError), timeline.stage('logging'):
        raise RuntimeError
    timeline.switch('forward')
    with pytest.raises(RuntimeError), timeline.stage('encode'):
        raise RuntimeError
    assert timeline.switch('other') == 'forward', 'an exception ends the nested stage that raised it'
    assert timeline.seconds['evaluation'] > 0.002
    assert 'logging' not in timeline.seconds


def test_line_includes_the_slowest_rank_only_if_it_is_slower():
    fast = BreakdownReport(10, 640, 2, 0.1, 0.101, 4e12, 1e12, 3.0, {'forward': 0.3, 'backward': 0.69, 'h2d': 0.01})
    line = '640 images/s (320 per device), MFU 200.0%, 100 ms/step, peak 3.0 GiB; backward 69%, forward 30%, copies'
    assert fast.line() == f'{line} to the device 1%'
    slow = BreakdownReport(10, 640, 2, 0.1, 0.2, None, None, None, {'forward': 1.0})
    assert '100 ms/step (slowest rank 200)' in slow.line() and slow.line().endswith('; forward 100%')
    assert 'throughput/device/mfu' not in slow.metrics()
