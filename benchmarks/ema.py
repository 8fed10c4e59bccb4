"""The EMA's update against that of Composer's own, on one model in one run.

    python benchmarks/ema.py [millions of parameters [repeats]]

Both algorithms meet the events of a training run with a U-Net that has Stable Diffusion 2's 686 tensors, narrowed to
about so many parameters. Seconds are medians of updates that take turns. Memory is what PyTorch's allocator was asked
for. Composer's temporary tensors come from memory that the process has already touched, which flatters it: with fresh
pages from the system its update takes up to twice as long.

`OMP_NUM_THREADS=1 taskset -c 1 python benchmarks/ema.py` gives steadier seconds on a machine that is busy.
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
from machine import heading, seconds_in_turns

from diffusion.algorithms.ema import EMA
from diffusion.models import sd2_config

SD2_MILLIONS = 865.9
SMOOTHING = 0.9999


def main(millions: int = 100, repeats: int = 15) -> None:
    """Run and print."""
    model = narrow_unet(millions)
    weights = list(model.parameters())
    size = sum(weight.nbytes for weight in weights)
    print(f'{heading()}, PyTorch {torch.__version__}, threads: {torch.get_num_threads()}')
    print(f'{sum(weight.numel() for weight in weights) / 1e6:.1f} M parameters in {len(weights)} tensors, ', end='')
    print(f'{size / 2**20:.1f} MiB; {repeats} updates each')
    print()
    # Neither algorithm calls the model, so it need not be a ComposerModel.
    state = State(model, rank_zero_seed=0, run_name='ema', device=DeviceCPU(), max_duration='1ep')  # type: ignore[arg-type]
    before = [allocated(lambda each=each: start(each, state)).held for each in both('1ba')]
    algorithms = both('0ba')
    after = [allocated(lambda each=each: start(each, state)).held for each in algorithms]
    updates = [lambda each=each: meet(each, Event.BATCH_END, state) for each in algorithms]
    seconds = seconds_in_turns(*updates, repeats=repeats)
    demands = [allocated(update) for update in updates]
    assert [demand.held for demand in demands] == [0, 0], 'an update keeps memory'

    print('| | diffusion | Composer | |')
    print('|---|---|---|---|')
    print(f'| update, milliseconds | {seconds[0] * 1e3:.1f} | {seconds[1] * 1e3:.1f} | ', end='')
    print(f'{seconds[1] / seconds[0]:.1f} times faster |')
    print(row('allocated during an update, MiB', [demand.total for demand in demands], size))
    print(row('most of it at once, MiB', [demand.peak for demand in demands], size))
    print(row('held before the start, MiB', before, size))
    print(row('held after the start, MiB', after, size))


def row(name: str, sizes: list[int], model: int) -> str:
    """A line of the table: bytes as MiB, and as parts of the model."""
    parts = ' and '.join(f'{size / model:.3g}' for size in sizes)
    return f'| {name} | {sizes[0] / 2**20:.1f} | {sizes[1] / 2**20:.1f} | {parts} of the model |'


def narrow_unet(millions: int) -> UNet2DConditionModel:
    """Stable Diffusion 2's U-Net with every width divided by one number; itself for 866 million parameters."""
    width = max(4, round(320 * math.sqrt(millions / SD2_MILLIONS) / 4) * 4)
    widths = [width, 2 * width, 4 * width, 4 * width]
    narrow = {
        'block_out_channels': widths,
        'cross_attention_dim': 1024 * width // 320,
        'attention_head_dim': [math.gcd(each, max(1, each // 64)) for each in widths],  # heads
        'norm_num_groups': math.gcd(width, 32),
    }
    return UNet2DConditionModel(**(sd2_config.UNET | narrow))


def both(start: str) -> list[Algorithm]:
    """Ours and Composer's with one meaning."""
    composers = ComposerEMA(half_life=None, smoothing=SMOOTHING, ema_start=start, update_interval='1ba')
    return [EMA(start, smoothing=SMOOTHING), composers]


def meet(algorithm: Algorithm, event: Event, state: State) -> None:
    """What Composer's engine does with an algorithm at an event."""
    if algorithm.match(event, state):
        algorithm.apply(event, state, Logger(state))


def start(algorithm: Algorithm, state: State) -> None:
    """The beginning of a run and the end of its first batch, which here is batch 0."""
    for event in (Event.INIT, Event.FIT_START, Event.BATCH_END):
        meet(algorithm, event, state)


class Allocated(NamedTuple):
    """Bytes that a call allocates in all, the most of them at one time, and how many remain when it is over."""

    total: int
    peak: int
    held: int


def allocated(call: Callable[[], object]) -> Allocated:
    """What a call asks of PyTorch's allocator on the CPU."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        call()
    assert profile.profiler is not None and profile.profiler.kineto_results is not None
    events = sorted(profile.profiler.kineto_results.events(), key=lambda event: event.start_ns())
    changes = [event.nbytes() for event in events if event.name() == '[memory]']  # type: ignore[attr-defined] # not in its stub
    total = peak = held = 0
    for change in changes:
        total += max(change, 0)
        held += change
        peak = max(peak, held)
    return Allocated(total, peak, held)


if __name__ == '__main__':
    main(*(int(word) for word in sys.argv[1:3]))
