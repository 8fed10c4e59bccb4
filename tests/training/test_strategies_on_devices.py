"""Parallelism strategies on all GPUs of this machine, by Composer's launcher, against training on one device."""

import functools
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import ROOT, read_losses
from recipe_files import write_yaml

from diffusion.config.load import load
from diffusion.training.train import train

STRATEGIES: dict[str, dict[str, Any]] = {
    'ddp': {'strategy': 'ddp'},
    'fsdp2': {'strategy': 'fsdp2', 'reshard_after_forward': False},
    'fsdp2 resharded': {'strategy': 'fsdp2', 'reshard_after_forward': True},
    'fsdp2 sharded checkpoints': {'strategy': 'fsdp2', 'checkpoints': 'sharded'},
    'hsdp': {'strategy': 'fsdp2', 'replicas': 2},
    'fsdp2 checkpointed activations': {'strategy': 'fsdp2', 'activation_checkpointing': True},
}
CASES = [
    pytest.param('cpu', 'fsdp2', marks=[pytest.mark.cpu_form, pytest.mark.slow]),
    *(pytest.param('cuda', name, marks=pytest.mark.gpu) for name in STRATEGIES),
]
"""Strategies by device; on a CPU, test_performance.py and test_same_curve.py compare the others."""


def sections(device: str) -> dict[str, Any]:
    """Return the parts of a recipe that the runs have in common."""
    trainer: dict[str, Any] = {'max_duration': '6ba', 'save_interval': '6ba', 'progress_bar': False}
    trainer |= {'device': 'cpu'} if device == 'cpu' else {'device': 'gpu', 'precision': 'amp_bf16'}
    return {
        'trainer': trainer,
        'algorithms': {'ema': {'ema_start': '2ba', 'smoothing': 0.5}},
        'callbacks': {'loss_guard': None, 'breakdown': {'window': 2}},
        'speed': {'compile': False},  # test_speed_on_devices.py compiles
    }


def launch(recipe: Path, devices: int) -> None:
    """Run a recipe with Composer's launcher, one process per device."""
    # Do not use the fork server: a fork of a process that has asked for the number of GPUs cannot use them.
    path = f'{ROOT}:{os.environ.get("PYTHONPATH", "")}'.rstrip(':')
    environ = os.environ | {'PYTHONPATH': path, 'OMP_NUM_THREADS': '1'}
    command = [sys.executable, '-m', 'composer.cli.launcher', '-n', str(devices), str(ROOT / 'run.py'), str(recipe)]
    ended = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=240)
    assert ended.returncode == 0, f'{ended.stdout[-3000:]}\n{ended.stderr[-6000:]}'


def device_count(device: str) -> int:
    """Return the number of devices to train on: a power of two, which divides the batch of 8."""
    return 1 if device == 'cpu' else 2 ** min(3, torch.cuda.device_count().bit_length() - 1)


@pytest.fixture(scope='module')
def losses_of_one_device(tiny_recipe, tmp_path_factory) -> Callable[[str], dict[int, float]]:
    """Function that trains on one device of a type, the first time, and returns the losses by batch."""

    @functools.cache
    def train_alone(device: str) -> dict[int, float]:
        folder = tmp_path_factory.mktemp('alone')
        train(load(write_yaml(folder / 'recipe.yaml', tiny_recipe(folder, **sections(device))))).close()
        return read_losses(folder / 'run')

    return train_alone


@pytest.mark.cpu_seconds(15)
@pytest.mark.parametrize(('device', 'name'), CASES)
def test_strategy_has_the_losses_of_one_device(write_recipe, losses_of_one_device, ranks, tmp_path, device, name):
    strategy, devices = STRATEGIES[name], device_count(device)
    if strategy.get('replicas', 1) > devices:
        pytest.skip(f'{name} needs {strategy["replicas"]} GPUs; this machine has {devices}')
    together = write_recipe('together', parallelism=strategy, **sections(device))
    ranks.run(1, together) if device == 'cpu' else launch(together, devices)
    expected, found = losses_of_one_device(device), read_losses(tmp_path / 'runs' / 'together')
    assert len(expected) == 6
    # Sums of gradients and bfloat16's roundings differ; a wrong scale or a missing part of a batch changes far more.
    assert found == pytest.approx(expected, rel=1e-3 if device == 'cpu' else 2e-2)
