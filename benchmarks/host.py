"""Benchmark of the host's time in a training step outside of the forward and backward pass, by part, before and after.

    python benchmarks/host.py [steps [revision of git to compare with, or "none" [rounds]]]

At 128 GPUs a step of Stable Diffusion 2 takes the GPUs 22 to 70 ms, and they are idle while the host prepares or
finishes a step. A real Trainer with the callbacks and loggers of yamls/phase1.yaml, EMA and gradient clipping trains
the 686 tensors of the U-Net as FSDP2 shards them: DTensors, here with 8 elements each, so that arithmetic takes no
time. Forward and backward pass are replaced by nothing; gradients are there already. So this is what the host does
whatever the GPU is. It is CPU time of one thread, the median over steps. Both versions of the code run in turns. The
second table lists where the host waits for the device.

benchmarks/dispatch.py measures the passes, which are left out here.
"""

import json
import logging
import os
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from machine import heading
from torch import Tensor

ELEMENTS = 8
BATCH = 2
CELLS = 8
"""Side of the latents. Their size changes the arithmetic of the draws, but not the number of kernels."""
WARMUP = 8
EXCLUDED = ('forward', 'backward')
BEFORE = '3c46e16'
"""Default commit to compare with; comments name it where the code is for its modules."""


class Parts:
    """Seconds of a thread's CPU time by part of the step, each without the parts inside it."""

    def __init__(self) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self._inside: list[str] = []
        self._since = time.thread_time()

    def enter(self, part: str) -> None:
        """Count the time from here on for a part."""
        self._switch()
        self._inside.append(part)

    def leave(self) -> None:
        """Count the time from here on for the part before."""
        self._switch()
        self._inside.pop()

    def take(self) -> dict[str, float]:
        """Return the seconds so far and begin again."""
        self._switch()
        found, self.seconds = dict(self.seconds), defaultdict(float)
        return found

    def _switch(self) -> None:
        now = time.thread_time()
        self.seconds[self._inside[-1] if self._inside else 'Composer'] += now - self._since
        self._since = now

    def timed(self, function: Callable[..., Any], part: str) -> Callable[..., Any]:
        """Return a function whose time counts for a part."""

        def call(*args: Any, **kwargs: Any) -> Any:
            self.enter(part)
            try:
                return function(*args, **kwargs)
            finally:
                self.leave()

        return call


class PartsAfterFirstStep(Parts):
    """Parts that call a function at the end of the first step."""

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self._call: Callable[[], object] | None = call

    def take(self) -> dict[str, float]:
        if self._call is not None:
            self._call()
            self._call = None
        return super().take()


def main(steps: int = 60, before: str = BEFORE, rounds: int = 3) -> None:
    """Run both versions in turns and print the table."""
    folder = Path(__file__).parent
    with tempfile.TemporaryDirectory() as temporary:
        versions = {'after': folder.parent}
        if before != 'none':
            versions = {'before': Path(temporary) / 'before', 'after': folder.parent}
            command = ['git', '-C', str(folder.parent), 'archive', before, 'diffusion']
            archive = subprocess.run(command, check=True, capture_output=True).stdout
            versions['before'].mkdir()
            subprocess.run(['tar', '-x', '-C', str(versions['before'])], input=archive, check=True)
        found: dict[str, list[dict[str, float]]] = {name: [] for name in versions}
        for _ in range(rounds):
            for name, code in versions.items():
                found[name].append(measured(code, '--one', str(steps)))
        waits = measured(versions['after'], '--waits')
    print(f'{heading()}, PyTorch {torch.__version__}, one thread; best of {rounds} medians over {steps} steps')
    print(f'\n| host, ms per step | {" | ".join(versions)} |')
    print(f'|---|{"---|" * len(versions)}')
    best = {name: min(runs, key=lambda run: run['total']) for name, runs in found.items()}
    names = sorted(
        {part for run in best.values() for part in run if part != 'total'}, key=lambda part: order(part, best)
    )
    for part in [*names, 'total']:
        print(f'| {part} | {" | ".join(f"{run.get(part, 0.0) * 1e3:.2f}" for run in best.values())} |')
    print('\n| the host waits for the device in | times per step |\n|---|---|')
    for place, count in waits.items():
        print(f'| {place} | {count:g} |')


def order(part: str, runs: dict[str, dict[str, float]]) -> float:
    """Return the key by which parts are sorted: the largest first."""
    return -max(run.get(part, 0.0) for run in runs.values())


def measured(code: Path, *arguments: str) -> dict[str, float]:
    """Run this program with other arguments and the code in a folder; return the figures by name that it prints."""
    environment = os.environ | {'PYTHONPATH': str(code), 'OMP_NUM_THREADS': '1', 'CUDA_VISIBLE_DEVICES': ''}
    command = [sys.executable, __file__, *arguments]
    output = subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout
    return json.loads(output.splitlines()[-1])


def start() -> None:
    """Prepare this process for training on one rank."""
    os.environ |= {'RANK': '0', 'LOCAL_RANK': '0', 'NODE_RANK': '0', 'WORLD_SIZE': '1', 'LOCAL_WORLD_SIZE': '1'}
    warnings.simplefilter('ignore')
    logging.getLogger('diffusion').setLevel(logging.WARNING)
    torch.set_num_threads(1)


def waits() -> None:
    """Count the waits for the device per step, and print them as JSON."""
    from diffusion.profiling.device_syncs import find_waits

    start()
    with tempfile.TemporaryDirectory() as folder, find_waits() as found:
        steps = PartsAfterFirstStep(found.clear)
        batches = len(list(training(steps, folder, WARMUP)))
    sites = found.most_common()
    print(json.dumps({f'{site.file} ({site.function})': round(count / (batches - 1), 2) for site, count in sites}))


def one(steps: int) -> None:
    """Measure the installed code and print the medians as JSON."""
    start()
    parts = Parts()
    with tempfile.TemporaryDirectory() as folder:
        runs = list(training(parts, folder, WARMUP + steps))[WARMUP:]
    median = {
        part: statistics.median(run.get(part, 0.0) for run in runs) for part in {key for run in runs for key in run}
    }
    outside = [sum(value for part, value in run.items() if part not in EXCLUDED) for run in runs]
    for part in EXCLUDED:
        median.pop(part, None)
    print(json.dumps(median | {'total': statistics.median(outside)}))


def training(parts: Parts, folder: str, batches: int) -> Iterator[dict[str, float]]:
    """Train, and yield the seconds of each step by part."""
    from composer import Trainer
    from composer.callbacks import LRMonitor, RuntimeEstimator
    from composer.core import Callback
    from composer.optim.scheduler import ConstantWithWarmupScheduler
    from torch.distributed.device_mesh import init_device_mesh

    from diffusion.algorithms.ema import EMA
    from diffusion.callbacks.loss_guard import LossGuard
    from diffusion.callbacks.preemption import Preemption
    from diffusion.callbacks.status_updates import Heartbeat
    from diffusion.loggers.metrics_file import MetricsFile
    from diffusion.loggers.progress_lines import ConsoleLines

    store = torch.distributed.FileStore(f'{folder}/store', 1)  # type: ignore[reportPrivateImportUsage]
    torch.distributed.init_process_group('gloo', store=store, rank=0, world_size=1)
    model = sharded_model(init_device_mesh('cpu', (1,)), parts)
    steps: list[dict[str, float]] = []

    class FillGradients(Callback):
        def after_backward(self, state: Any, logger: Any) -> None:
            with parts_paused(parts):
                for weight, gradient in zip(weights, gradients, strict=True):
                    weight.grad = gradient

        def batch_end(self, state: Any, logger: Any) -> None:
            steps.append(parts.take())

    weights = list(model.denoiser.parameters())
    gradients = [torch.ones_like(weight) for weight in weights]
    optimizer = adamw()(weights, lr=1e-4, weight_decay=0.01, fused=True)
    trainer = Trainer(
        model=model,
        train_dataloader=torch.utils.data.DataLoader(samples(model, batches * BATCH), batch_size=BATCH),  # type: ignore[arg-type]
        optimizers=optimizer,
        schedulers=ConstantWithWarmupScheduler('10ba'),
        max_duration=f'{batches}ba',
        algorithms=[clipping(), EMA()],
        callbacks=[
            FillGradients(),
            Heartbeat(),
            breakdown(),
            LRMonitor(),
            RuntimeEstimator(),
            LossGuard(folder=folder),
            Preemption(),
        ],
        loggers=[MetricsFile(folder), ConsoleLines()],
        device='cpu',
        progress_bar=False,
    )
    mark_as_sharded(model.denoiser)
    reduce_overhead(trainer)
    watch(trainer, parts)
    trainer.fit()
    trainer.close()
    yield from steps


@contextmanager
def parts_paused(parts: Parts) -> Iterator[None]:
    """Context whose time counts for the backward pass, which would set the gradients."""
    parts.enter('backward')
    try:
        yield
    finally:
        parts.leave()


def watch(trainer: Any, parts: Parts) -> None:
    """Time the parts of a Trainer."""
    from composer.core import Algorithm, Callback, Event
    from composer.loggers import LoggerDestination

    for each in (*trainer.state.algorithms, *trainer.state.callbacks):
        kind = type(each)
        names = ['apply'] if isinstance(each, Algorithm) else ['run_event', *(event.value for event in Event)]
        bases = (Callback, LoggerDestination)
        own = [name for name in names if all(getattr(kind, name) is not getattr(base, name, None) for base in bases)]
        for name in own[: 1 if 'run_event' in own else None]:
            if kind.__name__ != 'FillGradients':
                setattr(each, name, parts.timed(getattr(each, name), kind.__name__))
    for logger in trainer.logger.destinations:
        logger.log_metrics = parts.timed(logger.log_metrics, 'loggers')
    for optimizer in trainer.state.optimizers:
        optimizer.step = parts.timed(optimizer.step, 'optimizer')
    trainer._train_microbatches = parts.timed(trainer._train_microbatches, 'Composer')
    Tensor.backward = parts.timed(Tensor.backward, 'backward')  # type: ignore[method-assign]
    model = trainer.state.model
    model.forward = parts.timed(model.forward, 'forward')
    model.loss = parts.timed(model.loss, 'forward')


def sharded_model(mesh: Any, parts: Parts) -> Any:
    """Return a LatentDiffusion whose denoiser has the modules of SD2's, shards as weights, and computes nothing."""
    from ema import narrow_unet
    from torch.distributed.tensor import Shard, distribute_tensor

    from diffusion.models.families.sd2.builder import tiny

    model = tiny(caption_dropout=0.1, train_text_encoder=False)
    denoiser = model.denoiser = narrow_unet(1)
    for module in denoiser.modules():
        for name, _ in list(module.named_parameters(recurse=False)):
            shard = distribute_tensor(torch.ones(ELEMENTS, 1), mesh, [Shard(0)])
            module.register_parameter(name, torch.nn.Parameter(shard))
    denoiser.forward = lambda noisy, *rest, **more: (noisy.detach().requires_grad_(),)  # type: ignore[method-assign]
    model.flops_per_batch = lambda batch: 1.0  # type: ignore[method-assign]
    first = batch_of(model)
    draws = type(model.draws_of(first) if callable(getattr(model, 'draws_of', None)) else model._draws(first))  # type: ignore[operator]
    compile_draws(model)
    for method in ('precompute_draws', 'at_once', 'words', 'normal', 'uniform', 'integers'):
        if hasattr(draws, method):
            setattr(draws, method, parts.timed(getattr(draws, method), 'noise'))
    return model


def mark_as_sharded(denoiser: torch.nn.Module) -> None:
    """Make a module one of FSDP2, as fully_shard does, without the hooks that gather its weights."""
    from torch.distributed.fsdp import FSDPModule

    denoiser.__class__ = type('FSDPUNet', (FSDPModule, type(denoiser)), {'reshard': lambda self: None})


def batch_of(model: Any) -> dict[str, Tensor]:
    """Return one batch."""
    return torch.utils.data.default_collate(samples(model, BATCH))


def samples(model: Any, count: int) -> list[dict[str, Tensor]]:
    """Return samples of latents and tokens."""
    channels = model.vae.config['latent_channels']
    keys = batch_keys()
    return [
        {
            keys.LATENT_MOMENTS: torch.randn(2 * channels, CELLS, CELLS),
            keys.INPUT_IDS: torch.full((1, 16), 7),
            keys.SAMPLE_ID: torch.tensor(index),
            keys.EPOCH: torch.tensor(0),
            keys.BATCH_INDEX: torch.tensor(index // BATCH),
        }
        for index in range(count)
    ]


def batch_keys() -> Any:
    """Return the module with the keys of a batch."""
    try:
        from diffusion.models import batch_keys as keys
    except ImportError:  # 3c46e16
        from diffusion.data import keys  # type: ignore[attr-defined, no-redef]
    return keys


def breakdown() -> Any:
    """Return the callback `breakdown`."""
    try:
        from diffusion.profiling.breakdown import Breakdown
    except ImportError:  # 3c46e16
        from diffusion.callbacks.breakdown import Breakdown  # type: ignore[import-not-found, no-redef]
    return Breakdown(window=50)


def clipping() -> Any:
    """Return the algorithm `gradient_clipping`."""
    try:
        from diffusion.algorithms.gradient_clipping import GradientClipping
    except ImportError:  # 3c46e16
        from composer.algorithms import GradientClipping  # type: ignore[assignment]
    return GradientClipping(clipping_type='norm', clipping_threshold=1.0)


def adamw() -> type[torch.optim.AdamW]:
    """Return the optimizer `adamw`."""
    try:
        from diffusion.training.adamw import AdamW
    except ImportError:  # 3c46e16
        return torch.optim.AdamW
    return AdamW


def compile_draws(model: Any) -> None:
    """Compile the random numbers of a step as `speed.compile` does."""
    if hasattr(model, 'random_bits'):
        from diffusion.models.randomness import fusible_random_bits

        model.random_bits = torch.compile(fusible_random_bits, dynamic=True)


def reduce_overhead(trainer: Any) -> None:
    """Reduce the Trainer's work per step as the task `train` does."""
    try:
        from diffusion.training.performance import reduce_step_overhead
    except ImportError:  # 3c46e16
        return
    reduce_step_overhead(trainer)


if __name__ == '__main__':
    if sys.argv[1:2] == ['--one']:
        one(int(sys.argv[2]))
    elif sys.argv[1:2] == ['--waits']:
        waits()
    else:
        main(*(int(word) if word.isdigit() else word for word in sys.argv[1:4]))  # type: ignore[arg-type]
