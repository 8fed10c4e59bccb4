"""Benchmark of asynchronous saves against blocking ones, with 100 M parameters, AdamW and EMA in one process.

    python benchmarks/checkpoint_stall.py [FOLDER [millions of parameters]]

Two real trainers run one after the other with one training thread each, and save three times to FOLDER (default: a
temporary folder). The stall is the time for which a save blocks training. Steps are compared in the same run: those
while no save is being written, and those while one is.
"""

import itertools
import statistics
import sys
import tempfile
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from composer import Trainer
from composer.core import Callback, State
from composer.loggers import InMemoryLogger, Logger
from composer.models import ComposerModel
from ema import narrow_unet
from machine import heading
from torch import Tensor
from torch.utils.data import DataLoader

from diffusion.algorithms.ema import EMA
from diffusion.checkpointing.checkpointer import Checkpointer
from diffusion.planning.model_costs import FLOAT32

INTERVAL = 15
"""Batches between two saves."""
SAVES = 3
STATES = 4
"""Copies of the weights in a checkpoint: the weights, two moments and the average."""


class Denoiser(ComposerModel):
    """A narrow U-Net of Stable Diffusion 2 that predicts the noise of random latents."""

    def __init__(self, millions: int) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.unet = narrow_unet(millions)

    def forward(self, batch: Tensor) -> Tensor:
        text = batch.new_zeros(len(batch), 4, self.unet.config.cross_attention_dim)  # type: ignore[attr-defined]
        return self.unet(batch, torch.zeros(len(batch)), text).sample

    def loss(self, outputs: Tensor, batch: Tensor) -> Tensor:
        return (outputs - batch).square().mean()


class StepTimes(Callback):
    """Records the duration of each step, and if a save was being written at its start and its end."""

    def __init__(self, saver: Checkpointer) -> None:
        self.saver = saver
        self.quiet: list[float] = []
        self.saving: list[float] = []
        self.buffer_bytes = 0
        self._began = 0.0

    def batch_start(self, state: State, logger: Logger) -> None:
        self._began = time.perf_counter()

    def batch_end(self, state: State, logger: Logger) -> None:
        seconds = time.perf_counter() - self._began
        if state.timestamp.batch.value > 3:  # the first steps allocate memory
            (self.saving if self.saver.is_saving else self.quiet).append(seconds)
        self.buffer_bytes = max(self.buffer_bytes, self.saver.snapshot_bytes)


class Result(NamedTuple):
    """Figures of a run."""

    stalls: list[float]
    durations: list[float]
    steps: StepTimes


def main(folder: str = '', millions: str = '100') -> None:
    """Run the benchmark and print its table."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(dir=folder or None) as root:
        results = [run(Path(root) / str(each), int(millions), asynchronous=each) for each in (False, True)]
    blocking, asynchronous = results
    parameters = sum(weight.numel() for weight in Denoiser(int(millions)).parameters())
    print(f'{heading()}, PyTorch {torch.__version__}, threads: {torch.get_num_threads()}')
    print(f'{parameters / 1e6:.1f} M parameters, {STATES * FLOAT32 * parameters / 1e9:.2f} GB per checkpoint')
    print()
    print('| | blocking | asynchronous |')
    print('|---|---|---|')
    print(row('stall of the first save, s', *(each.stalls[0] for each in results)))
    print(row('median stall of later saves, s', *(statistics.median(each.stalls[1:]) for each in results)))
    print(row('median time to the publication, s', *(statistics.median(each.durations) for each in results)))
    print(row('median step while no save is written, s', *(statistics.median(each.steps.quiet) for each in results)))
    print(row('slowest', *(max(each.steps.quiet) for each in results)))
    saving = asynchronous.steps.saving
    print(f'| median step while one is written, s | | {statistics.median(saving):.3f} ({len(saving)} steps) |')
    print(f'| slowest | | {max(saving):.3f} |')
    planned = STATES * FLOAT32 * parameters
    print(
        f'| memory of the snapshot, GB (planned {planned / 1e9:.3f}) | | {asynchronous.steps.buffer_bytes / 1e9:.3f} |'
    )
    ratio = statistics.median(asynchronous.stalls[1:]) / statistics.median(blocking.stalls[1:])
    slower = statistics.median(saving) / statistics.median(asynchronous.steps.quiet) - 1
    print(f'\nA save blocks training for {ratio:.1%} of the time; a step meanwhile takes {slower:+.1%} longer.')


def run(folder: Path, millions: int, *, asynchronous: bool) -> Result:
    """Train with saves, and return the figures; the last save, which blocks in both cases, is left out."""
    model, metrics = Denoiser(millions), InMemoryLogger()
    saver = Checkpointer(folder, save_interval=f'{INTERVAL}ba', asynchronous=asynchronous)
    steps = StepTimes(saver)
    trainer = Trainer(
        model=model,
        train_dataloader=DataLoader([torch.randn(4, 8, 8) for _ in range(1000)], batch_size=2),  # type: ignore[arg-type]
        optimizers=torch.optim.AdamW(model.parameters(), lr=1e-4),
        algorithms=[EMA()],
        callbacks=[steps, saver],
        loggers=[metrics],
        max_duration=f'{INTERVAL * (SAVES + 1)}ba',
        progress_bar=False,
        device='cpu',
    )
    trainer.fit()
    trainer.close()
    stalls, durations = (values(metrics, f'checkpoint/{name}_seconds')[:SAVES] for name in ('stall', 'save'))
    return Result(stalls, durations, steps)


def values(metrics: InMemoryLogger, name: str) -> list[float]:
    """Return the values of a metric in order."""
    found: Any = metrics.data[name]
    return [float(value) for _, value in itertools.chain(found)]


def row(name: str, blocking: float, asynchronous: float) -> str:
    """Format a table row."""
    return f'| {name} | {blocking:.3f} | {asynchronous:.3f} |'


if __name__ == '__main__':
    main(*sys.argv[1:])
