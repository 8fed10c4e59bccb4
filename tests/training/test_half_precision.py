"""Half precision: runs in bfloat16 and float16 autocast on CPUs, through the real Trainer."""

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpointing.saved_runs import SHARDED
from composer.core import Callback, State
from composer.loggers import Logger
from cpu_autocast import allow_half_precision, overflow_at
from ranks import ROOT, assert_same_weights, largest_difference, read_losses
from recipe_files import write_yaml

from diffusion.checkpointing.checkpoint_lookup import find_checkpoint
from diffusion.checkpointing.checkpoint_weights import weights_of
from diffusion.config.load import load
from diffusion.training.train import build_trainer

EVERYTHING: dict[str, Any] = {
    # The rate of yamls/phase1.yaml. At the fixture's 1e-3 the U-Net's third loss differs by 6.5e-3: Adam's first
    # updates are the rate times the sign of each gradient, and in bfloat16 the smallest 0.7% of the gradients have the
    # other sign. With an eps of 1e-2 small gradients make small updates, and losses at 1e-3 differ by 2e-4, as at 1e-4.
    'optimizer': {'name': 'adamw', 'lr': 1.0e-4},
    'device_train_microbatch_size': 2,
    'speed': {'channels_last': True, 'low_precision_norms': True, 'inference_mode': True},
    'callbacks': {'loss_guard': None},
    'algorithms': {
        'ema': {'ema_start': '1ba', 'smoothing': 0.9},
        'gradient_clipping': {'clipping_type': 'norm', 'clipping_threshold': 1.0},
    },
}


@pytest.fixture(scope='module')
def run(tmp_path_factory, tiny_recipe, ranks):
    """Function that trains a recipe with CPU autocast, or resumes it, and returns the run's folder."""
    root = tmp_path_factory.mktemp('half_precision')

    def train(name: str, count: int, precision: str, *, trainer: Any = None, overflow: str = '', **sections) -> Path:
        content = tiny_recipe(root / 'runs', name=name, **(EVERYTHING | sections))
        del content['trainer']['device']
        content['trainer'] |= {'max_duration': '4ba', 'save_interval': '2ba', 'precision': precision}
        content['trainer'] |= trainer or {}
        content['speed'] = content['speed'] | ({'reduce_once': True} if count > 1 else {})
        path = write_yaml(root / f'{name}.yaml', content)
        environment = {'OVERFLOW_BATCH': overflow} if overflow else {}
        ranks.start_program(count, ROOT / 'tests/training/cpu_autocast.py', path, environment=environment).end()
        return root / 'runs' / name

    return train


def assert_float32_checkpoint(folder: Path) -> None:
    """Assert that the newest checkpoint of a run holds training and averaged weights in float32."""
    for kind in ('training', 'ema'):
        weights, _ = weights_of(find_checkpoint(str(folder)), kind)
        assert {value.dtype for value in weights.values() if value.is_floating_point()} == {torch.float32}


@pytest.mark.slow
def test_bfloat16_runs_have_the_losses_of_float32(run):
    """On one rank, and on two with shards, against one run in float32."""
    single = read_losses(run('float32', 1, 'fp32'))
    for count, sections in ((1, {}), (2, {'parallelism': SHARDED | {'activation_checkpointing': True}})):
        half = run(f'on_{count}', count, 'amp_bf16', **sections)
        assert read_losses(half) != single
        assert largest_difference(read_losses(half), single) < 3e-3
        assert_float32_checkpoint(half)


class Recorder(Callback):
    """Callback that records the weights and the loss scale after each batch."""

    def __init__(self) -> None:
        self.weights: list[list[torch.Tensor]] = []
        self.scales: list[float] = []

    def batch_end(self, state: State, logger: Logger) -> None:
        assert state.scaler is not None
        self.weights.append([weight.detach().clone() for weight in state.model.parameters()])
        self.scales.append(state.scaler.get_scale())


@pytest.mark.cpu_seconds(15)
def test_float16_overflow_skips_the_update_halves_the_scale_and_resumes_exactly(write_recipe, tmp_path, monkeypatch):
    allow_half_precision(monkeypatch)
    overflow_at(monkeypatch, 1)

    def fit(name: str, batches: int) -> Recorder:
        trainer = {'max_duration': f'{batches}ba', 'save_interval': '2ba', 'precision': 'amp_fp16', 'autoresume': True}
        path = write_recipe(name, small=True, trainer=trainer | {'progress_bar': False}, **EVERYTHING)
        trainer, recorder = build_trainer(load(path)), Recorder()
        trainer.state.callbacks.append(recorder)
        trainer.fit()
        trainer.close()
        return recorder

    whole = fit('whole', 3)
    same = [all(map(torch.equal, before, after)) for before, after in pairwise(whole.weights)]
    assert same == [True, False], 'the update of batch 1 alone is skipped'
    assert whole.scales == [1024, 512, 512]
    fit('resumed', 2)
    assert fit('resumed', 3).scales == [512]
    folders = tmp_path / 'runs' / 'whole', tmp_path / 'runs' / 'resumed'
    losses, resumed = (read_losses(folder) for folder in folders)
    assert losses == resumed
    assert all(math.isfinite(loss) for loss in losses.values())
    assert_same_weights(*folders)
    assert_float32_checkpoint(folders[0])
    averages, _ = weights_of(find_checkpoint(str(folders[0])), 'ema')
    assert all(value.isfinite().all() for value in averages.values() if value.is_floating_point())
    assert not (folders[0] / 'bad_batches.jsonl').exists(), 'loss_guard leaves overflows to the scaler'


@pytest.mark.slow
def test_float16_overflow_on_one_rank_skips_the_update_of_all_shards(run):
    settings: dict[str, Any] = {'overflow': '1', 'parallelism': SHARDED}
    settings['speed'] = EVERYTHING['speed'] | {'fused_optimizer': True}
    each = {'save_interval': '1ba', 'save_num_checkpoints_to_keep': -1}
    folder = run('fp16_fsdp2', 2, 'amp_fp16', trainer=each, **settings)
    losses = read_losses(folder)
    assert all(math.isfinite(loss) for loss in losses.values())
    saved = [weights_of(find_checkpoint(folder / f'ba{batch}'), 'training')[0] for batch in (1, 2, 3)]
    changed = [any(not torch.equal(before[name], after[name]) for name in before) for before, after in pairwise(saved)]
    assert changed == [False, True]
    assert all(value.isfinite().all() for value in saved[-1].values() if value.is_floating_point())
    run('fp16_fsdp2_resumed', 2, 'amp_fp16', trainer={'max_duration': '2ba'}, **settings)
    resumed = run('fp16_fsdp2_resumed', 2, 'amp_fp16', **settings)
    assert read_losses(resumed) == losses
    assert_same_weights(resumed, folder)
