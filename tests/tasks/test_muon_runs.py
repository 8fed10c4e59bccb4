"""Runs with Muon through the Trainer: the same result on 1 and 2 ranks and under DDP and FSDP2."""

from pathlib import Path

import pytest
import yaml
from ranks import largest_difference, read_losses

from diffusion.checkpointing.checkpoint_lookup import find_checkpoint
from diffusion.checkpointing.checkpoint_weights import weights_of
from diffusion.config.load import load
from diffusion.errors import UserError
from diffusion.training.train import build_trainer, train

STRATEGIES = {
    'ddp': {},
    'fsdp2': {'strategy': 'fsdp2'},
    'sharded': {'strategy': 'fsdp2', 'checkpoints': 'sharded', 'reshard_after_forward': False},
}


class Runs:
    """Runs of 6 batches with checkpoints after 3 and 6."""

    def __init__(self, root: Path, tiny_recipe, ranks) -> None:
        self.root, self.tiny_recipe, self.ranks = root, tiny_recipe, ranks

    def recipe(self, name: str, strategy: str) -> Path:
        content = self.tiny_recipe(self.root / 'runs', name=name, parallelism=STRATEGIES[strategy])
        # With 32 channels, the 32 groups of GroupNorm have one channel each and remove what `time_emb_proj` adds: the
        # gradient of its weight is rounding noise, which orthogonalization would scale up to a whole update.
        content['model']['block_out_channels'] = [64, 64]
        content['optimizer'] = {'name': 'muon', 'lr': 1.0e-3, 'weight_decay': 0.1}
        content['scheduler'] = {'name': 'constant_with_warmup', 't_warmup': '4ba'}
        content['algorithms'] = {'gradient_clipping': {'clipping_type': 'norm', 'clipping_threshold': 0.1}}
        content['callbacks'] = {'loss_guard': None}
        content['trainer'] |= {'max_duration': '6ba', 'save_interval': '3ba'}
        path = self.root / f'{name}.yaml'
        path.write_text(yaml.safe_dump(content))
        return path

    def start(self, count: int, name: str, strategy: str) -> Path:
        """Train or resume a run, and return its folder."""
        recipe = self.recipe(name, strategy)
        if count == 1:
            train(load(recipe)).close()
        else:
            self.ranks.run(count, recipe)
        return self.root / 'runs' / name

    def whole(self, count: int, strategy: str) -> Path:
        """Return the folder of an uninterrupted run, which trains when it is first needed."""
        folder = self.root / 'runs' / f'whole-{count}-{strategy}'
        return folder if folder.exists() else self.start(count, folder.name, strategy)


@pytest.fixture(scope='module')
def runs(tmp_path_factory, tiny_recipe, ranks):
    return Runs(tmp_path_factory.mktemp('muon'), tiny_recipe, ranks)


def distance(one: Path, other: Path) -> float:
    """Return the distance of two runs' weights, relative to their norm."""
    ours, theirs = (weights_of(find_checkpoint(run), 'training')[0] for run in (one, other))
    assert ours.keys() == theirs.keys()
    difference = sum(float((ours[name].double() - theirs[name].double()).square().sum()) for name in ours)
    return (difference / sum(float(theirs[name].double().square().sum()) for name in ours)) ** 0.5


@pytest.mark.slow
@pytest.mark.parametrize('strategy', ['sharded', 'ddp'])
def test_two_ranks_train_as_one(runs, strategy):
    one, two = runs.whole(1, 'ddp'), runs.whole(2, strategy)
    assert largest_difference(read_losses(one), read_losses(two)) < 1e-5
    assert distance(one, two) < 1e-6


@pytest.mark.slow
def test_settings_that_change_on_resume_are_applied_except_the_choice_of_matrices(runs):
    recipe = runs.recipe('changed', 'ddp')
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
