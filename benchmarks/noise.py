"""Cost of keyed randomness in a training step: operations counted, time measured on the CPU, estimates for two GPUs.

    python benchmarks/noise.py [millions of parameters [repeats]]

The draws are those of `LatentDiffusion.forward`: noise, noise of the VAE's posterior, timesteps, caption dropout. By
default the U-Net is that of Stable Diffusion 2 (866 M parameters), which takes 7 GB; use a smaller one for a quick run.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from ema import narrow_unet
from machine import heading, interleaved_medians
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from diffusion.compatibility.private_names import TorchDispatchMode, tree_leaves
from diffusion.models.randomness import Draws, Purpose, draws_for

LATENT_SIZES = {'256 px': 32, '512 px': 64}
BATCH = 16
"""Samples per device in the estimate: the recipe's microbatch."""
GPUS = {'A100 80GB': (312e12, 2.0e12), 'H200': (989e12, 4.8e12)}
"""Published peak bfloat16 FLOP/s, and memory bandwidth in bytes/s, of each GPU."""
MFU = 0.4
"""Assumed MFU of the step in the estimate; a lower one makes the share of the draws smaller."""
KERNEL_SECONDS = 2e-6
"""Assumed shortest duration of a GPU kernel."""
MOVES = ('aten::arange', 'aten::stack', 'aten::cat', 'aten::_to_copy', 'aten::clone', 'aten::copy_')
"""Operations that do no arithmetic."""


def main(millions: int = 866, repeats: int = 3) -> None:
    """Run the benchmark and print its tables."""
    print(f'{heading()}, PyTorch {torch.__version__}, threads: {torch.get_num_threads()}')
    with torch.device('meta'):
        unet = narrow_unet(millions)
    print(f'U-Net of {sum(weight.numel() for weight in unet.parameters()) / 1e6:.1f} M parameters')
    steps = {name: OperationCounts(lambda size=size: step(unet, size)) for name, size in LATENT_SIZES.items()}
    print_counted(steps)
    print_measured(filled(unet), repeats)
    print_estimated(steps)


def print_counted(steps: Mapping[str, 'OperationCounts']) -> None:
    """Print the operations of the draws against those of the U-Net's step."""
    print('\nOperations per sample, each operation of the draws counted as one whatever its duration:\n')
    print('| | normals | integer operations | float operations | U-Net forward and backward, GFLOP | share, % |')
    print('|---|---|---|---|---|---|')
    draws = draws_for([7], seed=17)
    for name, size in LATENT_SIZES.items():
        draw(draws, size)  # counters and keys are made once per shape
        drawn = OperationCounts(lambda size=size: draw(draws, size))
        share = 100 * (drawn.integer + drawn.float) / steps[name].flops
        print(f'| {name} | {2 * 4 * size**2} | {drawn.integer} | {drawn.float} ', end='')
        print(f'| {steps[name].flops / 1e9:.2f} | {share:.6f} |')
    normals = OperationCounts(lambda: draws.normal(Purpose.NOISE, [1024]))
    print(f'\nOne normal: {normals.integer / 1024:.1f} operations on integers, {normals.float / 1024:.1f} on floats.')


def print_measured(unet: UNet2DConditionModel, repeats: int) -> None:
    """Measure and print the time of the draws and of a step on this machine."""
    print(f'\nMeasured on this machine, 256 px, one sample, float32, medians of {repeats} alternating runs:\n')
    print('| | milliseconds | share of the step, % |')
    print('|---|---|---|')
    draws = draws_for([7], seed=17)
    functions = lambda: step(unet, 32), lambda: draw(draws, 32), lambda: draw_from_stream(32)
    interleaved_medians(*functions, repeats=1)
    unet_seconds, keyed, stream = interleaved_medians(*functions, repeats=repeats)
    print(f'| U-Net, forward and backward | {unet_seconds * 1e3:.0f} | 100 |')
    print(f'| keyed draws | {keyed * 1e3:.2f} | {100 * keyed / unet_seconds:.4f} |')
    print(f"| the same draws from torch's generator | {stream * 1e3:.2f} | {100 * stream / unet_seconds:.4f} |")


def print_estimated(steps: Mapping[str, 'OperationCounts']) -> None:
    """Print estimates for GPUs from counted operations and published rates."""
    print(
        f'\nEstimated, not measured: {BATCH} samples per device, steps at {MFU:.0%} of peak, kernels take at least ',
        end='',
    )
    print(f'{KERNEL_SECONDS * 1e6:.0f} microseconds. Kernels and bytes are counted in eager PyTorch on the CPU.\n')
    print('| | kernels: draws, U-Net | MB moved | ms to move them | kernel ms | ms/step | share, % |')
    print('|---|---|---|---|---|---|---|')
    draws = draws_for(range(BATCH), seed=17)
    for gpu, (flops, bandwidth) in GPUS.items():
        for name, size in LATENT_SIZES.items():
            moved = OperationCounts(lambda size=size: draw(draws, size)).moved
            busy = sum(max(KERNEL_SECONDS, each / bandwidth) for each in moved)
            step_seconds = BATCH * steps[name].flops / (flops * MFU)
            print(f'| {gpu}, {name} | {len(moved)}, {len(steps[name].moved)} | {sum(moved) / 1e6:.0f} ', end='')
            print(f'| {sum(moved) / bandwidth * 1e3:.3f} | {busy * 1e3:.2f} | {step_seconds * 1e3:.1f} ', end='')
            print(f'| {100 * busy / step_seconds:.2f} |')


def draw(draws: Draws, size: int) -> list[Tensor]:
    """Draw the random numbers that `LatentDiffusion.forward` draws."""
    normals = 4 * size**2
    words = (Purpose.TIMESTEP, Purpose.CAPTION_DROPOUT)
    draws = draws.precompute_draws(words, {Purpose.NOISE: normals, Purpose.POSTERIOR: normals})
    return [
        draws.normal(Purpose.POSTERIOR, (4, size, size)),
        draws.integers(Purpose.TIMESTEP, 1000),
        draws.normal(Purpose.NOISE, (4, size, size)),
        draws.uniform(Purpose.CAPTION_DROPOUT),
    ]


def draw_from_stream(size: int) -> list[Tensor]:
    """Draw the same numbers for one sample from torch's generator."""
    shape = (1, 4, size, size)
    return [torch.randn(shape), torch.randint(1000, (1,)), torch.randn(shape), torch.rand(1, dtype=torch.float64)]


def step(unet: UNet2DConditionModel, size: int) -> None:
    """Run the forward and backward pass of one sample."""
    unet.zero_grad()
    device = next(unet.parameters()).device
    latents = torch.full((1, 4, size, size), 0.5, device=device)
    text_embeds = torch.full((1, 77, unet.config['cross_attention_dim']), 0.5, device=device)
    unet(latents, torch.full((1,), 500, device=device), text_embeds, return_dict=False)[0].square().mean().backward()


def filled(unet: UNet2DConditionModel) -> UNet2DConditionModel:
    """Move a U-Net from the meta device to the CPU, with small random weights."""
    unet.zero_grad()  # the gradients are on the meta device too
    unet = unet.to_empty(device='cpu')
    with torch.no_grad():
        for weight in unet.parameters():
            weight.uniform_(-0.03, 0.03)
    return unet


class OperationCounts(TorchDispatchMode):
    """Counts of the operations that a call dispatches, without views.

    Attributes:
        integer: Operations on integers, one per element of the result, without conversions and copies.
        float: Operations on floats, one per element of the result, without conversions and copies.
        moved: Lower bound on the bytes that each kernel reads and writes.
        flops: FLOPs of matrix products, convolutions and attention; a multiply-add is 2.
    """

    def __init__(self, call: Callable[[], object]) -> None:
        super().__init__()
        self.integer = self.float = 0
        self.moved: list[int] = []
        with FlopCounterMode(display=False) as flops, self:
            call()
        self.flops = flops.get_total_flops()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        if func.is_view:
            return results
        written = [leaf for leaf in tree_leaves(results) if isinstance(leaf, Tensor)]
        read = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        # A broadcast tensor has more elements than its storage; only the storage is read.
        self.moved.append(sum(min(each.nbytes, each.untyped_storage().nbytes()) for each in (*written, *read)))
        if func.name().partition('.')[0] not in MOVES:
            self.integer += sum(each.numel() for each in written if each.dtype == torch.int64)
            self.float += sum(each.numel() for each in written if each.dtype != torch.int64)
        return results


if __name__ == '__main__':
    main(*(int(word) for word in sys.argv[1:3]))
