"""Benchmark of the host's time for the forward and backward pass of Stable Diffusion 2's U-Net, eager and compiled.

    python benchmarks/dispatch.py [steps]

The U-Net is so narrow that its arithmetic takes little time, so that this is about what the host takes to launch the
kernels on a GPU. The graphs that the blocks of the real U-Net and of its VAE's encoder need are counted too, which
compiles nothing. Compilation takes minutes.
"""

import statistics
import sys
import time
from collections.abc import Callable, Sequence

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from ema import narrow_unet
from machine import heading
from torch import Tensor, nn

from diffusion.compatibility.private_names import counters
from diffusion.models.activation_memory import blocks_of
from diffusion.models.families.adapter import adapter_of
from diffusion.models.families.sd2 import builder as sd2_builder
from diffusion.models.vae import STABLE_DIFFUSION_VAE
from diffusion.training import performance

CELLS = 8
"""Side of the latents."""
PIXELS = 64


def main(steps: int = 15) -> None:
    """Print the host's time for forward and backward pass, eager and with compiled blocks, and the count of graphs."""
    torch.set_num_threads(1)
    print(f'{heading()}, PyTorch {torch.__version__}, one thread; U-Net of SD2 in miniature, one sample')
    # Widths of 32 and more: code that torch 2.7.0 compiles for a CPU at widths of 12 corrupts memory.
    unet = narrow_unet(9)
    performance.fuse_attention(unet)
    inputs = inputs_of(unet)

    def forward() -> Tensor:
        return unet(*inputs, return_dict=False)[0].square().mean()

    print('\n| host, ms | forward | backward |\n|---|---|---|')
    print(f'| eager | {median_passes(forward, steps)} |')
    blocks = unet_blocks(unet)
    compile_all(blocks, with_gradients=True)
    print(f'| {len(blocks)} compiled blocks | {median_passes(forward, steps)} |')
    denoiser, encoder = count_graphs()
    print(f'\nSD2 needs {denoiser} graphs for the U-Net and {encoder} for the encoder, {denoiser + encoder} in all.')


def count_graphs() -> tuple[int, int]:
    """Return how many graphs SD2's blocks need: those of the U-Net, and those of the VAE's encoder."""
    torch.compiler.reset()  # code that has been compiled already would not be counted
    backend, performance.BACKEND = performance.BACKEND, 'eager'
    try:
        with torch.device('meta'):
            unet, vae = UNet2DConditionModel(**sd2_builder.UNET), AutoencoderKL(**STABLE_DIFFUSION_VAE)
            images = torch.zeros(1, 3, PIXELS, PIXELS)
        performance.fuse_attention(unet)
        before = counters['stats']['unique_graphs']
        compile_all(unet_blocks(unet), with_gradients=True)
        unet(*inputs_of(unet), return_dict=False)
        between = counters['stats']['unique_graphs']
        compile_all(performance.encoder_blocks(vae), with_gradients=False)
        with torch.no_grad():
            vae.encode(images)
    finally:
        performance.BACKEND = backend
    return between - before, counters['stats']['unique_graphs'] - between


def unet_blocks(unet: UNet2DConditionModel) -> list[nn.Module]:
    """Return the blocks of a U-Net that a run compiles."""
    unet.fsdp_wrap_fn = adapter_of(unet).is_block  # type: ignore[assignment]
    return blocks_of(unet)


def inputs_of(unet: UNet2DConditionModel) -> tuple[Tensor, Tensor, Tensor]:
    """Return latents, timesteps and text for a U-Net, on its device."""
    with unet.device:
        return torch.randn(1, 4, CELLS, CELLS), torch.zeros(1), torch.randn(1, 4, unet.config['cross_attention_dim'])


def compile_all(blocks: Sequence[nn.Module], *, with_gradients: bool) -> None:
    """Compile blocks as a run does."""
    performance.configure_dynamo(graphs=4 * len(blocks))
    for block in blocks:
        performance._compile_forward(block, with_gradients=with_gradients)


def median_passes(forward: Callable[[], Tensor], steps: int) -> str:
    """Return the median milliseconds of forward and backward pass as two columns of a table."""
    seconds: list[tuple[float, float]] = []
    for _ in range(3 + steps):
        started = time.thread_time()
        loss = forward()
        between = time.thread_time()
        loss.backward()
        seconds.append((between - started, time.thread_time() - between))
    return ' | '.join(f'{1e3 * statistics.median(column):.1f}' for column in zip(*seconds[3:], strict=True))


if __name__ == '__main__':
    main(*(int(word) for word in sys.argv[1:2]))
