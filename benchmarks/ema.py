"""Benchmark of our EMA update against that of Composer, on the same model in one process.

    python benchmarks/ema.py [millions of parameters [repeats]]

Both algorithms receive the events of a training run with a U-Net that has the 686 tensors of Stable Diffusion 2, with
reduced widths. Times are medians of alternating updates. Memory is what was requested from PyTorch's allocator.
Composer's temporary tensors reuse memory that the process has already touched, which favors it: with new pages from the
operating system, its update takes up to twice as long.

`OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/ema.py` gives less noisy times on a busy machine.
"""

import math
import sys
from collections.abc import Callable
from typing import NamedTuple

import torch
from composer.algorithms import EMA as ComposerEMA
from composer.core import Algorithm, Event, State
from composer.devices import DeviceCPU
from composer.loggers import Logger
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from machine import heading, interleaved_medians

from diffusion.algorithms.ema import EMA
from diffusion.models.families.sd2 import builder as sd2_builder

SD2_MILLIONS = 865.9
SMOOTHING = 0.9999


def main(millions: int = 100, repeats: int = 15) -> None:
    """Run the benchmark and print its table."""
    model = narrow_unet(millions)
    weights = list(model.parameters())
    size = sum(weight.nbytes for weight in weights)
    print(f'{heading()}, PyTorch {torch.__version__}, threads: {torch.get_num_threads()}')
    print(f'{sum(weight.numel() for weight in weights) / 1e6:.1f} M parameters in {len(weights)} tensors, ', end='')
    print(f'{size / 2**20:.1f} MiB; {repeats} updates each')
    print()
    # Neither algorithm calls the model, so it need not be a ComposerModel.
    state = State(model, rank_zero_seed=0, run_name='ema', device=DeviceCPU(), max_duration='1ep')  # type: ignore[arg-type]
    before = [allocated(lambda each=each: start(each, state)).held for each in make_algorithms('1ba')]
    algorithms = make_algorithms('0ba')
    after = [allocated(lambda each=each: start(each, state)).held for each in algorithms]
    updates = [lambda each=each: run_event(each, Event.BATCH_END, state) for each in algorithms]
    seconds = interleaved_medians(*updates, repeats=repeats)
    allocations = [allocated(update) for update in updates]
    assert [each.held for each in allocations] == [0, 0], 'an update must not keep memory'

    print('| | diffusion | Composer | |')
    print('|---|---|---|---|')
    print(f'| update, milliseconds | {seconds[0] * 1e3:.1f} | {seconds[1] * 1e3:.1f} | ', end='')
    print(f'{seconds[1] / seconds[0]:.1f} times faster |')
    print(row('allocated during an update, MiB', [each.total for each in allocations], size))
    print(row('peak during an update, MiB', [each.peak for each in allocations], size))
    print(row('held before the start, MiB', before, size))
    print(row('held after the start, MiB', after, size))


def row(name: str, sizes: list[int], model: int) -> str:
    """Format a table row: bytes as MiB and as multiples of the model's size."""
    parts = ' and '.join(f'{size / model:.3g}' for size in sizes)
    return f'| {name} | {sizes[0] / 2**20:.1f} | {sizes[1] / 2**20:.1f} | {parts} of the model |'


def narrow_unet(millions: int) -> UNet2DConditionModel:
    """Return Stable Diffusion 2's U-Net with all widths reduced by the same factor (1 for 866 million parameters)."""
    width = max(4, round(320 * math.sqrt(millions / SD2_MILLIONS) / 4) * 4)
    widths = [width, 2 * width, 4 * width, 4 * width]
    narrow = {
        'block_out_channels': widths,
        'cross_attention_dim': 1024 * width // 320,
        'attention_head_dim': [math.gcd(each, max(1, each // 64)) for each in widths],  # heads
        'norm_num_groups': math.gcd(width, 32),
    }
    return UNet2DConditionModel(**(sd2_builder.UNET | narrow))


def make_algorithms(start: str) -> list[Algorithm]:
    """Return our EMA and Composer's EMA with equivalent settings."""
    composer_ema = ComposerEMA(half_life=None, smoothing=SMOOTHING, ema_start=start, update_interval='1ba')
    return [EMA(start, smoothing=SMOOTHING), composer_ema]


def run_event(algorithm: Algorithm, event: Event, state: State) -> None:
    """Run an event for an algorithm as Composer's engine does."""
    if algorithm.match(event, state):
        algorithm.apply(event, state, Logger(state))


def start(algorithm: Algorithm, state: State) -> None:
    """Run the events from the start of a run to the end of its first batch, which is batch 0 here."""
    for event in (Event.INIT, Event.FIT_START, Event.BATCH_END):
        run_event(algorithm, event, state)


class Allocated(NamedTuple):
    """Bytes that a call allocates."""

    total: int
    """Sum of all allocations."""
    peak: int
    """Peak of allocated memory."""
    held: int
    """Bytes still allocated when the call returns."""


def allocated(call: Callable[[], object]) -> Allocated:
    """Measure the allocations of a call from PyTorch's CPU allocator."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    changes = [event.nbytes() for event in events if event.name() == '[memory]']  # type: ignore[attr-defined] # missing from the stub
    total = peak = held = 0
    for change in changes:
        total += max(change, 0)
        held += change
        peak = max(peak, held)
    return Allocated(total, peak, held)


if __name__ == '__main__':
    main(*(int(word) for word in sys.argv[1:3]))
