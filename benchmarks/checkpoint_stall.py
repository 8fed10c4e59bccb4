"""Benchmark of asynchronous saves against blocking ones, with 100 M parameters, AdamW and EMA in one process.

    python benchmarks/checkpoint_stall.py [FOLDER [millions of parameters]]

A real trainer with one training thread saves to FOLDER (default: a temporary folder) by turns: a blocking save, then an
asynchronous one, so that other load on the machine slows both equally. The stall is the time for which a save blocks
training. Steps while a save is being written are compared with those of the same run while none is.
"""

import os
import statistics
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

import torch
from composer import Trainer
from composer.core import Callback, Event, State
from composer.loggers import InMemoryLogger, Logger
from composer.models import ComposerModel
from ema import narrow_unet
from machine import heading
from torch import Tensor
from torch.utils.data import DataLoader

from diffusion.algorithms.ema import EMA
from diffusion.checkpointing.checkpointer import Checkpointer
from diffusion.planning.model_costs import FLOAT32

PAUSE = 8
"""Batches without a save before each save."""
SAVES = 4
"""Saves of each kind; the first is left out of the medians."""
STEPS = ('no save runs', 'its snapshot is copied', 'it is written')
"""Kinds of steps: the snapshot is copied during the first step of an asynchronous save."""
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


class Turns(Callback):
    """Lets two savers save by turns; records the seconds of stalls, saves, and steps of each kind in `STEPS`."""

    def __init__(self, folder: Path, metrics: InMemoryLogger) -> None:
        self.metrics = metrics
        self.savers = {
            name: Checkpointer(folder / name, save_interval=partial(self.is_due, name), asynchronous=name != 'blocking')  # type: ignore[arg-type]
            for name in ('blocking', 'asynchronous')
        }
        self.stalls: dict[str, list[float]] = {name: [] for name in self.savers}
        self.durations: dict[str, list[float]] = {name: [] for name in self.savers}
        self.quiet: list[float] = []
        self.copying: list[float] = []
        self.writing: list[float] = []
        self._began = 0.0
        self._turn = 'blocking'
        self._free_since = 0

    @property
    def is_saving(self) -> bool:
        return self.savers['asynchronous'].is_saving

    def is_due(self, name: str, state: State, event: Event) -> bool:
        """Return True if it is the turn of a saver, PAUSE batches after the save before."""
        waited = state.timestamp.batch.value - self._free_since
        due = event is Event.BATCH_CHECKPOINT and name == self._turn and not self.is_saving and waited >= PAUSE
        if due:
            self._turn = 'asynchronous' if name == 'blocking' else 'blocking'
            self._free_since = state.timestamp.batch.value
        return due

    def batch_start(self, state: State, logger: Logger) -> None:
        for name, saver in self.savers.items():
            if len(saver.saved_checkpoints) > len(self.stalls[name]):
                self._free_since = state.timestamp.batch.value
                self.stalls[name].append(self.metrics.data['checkpoint/stall_seconds'][-1][1])
                self.durations[name].append(self.metrics.data['checkpoint/save_seconds'][-1][1])
        if len(self.stalls['asynchronous']) == SAVES:
            state.stop_training()
        self._began = time.perf_counter()

    def batch_end(self, state: State, logger: Logger) -> None:
        seconds = time.perf_counter() - self._began
        if state.timestamp.batch.value > PAUSE // 2:  # the first steps allocate memory
            is_first = state.timestamp.batch.value == self._free_since + 1
            steps = self.quiet if not self.is_saving else self.copying if is_first else self.writing
            steps.append(seconds)


def main(folder: str = '', millions: str = '100') -> None:
    """Run the benchmark and print its table."""
    torch.set_num_threads(1)
    model, metrics = Denoiser(int(millions)), InMemoryLogger()
    parameters = sum(weight.numel() for weight in model.parameters())
    planned = STATES * FLOAT32 * parameters / 1e9
    with tempfile.TemporaryDirectory(dir=folder or None) as root:
        turns = Turns(Path(root), metrics)
        trainer = Trainer(
            model=model,
            train_dataloader=DataLoader([torch.randn(4, 8, 8) for _ in range(10_000)]),  # type: ignore[arg-type]
            optimizers=torch.optim.AdamW(model.parameters(), lr=1e-4),
            algorithms=[EMA()],
            callbacks=[turns, *turns.savers.values()],
            loggers=[metrics],
            max_duration='1ep',
            progress_bar=False,
            device='cpu',
        )
        trainer.fit()
        memory = turns.savers['asynchronous'].snapshot_bytes / 1e9
        trainer.close()
    print(
        f'{heading()}, load {os.getloadavg()[1]:.1f}, PyTorch {torch.__version__}, threads: {torch.get_num_threads()}'
    )
    print(f'{parameters / 1e6:.1f} M parameters, {planned:.2f} GB per checkpoint, {SAVES} saves of each kind')
    print()
    print('| | blocking | asynchronous |')
    print('|---|---|---|')
    print(row('stall of the first save, s', [found[0] for found in turns.stalls.values()]))
    stalls = [statistics.median(found[1:]) for found in turns.stalls.values()]
    print(row('median stall of the later saves, s', stalls))
    print(row('median time to the publication, s', [statistics.median(each[1:]) for each in turns.durations.values()]))
    print(row('memory of a snapshot, GB', [0.0, memory]) + f' planned: {planned:.3f} GB')
    print()
    found = [turns.quiet, turns.copying, turns.writing]
    counts = ' | '.join(f'{name} ({len(each)} steps)' for name, each in zip(STEPS, found, strict=True))
    print(f'| | {counts} |')
    print('|---|---|---|---|')
    median, slowest = ([what(each) for each in found] for what in (statistics.median, max))
    print(row('median step, s', median))
    print(row('slowest step, s', slowest))
    print(f'\nAn asynchronous save blocks training for {stalls[1] / stalls[0]:.1%} of the time of a blocking one.')
    for index, when in enumerate(STEPS[1:], 1):
        more = ', '.join(
            f'the {name} {each[index] / each[0] - 1:+.1%} longer'
            for name, each in (('median step takes', median), ('slowest', slowest))
        )
        print(f'While {when}: {more}.')
    spread = slowest[0] / median[0] - 1
    print(f'Without a save, the slowest step takes {spread:+.1%} longer than the median.')


def row(name: str, values: list[float]) -> str:
    """Format a table row."""
    cells = ' | '.join(f'{value:.3f}' for value in values)
    return f'| {name} | {cells} |'


if __name__ == '__main__':
    main(*sys.argv[1:])
