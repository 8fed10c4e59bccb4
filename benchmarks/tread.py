"""Benchmark of TREAD: time and FLOPs of a PRX training step with and without tokens that skip blocks.

    python benchmarks/tread.py [DEPTH [WIDTH [SIDE [REPEATS]]]]

The default is a PRX of 12 blocks of width 384, on latents of 32x32 cells with patches of 2x2, in float32 on one core.
Half of the tokens skip the blocks 2 to 8. A step is the forward and backward pass of the denoiser on 4 samples.
"""

import sys
from functools import partial

import torch
from machine import heading, interleaved_medians

from diffusion.models.families.adapter import Condition
from diffusion.models.families.prx.builder import tiny_prx
from diffusion.models.flops import FlopCount
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.randomness import draws_for
from diffusion.models.token_routing import Route

BATCH = 4
TEXT_LENGTH = 16


def step(model: LatentDiffusion, side: int) -> None:
    """Run one forward and backward pass of a model's denoiser on random latents."""
    if model.router is not None:
        model.router.begin(draws_for(range(BATCH), seed=0))
    latents, noise = torch.randn(2, BATCH, model.denoiser_sizes.in_channels, side, side)
    condition = Condition(torch.randn(BATCH, TEXT_LENGTH, model.denoiser_sizes.text_width))
    model.denoise(latents, noise, torch.full((BATCH,), 500.0), condition).prediction.square().mean().backward()
    model.zero_grad()


def main(depth: int = 12, width: int = 384, side: int = 32, repeats: int = 9) -> None:
    """Print the step time and FLOPs of both variants."""
    torch.set_num_threads(1)
    route = Route(2, depth - 3, 0.5)
    models = [tiny_prx(depth=depth, hidden_size=width, num_heads=width // 64, patch_size=2) for _ in range(2)]
    counts = [FlopCount(model.denoiser) for model in models]
    models[1].route_tokens(route)
    counts[1].route(route)
    flops = [3 * BATCH * count(side, side, TEXT_LENGTH) for count in counts]
    steps = [partial(step, model, side) for model in models]
    for each in steps:
        each()
    seconds = interleaved_medians(*steps, repeats=repeats)
    print(f'{heading()}; depth {depth}, width {width}, {(side // 2) ** 2} tokens, medians of {repeats}\n')
    print('| | s/step | GFLOP/step |\n|---|---|---|')
    for name, time, count in zip(('all tokens', 'TREAD'), seconds, flops, strict=True):
        print(f'| {name} | {time:.3f} | {count / 1e9:.1f} |')
    print(f'| TREAD over all tokens | {seconds[1] / seconds[0]:.2f} | {flops[1] / flops[0]:.2f} |')


if __name__ == '__main__':
    main(*(int(word) for word in sys.argv[1:]))
