"""Train in half precision on CPUs: `cpu_autocast.py RECIPE OVERRIDES...`, or `allow_half_precision` in a test.

With OVERFLOW_BATCH=N in the environment, gradients of rank 1 in batch N of each epoch are infinite.

Composer refuses amp on CPUs, and its precision context does nothing without CUDA, so that a Trainer whose check is
merely removed would train in float32. This module supplies CPU autocast and a GradScaler for CPUs, and fails a
run whose matrix products and convolutions are not in half precision, or whose losses, weights or moments are.
"""

import contextlib
import os
import sys
from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from diffusion.algorithms.average import reshard

HALF = {'amp_bf16': torch.bfloat16, 'amp_fp16': torch.float16}
"""Autocast's dtype by the name of Composer's precision."""


@contextlib.contextmanager
def cpu_precision_context(precision: Any, *_: Any, **__: Any) -> Iterator[None]:
    """Stand in for Composer's get_precision_context, with the CPU's autocast instead of CUDA's."""
    dtype = HALF.get(str(getattr(precision, 'value', precision)))
    with torch.autocast('cpu', dtype=dtype or torch.bfloat16, enabled=dtype is not None):
        yield


def allow_half_precision(patch: pytest.MonkeyPatch) -> None:
    """Lift the refusal of half precision on CPUs, supply CPU autocast, and check dtypes in every training run."""
    from composer import Trainer
    from composer.distributed import prepare_distributed
    from composer.trainer import trainer as composer_trainer

    from diffusion.callbacks import image_grid
    from diffusion.evaluation import image_metrics
    from diffusion.models.latent_diffusion import LatentDiffusion
    from diffusion.training import components

    for module in (composer_trainer, image_grid, image_metrics):
        patch.setattr(module, 'get_precision_context', cpu_precision_context)
    for module in (composer_trainer, prepare_distributed):
        patch.setattr(module, '_validate_precision', lambda *_: None)
    patch.setattr(composer_trainer, 'GradScaler', partial(torch.GradScaler, 'cpu', init_scale=2.0**10))
    patch.setattr(components, 'check_device', lambda _: None)
    fit, loss = Trainer.fit, LatentDiffusion.loss

    def checked_loss(self: LatentDiffusion, outputs: Any, batch: Any) -> Tensor:
        value = loss(self, outputs, batch)
        assert self.sample_losses is not None
        for part in (outputs.target, outputs.weight, value, self.sample_losses):
            assert part.dtype == torch.float32, f'a part of the loss is in {part.dtype}'
        return value

    def checked_fit(trainer: Trainer, *arguments: Any, **keywords: Any) -> None:
        found: dict[str, set[torch.dtype]] = {}
        handles = record_outputs(trainer.state.model, found)
        fit(trainer, *arguments, **keywords)
        for handle in handles:
            handle.remove()
        expected = HALF.get(trainer.state.precision.value, torch.float32)
        wrong = {name: dtypes for name, dtypes in found.items() if dtypes != {expected}}
        assert found, 'no layer of the denoiser was called'
        assert not wrong, f'these layers did not compute in {expected}: {wrong}'
        assert_float32_state(trainer)

    patch.setattr(LatentDiffusion, 'loss', checked_loss)
    patch.setattr(Trainer, 'fit', checked_fit)


def overflow_at(patch: pytest.MonkeyPatch, batch_index: int) -> None:
    """Make the gradients of one batch of each epoch infinite, while its loss stays finite."""
    from diffusion.models import batch_keys
    from diffusion.models.latent_diffusion import LatentDiffusion

    loss = LatentDiffusion.loss

    def overflowing(self: LatentDiffusion, outputs: Any, batch: Any) -> Tensor:
        value = loss(self, outputs, batch)
        if int(batch[batch_keys.BATCH_INDEX][0]) == batch_index:
            value.register_hook(lambda gradient: gradient * torch.inf)
        return value

    patch.setattr(LatentDiffusion, 'loss', overflowing)


def record_outputs(model: Any, found: dict[str, set[torch.dtype]]) -> list[Any]:
    """Record the dtypes of the outputs of the denoiser's linear and convolutional layers outside compiled blocks."""
    denoiser = getattr(model, 'module', model).denoiser
    # Compiled blocks have an own `forward`; a hook inside would break their graphs.
    compiled = [module for module in denoiser.modules() if 'forward' in vars(module)]
    inside = {id(layer) for module in compiled for layer in module.modules()}
    handles = []
    for name, layer in denoiser.named_modules():
        if isinstance(layer, nn.Linear | nn.Conv2d) and id(layer) not in inside:

            def record(_: nn.Module, __: Any, output: Tensor, name: str = name) -> None:
                found.setdefault(name, set()).add(output.dtype)

            handles.append(layer.register_forward_hook(record))
    return handles


def assert_float32_state(trainer: Any) -> None:
    reshard(trainer.state.model)  # FSDP2 may leave gathered weights after an evaluation
    trained = [weight for weight in trainer.state.model.parameters() if weight.requires_grad]
    assert {weight.dtype for weight in trained} == {torch.float32}
    for optimizer in trainer.state.optimizers:
        values = [value for state in optimizer.state.values() for value in state.values()]
        assert {value.dtype for value in values if isinstance(value, Tensor)} <= {torch.float32}


if __name__ == '__main__':
    from diffusion.launch.workers import end_process
    from diffusion.tasks import run_recipe

    allow_half_precision(pytest.MonkeyPatch())
    if 'OVERFLOW_BATCH' in os.environ and os.environ['RANK'] == '1':
        overflow_at(pytest.MonkeyPatch(), int(os.environ['OVERFLOW_BATCH']))
    end_process(run_recipe.main(sys.argv[1:]))
