"""Progress of a run: speed and remaining time of training batches by a fake clock, and the smoothed loss curve."""

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from composer.core import Callback, State, Time
from composer.loggers import Logger
from golden import check_golden, figure_text
from shards import write_image_shards

from diffusion.config.load import load
from diffusion.loggers.metrics_file import MetricsFile, smoothed
from diffusion.loggers.progress_lines import BatchTimer, ProgressLine, format_duration, total_batches, with_bar
from diffusion.training.train import build_trainer


def test_average_weighs_batches_by_the_time_since_then_and_the_last_ten_at_least():
    seconds, timer, now = np.random.default_rng(0).uniform(0.5, 12, 40), BatchTimer(), 1000.0
    for each in (90.0, *seconds):
        timer.begin(now)
        now += each
        timer.end(now)
    kept = np.maximum(0.9, np.exp(-seconds / 60))
    weights = [kept[number + 1 :].prod() for number in range(40)]
    assert timer.seconds_per_batch == pytest.approx(np.average(seconds, weights=weights))


class Work(Callback):
    """Let batches take half a second, every fourth of them save for 100 s, and evaluations take 600 s."""

    def __init__(self) -> None:
        self.now = 0.0

    def before_train_batch(self, state: State, logger: Logger) -> None:
        self.now += 0.5

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value % 4 == 0:
            self.now += 100

    def eval_start(self, state: State, logger: Logger) -> None:
        self.now += 600


@pytest.mark.parametrize('duration', ['12ba', pytest.param('4ep', marks=pytest.mark.slow)])
def test_time_left_is_that_of_training_alone(write_recipe, tmp_path, monkeypatch, caplog, duration):
    few = write_image_shards(tmp_path / 'few', count=4, side=32)
    path = write_recipe(
        loggers={'console_lines': {'every_seconds': 0.0}},
        eval_streams={'few': {'local': str(few), 'resolution': 32}},
        trainer={'max_duration': duration, 'eval_interval': '6ba', 'save_interval': '12ba', 'device': 'cpu'},
    )
    trainer, work = build_trainer(load(path, ['global_batch=4', 'streams.small.choose=12'])), Work()
    trainer.state.callbacks.append(work)
    monkeypatch.setattr('diffusion.loggers.progress_lines.time', SimpleNamespace(monotonic=lambda: work.now))
    with caplog.at_level('INFO', logger='diffusion'):
        trainer.fit()
    trainer.close()
    lines = [each.getMessage() for each in caplog.records if each.name.endswith('progress_lines')]
    text = ''.join(re.sub(r'(?<=[ =])\d\.\d{4}', 'X', f'{line}\n') for line in lines)
    check_golden(Path(__file__).parent / 'golden/training', {'lines.txt': text})


def test_bar_takes_an_eighth_of_the_terminal_unless_the_line_would_not_fit():
    assert [with_bar('text', batch, 4) for batch in (3, 9)] == ['[#######...] text', '[##########] text']
    assert [len(with_bar('x' * count, 1, 4)) for count in (67, 68)] == [80, 68]
    assert [format_duration(seconds) for seconds in (89, 90, 5399, 5400)] == ['89 s', '1.5 min', '90.0 min', '1.5 h']
    ends: list[Any] = [Time(count, unit) for count, unit in ((9, 'ba'), (4, 'ep'), (48, 'sp'))]
    states: list[Any] = [SimpleNamespace(max_duration=end, dataloader_len=Time(3, 'ba')) for end in (*ends, None)]
    assert [total_batches(state) for state in states] == [9, 12, None, None]
    assert total_batches(SimpleNamespace(max_duration=ends[1], dataloader_len=None)) is None  # type: ignore[arg-type]


def test_progress_of_training_and_evaluation_in_a_terminal(monkeypatch, caplog):
    shown, now, line = [], [100.0], ProgressLine()
    monkeypatch.setattr('diffusion.loggers.status_line.show', shown.append)
    monkeypatch.setattr('diffusion.loggers.progress_lines.time', SimpleNamespace(monotonic=lambda: now[0]))
    loss: Any = SimpleNamespace(compute=lambda: 0.12345)
    state: Any = SimpleNamespace(max_duration=Time(9, 'ba'), dataloader_len=None, dataloader_label='few')
    state.eval_metrics = {'few': {'loss': loss, 'more': loss}}

    def go_on(seconds: float, event: str, batch: int = 0, evaluated: int = 0) -> None:
        now[0] += seconds
        state.timestamp, state.eval_timestamp = (SimpleNamespace(batch=Time(n, 'ba')) for n in (batch, evaluated))
        getattr(line, event)(state, None)

    with caplog.at_level('INFO', logger='diffusion'):
        go_on(0, 'eval_batch_end', 0, 1)
        go_on(0, 'fit_start')
        for batch in range(1, 4):  # the first takes 5 s and does not count, the others 1 s each
            go_on(0, 'before_dataloader', batch - 1)
            now[0] += 5.0 if batch == 1 else 1.0
            line.log_metrics({'loss/train/total': batch / 8})
            line.log_metrics({'other': 1.0})
            go_on(0, 'batch_end', batch)
            go_on(0.1, 'batch_end', batch)
        state.dataloader_len = Time(7, 'ba')
        go_on(0.15, 'eval_batch_end', 3, 2)
        for event in ('eval_end', 'fit_end', 'fit_end', 'close'):
            go_on(0, event, 3)
        state.max_duration = None
        go_on(0, 'eval_end', 3)
    text = ''.join(f'{line}\n' for line in (*shown, 'LOGGED', *caplog.messages))
    check_golden(Path(__file__).parent / 'golden/terminal', {'status.txt': text})


def test_losses_are_written_by_rank_zero_and_drawn(tmp_path, monkeypatch, draw_loss_curve):
    figures = []
    monkeypatch.setattr('diffusion.loggers.metrics_file.draw_loss_curve', draw_loss_curve)
    monkeypatch.setattr('matplotlib.figure.Figure.savefig', lambda figure, out, dpi: figures.append((figure, out, dpi)))
    for rank, folder in enumerate((tmp_path / 'phase1', tmp_path / 'other')):
        monkeypatch.setattr('composer.utils.dist.get_global_rank', lambda rank=rank: rank)
        logger: Any = MetricsFile(str(folder))
        for event in (logger.init, logger.fit_end):
            event(None, None)
        for step, loss in ((2, 4.0), (1, 7.0), (3, 2.0), (2, 5.0)):
            logger.log_metrics({'loss/train/total': torch.tensor(loss), 'image': torch.ones(2), 'name': 'x'}, step)
            logger.log_metrics({'metrics/few/loss': loss / 2, 'metrics/few/other': 1}, step)
            logger.log_metrics({'name': 'x'}, step)
        logger.fit_end(None, None)
        logger.close(None, None)
    ((figure, out, dpi),) = figures
    assert out == tmp_path / 'phase1/loss.png' and [*tmp_path.rglob('*.jsonl')] == [out.with_name('metrics.jsonl')]
    found = {
        'curves.txt': f'{dpi} dots per inch\n{figure_text(figure)}',
        'metrics.jsonl': out.with_name('metrics.jsonl').read_text(),
    }
    check_golden(Path(__file__).parent / 'golden/losses', found)


@pytest.mark.parametrize('count', [1, 2, 50, 400])
def test_smoothed_curve_is_the_weighted_mean_of_the_values_around(count):
    values = np.random.default_rng(0).exponential(size=count)
    distances = np.abs(np.arange(count)[:, None] - np.arange(count))
    weights = np.exp(-100 / max(100, count)) ** distances
    expected = weights @ values / weights.sum(axis=1)
    assert np.allclose(smoothed(values.tolist()), expected)
