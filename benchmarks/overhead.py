"""What the Trainer costs: our step against a bare PyTorch loop and a plain text-to-image trainer, in one run.

    python benchmarks/overhead.py [rounds [batch]]

All train one small U-Net on the same latents and captions, in the same precision, with AdamW: ours and the bare loop
with its fused kernel (speed.fused_optimizer), the plain trainer as diffusers' example makes it. They take turns step by
step: the rivals' steps run at the end of each batch of ours, so that a slow minute of the machine slows them all.
Ratios are medians of the rounds' own ratios. The Trainer has the callbacks and loggers of the recipes, its loss guard
and keyed randomness among them, which neither rival has; the bare loop calls our model.

The second table is what the breakdown callback costs, counted: its changes of stage in a step times what one takes,
and its reports.
"""

import logging
import statistics
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as functional
from composer import Trainer
from composer.callbacks import LRMonitor, RuntimeEstimator
from composer.core import Callback, State
from composer.loggers import Logger
from composer.optim.scheduler import ConstantWithWarmupScheduler
from diffusers.schedulers.scheduling_ddpm import DDPMScheduler
from machine import heading
from torch import Tensor
from torch.utils.data import DataLoader

from diffusion.callbacks.loss_guard import LossGuard
from diffusion.loggers.console_lines import ConsoleLines
from diffusion.loggers.metrics_file import MetricsFile
from diffusion.models import batch_keys
from diffusion.models.builders import tiny
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.profiling.breakdown import Breakdown
from diffusion.profiling.step_timer import Timeline

WARMUP = 5
CELLS = 8
"""Side of the latents."""
Loader = DataLoader[dict[str, Tensor]]


def main(rounds: int = 60, batch: int = 32) -> None:
    """Run and print."""
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    print(f'{heading()}, PyTorch {torch.__version__}, threads: {torch.get_num_threads()}, {device}')
    models = [make_model().to(device) for _ in range(3)]
    print(f'U-Net of {millions(models[0]):.1f} M parameters, batch {batch}, float32, {rounds} rounds')
    print()
    rivals = {
        'bare PyTorch loop': Rival(bare_loop(models[1], make_loader(models[1], batch), device)),
        "trainer as in diffusers' example": Rival(plain_trainer(models[2], make_loader(models[2], batch), device)),
    }
    with tempfile.TemporaryDirectory() as folder:
        breakdown, turns = Breakdown(window=20), Turns(rivals)
        loader = make_loader(models[0], batch)
        trainer = make_trainer(models[0], loader, breakdown, turns, folder, batches=WARMUP + rounds)
        trainer.fit()
        trainer.close()
    print_steps(turns)
    print_breakdown(breakdown, turns)


def make_model() -> LatentDiffusion:
    """The same initial weights each time."""
    torch.manual_seed(17)
    return tiny(block_out_channels=(64, 128), caption_dropout=0.0, train_text_encoder=False)


def millions(model: LatentDiffusion) -> float:
    """Parameters of the denoiser."""
    return sum(weight.numel() for weight in model.denoiser.parameters()) / 1e6


def samples(count: int, channels: int) -> list[dict[str, Tensor]]:
    """Latents and tokens in memory: what a loader costs is another benchmark's."""
    generator = torch.Generator().manual_seed(0)
    return [
        {
            batch_keys.LATENT_MOMENTS: torch.randn(2 * channels, CELLS, CELLS, generator=generator),
            batch_keys.INPUT_IDS: torch.randint(0, 49406, (1, 16), generator=generator),
            batch_keys.SAMPLE_ID: torch.tensor(index),
            batch_keys.EPOCH: torch.tensor(0),
            batch_keys.BATCH_INDEX: torch.tensor(0),
        }
        for index in range(count)
    ]


def make_loader(model: LatentDiffusion, batch: int) -> Loader:
    """Everybody's own, over the same samples."""
    data: Any = samples(8 * batch, model.vae.config['latent_channels'])
    return DataLoader(data, batch_size=batch, shuffle=True, drop_last=True)


def make_optimizer(model: LatentDiffusion, *, fused: bool = True) -> torch.optim.Optimizer:
    """AdamW as in the recipes."""
    return torch.optim.AdamW(model.denoiser.parameters(), lr=1e-4, weight_decay=0.01, fused=fused or None)


def make_trainer(
    model: LatentDiffusion, loader: Loader, breakdown: Breakdown, turns: 'Turns', folder: str, *, batches: int
) -> Trainer:
    """Ours: Composer's, with the callbacks and loggers of the recipes."""
    warnings.simplefilter('ignore')
    logging.getLogger('diffusion').setLevel(logging.WARNING)
    return Trainer(
        model=model,
        train_dataloader=loader,
        optimizers=make_optimizer(model),
        schedulers=ConstantWithWarmupScheduler('10ba'),
        max_duration=f'{batches}ba',
        callbacks=[LRMonitor(), RuntimeEstimator(), LossGuard(folder=folder), breakdown, turns],
        loggers=[MetricsFile(folder), ConsoleLines()],
        device='gpu' if torch.cuda.is_available() else 'cpu',
        progress_bar=False,
    )


def bare_loop(model: LatentDiffusion, loader: Loader, device: str) -> Iterator[None]:
    """The same model's loss, and nothing else."""
    optimizer = make_optimizer(model)
    for given in endless(loader):
        batch = {name: tensor.to(device, non_blocking=True) for name, tensor in given.items()}
        optimizer.zero_grad(set_to_none=True)
        loss = model.loss(model(batch), batch)
        loss.backward()
        optimizer.step()
        yield


def plain_trainer(model: LatentDiffusion, loader: Loader, device: str) -> Iterator[None]:
    """The steps that diffusers' text-to-image example takes, on one device and without its clipping."""
    unet, text_encoder = model.denoiser, model.text.encoders[0]
    noise_scheduler: Any = DDPMScheduler(beta_start=0.00085, beta_end=0.012, beta_schedule='scaled_linear')
    optimizer = make_optimizer(model, fused=False)
    lr_scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 10))
    channels = model.vae.config['latent_channels']
    mean, std = model.latent_mean, model.latent_std
    logged = []
    for given in endless(loader):
        batch = {name: tensor.to(device, non_blocking=True) for name, tensor in given.items()}
        moments = batch[batch_keys.LATENT_MOMENTS]
        posterior = moments[:, :channels], (0.5 * moments[:, channels:].clamp(-30, 20)).exp()
        latents = (posterior[0] + posterior[1] * torch.randn_like(posterior[0]) - mean) / std
        noise = torch.randn_like(latents)
        timesteps: Any = torch.randint(0, 1000, (len(latents),), device=device).long()
        noisy = noise_scheduler.add_noise(latents, noise, timesteps)
        with torch.no_grad():
            hidden = text_encoder(batch[batch_keys.INPUT_IDS][:, 0], return_dict=False)[0]
        predicted = unet(noisy, timesteps, hidden, return_dict=False)[0]
        loss = functional.mse_loss(predicted.float(), noise.float(), reduction='mean')
        loss.backward()
        optimizer.step()
        lr_scheduler.step()
        optimizer.zero_grad()
        logged.append({'train_loss': loss.detach().item(), 'lr': lr_scheduler.get_last_lr()[0]})
        yield


def endless(loader: Loader) -> Iterator[dict[str, Tensor]]:
    """Epoch after epoch."""
    while True:
        yield from loader


class Rival:
    """Takes a step when it is told to."""

    def __init__(self, steps: Iterator[None]) -> None:
        self.steps = steps
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def step(self) -> None:
        """One step, timed."""
        wall, cpu = timed(lambda: next(self.steps))
        self.wall.append(wall)
        self.cpu.append(cpu)


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Seconds by the wall and of this process's processors."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    synchronize()
    return time.perf_counter() - wall, time.process_time() - cpu


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class Turns(Callback):
    """Lets the rivals take their steps between two batches of the Trainer, which is timed from one to the next."""

    def __init__(self, rivals: dict[str, Rival]) -> None:
        self.rivals = rivals
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.ends: list[float] = []
        """Of all batches; what is between two of them includes the rivals."""
        self._resumed: tuple[float, float] | None = None

    def batch_end(self, state: State, logger: Logger) -> None:
        synchronize()
        self.ends.append(time.perf_counter())
        if self._resumed is not None:
            self.wall.append(time.perf_counter() - self._resumed[0])
            self.cpu.append(time.process_time() - self._resumed[1])
            for rival in self.rivals.values():
                rival.step()
        self._resumed = time.perf_counter(), time.process_time()


def print_steps(turns: Turns) -> None:
    """Milliseconds, and samples a second of the Trainer as parts of the rivals'."""
    print('| | ms a step | ms of processor | Trainer, times its samples/s | times, by processor |')
    print('|---|---|---|---|---|')
    wall, cpu = turns.wall[WARMUP:], turns.cpu[WARMUP:]
    print(f'| Trainer | {middle_ms(wall)} | {middle_ms(cpu)} | 1 | 1 |')
    for name, rival in turns.rivals.items():
        theirs = rival.wall[WARMUP:], rival.cpu[WARMUP:]
        ratios = [ratio(rivals, ours) for rivals, ours in zip(theirs, (wall, cpu), strict=True)]
        print(f'| {name} | {middle_ms(theirs[0])} | {middle_ms(theirs[1])} | {ratios[0]:.3f} | {ratios[1]:.3f} |')


def print_breakdown(breakdown: Breakdown, turns: Turns) -> None:
    """What the breakdown takes of a step."""
    calls, one = changes_of_stage(), seconds_of_a_change()
    assert breakdown.report is not None
    report_seconds = statistics.median(timed(breakdown.report.metrics)[0] for _ in range(20))
    step = statistics.median(turns.wall[WARMUP:])
    cost = calls * one + report_seconds / breakdown.window
    windows = (len(turns.ends) - breakdown.skip) // breakdown.window
    last = breakdown.skip + windows * breakdown.window - 1
    window_seconds = turns.ends[last] - turns.ends[last - breakdown.window]
    stages = sum(breakdown.report.shares.values()) * breakdown.report.step_seconds * breakdown.window
    print()
    print('| breakdown callback | |')
    print('|---|---|')
    print(f'| changes of stage a step | {calls} |')
    print(f'| one of them, microseconds | {1e6 * one:.2f} |')
    print(f'| in all, share of the step, % | {100 * cost / step:.4f} |')
    print(f'| sum of the stages, share of what another clock says, % | {100 * stages / window_seconds:.2f} |')


def changes_of_stage() -> int:
    """How often a step goes over from one stage to another, with the callbacks and loggers above."""
    counted: list[int] = []

    class Counting(Callback):
        def fit_start(self, state: State, logger: Logger) -> None:
            timeline: Any = next(each for each in state.callbacks if isinstance(each, Breakdown)).timeline
            switch, self.calls = timeline.switch, 0

            def counting(stage: str) -> str:
                self.calls += 1
                return switch(stage)

            timeline.switch = counting

        def batch_end(self, state: State, logger: Logger) -> None:
            counted.append(self.calls)

    model, counting = make_model(), Counting()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(model, make_loader(model, 2), Breakdown(), Turns({}), folder, batches=4)
        trainer.state.callbacks.append(counting)
        trainer.fit()
        trainer.close()
    return counted[-1] - counted[-2]


def seconds_of_a_change(repeats: int = 20_000) -> float:
    """Of a change of stage, entered as callbacks and loggers are."""
    timeline = Timeline()
    nothing = timeline.timed(lambda: None, 'logging')
    rounds = []
    for _ in range(9):
        started = time.perf_counter()
        for _ in range(repeats // 9):
            nothing()
        rounds.append((time.perf_counter() - started) / (repeats // 9) / 2)  # there and back
    return statistics.median(rounds)


def middle_ms(seconds: list[float]) -> str:
    """Median in milliseconds."""
    return f'{1e3 * statistics.median(seconds):.1f}'


def ratio(others: list[float], ours: list[float]) -> float:
    """Median of the rounds' ratios."""
    return statistics.median(theirs / own for theirs, own in zip(others, ours, strict=True))


if __name__ == '__main__':
    main(*(int(word) for word in sys.argv[1:3]))
