"""What keyed randomness costs a training step, counted, measured on the CPU, and estimated for two GPUs.

    python benchmarks/noise.py [millions of the U-Net's parameters [repeats]]

The draws are those of `LatentDiffusion.forward`: noise, noise of the VAE's posterior, timesteps, caption dropout. The
U-Net is Stable Diffusion 2's (866 M) by default, which takes 7 GB here; a small one is for trying the command out.
"""

import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from ema import narrow_unet
from machine import heading, seconds_in_turns
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import FlopCounterMode

from diffusion.models.randomness import Draws, Purpose, draws_for

LATENT_SIZES = {'256 px': 32, '512 px': 64}
BATCH = 16
"""Samples a device in the estimate: the recipe's microbatch."""
GPUS = {'A100 80GB': (312e12, 2.0e12), 'H200': (989e12, 4.8e12)}
"""Peak bfloat16 FLOP/s and bytes/s of memory, as published."""
MFU = 0.4
"""Of the step in the estimate; less makes the draws' share smaller."""
KERNEL_SECONDS = 2e-6
"""The least that a kernel occupies a GPU in the estimate, however small it is."""
MOVES = ('aten::arange', 'aten::stack', 'aten::cat', 'aten::_to_copy', 'aten::clone', 'aten::copy_')
"""What is no arithmetic."""


def main(millions: int = 866, repeats: int = 3) -> None:
    """Run and print."""
    print(f'{heading()}, PyTorch {torch.__version__}, threads: {torch.get_num_threads()}')
    with torch.device('meta'):
        unet = narrow_unet(millions)
    print(f'U-Net of {sum(weight.numel() for weight in unet.parameters()) / 1e6:.1f} M parameters')
    steps = {name: Counted(lambda size=size: step(unet, size)) for name, size in LATENT_SIZES.items()}
    print_counted(steps)
    print_measured(filled(unet), repeats)
    print_estimated(steps)


def print_counted(steps: Mapping[str, 'Counted']) -> None:
    """Operations of the draws against those of the U-Net's steps."""
    print('\nCounted, a sample; every operation of the draws as one, however long it takes:\n')
    print('| | normals | integer operations | float operations | U-Net forward and backward, GFLOP | share, % |')
    print('|---|---|---|---|---|---|')
    draws = draws_for([7], seed=17)
    for name, size in LATENT_SIZES.items():
        drawn = Counted(lambda size=size: draw(draws, size))
        share = 100 * (drawn.integer + drawn.float) / steps[name].flops
        print(f'| {name} | {2 * 4 * size**2} | {drawn.integer} | {drawn.float} ', end='')
        print(f'| {steps[name].flops / 1e9:.2f} | {share:.6f} |')
    normals = Counted(lambda: draws.normal(Purpose.NOISE, [1024]))
    print(f'\nOne normal: {normals.integer / 1024:.1f} operations on integers, {normals.float / 1024:.1f} on floats.')


def print_measured(unet: UNet2DConditionModel, repeats: int) -> None:
    """Seconds on this machine."""
    print(f'\nMeasured here, 256 px, one sample, float32, medians of {repeats} in turns:\n')
    print('| | milliseconds | share of the step, % |')
    print('|---|---|---|')
    draws = draws_for([7], seed=17)
    functions = lambda: step(unet, 32), lambda: draw(draws, 32), lambda: draw_from_stream(32)
    seconds_in_turns(*functions, repeats=1)
    whole, keyed, stream = seconds_in_turns(*functions, repeats=repeats)
    print(f'| U-Net, forward and backward | {whole * 1e3:.0f} | 100 |')
    print(f'| keyed draws | {keyed * 1e3:.2f} | {100 * keyed / whole:.4f} |')
    print(f"| the same from torch's generator | {stream * 1e3:.2f} | {100 * stream / whole:.4f} |")


def print_estimated(steps: Mapping[str, 'Counted']) -> None:
    """What counts and published rates of GPUs make likely."""
    print(
        f'\nEstimated, not measured: {BATCH} samples a device, steps at {MFU:.0%} of peak, no kernel shorter ', end=''
    )
    print(
        f'than {KERNEL_SECONDS * 1e6:.0f} microseconds. Kernels and bytes are counted, in eager PyTorch on the CPU.\n'
    )
    print('| | kernels: draws, U-Net | MB moved | ms to move them | ms of kernels | ms a step | share, % |')
    print('|---|---|---|---|---|---|---|')
    draws = draws_for(range(BATCH), seed=17)
    for gpu, (flops, bandwidth) in GPUS.items():
        for name, size in LATENT_SIZES.items():
            moved = Counted(lambda size=size: draw(draws, size)).moved
            busy = sum(max(KERNEL_SECONDS, each / bandwidth) for each in moved)
            whole = BATCH * steps[name].flops / (flops * MFU)
            print(f'| {gpu}, {name} | {len(moved)}, {len(steps[name].moved)} | {sum(moved) / 1e6:.0f} ', end='')
            print(f'| {sum(moved) / bandwidth * 1e3:.3f} | {busy * 1e3:.2f} | {whole * 1e3:.1f} ', end='')
            print(f'| {100 * busy / whole:.2f} |')


def draw(draws: Draws, size: int) -> list[Tensor]:
    """What `LatentDiffusion.forward` draws."""
    normals = 4 * size**2
    purposes = {Purpose.TIMESTEP: 1, Purpose.CAPTION_DROPOUT: 1, Purpose.NOISE: normals, Purpose.POSTERIOR: normals}
    draws = draws.at_once(purposes)
    return [
        draws.normal(Purpose.POSTERIOR, (4, size, size)),
        draws.integers(Purpose.TIMESTEP, 1000),
        draws.normal(Purpose.NOISE, (4, size, size)),
        draws.uniform(Purpose.CAPTION_DROPOUT),
    ]


def draw_from_stream(size: int) -> list[Tensor]:
    """The same of one sample, as others draw it."""
    shape = (1, 4, size, size)
    return [torch.randn(shape), torch.randint(1000, (1,)), torch.randn(shape), torch.rand(1, dtype=torch.float64)]


def step(unet: UNet2DConditionModel, size: int) -> None:
    """Forward and backward of one sample."""
    unet.zero_grad()
    device = next(unet.parameters()).device
    latents = torch.full((1, 4, size, size), 0.5, device=device)
    text_embeds = torch.full((1, 77, unet.config['cross_attention_dim']), 0.5, device=device)
    unet(latents, torch.full((1,), 500, device=device), text_embeds, return_dict=False)[0].square().mean().backward()


def filled(unet: UNet2DConditionModel) -> UNet2DConditionModel:
    """A U-Net of the meta device, here, with small random weights."""
    unet.zero_grad()  # the gradients are on the meta device too
    unet = unet.to_empty(device='cpu')
    with torch.no_grad():
        for weight in unet.parameters():
            weight.uniform_(-0.03, 0.03)
    return unet


class Counted(TorchDispatchMode):
    """What a call dispatches, views left out.

    Attributes:
        integer: Operations on integers, one an element of the result.
        float: Operations on floats, likewise; conversions and copies are neither.
        moved: Bytes that each kernel reads and writes at least.
        flops: FLOP of matrix products, convolutions and attention, a multiply-add being 2.
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
        # A broadcast tensor is as large as what it is broadcast from.
        self.moved.append(sum(min(each.nbytes, each.untyped_storage().nbytes()) for each in (*written, *read)))
        if func._schema.name not in MOVES:
            self.integer += sum(each.numel() for each in written if each.dtype == torch.int64)
            self.float += sum(each.numel() for each in written if each.dtype != torch.int64)
        return results


if __name__ == '__main__':
    main(*(int(word) for word in sys.argv[1:3]))
