"""Loss curves of real runs on 1, 2 and 4 ranks, with DDP and FSDP2: they must be the same.

A run has 20 batches of images of two resolutions and crosses the end of an epoch, with keyed crops, flips, captions,
dropout and noise, and with an EMA that starts late. On other numbers of ranks, sums have another order, but nothing
else may differ: in float64 the difference must shrink with the precision.
"""

import random
from pathlib import Path

import pytest
import torch
from checkpointing.saved_runs import SHARDED, assert_same_end
from ranks import Runs, largest_difference, read_losses
from recipe_files import write_yaml
from transformers import Dinov2Config, Dinov2Model

from diffusion.checkpointing.checkpoint_lookup import find_checkpoint
from diffusion.checkpointing.checkpoint_weights import Weights, weights_of

BATCHES = 20
WHICH: tuple[Weights, ...] = ('training', 'ema')
EPOCH = 17
"""Batches per epoch: 88 samples of one stream and 48 of the other, in batches of 8."""


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


@pytest.mark.slow
def test_in_float64_the_difference_shrinks_with_the_precision(runs):
    """Train without clipping: with it FSDP2 differs by 5e-10, since torch 2.7 computes norms of shards less exactly."""
    algorithms = {'ema': runs.content['algorithms']['ema']}
    for count, parallelism in ((1, {}), (2, SHARDED | {'mixed_precision': 'full'})):
        path = runs.recipe(f'double-{count}', parallelism=parallelism, algorithms=algorithms)
        runs.ranks.run(count, path, double=True)
    one, two = runs.folder('double-1'), runs.folder('double-2')
    first, another = read_losses(one), read_losses(two)
    assert list(first) == list(range(BATCHES)) and EPOCH < BATCHES, 'the run crosses the end of an epoch'
    assert largest_difference(first, another) < 1e-12
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
            job.wait_for_batch(folder, randomness.randint(0, 7))
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


FEW_BATCHES = 4
SHARDED_IN_FULL: dict[str, object] = {'strategy': 'fsdp2', 'checkpoints': 'sharded', 'mixed_precision': 'full'}
SHARDED_IN_FULL |= {'activation_checkpointing': True}


@pytest.fixture(scope='module')
def run(tmp_path_factory, tiny_recipe, ranks):
    """Function that trains a PRX in float64 up to a batch, or resumes it, and returns the losses of all batches."""
    root = tmp_path_factory.mktemp('cheaper')
    torch.manual_seed(0)
    dino = Dinov2Config(hidden_size=32, num_attention_heads=2, num_hidden_layers=2, image_size=28, patch_size=14)
    Dinov2Model(dino).save_pretrained(root / 'dino')

    def train(name: str, count: int, parallelism: dict, *, method: str, until: int = FEW_BATCHES) -> dict[int, float]:
        algorithms = {
            **({'tread': {'start': 1, 'end': 3}} if method == 'tread' else {}),
            'contrastive_flow_matching': {'weight': 0.2},
            'gradient_clipping': {'clipping_type': 'norm', 'clipping_threshold': 1.0},
            'ema': {'ema_start': '1ba', 'smoothing': 0.9},
        }
        content = tiny_recipe(root / 'runs', name=name, algorithms=algorithms, parallelism=parallelism)
        content['model'] = {
            **{'name': 'tiny_prx', 'resolution': 32, 'vae': content['model']['vae']},
            **{'hidden_size': 32, 'num_heads': 2, 'depth': 4, 'text_width': 32, 'text_layers': 1},
            'representation_alignment': {'encoder': str(root / 'dino'), 'block': 1, 'hidden_size': 48},
        }
        if method == 'sprint':
            content['model']['sprint'] = {'start': 1, 'end': 3}
            content['model']['representation_alignment'] |= {'block': 0, 'projection': 'conv', 'spatial_norm': 1.0}
        content['trainer'] |= {'max_duration': f'{until}ba', 'save_interval': '2ba'}
        path = write_yaml(root / f'{name}.yaml', content)
        ranks.run(count, path, double=True)
        return read_losses(root / 'runs' / name)

    return train


@pytest.mark.slow
@pytest.mark.parametrize('method', ['tread', 'sprint'])
def test_other_numbers_of_ranks_and_strategies_give_the_same_curve(run, method):
    """A run on one rank, and one that starts on 2 ranks with FSDP2 and resumes on 4 with DDP."""
    one = run(f'{method}-one', 1, {}, method=method)
    assert list(one) == list(range(FEW_BATCHES))
    run(f'{method}-other', 2, SHARDED_IN_FULL, method=method, until=2)
    assert largest_difference(one, run(f'{method}-other', 4, {}, method=method)) < 1e-7
