"""Benchmark of the host's time for the forward and backward pass of Stable Diffusion 2's U-Net, eager and compiled.

    python benchmarks/dispatch.py [steps]

The U-Net is so narrow that its arithmetic takes little time, so that this is about what the host takes to launch the
kernels on a GPU. It also counts the graphs that its compiled blocks need. Compilation takes minutes.
"""

import statistics
import sys
import time
from collections.abc import Callable

import torch
from ema import narrow_unet
from machine import heading
from torch import Tensor

from diffusion.compatibility.private_names import counters
from diffusion.models.activation_memory import blocks_of
from diffusion.training import performance

CELLS = 8
"""Side of the latents."""


def main(steps: int = 15) -> None:
    """Print the host's time for forward and backward pass, eager and with compiled blocks."""
    torch.set_num_threads(1)
    unet = narrow_unet(1)
    performance.fuse_attention(unet)
    latents, text = torch.randn(1, 4, CELLS, CELLS), torch.randn(1, 4, unet.config['cross_attention_dim'])

    def forward() -> Tensor:
        return unet(latents, torch.zeros(1), text, return_dict=False)[0].square().mean()

    print(f'{heading()}, PyTorch {torch.__version__}, one thread; U-Net of SD2 in miniature, one sample')
    print('\n| host, ms | forward | backward |\n|---|---|---|')
    print(f'| eager | {median_passes(forward, steps)} |')
    blocks = blocks_of(unet)
    performance.configure_dynamo(graphs=4 * len(blocks))
    for block in blocks:
        performance._compile_forward(block, with_gradients=True)
    print(f'| {len(blocks)} compiled blocks | {median_passes(forward, steps)} |')
    print(f'\n{counters["stats"]["unique_graphs"]} graphs were compiled.')


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
