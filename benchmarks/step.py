"""A training step of the U-Net, from the plain path to the preset of `speed:`, part by part, in one run.

    python benchmarks/step.py [--pixels 256 512] [--microbatch N] [--try N ...] [--without PART] [--help]

On a GPU it is Stable Diffusion 2's U-Net (866 M) in bfloat16, from latents and text embeddings, which is how the
published figures were measured; each row adds a part to the one above, and the last rows try other microbatches. On a
CPU it is a small U-Net in float32, which shows that the code runs and little else; compiling it takes a quarter of an
hour there, and is left out unless it is asked for.

A step is a batch, cut into microbatches, and an update. MFU counts three forward passes against the GPU's peak.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch._dynamo
from composer.callbacks.speed_monitor import GPU_AVAILABLE_FLOPS
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from ema import narrow_unet
from machine import heading
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel

from diffusion.config.performance_preset import effective_parts
from diffusion.config.recipe import SpeedConfig
from diffusion.models import batch_keys, sd2_config
from diffusion.models.flops import FlopCount
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.pretrained import TextConditioner, clip_tokenizer
from diffusion.training.performance import apply_speed, set_backends

ON_GPU = torch.cuda.is_available()
DEVICE = 'cuda' if ON_GPU else 'cpu'
PLAIN = effective_parts(SpeedConfig(preset='none'), on_gpu=ON_GPU)
PARTS = (
    ('tf32',),
    ('fused_optimizer',),
    ('flash_attention',),
    ('conv_benchmark',),
    ('channels_last',),
    ('low_precision_norms',),
    ('compile',),
)
"""In the order in which they are added."""
PUBLISHED_MICROBATCH = 16


@dataclass
class Contestant:
    """A way to compute the step.

    Attributes:
        name: In the table.
        parts: Of `speed` that are on.
        microbatch: Samples computed at once.
        seconds: Of steps.
        failed: Why it has none.
        peak_gib: Most memory its tensors took.
    """

    name: str
    parts: SpeedConfig
    microbatch: int
    seconds: list[float]
    failed: str = ''
    peak_gib: float = 0.0

    @property
    def step_seconds(self) -> float:
        return statistics.median(self.seconds)


def main(argv: Sequence[str] | None = None) -> None:
    """Run and print."""
    args = arguments(argv)
    print(f'{heading()}, PyTorch {torch.__version__}, {torch.cuda.get_device_name() if ON_GPU else DEVICE}')
    for pixels in args.pixels:
        size = pixels // 8 if ON_GPU else max(8, pixels // 32)
        batch = args.batch or (256 if pixels <= 256 else 64) if ON_GPU else args.batch or 4
        contestants = entered(batch, args)
        measure(contestants, batch, size, args)
        print_table(contestants, batch, size, pixels)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--pixels', type=int, nargs='+', default=[256, 512])
    parser.add_argument('--batch', type=int, help='samples of a step (256 at 256 px, 64 at 512 px; 4 on a CPU)')
    parser.add_argument('--microbatch', type=int, help='of the preset (64 and 32; the batch on a CPU)')
    parser.add_argument('--try', type=int, nargs='*', default=[], dest='others', help='more microbatches of the preset')
    parser.add_argument('--steps', type=int, default=10, help='measured, of each contestant')
    parser.add_argument('--warmup', type=int, default=3)
    parser.add_argument('--millions', type=int, default=4, help='of the U-Net on a CPU')
    parser.add_argument('--without', nargs='*', default=[], help='parts to leave out')
    parser.add_argument('--compile', action='store_true', help='on a CPU too')
    args = parser.parse_args(argv)
    if not ON_GPU and not args.compile:
        args.without.append('compile')
    return args


def entered(batch: int, args: argparse.Namespace) -> list[Contestant]:
    """The plain path, a row for each part that is added, and other microbatches of the preset."""
    small = min(PUBLISHED_MICROBATCH, batch)
    microbatch = min(batch, args.microbatch or ((64 if batch >= 256 else 32) if ON_GPU else batch))
    parts = PLAIN
    found = [Contestant('plain', parts, small, [])]
    for added in PARTS:
        names = [name for name in added if name not in args.without]
        if names:
            parts = replace(parts, **dict.fromkeys(names, True))
            found.append(Contestant(f'+ {", ".join(names)}', parts, small, []))
    if microbatch != small:
        found.append(Contestant(f'+ microbatch {microbatch}', parts, microbatch, []))
    return [*found, *(Contestant(f'preset, microbatch {other}', parts, other, []) for other in args.others)]


def measure(contestants: Sequence[Contestant], batch: int, size: int, args: argparse.Namespace) -> None:
    """Step by step in turns on a CPU, which is noisy; one after another on a GPU, whose memory holds one."""
    if ON_GPU:
        for each in contestants:
            run(each, steps_of(each, batch, size, args), args.warmup + args.steps)
            torch._dynamo.reset()
            gc.collect()
            torch.cuda.empty_cache()
    else:
        running = [steps_of(each, batch, size, args) for each in contestants]
        for _ in range(args.warmup + args.steps):
            for each, steps in zip(contestants, running, strict=True):
                run(each, steps, 1)
    for each in contestants:
        each.seconds = each.seconds[args.warmup :]


def run(contestant: Contestant, steps: Iterator[None], count: int) -> None:
    """Take and time some steps."""
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    try:
        for _ in range(count):
            started = time.perf_counter()
            next(steps)
            contestant.seconds.append(time.perf_counter() - started)
    except torch.OutOfMemoryError:
        contestant.failed, contestant.seconds = 'does not fit', []
    if ON_GPU:
        contestant.peak_gib = torch.cuda.max_memory_allocated() / 2**30


def steps_of(contestant: Contestant, batch: int, size: int, args: argparse.Namespace) -> Iterator[None]:
    """Steps of a contestant; its model lives as long."""
    parts = contestant.parts
    model = make_model(args.millions)
    apply_speed(model, parts, shapes=1)
    model.to(DEVICE)
    set_backends(parts, on_gpu=ON_GPU)
    fused = True if parts.fused_optimizer else None
    optimizer = torch.optim.AdamW(model.denoiser.parameters(), lr=1e-4, weight_decay=0.01, fused=fused)
    microbatches = [batch_of(model, contestant.microbatch, size) for _ in range(-(-batch // contestant.microbatch))]
    while True:
        optimizer.zero_grad(set_to_none=True)
        for microbatch in microbatches:
            with torch.autocast(DEVICE, torch.bfloat16, enabled=ON_GPU):
                loss = model.loss(model(microbatch), microbatch)
            (loss / len(microbatches)).backward()
        optimizer.step()
        if ON_GPU:
            torch.cuda.synchronize()
        yield


def make_model(millions: int) -> LatentDiffusion:
    """A U-Net, and encoders that are there because a model has some: latents and text embeddings are given."""
    torch.manual_seed(17)
    if ON_GPU:
        with torch.device(DEVICE):
            unet = UNet2DConditionModel(**sd2_config.UNET)
    else:
        unet = narrow_unet(millions)
    width = unet.config['cross_attention_dim']
    vae = AutoencoderKL(latent_channels=4, norm_num_groups=32, block_out_channels=(32,))
    settings = {'hidden_size': width, 'intermediate_size': width, 'num_hidden_layers': 1, 'num_attention_heads': 1}
    text = CLIPTextModel(CLIPTextConfig(**settings, bos_token_id=49406, eos_token_id=49407))
    model = LatentDiffusion(unet, vae, TextConditioner([text], [clip_tokenizer()]), caption_dropout=0.0)
    model._scale_checked = True
    return model


def batch_of(model: LatentDiffusion, count: int, size: int) -> dict[str, Tensor]:
    """Latents and text embeddings as they are precomputed."""
    batch: dict[str, Any] = {
        batch_keys.LATENT_MOMENTS: torch.randn(count, 8, size, size, dtype=torch.float16),
        batch_keys.TEXT_EMBEDS: torch.randn(
            count, 77, model.denoiser.config['cross_attention_dim'], dtype=torch.float16
        ),
        batch_keys.INPUT_IDS: torch.zeros(count, 1, 77, dtype=torch.int64),
        batch_keys.SAMPLE_ID: torch.arange(count),
        batch_keys.EPOCH: torch.zeros(count, dtype=torch.int64),
        batch_keys.BATCH_INDEX: torch.zeros(count, dtype=torch.int64),
    }
    return {name: tensor.to(DEVICE) for name, tensor in batch.items()}


def print_table(contestants: Sequence[Contestant], batch: int, size: int, pixels: int) -> None:
    """Images a second, MFU, and times the plain path."""
    peak = peak_flops()
    flops = batch * 3 * sd2_forward_flops(size)
    print(f'\n{pixels} px, batch {batch}, latents {size}x{size}\n')
    print('| | microbatch | ms a step | images/s | MFU, % | times plain | GiB |')
    print('|---|---|---|---|---|---|---|')
    plain = contestants[0]
    for each in contestants:
        if each.failed:
            print(f'| {each.name} | {each.microbatch} | {each.failed} | | | | |')
            continue
        seconds = each.step_seconds
        mfu = f'{100 * flops / seconds / peak:.1f}' if peak else ''
        times = f'{plain.step_seconds / seconds:.2f}' if plain.seconds else ''
        row = f'{1e3 * seconds:.1f} | {batch / seconds:.1f} | {mfu} | {times} | {each.peak_gib:.1f}'
        print(f'| {each.name} | {each.microbatch} | {row} |')


def sd2_forward_flops(size: int) -> int:
    """Of Stable Diffusion 2's U-Net, a sample."""
    with torch.device('meta'):
        unet = UNet2DConditionModel(**sd2_config.UNET)
    return FlopCount(unet, channels=4, text_width=unet.config['cross_attention_dim'])(size, size, 77)


def peak_flops() -> float | None:
    """Of this GPU in bfloat16, None if it is not known."""
    if not ON_GPU:
        return None
    name = torch.cuda.get_device_name().lower()
    for key, rates in GPU_AVAILABLE_FLOPS.items():
        family = key.partition('-')[0]
        if family in name and 'amp_bf16' in rates and ('pcie' in key) == ('pcie' in name):
            return float(rates['amp_bf16'])
    return None


if __name__ == '__main__':
    main()
