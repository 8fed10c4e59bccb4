"""A tiny run of Composer for tests of weight averages, with a parameter that is not trained and buffers."""

from typing import Any

import torch
from composer import Trainer
from composer.core import Algorithm, Callback, State
from composer.loggers import Logger
from composer.models import ComposerClassifier
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from diffusion.algorithms.average import trained_parameters


class Recorder(Callback):
    """Record copies of the trained weights after each batch."""

    def __init__(self) -> None:
        self.weights: list[dict[str, Tensor]] = []

    def batch_end(self, state: State, logger: Logger) -> None:
        self.weights.append(weights_of(state))


def weights_of(state: State) -> dict[str, Tensor]:
    """Return copies of a run's trained weights."""
    return {name: weight.detach().clone() for name, weight in trained_parameters(state.model).items()}


def make_trainer(
    *algorithms: Algorithm,
    duration: str = '12ba',
    samples: int = 48,
    callbacks: tuple[Callback, ...] = (),
    **settings: Any,
) -> Trainer:
    torch.manual_seed(0)
    network = nn.Sequential(nn.Linear(4, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 3))
    network[0].bias.requires_grad_(False)
    model = ComposerClassifier(network, num_classes=3)
    data = TensorDataset(torch.randn(samples, 4), torch.randint(0, 3, (samples,)))
    return Trainer(
        model=model,
        train_dataloader=DataLoader(data, batch_size=8),
        optimizers=torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=0.1),
        max_duration=duration,
        algorithms=list(algorithms),
        callbacks=list(callbacks),
        progress_bar=False,
        seed=1,
        device='cpu',
        **settings,
    )
