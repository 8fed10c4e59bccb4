"""Loss curves of real runs on 1, 2 and 4 ranks, with DDP and FSDP2: they must be the same.

A run has 20 batches of images of two resolutions and crosses the end of an epoch, with keyed crops, flips, captions,
dropout and noise, and with an EMA that starts late. On other numbers of ranks, sums have another order, but nothing
else may differ: in float64 the difference must shrink with the precision.
"""

import random
from pathlib import Path

import pytest
import yaml
from checkpointing.saved_runs import SHARDED, assert_same_end
from ranks import Ranks, largest_difference, read_losses

from diffusion.checkpointing.checkpoint_lookup import find_checkpoint
from diffusion.checkpointing.checkpoint_weights import Weights, weights_of
from diffusion.config.load import load
from diffusion.training.train import train

BATCHES = 20
WHICH: tuple[Weights, ...] = ('training', 'ema')
EPOCH = 17
"""Batches per epoch: 88 samples of one stream and 48 of the other, in batches of 8."""


class Runs:
    """Runs of one recipe."""

    def __init__(self, root: Path, content: dict, ranks: Ranks) -> None:
        self.root, self.content, self.ranks = root, content, ranks

    def recipe(self, name: str, **sections) -> Path:
        path = self.root / f'{name}.yaml'
        path.write_text(yaml.safe_dump(self.content | {'name': name} | sections))
        return path

    def folder(self, name: str) -> Path:
        return self.root / 'runs' / name

    def wait_for_batch(self, job, name: str, batch: int) -> None:
        """Return when the loss of a batch has been written."""
        metrics = self.folder(name) / 'metrics.jsonl'
        job.wait_for(metrics)
        while f'"step": {batch}, "loss/train/total"' not in metrics.read_text():
            assert job.running(), job.output()
            job.spend(0.005)


@pytest.fixture(scope='module')
def runs(tmp_path_factory, tiny_recipe, ranks):
    from shards import write_image_shards

    root = tmp_path_factory.mktemp('curve')
    small = write_image_shards(root / '32px', count=91, side=40)
    large = write_image_shards(root / '64px', count=50, side=72, offset=200)
    content = tiny_recipe(root / 'runs', algorithms={'ema': {'ema_start': '7ba', 'smoothing': 0.9}})
    content['model']['objective'] = {'timesteps': 'stratified'}
    content['dataset'] = {'name': 'image_text', 'crop': 'random', 'min_crop_scale': 0.6, 'flip': True}
    content['streams'] = {
        'small': {'local': str(small), 'resolution': 32},
        'large': {'local': str(large), 'resolution': 64},
    }
    content['optimizer'] = {'name': 'adamw', 'lr': 1.0e-4}
    content['scheduler'] = {'name': 'constant_with_warmup', 't_warmup': '4ba'}
    content['algorithms']['gradient_clipping'] = {'clipping_type': 'norm', 'clipping_threshold': 1.0}
    content['callbacks'] = {'loss_guard': None}
    content['trainer'] |= {'max_duration': f'{BATCHES}ba', 'save_interval': '6ba'}
    return Runs(root, content, ranks)


def distance(one: Path, other: Path, which: Weights) -> float:
    """Return the distance of two runs' weights, relative to how far training moved them since batch 6."""
    ours, theirs = (weights_of(find_checkpoint(run), which)[0] for run in (one, other))
    start = weights_of(one / 'ba6', 'training')[0]
    difference = sum(float((ours[name].double() - theirs[name].double()).square().sum()) for name in ours)
    moved = sum(float((ours[name].double() - start[name].double()).square().sum()) for name in ours)
    return (difference / moved) ** 0.5


@pytest.mark.slow  # tests/checkpointing/test_checkpointer.py compares two ranks with one in fewer batches
def test_sharded_runs_on_two_ranks_have_the_curve_of_one_rank(runs):
    train(load(runs.recipe('one'))).close()
    runs.ranks.run(2, runs.recipe('sharded', parallelism=SHARDED))
    one, other = runs.folder('one'), runs.folder('sharded')
    first, another = read_losses(one), read_losses(other)
    assert list(first) == list(range(BATCHES)) and EPOCH < BATCHES, 'the run crosses the end of an epoch'
    assert another[0] == pytest.approx(first[0], rel=1e-6)
    assert largest_difference(first, another) < 1e-4
    for which in WHICH:
        assert distance(one, other, which) < 0.05


@pytest.mark.slow
def test_in_float64_the_difference_shrinks_with_the_precision(runs):
    """Train without clipping: with it FSDP2 differs by 5e-10, since torch 2.7 computes norms of shards less exactly."""
    algorithms = {'ema': runs.content['algorithms']['ema']}
    for count, parallelism in ((1, {}), (2, SHARDED | {'mixed_precision': 'full'})):
        path = runs.recipe(f'double-{count}', parallelism=parallelism, algorithms=algorithms)
        runs.ranks.run(count, path, double=True)
    one, two = runs.folder('double-1'), runs.folder('double-2')
    assert largest_difference(read_losses(one), read_losses(two)) < 1e-12
    for which in WHICH:
        assert distance(one, two, which) < 1e-6


@pytest.mark.slow
def test_runs_killed_at_random_times_resume_bit_for_bit(runs):
    """Three kills at any time and three during a save; each run ends with the weights of the uninterrupted run."""
    randomness = random.Random(20)
    trainer = runs.content['trainer'] | {'save_interval': '2ba', 'max_duration': '12ba'}
    whole = runs.folder('whole-short')
    runs.ranks.run(1, runs.recipe('whole-short', trainer=trainer))

    def kill(number: int) -> Path:
        path, folder = runs.recipe(f'random-{number}', trainer=trainer), runs.folder(f'random-{number}')
        if number % 2:
            unfinished = folder / f'.ba{2 * randomness.randint(1, 5)}.unfinished'
            runs.ranks.start(1, path, deaths={0: (randomness.randrange(2, 5), unfinished)}).wait_for_death(0)
            assert unfinished.exists()
        else:
            job = runs.ranks.start(1, path)
            runs.wait_for_batch(job, folder.name, randomness.randint(0, 7))
            job.spend(randomness.random() * 0.2)
            job.kill()
        return path

    for number in range(0, 6, 2):
        paths = [kill(number), kill(number + 1)]
        resumed = [runs.ranks.start(1, path) for path in paths]  # one per core of a machine with two
        for job, path in zip(resumed, paths, strict=True):
            folder = runs.folder(path.stem)
            assert job.wait() == [0], job.output()
            assert_same_end(folder, whole)
            assert not list(folder.glob('.ba*')), 'unfinished checkpoints are removed'
