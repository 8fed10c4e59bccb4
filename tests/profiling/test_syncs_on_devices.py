"""Waits of the host for the device: counted by PyTorch's warnings on a GPU, and by calls on the CPU."""

from typing import Any

import pytest
import torch

from diffusion.config.load import load
from diffusion.profiling.device_syncs import _short, find_waits
from diffusion.training.train import build_trainer

pytestmark = pytest.mark.filterwarnings('ignore:Synchronization debug mode is a prototype feature')


def test_reads_of_values_are_found_on_every_device(device):
    values = torch.arange(3.0, device=device)
    with find_waits() as nothing:
        values.add_(1).mul_(2)
    with find_waits() as found:
        float(values.sum())
        values[values > 1].tolist()
    with find_waits() as others:
        values[values > 5] = 0
        torch.equal(values, values.nonzero().cpu().to(device))
        values[torch.zeros(1, dtype=torch.int64, device=device)]
    assert others.total() == 4 if device == 'cpu' else others.total() >= 4, dict(others)
    assert not nothing
    assert found.total() == 3 if device == 'cpu' else found.total() >= 3, dict(found)
    assert {site.function for site in found} == {'test_reads_of_values_are_found_on_every_device'}


def test_files_are_named_from_their_package_on():
    environment = '/home/diffusion/.venv/lib/python3.11/site-packages'
    found = [_short(f'{environment}/{file}') for file in ('torch/nn/linear.py', 'composer/trainer/trainer.py')]
    assert found == ['torch/nn/linear.py', 'composer/trainer/trainer.py']
    assert _short('/home/diffusion/diffusion/models/vae.py') == 'diffusion/models/vae.py'


@pytest.mark.slow
def test_our_code_never_waits_for_the_device_in_a_step(write_recipe, device):
    names = ('breakdown', 'lr_monitor', 'runtime_estimator', 'loss_guard')
    trainer: dict[str, Any] = {'max_duration': '8ba', 'progress_bar': False}
    trainer |= {'device': 'cpu'} if device == 'cpu' else {'device': 'gpu', 'precision': 'amp_bf16'}
    recipe = write_recipe(
        callbacks=dict.fromkeys(names),
        algorithms={'ema': None},
        global_batch=4,
        device_train_microbatch_size=2,
        speed={'compile': False},
        trainer=trainer,
    )
    built = build_trainer(load(recipe))
    built.fit(duration='1ba')
    with find_waits() as found:
        built.fit(duration='2ba')
    built.close()
    # The end of `fit` saves, and a save waits for what it checks and copies.
    saves = ('diffusion/checkpointing/', 'diffusion/algorithms/finite_weights.py')
    steps = [site for site in found if not site.file.startswith(saves)]
    ours = {f'{site.file} ({site.function})' for site in steps if site.file.startswith('diffusion/')}
    assert not ours, {str(site): count for site, count in found.items()}
    assert found, 'Composer waits in every batch'
