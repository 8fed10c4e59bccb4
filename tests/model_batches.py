"""Batches of a latent diffusion model, as its data loader would make them, and comparisons of models."""

from collections.abc import Mapping, Sequence
from contextlib import closing
from typing import Any

import torch
from composer import Trainer
from composer.loggers import InMemoryLogger
from torch.utils.data import DataLoader

from diffusion.models import batch_keys

CAPTIONS = ['a red square', 'two cats', '', 'a very long caption of a small green circle and more']


def batch_of(
    model: Any, captions: Sequence[str] = CAPTIONS, *, width: int = 64, height: int = 64, first_id: int = 10
) -> dict[str, torch.Tensor]:
    """Return random images with captions, of the samples from `first_id` on, in batch 7 of epoch 2."""
    generator = torch.Generator().manual_seed(1)
    size = len(captions)
    return {
        batch_keys.IMAGE: torch.randint(0, 256, (size, 3, height, width), dtype=torch.uint8, generator=generator),
        batch_keys.INPUT_IDS: model._tokens(captions),
        batch_keys.SAMPLE_ID: torch.arange(first_id, first_id + size),
        batch_keys.EPOCH: torch.full((size,), 2),
        batch_keys.BATCH_INDEX: torch.full((size,), 7),
    }


def fit(model: Any, batch: Mapping[str, torch.Tensor], *, batch_size: int = 4, **settings: Any) -> InMemoryLogger:
    """Train the samples of a batch, in batches, for one batch by default; return what was logged."""
    samples: Any = [dict(zip(batch, row, strict=True)) for row in zip(*batch.values(), strict=True)]
    defaults: dict[str, Any] = {'loggers': [logger := InMemoryLogger()], 'max_duration': '1ba', 'progress_bar': False}
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader(samples, batch_size=batch_size),
        optimizers=torch.optim.SGD([each for each in model.parameters() if each.requires_grad], lr=1e-3),
        device='cpu',
        **(defaults | settings),
    )
    with closing(trainer):
        trainer.fit()
    return logger


def size_of(module: torch.nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def shapes_of(module: torch.nn.Module) -> dict[str, torch.Size]:
    return {name: tensor.shape for name, tensor in module.state_dict().items()}


def assert_same_loss_and_gradients(model: Any, batch: Any, expected: torch.Tensor, **tolerances: Any) -> None:
    """Assert that the loss of a batch is the expected one, and that the two have the same gradients."""
    model.zero_grad(set_to_none=True)
    expected.backward()
    wanted = {name: parameter.grad for name, parameter in model.named_parameters()}
    model.zero_grad(set_to_none=True)
    loss = model.loss(model(batch), batch)
    torch.testing.assert_close(loss, expected, rtol=1e-4, atol=1e-6)
    loss.backward()
    found = {name: parameter.grad for name, parameter in model.named_parameters()}
    assert any(each is not None and each.any() for each in found.values())
    torch.testing.assert_close(found, wanted, **tolerances)
