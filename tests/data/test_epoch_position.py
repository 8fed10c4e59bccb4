"""Position of the training data in checkpoints: always the timestamp's."""

from typing import Any

import pytest
from composer.core import Callback
from ranks import read_losses

from diffusion.config.load import load
from diffusion.errors import DataError
from diffusion.training.components import build_loader
from diffusion.training.train import build_trainer, train

SHORT = ['global_batch=4', 'streams.small.choose=12']


def test_run_extended_by_an_epoch_trains_on_the_next_one(write_recipe, tmp_path):
    path = write_recipe()
    for name, duration in (('whole', '2ep'), ('run', '1ep'), ('run', '2ep')):
        words = [f'name={name}', f'trainer.max_duration={duration}', 'trainer.save_interval=1ep']
        train(load(path, [*SHORT, *words])).close()
    assert read_losses(tmp_path / 'runs' / 'run') == read_losses(tmp_path / 'runs' / 'whole')


@pytest.mark.slow
def test_second_fit_continues_within_the_epoch_and_with_a_new_loader(write_recipe, tmp_path):
    path, words = write_recipe(), [*SHORT, 'trainer.max_duration=2ep', 'trainer.save_interval=2ep']
    train(load(path, [*words, 'name=whole'])).close()
    trainer = build_trainer(load(path, words))
    trainer.fit(duration='1ba')
    trainer.fit(duration='1ba')
    trainer.fit(train_dataloader=build_loader(load(path, [*SHORT, 'name=other'])), duration='4ba')
    trainer.close()
    assert read_losses(tmp_path / 'runs' / 'run') == read_losses(tmp_path / 'runs' / 'whole')


def test_no_checkpoint_is_written_while_data_and_run_disagree(write_recipe, tmp_path):
    trainer = build_trainer(load(write_recipe(), ['trainer.save_interval=1ba']))

    class Iterate(Callback):
        def batch_end(self, state: Any, logger):
            if state.timestamp.batch.value == 2:
                state.train_dataloader.dataset.next_epoch += 1

    trainer.state.callbacks.insert(0, Iterate())
    with pytest.raises(DataError, match='the run is in epoch 0, but its training data is in epoch 1'):
        trainer.fit()
    trainer.close()
    assert not (tmp_path / 'runs' / 'run' / 'ba2').exists()
    assert (tmp_path / 'runs' / 'run' / 'ba1').exists()
