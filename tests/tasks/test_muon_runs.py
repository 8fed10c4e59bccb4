"""Runs with Muon through the Trainer: the same result on one rank and on two with sharded weights, and on resume."""

from pathlib import Path

import pytest
import yaml
from ranks import largest_difference, read_losses

from diffusion.checkpointing.checkpoint_lookup import find_checkpoint
from diffusion.checkpointing.checkpoint_weights import weights_of
from diffusion.config.load import load
from diffusion.errors import UserError
from diffusion.training.train import build_trainer, train

SHARDED = {'strategy': 'fsdp2', 'checkpoints': 'sharded', 'reshard_after_forward': False}


@pytest.fixture
def write(tmp_path, tiny_recipe):
    """Function that writes the recipe of a run of 6 batches with checkpoints after 3 and 6."""

    def write(name: str, **parallelism) -> Path:
        content = tiny_recipe(tmp_path / 'runs', name=name, parallelism=parallelism)
        # With 32 channels, the 32 groups of GroupNorm have one channel each and remove what `time_emb_proj` adds: the
        # gradient of its weight is rounding noise, which orthogonalization would scale up to a whole update.
        content['model']['block_out_channels'] = [64, 64]
        content['optimizer'] = {'name': 'muon', 'lr': 1.0e-3, 'weight_decay': 0.1}
        content['scheduler'] = {'name': 'constant_with_warmup', 't_warmup': '4ba'}
        content['algorithms'] = {'gradient_clipping': {'clipping_type': 'norm', 'clipping_threshold': 0.1}}
        content['callbacks'] = {'loss_guard': None}
        content['trainer'] |= {'max_duration': '6ba', 'save_interval': '3ba'}
        path = tmp_path / f'{name}.yaml'
        path.write_text(yaml.safe_dump(content))
        return path

    return write


@pytest.mark.slow
def test_two_ranks_with_sharded_weights_train_as_one(write, ranks, tmp_path):
    train(load(write('one'))).close()
    ranks.run(2, write('two', **SHARDED))
    one, two = tmp_path / 'runs' / 'one', tmp_path / 'runs' / 'two'
    assert largest_difference(read_losses(one), read_losses(two)) < 1e-5
    ours, theirs = (weights_of(find_checkpoint(run), 'training')[0] for run in (one, two))
    assert ours.keys() == theirs.keys()
    difference = sum(float((ours[name].double() - theirs[name].double()).square().sum()) for name in ours)
    assert (difference / sum(float(theirs[name].double().square().sum()) for name in ours)) ** 0.5 < 1e-6


@pytest.mark.slow
def test_settings_that_change_on_resume_are_applied_except_the_choice_of_matrices(write):
    recipe = write('changed')
    train(load(recipe, ['trainer.max_duration=1ba'])).close()
    changes = {'lr': 2.0e-3, 'adamw_lr': 5.0e-4, 'momentum': 0.5, 'nesterov': False, 'newton_schulz_steps': 3}
    trainer = build_trainer(load(recipe, [f'optimizer.{key}={value}' for key, value in changes.items()]))
    matrices, others = trainer.state.optimizers[0].param_groups
    assert (matrices['initial_lr'], others['initial_lr']) == (2.0e-3, 5.0e-4)
    assert matrices['lr'] == pytest.approx(4 * others['lr'])
    assert (matrices['momentum'], matrices['nesterov'], matrices['newton_schulz_steps']) == (0.5, False, 3)
    trainer.close()
    with pytest.raises(UserError, match=r'optimizer\.convolutions: true in the checkpoint, false now'):
        build_trainer(load(recipe, ['optimizer.convolutions=false']))
