"""A tiny training run for fault-injection tests; a module for tests, and the program of each rank in two-rank tests."""

import contextlib
import inspect
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from composer import Trainer
from composer.core import Callback, Event, State
from composer.loggers import Logger, LoggerDestination
from composer.models import ComposerModel
from composer.optim import LinearScheduler
from composer.utils import dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.utils.data import DataLoader

from diffusion.callbacks import loss_guard
from diffusion.callbacks.loss_guard import BadLoss, LossGuard
from diffusion.callbacks.nan_guard import NaNGuard
from diffusion.callbacks.preemption import Preemption
from diffusion.errors import UserError
from diffusion.exit_codes import PREEMPTED, Preempted
from diffusion.models import batch_keys

BATCH = 8
BATCHES = 6
"""Batches per epoch."""


class BadGradient(torch.autograd.Function):
    """Identity function whose gradients are NaN for some samples."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, bad: Tensor) -> Tensor:
        ctx.save_for_backward(bad)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        (bad,) = ctx.saved_tensors
        return grads[0].masked_fill(bad[:, None], torch.nan), None


class Regression(ComposerModel):
    """A small regression network; if `keep_sample_losses`, it sets `sample_losses` as LatentDiffusion does."""

    def __init__(self, *, keep_sample_losses: bool = True) -> None:
        super().__init__()
        self.network = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))
        self.keep_sample_losses = keep_sample_losses

    def forward(self, batch: dict[str, Tensor]) -> Tensor:
        return BadGradient.apply(self.network(batch['x']), batch['bad_gradient'])  # type: ignore[return-value]

    def loss(self, outputs: Tensor, batch: dict[str, Tensor]) -> Tensor:
        losses = (outputs - batch['y']).square().mean(dim=1)
        if self.keep_sample_losses:
            self.sample_losses = losses.detach()
        return losses.mean()

    def eval_forward(self, batch: Any, outputs: Any = None) -> Tensor:
        return self.network(batch['x'])


class At(Callback):
    """Call a function at an event, when Composer's timestamp has the given batch number."""

    def __init__(self, event: Event, batch: int, do: Callable[[], Any]) -> None:
        self.event, self.batch, self.do = event, batch, do

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event == self.event and state.timestamp.batch.value == self.batch:
            self.do()


class Recorder(Callback):
    """Record copies of the weights and moments after each batch, and the learning rates."""

    def __init__(self) -> None:
        self.weights: list[list[Tensor]] = []
        self.moments: list[list[Tensor]] = []
        self.rates: list[float] = []

    def batch_end(self, state: State, logger: Logger) -> None:
        optimizer = state.optimizers[0]
        self.weights.append(weights_of(state))
        self.moments.append([v.clone() for each in optimizer.state.values() for v in each.values()])
        self.rates.append(optimizer.param_groups[0]['lr'])


def weights_of(state: State) -> list[Tensor]:
    return [parameter.detach().clone() for parameter in state.model.parameters()]


def make_data(
    *, bad: Collection[int] = (), value: float = torch.nan, bad_gradient: Collection[int] = (), ids: bool = True
) -> list[dict[str, Any]]:
    """Return 48 samples with IDs from 100; the targets of the samples in `bad` are multiplied by `value`."""
    generator = torch.Generator().manual_seed(3)
    data = []
    for number in range(100, 100 + BATCH * BATCHES):
        x, y = torch.randn(4, generator=generator), torch.randn(3, generator=generator)
        sample = {'x': x, 'y': y * value if number in bad else y, 'bad_gradient': number in bad_gradient}
        data.append(sample | ({batch_keys.SAMPLE_ID: number} if ids else {}))
    return data


def make_trainer(
    data: list[dict[str, Any]],
    callbacks: Sequence[Callback],
    *,
    duration: str = '12ba',
    folder: Path | None = None,
    keep_sample_losses: bool = True,
    workers: int = 0,
    **settings: Any,
) -> Trainer:
    torch.manual_seed(0)
    model = Regression(keep_sample_losses=keep_sample_losses)
    saving = {'save_folder': folder and str(folder), 'save_interval': '100ba', 'save_filename': 'ba{batch}.pt'}
    dist.initialize_dist('cpu')
    samples: Any = data
    sampler, size = dist.get_sampler(samples, shuffle=False), BATCH // dist.get_world_size()
    return Trainer(
        model=model,
        train_dataloader=DataLoader(samples, batch_size=size, sampler=sampler, num_workers=workers),
        optimizers=torch.optim.AdamW(model.parameters(), lr=0.05, weight_decay=0.1),
        schedulers=LinearScheduler(t_max='12ba'),
        max_duration=duration,
        callbacks=list(callbacks),
        save_overwrite=True,
        progress_bar=False,
        seed=1,
        device='cpu',
        **(saving | settings),
    )


def run_to_end(trainer: Trainer) -> list[Tensor]:
    trainer.fit()
    trainer.close()
    return weights_of(trainer.state)


def assert_stops(trainer: Trainer, match: str, error: type[BaseException] = BadLoss) -> BaseException:
    """Assert that training ends with an error, and return it."""
    with contextlib.closing(trainer), pytest.raises(error, match=match) as caught:
        trainer.fit()
    return caught.value


def bad_batches(folder: Path) -> list[dict[str, Any]]:
    """Return the records of bad batches in a run's folder."""
    return [json.loads(line) for line in (folder / 'bad_batches.jsonl').read_text().splitlines()]


class FirstNorm(LoggerDestination):
    def log_metrics(self, metrics: dict[str, Any], step: int | None = None) -> None:
        if 'grad_norm/total' in metrics and step == 0:
            print(f'gradient norm of batch 0: {metrics["grad_norm/total"]}', flush=True)


def recorded_summaries() -> list[bool]:
    """Return True for each summary of sharded gradients that records autograd: the callback's, and without no_grad."""
    mesh = init_device_mesh('cpu', (dist.get_world_size(),))
    gradients = [distribute_tensor(torch.ones(8, requires_grad=True), mesh, [Shard(0)]) for _ in range(3)]
    calls = loss_guard.summarize_gradients, inspect.unwrap(loss_guard.summarize_gradients)
    with torch.enable_grad():  # as in the optimizer's closure
        return [call(gradients).squared_norm.requires_grad for call in calls]


def keep_killing() -> None:
    """Send SIGTERM to this process until it has exited, as a launcher does once another rank has exited."""
    loop = f'while kill -TERM {os.getpid()}; do sleep 0.002; done'
    subprocess.Popen(['sh', '-c', loop], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def main(scenario: str, folder: Path) -> int:
    """Run one rank of a two-rank test and return its exit status."""
    rank = dist.get_global_rank()
    callbacks: list[Callback] = [Preemption()]
    settings: dict[str, Any] = {}
    data = make_data()
    if scenario == 'preemption':
        if rank == 1:
            callbacks.append(At(Event.AFTER_LOSS, 3, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    else:
        # Four samples per rank in batch 1: 108, 110, 112, 114 on rank 0 and 109, 111, 113, 115 on rank 1.
        data = make_data(bad=[111])
        if scenario.startswith('nan_guard'):
            callbacks.append(NaNGuard(folder=str(folder)))
            settings['save_interval'] = '1ba'
        else:
            callbacks.append(LossGuard(action=scenario.partition('-')[0], folder=str(folder)))  # type: ignore[arg-type]
    if scenario.endswith('-fsdp2'):
        from composer.utils.parallelism import FSDP2Config

        settings['parallelism_config'] = {'fsdp': FSDP2Config(state_dict_type='full')}
    trainer = make_trainer(data, callbacks, folder=folder, loggers=[FirstNorm()], **settings)
    if scenario.endswith('-fsdp2'):
        from diffusion.training.parallelism import average_gradients_on_cpu

        average_gradients_on_cpu(trainer.state.model)
        print(f'autograd is recorded: {recorded_summaries()}', flush=True)
        assert all(hasattr(parameter, 'to_local') for parameter in trainer.state.model.parameters())
    try:
        trainer.fit()
    except (UserError, Preempted) as error:
        print(f'rank {rank}: {error}', flush=True)
        return error.exit_status if isinstance(error, UserError) else PREEMPTED
    finally:
        print(f'rank {rank} ended at {trainer.state.timestamp.batch.value}', flush=True)
        finite = all(bool(weight.isfinite().all()) for weight in weights_of(trainer.state))
        print(f'rank {rank} has finite weights: {finite}', flush=True)
        trainer.close()
        if scenario == 'preemption':
            keep_killing()
    return 0


if __name__ == '__main__':
    sys.exit(main(sys.argv[1], Path(sys.argv[2])))
