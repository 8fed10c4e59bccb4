"""Benchmark of the Trainer's overhead: our step against a bare PyTorch loop and a plain text-to-image trainer.

    python benchmarks/overhead.py [rounds [batch]]

All three train the same small U-Net on the same latents and captions, in the same precision, with AdamW: ours and the
bare loop with its fused kernel (speed.fused_optimizer), the plain trainer as in diffusers' example. They alternate step
by step: the baselines' steps run at the end of each batch of ours, so that other load on the machine slows all of them
equally. Ratios are medians over rounds. The Trainer has the callbacks and loggers of the recipes, including the loss
guard and keyed randomness, which neither baseline has; the bare loop calls our model.

The second table shows the cost of the breakdown callback: the number of stage changes per step times the duration of
one, plus its reports.
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
from diffusion.loggers.metrics_file import MetricsFile
from diffusion.loggers.progress_lines import ConsoleLines
from diffusion.models import batch_keys
from diffusion.models.families.sd2.builder import tiny
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.profiling.breakdown import Breakdown, Timeline
from diffusion.training.adamw import AdamW
from diffusion.training.performance import reduce_step_overhead

WARMUP = 5
CELLS = 8
"""Side of the latents."""
Loader = DataLoader[dict[str, Tensor]]


def main(rounds: int = 60, batch: int = 32) -> None:
    """Run the benchmark and print its tables."""
    device = 'cuda' if torch.cuda.is_available() else 'cpu'
    print(f'{heading()}, PyTorch {torch.__version__}, threads: {torch.get_num_threads()}, {device}')
    models = [make_model().to(device) for _ in range(3)]
    print(f'U-Net of {millions(models[0]):.1f} M parameters, batch {batch}, float32, {rounds} rounds')
    print()
    baselines = {
        'bare PyTorch loop': Baseline(bare_loop(models[1], make_loader(models[1], batch), device)),
        "trainer as in diffusers' example": Baseline(plain_trainer(models[2], make_loader(models[2], batch), device)),
    }
    with tempfile.TemporaryDirectory() as folder:
        breakdown, interleaved = Breakdown(window=20), InterleaveBaselines(baselines)
        loader = make_loader(models[0], batch)
        trainer = make_trainer(models[0], loader, breakdown, interleaved, folder, batches=WARMUP + rounds)
        trainer.fit()
        trainer.close()
    print_steps(interleaved)
    print_breakdown(breakdown, interleaved)


def make_model() -> LatentDiffusion:
    """Return a small model, with the same initial weights on each call."""
    torch.manual_seed(17)
    return tiny(block_out_channels=(64, 128), caption_dropout=0.0, train_text_encoder=False)


def millions(model: LatentDiffusion) -> float:
    """Return the number of parameters of the denoiser, in millions."""
    return sum(weight.numel() for weight in model.denoiser.parameters()) / 1e6


def samples(count: int, channels: int) -> list[dict[str, Tensor]]:
    """Return random latents and tokens in memory; benchmarks/loader.py measures the cost of loading."""
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
    """Return a new loader over the same samples."""
    data: Any = samples(8 * batch, model.vae.config['latent_channels'])
    return DataLoader(data, batch_size=batch, shuffle=True, drop_last=True)


def make_optimizer(
    model: LatentDiffusion, *, fused: bool = True, kind: type[torch.optim.AdamW] = torch.optim.AdamW
) -> torch.optim.Optimizer:
    """Return AdamW with the settings of the recipes."""
    return kind(model.denoiser.parameters(), lr=1e-4, weight_decay=0.01, fused=fused or None)


def make_trainer(
    model: LatentDiffusion,
    loader: Loader,
    breakdown: Breakdown,
    interleaved: 'InterleaveBaselines',
    folder: str,
    *,
    batches: int,
) -> Trainer:
    """Return Composer's Trainer with the callbacks and loggers of the recipes."""
    warnings.simplefilter('ignore')
    logging.getLogger('diffusion').setLevel(logging.WARNING)
    trainer = Trainer(
        model=model,
        train_dataloader=loader,
        optimizers=make_optimizer(model, kind=AdamW),
        schedulers=ConstantWithWarmupScheduler('10ba'),
        max_duration=f'{batches}ba',
        callbacks=[LRMonitor(), RuntimeEstimator(), LossGuard(folder=folder), breakdown, interleaved],
        loggers=[MetricsFile(folder), ConsoleLines()],
        device='gpu' if torch.cuda.is_available() else 'cpu',
        progress_bar=False,
    )
    reduce_step_overhead(trainer)  # as the task `train` does
    return trainer


def bare_loop(model: LatentDiffusion, loader: Loader, device: str) -> Iterator[None]:
    """Yield after each step of a loop that computes our model's loss and updates the weights, and nothing else."""
    optimizer = make_optimizer(model)
    for given in endless(loader):
        batch = {name: tensor.to(device, non_blocking=True) for name, tensor in given.items()}
        optimizer.zero_grad(set_to_none=True)
        loss = model.loss(model(batch), batch)
        loss.backward()
        optimizer.step()
        yield


def plain_trainer(model: LatentDiffusion, loader: Loader, device: str) -> Iterator[None]:
    """Yield after each step of a trainer as in diffusers' text-to-image example, on one device and without clipping."""
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
    """Yield the batches of a loader, epoch after epoch."""
    while True:
        yield from loader


class Baseline:
    """Training loop that is run and timed step by step."""

    def __init__(self, steps: Iterator[None]) -> None:
        self.steps = steps
        self.wall: list[float] = []
        self.cpu: list[float] = []

    def step(self) -> None:
        """Run and time one step."""
        wall, cpu = timed(lambda: next(self.steps))
        self.wall.append(wall)
        self.cpu.append(cpu)


def timed(call: Callable[[], object]) -> tuple[float, float]:
    """Return the wall-clock seconds and the CPU seconds of a call."""
    wall, cpu = time.perf_counter(), time.process_time()
    call()
    synchronize()
    return time.perf_counter() - wall, time.process_time() - cpu


def synchronize() -> None:
    """Wait for the GPU, if there is one."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()


class InterleaveBaselines(Callback):
    """Callback that times each batch of the Trainer, and runs a step of each baseline after it."""

    def __init__(self, baselines: dict[str, Baseline]) -> None:
        self.baselines = baselines
        self.wall: list[float] = []
        self.cpu: list[float] = []
        self.ends: list[float] = []
        """End time of each batch; the time between two ends includes the steps of the baselines."""
        self._resumed: tuple[float, float] | None = None

    def batch_end(self, state: State, logger: Logger) -> None:
        synchronize()
        self.ends.append(time.perf_counter())
        if self._resumed is not None:
            self.wall.append(time.perf_counter() - self._resumed[0])
            self.cpu.append(time.process_time() - self._resumed[1])
            for baseline in self.baselines.values():
                baseline.step()
        self._resumed = time.perf_counter(), time.process_time()


def print_steps(interleaved: InterleaveBaselines) -> None:
    """Print milliseconds per step, and the Trainer's throughput relative to each baseline."""
    print("| | ms/step | CPU ms/step | Trainer's samples/s relative to it | the same by CPU time |")
    print('|---|---|---|---|---|')
    wall, cpu = interleaved.wall[WARMUP:], interleaved.cpu[WARMUP:]
    print(f'| Trainer | {median_ms(wall)} | {median_ms(cpu)} | 1 | 1 |')
    for name, baseline in interleaved.baselines.items():
        seconds = baseline.wall[WARMUP:], baseline.cpu[WARMUP:]
        ratios = [median_ratio(theirs, ours) for theirs, ours in zip(seconds, (wall, cpu), strict=True)]
        print(f'| {name} | {median_ms(seconds[0])} | {median_ms(seconds[1])} | {ratios[0]:.3f} | {ratios[1]:.3f} |')


def print_breakdown(breakdown: Breakdown, interleaved: InterleaveBaselines) -> None:
    """Print the cost of the breakdown callback relative to a step."""
    # A cost of some hundredths of a percent cannot be measured as a difference between two noisy steps, so it is the
    # product of a count and the duration of one stage change.
    changes, change_seconds = stage_changes_per_step(), seconds_per_stage_change()
    assert breakdown.report is not None
    report_seconds = statistics.median(timed(breakdown.report.metrics)[0] for _ in range(20))
    step = statistics.median(interleaved.wall[WARMUP:])
    cost = changes * change_seconds + report_seconds / breakdown.window
    windows = (len(interleaved.ends) - breakdown.skip) // breakdown.window
    last = breakdown.skip + windows * breakdown.window - 1
    window_seconds = interleaved.ends[last] - interleaved.ends[last - breakdown.window]
    stages = sum(breakdown.report.shares.values()) * breakdown.report.step_seconds * breakdown.window
    print()
    print('| breakdown callback | |')
    print('|---|---|')
    print(f'| stage changes per step | {changes} |')
    print(f'| microseconds per stage change | {1e6 * change_seconds:.2f} |')
    print(f'| total share of the step, % | {100 * cost / step:.4f} |')
    print(f'| sum of stages over independently measured time, % | {100 * stages / window_seconds:.2f} |')


def stage_changes_per_step() -> int:
    """Return the number of stage changes per step with the callbacks and loggers of the benchmark."""
    counts: list[int] = []

    class CountStageChanges(Callback):
        def fit_start(self, state: State, logger: Logger) -> None:
            timeline: Any = next(each for each in state.callbacks if isinstance(each, Breakdown)).timeline
            switch, self.calls = timeline.switch, 0

            def counting_switch(stage: str) -> str:
                self.calls += 1
                return switch(stage)

            timeline.switch = counting_switch

        def batch_end(self, state: State, logger: Logger) -> None:
            counts.append(self.calls)

    model, counter = make_model(), CountStageChanges()
    with tempfile.TemporaryDirectory() as folder:
        trainer = make_trainer(model, make_loader(model, 2), Breakdown(), InterleaveBaselines({}), folder, batches=4)
        trainer.state.callbacks.append(counter)
        trainer.fit()
        trainer.close()
    return counts[-1] - counts[-2]


def seconds_per_stage_change(repeats: int = 20_000) -> float:
    """Return the duration of a stage change, entered in the way of callbacks and loggers."""
    timeline = Timeline()
    nothing = timeline.timed(lambda: None, 'logging')
    rounds = []
    for _ in range(9):
        started = time.perf_counter()
        for _ in range(repeats // 9):
            nothing()
        rounds.append((time.perf_counter() - started) / (repeats // 9) / 2)  # each call enters and leaves a stage
    return statistics.median(rounds)


def median_ms(seconds: list[float]) -> str:
    """Format the median in milliseconds."""
    return f'{1e3 * statistics.median(seconds):.1f}'


def median_ratio(others: list[float], ours: list[float]) -> float:
    """Return the median over rounds of another's seconds divided by ours."""
    return statistics.median(theirs / our for theirs, our in zip(others, ours, strict=True))


if __name__ == '__main__':
    main(*(int(word) for word in sys.argv[1:3]))
