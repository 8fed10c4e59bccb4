"""Benchmark of a step of Muon in batches against a loop over matrices, and against AdamW, in one process.

    python benchmarks/muon.py [repeats [steps of Newton-Schulz]]

The model is the U-Net of benchmarks/first_quickstart.yaml, with random gradients. Times are medians of alternating
steps. Operations are calls of PyTorch's kernels, each of which is at least one launch on a GPU, counted with the
batches that GPUs get. A training step is the forward and backward pass of the denoiser with a batch of 32 and the
optimizer's step. On a GPU, Newton-Schulz runs in bfloat16, otherwise in float32.
"""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from machine import heading, interleaved_medians
from torch import Tensor

from diffusion.compatibility.private_names import TorchDispatchMode
from diffusion.config.load import load
from diffusion.training.components import build_model
from diffusion.training.muon import MAX_BATCH_ELEMENTS, RMS_OF_ADAMW, Muon, muon_groups, orthogonalize

RECIPE = Path(__file__).parent / 'first_quickstart.yaml'
BATCH = 32
NAMES = ('Muon in batches', 'Muon, one matrix at a time', 'AdamW, fused')
SETTINGS: dict[str, Any] = {'lr': 1e-4, 'weight_decay': 0.01, 'betas': (0.9, 0.99), 'fused': True}


class LoopMuon(Muon):
    """Muon as it is usually published: one matrix after another."""

    def _update_matrices(self, group: dict[str, Any], weights: list[Tensor], parts: list[int]) -> None:
        assert set(parts) == {1}, 'the model has no fused projections'
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


class Operations(TorchDispatchMode):
    """Mode that counts the operations that PyTorch dispatches, without views, which launch no kernel."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **(kwargs or {}))


def count_operations(call: Callable[[], object]) -> int:
    """Return the number of operations of a call."""
    with mock.patch.dict(MAX_BATCH_ELEMENTS, {'cpu': MAX_BATCH_ELEMENTS['cuda']}), Operations() as operations:
        call()
    return operations.count


def denoising_pass(model: Any, device: torch.device) -> Callable[[], object]:
    """Return a function that runs a forward and backward pass of a model's denoiser with random inputs."""
    config = model.denoiser.config
    noisy = torch.randn(BATCH, config.in_channels, config.sample_size, config.sample_size, device=device)
    embeds = torch.randn(BATCH, 16, config.cross_attention_dim, device=device)
    timesteps = torch.arange(BATCH, device=device)
    return lambda: model.denoiser(noisy, timesteps, embeds).sample.square().mean().backward()


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

    def synchronized(call: Callable[[], object]) -> Callable[[], None]:
        def run() -> None:
            call()
            if device.type == 'cuda':
                torch.cuda.synchronize()

        return run

    calls = [synchronized(call) for call in (*(each.step for each in optimizers), denoising_pass(model, device))]
    for call in calls:
        call()  # allocates the state
    operations = [count_operations(call) for call in calls[:-1]]
    *seconds, passes = interleaved_medians(*calls, repeats=repeats)
    numbers = [sum(each.numel() for each in some) / 1e6 for some in (matrices, trained)]
    print(f'{heading()}, PyTorch {torch.__version__}, {device.type}, threads: {torch.get_num_threads()}')
    print(
        f'{len(matrices)} matrices of {len(sizes)} sizes, {numbers[0]:.1f} M of {numbers[1]:.1f} M parameters; ', end=''
    )
    print(f'{steps} Newton-Schulz steps; {repeats} steps each; forward and backward pass: {passes * 1e3:.1f} ms')
    print()
    print('| | operations | milliseconds per step | relative to batches | training step relative to AdamW |')
    print('|---|---|---|---|---|')
    for name, count, taken in zip(NAMES, operations, seconds, strict=True):
        training = (passes + taken) / (passes + seconds[-1])
        print(f'| {name} | {count} | {taken * 1e3:.1f} | {taken / seconds[0]:.2f} | {training:.2f} |')


if __name__ == '__main__':
    main(*(int(word) for word in sys.argv[1:3]))
