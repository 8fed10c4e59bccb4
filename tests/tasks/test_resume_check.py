"""`diffusion check --resume` and the log of a resumed run: changed settings, and the learning rate before and after."""

import logging
import math
import shutil
from pathlib import Path

import pytest
from commands import output_of
from composer.core import Timestamp
from recipe_files import write_yaml

from diffusion.callbacks.optimizer_settings import one_batch_earlier
from diffusion.config.load import load
from diffusion.training.train import build_trainer, train

BATCHES = 6
LONGER = f'trainer.max_duration={2 * BATCHES}ba'
EPOCH = 5
"""Batches per epoch: 40 images in batches of 8."""


def cosine(batch: int, end: int) -> float:
    """Return the rate of a batch of a cosine schedule that ends at `end`: Composer gives it that of the time before."""
    return 1e-3 * (1 + math.cos(math.pi * max(0, batch - 1) / end)) / 2


@pytest.fixture(scope='module')
def finished(tmp_path_factory, tiny_recipe):
    """Recipe of a run that has ended after 6 batches of a cosine schedule; tests that train copy the run."""
    root = tmp_path_factory.mktemp('finished')
    content = tiny_recipe(root / 'runs', scheduler={'name': 'cosine'})
    content['trainer'] |= {'max_duration': f'{BATCHES}ba', 'save_interval': f'{BATCHES}ba'}
    path = write_yaml(root / 'recipe.yaml', content)
    train(load(path)).close()
    return str(path)


class Rates:
    def __init__(self, trainer) -> None:
        self.found: dict[int, float] = {}
        trainer.state.callbacks[0].batch_start = lambda state, logger: self.found.update(
            {state.timestamp.batch.value: state.optimizers[0].param_groups[0]['lr']}
        )


def test_extended_run_says_its_learning_rate_before_and_after(finished, tmp_path, caplog, capsys):
    last, now, same = cosine(5, 6), cosine(6, 12), cosine(6, 6)
    assert now / last == pytest.approx(2.52, abs=0.01)
    expected = f'learning rate {last:.4g} in batch 5, {now:.4g} in batch 6 ({now / last:.4g} times), {same:.4g} without'
    out = output_of(capsys, 'check', finished, LONGER, '--resume', '--quiet')
    assert expected in out
    assert 'ba6, 1 changed setting\n' in out
    assert 'trainer.max_duration 6ba -> 12ba (applied: the length of the run; the learning rate follows)' in out
    caplog.set_level(logging.INFO, logger='diffusion')
    shutil.copytree(Path(finished).parent / 'runs', tmp_path / 'runs', symlinks=True)
    trainer = build_trainer(load(finished, [LONGER, f'runs_dir={tmp_path}/runs']))
    (record,) = (each for each in caplog.records if 'learning rate' in each.message)
    assert expected in record.message and record.levelno == logging.WARNING
    rates = Rates(trainer)
    trainer.fit()
    trainer.close()
    assert rates.found == pytest.approx({batch: cosine(batch, 12) for batch in range(6, 12)})


def test_unchanged_run_resumes_without_a_line_about_its_rate(finished, write_recipe, caplog, capsys):
    out = output_of(capsys, 'check', write_recipe(), '--resume', '--quiet')
    assert 'has no checkpoint, so the run would start at batch 0' in out
    out = output_of(capsys, 'check', finished, '--resume', '--quiet')
    assert 'ba6, no changed settings' in out
    assert out.rstrip().endswith(f'{cosine(6, 6):.4g} in batch 6 ({cosine(6, 6) / cosine(5, 6):.4g} times)')
    caplog.set_level(logging.INFO, logger='diffusion')
    train(load(finished)).close()
    assert 'learning rate' not in caplog.text and 'runs/run: already trained to 6ba' in caplog.text
    assert one_batch_earlier(Timestamp(batch=4, sample=32)).state_dict() == Timestamp(batch=3, sample=24).state_dict()


def test_schedule_in_epochs_uses_the_length_of_an_epoch(finished, capsys):
    overrides = ('scheduler.t_max=2ep', 'trainer.max_duration=9ba')
    out = output_of(capsys, 'check', finished, *overrides, '--resume', '--quiet')
    assert f' {cosine(BATCHES, 2 * EPOCH):.4g} in batch 6' in out
