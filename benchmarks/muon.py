"""Benchmark of a step of Muon in batches against a loop over matrices, and against AdamW, in one process.

    python benchmarks/muon.py [repeats [steps of Newton-Schulz]]

The model is that of yamls/quickstart.yaml, with random gradients. Times are medians of alternating steps, without
forward and backward pass. On a GPU, Newton-Schulz runs in bfloat16, otherwise in float32.
"""

import sys
from pathlib import Path
from typing import Any

import torch
from machine import heading, interleaved_medians
from torch import Tensor

from diffusion.config.load import load
from diffusion.training.components import build_model
from diffusion.training.muon import RMS_OF_ADAMW, Muon
from diffusion.training.muon_groups import muon_groups
from diffusion.training.newton_schulz import orthogonalize

RECIPE = Path(__file__).parents[1] / 'yamls' / 'quickstart.yaml'
SETTINGS: dict[str, Any] = {'lr': 1e-4, 'weight_decay': 0.01, 'betas': (0.9, 0.99), 'fused': True}


class LoopMuon(Muon):
    """Muon as it is usually published: one matrix after another."""

    def _update_matrices(self, group: dict[str, Any], weights: list[Tensor]) -> None:
        lr = group['lr']
        for weight in weights:
            assert weight.grad is not None
            momentum = self._state(weight, 'momentum_buffer')
            momentum.lerp_(weight.grad, 1 - group['momentum'])
            update = weight.grad.lerp(momentum, group['momentum']).flatten(1)
            dtype = torch.bfloat16 if weight.is_cuda else torch.float32
            direction = orthogonalize(update.to(dtype)[None], steps=group['newton_schulz_steps'])[0]
            weight.mul_(1 - lr * group['weight_decay'])
            scale = RMS_OF_ADAMW * max(update.shape) ** 0.5
            weight.add_(direction.view_as(weight), alpha=-lr * scale)


def main(repeats: int = 20, steps: int = 5) -> None:
    """Run the benchmark and print its table."""
    device = torch.device('cuda' if torch.cuda.is_available() else 'cpu')
    model = build_model(load(RECIPE)).to(device)
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    generator = torch.Generator(device).manual_seed(0)
    for parameter in trained:
        parameter.grad = torch.randn(parameter.shape, generator=generator, device=device)
    matrices = muon_groups(model)[0]['params']
    sizes = {(len(each), each.numel() // len(each)) for each in matrices}
    batched, loop = (kind(muon_groups(model), newton_schulz_steps=steps, **SETTINGS) for kind in (Muon, LoopMuon))
    optimizers = [batched, loop, torch.optim.AdamW(trained, **SETTINGS)]

    def step(optimizer: torch.optim.Optimizer) -> None:
        optimizer.step()
        if device.type == 'cuda':
            torch.cuda.synchronize()

    steps_of = [lambda each=each: step(each) for each in optimizers]
    for run in steps_of:
        run()  # allocates the state
    seconds = interleaved_medians(*steps_of, repeats=repeats)
    numbers = [sum(each.numel() for each in some) / 1e6 for some in (matrices, trained)]
    print(f'{heading()}, PyTorch {torch.__version__}, {device.type}, threads: {torch.get_num_threads()}')
    print(
        f'{len(matrices)} matrices of {len(sizes)} sizes, {numbers[0]:.1f} M of {numbers[1]:.1f} M parameters; ', end=''
    )
    print(f'{steps} Newton-Schulz steps, {repeats} steps each')
    print()
    print('| | milliseconds per step | relative to Muon in batches |')
    print('|---|---|---|')
    for name, taken in zip(('Muon in batches', 'Muon, one matrix at a time', 'AdamW, fused'), seconds, strict=True):
        print(f'| {name} | {taken * 1e3:.1f} | {taken / seconds[0]:.2f} |')


if __name__ == '__main__':
    main(*(int(word) for word in sys.argv[1:3]))
