"""Benchmark of the U-Net's training step as the settings of the `speed:` preset are turned on one after another.

    python benchmarks/step.py [--pixels 256 512] [--microbatch N] [--try N ...] [--without PART] [--help]

On a GPU, it trains Stable Diffusion 2's U-Net (866 M parameters) in bfloat16 on precomputed latents and text
embeddings, as in the published measurements; each row adds a setting to the row above, and the last rows try other
microbatches. On a CPU, it trains a small U-Net in float32, which shows that the code runs but says little about speed;
compiling takes a quarter of an hour there, so it needs --compile.

A step is one batch, split into microbatches, and one optimizer update. MFU is FLOPs of three forward passes over the
GPU's peak.
"""

import argparse
import gc
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
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
from diffusion.models.pretrained import clip_tokenizer
from diffusion.models.text_conditioner import TextConditioner
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
"""Settings of `speed` in the order in which they are turned on."""
PUBLISHED_MICROBATCH = 16


@dataclass
class Variant:
    """One combination of settings to measure.

    Attributes:
        name: Name of the table row.
        parts: Settings of `speed`.
        microbatch: Samples per microbatch.
        seconds: Duration of each step.
        failed: Reason if there are no durations.
        peak_gib: Peak of allocated memory in GiB.
    """

    name: str
    parts: SpeedConfig
    microbatch: int
    seconds: list[float]
    failed: str = ''
    peak_gib: float = 0.0

    @property
    def step_seconds(self) -> float:
        """Median duration of a step."""
        return statistics.median(self.seconds)


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its tables."""
    args = parse_arguments(argv)
    print(f'{heading()}, PyTorch {torch.__version__}, {torch.cuda.get_device_name() if ON_GPU else DEVICE}')
    for pixels in args.pixels:
        size = pixels // 8 if ON_GPU else max(8, pixels // 32)
        batch = args.batch or (256 if pixels <= 256 else 64) if ON_GPU else args.batch or 4
        variants = make_variants(batch, args)
        measure(variants, batch, size, args)
        print_table(variants, batch, size, pixels)


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        '--pixels', type=int, nargs='+', default=[256, 512], help='image sides to measure (default: 256 512)'
    )
    parser.add_argument('--batch', type=int, help='samples per step (default: 256 at 256 px, 64 at 512 px; 4 on a CPU)')
    parser.add_argument(
        '--microbatch',
        type=int,
        help='samples per microbatch with the preset (default: 64 at 256 px, 32 at 512 px; the batch on a CPU)',
    )
    parser.add_argument(
        '--try', type=int, nargs='*', default=[], dest='others', help='other microbatches to measure with the preset'
    )
    parser.add_argument('--steps', type=int, default=10, help='measured steps per row (default: %(default)s)')
    parser.add_argument('--warmup', type=int, default=3, help='steps before the measured ones (default: %(default)s)')
    parser.add_argument(
        '--millions', type=int, default=4, help='parameters of the U-Net on a CPU, in millions (default: %(default)s)'
    )
    parser.add_argument('--without', nargs='*', default=[], help='settings of `speed` to leave off')
    parser.add_argument('--compile', action='store_true', help='measure speed.compile on a CPU too')
    args = parser.parse_args(argv)
    if not ON_GPU and not args.compile:
        args.without.append('compile')
    return args


def make_variants(batch: int, args: argparse.Namespace) -> list[Variant]:
    """Return the variant without any setting, one per setting that is added, and the preset with other microbatches."""
    small = min(PUBLISHED_MICROBATCH, batch)
    microbatch = min(batch, args.microbatch or ((64 if batch >= 256 else 32) if ON_GPU else batch))
    parts = PLAIN
    found = [Variant('plain', parts, small, [])]
    for added in PARTS:
        names = [name for name in added if name not in args.without]
        if names:
            parts = replace(parts, **dict.fromkeys(names, True))
            found.append(Variant(f'+ {", ".join(names)}', parts, small, []))
    if microbatch != small:
        found.append(Variant(f'+ microbatch {microbatch}', parts, microbatch, []))
    return [*found, *(Variant(f'preset, microbatch {other}', parts, other, []) for other in args.others)]


def measure(variants: Sequence[Variant], batch: int, size: int, args: argparse.Namespace) -> None:
    """Run and time the steps of all variants."""
    # On a GPU, whose memory holds only one model, the variants run one after another. On a CPU, whose timings are
    # noisy, they alternate step by step, so that other load slows all of them alike.
    if ON_GPU:
        for each in variants:
            run(each, steps_of(each, batch, size, args), args.warmup + args.steps)
            torch.compiler.reset()
            gc.collect()
            torch.cuda.empty_cache()
    else:
        running = [steps_of(each, batch, size, args) for each in variants]
        for _ in range(args.warmup + args.steps):
            for each, steps in zip(variants, running, strict=True):
                run(each, steps, 1)
    for each in variants:
        each.seconds = each.seconds[args.warmup :]


def run(variant: Variant, steps: Iterator[None], count: int) -> None:
    """Run and time this many steps."""
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    try:
        for _ in range(count):
            started = time.perf_counter()
            next(steps)
            variant.seconds.append(time.perf_counter() - started)
    except torch.OutOfMemoryError:
        variant.failed, variant.seconds = 'does not fit', []
    if ON_GPU:
        variant.peak_gib = torch.cuda.max_memory_allocated() / 2**30


def steps_of(variant: Variant, batch: int, size: int, args: argparse.Namespace) -> Iterator[None]:
    """Yield after each step of a variant; its model lives as long as the generator."""
    parts = variant.parts
    model = make_model(args.millions)
    apply_speed(model, parts, shapes=1)
    model.to(DEVICE)
    set_backends(parts, on_gpu=ON_GPU)
    fused = True if parts.fused_optimizer else None
    optimizer = torch.optim.AdamW(model.denoiser.parameters(), lr=1e-4, weight_decay=0.01, fused=fused)
    microbatches = [batch_of(model, variant.microbatch, size) for _ in range(-(-batch // variant.microbatch))]
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
    """Return a model with the U-Net to measure and minimal encoders, which are not used."""
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
    # Skip the model's check of the scale of its latents, which means nothing for random ones.
    model._scale_checked = True
    return model


def batch_of(model: LatentDiffusion, count: int, size: int) -> dict[str, Tensor]:
    """Return a random batch in the form of precomputed latents and text embeddings."""
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


def print_table(variants: Sequence[Variant], batch: int, size: int, pixels: int) -> None:
    """Print throughput, MFU and speedup over the first variant."""
    peak = peak_flops()
    flops = batch * 3 * sd2_forward_flops(size)
    print(f'\n{pixels} px, batch {batch}, latents {size}x{size}\n')
    print('| | microbatch | ms/step | images/s | MFU, % | speedup | GiB |')
    print('|---|---|---|---|---|---|---|')
    plain = variants[0]
    for each in variants:
        if each.failed:
            print(f'| {each.name} | {each.microbatch} | {each.failed} | | | | |')
            continue
        seconds = each.step_seconds
        mfu = f'{100 * flops / seconds / peak:.1f}' if peak else ''
        times = f'{plain.step_seconds / seconds:.2f}' if plain.seconds else ''
        row = f'{1e3 * seconds:.1f} | {batch / seconds:.1f} | {mfu} | {times} | {each.peak_gib:.1f}'
        print(f'| {each.name} | {each.microbatch} | {row} |')


def sd2_forward_flops(size: int) -> int:
    """Return the FLOPs per sample of a forward pass of Stable Diffusion 2's U-Net."""
    with torch.device('meta'):
        unet = UNet2DConditionModel(**sd2_config.UNET)
    return FlopCount(unet)(size, size, 77)


def peak_flops() -> float | None:
    """Return the peak FLOP/s of this GPU in bfloat16, or None if it is unknown."""
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
