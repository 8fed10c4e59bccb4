"""Position of the training data in checkpoints: always the timestamp's, at every event and in every fit."""

import pytest
import yaml
from composer.core import Callback
from ranks import read_losses

from diffusion.config.load import load
from diffusion.errors import DataError
from diffusion.training.components import build_loader
from diffusion.training.train import build_trainer, train

SHORT = ['global_batch=4', 'streams.small.choose=12']


@pytest.fixture(scope='module')
def whole(tmp_path_factory, tiny_recipe):
    """Losses of an uninterrupted run of two epochs of three batches."""
    root = tmp_path_factory.mktemp('whole')
    path = root / 'whole.yaml'
    path.write_text(yaml.safe_dump(tiny_recipe(root / 'runs', name='whole')))
    train(load(path, [*SHORT, 'trainer.max_duration=2ep', 'trainer.save_interval=2ep'])).close()
    return read_losses(root / 'runs' / 'whole')


def test_run_extended_by_an_epoch_trains_on_the_next_one(write_recipe, tmp_path, whole):
    path = write_recipe()
    for duration in ('1ep', '2ep'):
        train(load(path, [*SHORT, f'trainer.max_duration={duration}', 'trainer.save_interval=1ep'])).close()
    assert read_losses(tmp_path / 'runs' / 'run') == whole


@pytest.mark.slow
def test_second_fit_continues_within_the_epoch_and_with_a_new_loader(write_recipe, tmp_path, whole):
    path = write_recipe()
    recipe = load(path, [*SHORT, 'trainer.max_duration=2ep', 'trainer.save_interval=2ep'])
    trainer = build_trainer(recipe)
    trainer.fit(duration='1ba')
    trainer.fit(duration='1ba')
    trainer.fit(train_dataloader=build_loader(load(path, [*SHORT, 'name=other'])), duration='4ba')
    trainer.close()
    assert read_losses(tmp_path / 'runs' / 'run') == whole


def test_no_checkpoint_is_written_while_data_and_run_disagree(write_recipe, tmp_path):
    trainer = build_trainer(load(write_recipe(), ['trainer.save_interval=1ba']))

    class Iterate(Callback):
        def batch_end(self, state, logger):
            if state.timestamp.batch.value == 2:
                state.train_dataloader.dataset.next_epoch += 1

    trainer.state.callbacks.insert(0, Iterate())
    with pytest.raises(DataError, match='the run is in epoch 0, but its training data is in epoch 1'):
        trainer.fit()
    trainer.close()
    assert not (tmp_path / 'runs' / 'run' / 'ba2').exists()
    assert (tmp_path / 'runs' / 'run' / 'ba1').exists()
