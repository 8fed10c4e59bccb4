"""Progress lines of real runs whose time is that of a fake clock."""

import re
from types import SimpleNamespace

import pytest
from composer.core import Callback, State
from composer.loggers import Logger

from diffusion.config.load import load
from diffusion.training.train import build_trainer

BATCH_SECONDS = 0.5


class Work(Callback):
    """Let batches take half a second, every fourth of them save for 100 s, and evaluations take 600 s."""

    def __init__(self) -> None:
        self.now = 0.0

    def before_train_batch(self, state: State, logger: Logger) -> None:
        self.now += BATCH_SECONDS

    def batch_end(self, state: State, logger: Logger) -> None:
        if state.timestamp.batch.value % 4 == 0:
            self.now += 100

    def eval_start(self, state: State, logger: Logger) -> None:
        self.now += 600


@pytest.mark.parametrize('duration', ['20ba', '4ep'])
def test_time_left_is_that_of_training_alone(write_recipe, pictures, monkeypatch, caplog, duration):
    path = write_recipe(
        loggers={'console_lines': {'every_seconds': 0.0}},
        eval_streams={'other': {'local': str(pictures[64]), 'resolution': 32}},
        trainer={'max_duration': duration, 'eval_interval': '10ba', 'save_interval': '20ba', 'device': 'cpu'},
    )
    trainer, work = build_trainer(load(path)), Work()
    trainer.state.callbacks.append(work)
    monkeypatch.setattr('diffusion.loggers.progress_lines.time', SimpleNamespace(monotonic=lambda: work.now))
    with caplog.at_level('INFO', logger='diffusion'):
        trainer.fit()
    trainer.close()
    found = re.findall(r'batch (\d+) of 20, loss \d\.\d+, (\S+) batches/s, (\d+) s left', caplog.text)
    assert [int(batch) for batch, _, _ in found] == list(range(2, 20))
    for batch, speed, left in found:
        # Work between two batches counts up to the duration of one batch, here in every fourth of them.
        assert 1.4 <= float(speed) <= 2.1
        assert (20 - int(batch)) * BATCH_SECONDS - 1 <= int(left) <= (20 - int(batch)) * BATCH_SECONDS * 1.4 + 1
    assert 'batch 20 of 20, loss ' in caplog.text
    assert len(re.findall(r'batch [12]0, evaluation: loss=\d', caplog.text)) == 2
