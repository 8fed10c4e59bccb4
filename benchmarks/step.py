"""Benchmark of the U-Net's training step as the settings of the `speed:` preset are turned on one after another.

    python benchmarks/step.py [--pixels 256 512] [--microbatch N] [--try N ...] [--without PART] [--rows NAME ...]
                              [--absent PART ...] [--json FILE] [--help]

On a GPU, it trains Stable Diffusion 2's U-Net (866 M parameters) in bfloat16 on precomputed latents and text
embeddings, as in the published measurements; each row adds a setting to the row above, and the last rows try other
microbatches. On a CPU, it trains a small U-Net in float32, which shows that the code runs but says little about speed;
compiling takes a quarter of an hour there, so it needs --compile.

A step is one batch, split into microbatches, and one optimizer update. MFU is FLOPs of three forward passes over the
GPU's peak. `GPU busy` is the time of a step for which the GPU computes; it waits for the host for the rest. `--absent
compile` adds a row with all settings but compile, which shows what its absence costs.
"""

import argparse
import gc
import json
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from diffusers.models.autoencoders.autoencoder_kl import AutoencoderKL
from diffusers.models.unets.unet_2d_condition import UNet2DConditionModel
from ema import narrow_unet
from gpu_time import GpuTime, gpu_time
from machine import heading
from stage_clock import StageClock
from step_references import peak_flops_of, planned_gib
from step_settings import GRAPHS, MICROBATCH, PARTS, PUBLISHED_MICROBATCH, ROWS
from step_settings import PLAIN as PLAIN_ROW
from torch import Tensor
from transformers import CLIPTextConfig, CLIPTextModel

from diffusion.config.recipe import SpeedConfig, effective_parts
from diffusion.models import batch_keys
from diffusion.models.families.sd2 import builder as sd2_builder
from diffusion.models.flops import FlopCount
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.pretrained import clip_tokenizer
from diffusion.models.text_conditioner import TextConditioner
from diffusion.training.performance import apply_speed, set_backends

ON_GPU = torch.cuda.is_available()
DEVICE = 'cuda' if ON_GPU else 'cpu'
PLAIN = effective_parts(SpeedConfig(preset='none'), on_gpu=ON_GPU)


@dataclass
class Variant:
    """One combination of settings to measure.

    Attributes:
        row: Name of the row on the command line.
        name: Name of the table row.
        parts: Settings of `speed`.
        microbatch: Samples per microbatch.
        seconds: Duration of each step.
        gpu: What the GPU did during a step; None on a CPU.
        stages: Seconds of each stage, of each step.
        failed: Why there are no durations; empty if there are.
        peak_gib: Peak of allocated memory in GiB.
    """

    row: str
    name: str
    parts: SpeedConfig
    microbatch: int
    seconds: list[float] = field(default_factory=list)
    stages: list[dict[str, float]] = field(default_factory=list)
    failed: str = ''
    peak_gib: float = 0.0
    gpu: GpuTime | None = None

    @property
    def step_seconds(self) -> float:
        """Median duration of a step."""
        return statistics.median(self.seconds)

    def stage_seconds(self) -> dict[str, float]:
        """Return the median duration of each stage of a step."""
        return {name: statistics.median(each[name] for each in self.stages) for name in self.stages[0]}


def main(argv: Sequence[str] | None = None) -> None:
    """Run the benchmark and print its tables."""
    args = parse_arguments(argv)
    print(f'{heading()}, PyTorch {torch.__version__}, {torch.cuda.get_device_name() if ON_GPU else DEVICE}')
    tables = []
    for pixels in args.pixels:
        size = pixels // 8 if ON_GPU else max(8, pixels // 32)
        batch = args.batch or (256 if pixels <= 256 else 64) if ON_GPU else args.batch or 4
        variants = [each for each in make_variants(batch, args) if each.row in args.rows]
        measure(variants, batch, size, args)
        print_table(variants, batch, size, pixels)
        tables.append(table_of(variants, batch, size, pixels))
    if args.json:
        args.json.write_text(json.dumps(tables, indent=1), encoding='utf-8')


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
    parser.add_argument('--rows', nargs='*', default=[*ROWS], help=f'rows to measure (default: {" ".join(ROWS)})')
    parser.add_argument(
        '--absent', nargs='*', default=[], choices=PARTS, help='settings to measure the absence of, with all others on'
    )
    parser.add_argument('--json', type=Path, help='file to write the figures to')
    args = parser.parse_args(argv)
    args.rows += [f'without {part}' for part in args.absent] + [f'try {other}' for other in args.others]
    if not ON_GPU and not args.compile:
        args.without += ['compile', GRAPHS]
    return args


def make_variants(batch: int, args: argparse.Namespace) -> list[Variant]:
    """Return the variant without any setting, one per setting that is added, and the preset with other microbatches."""
    small = min(PUBLISHED_MICROBATCH, batch)
    microbatch = min(batch, args.microbatch or ((64 if batch >= 256 else 32) if ON_GPU else batch))
    parts = PLAIN
    found = [Variant(PLAIN_ROW, PLAIN_ROW, parts, small)]
    for name in PARTS:
        if name not in args.without:
            parts = replace(parts, **{name: True})
            found.append(Variant(name, f'+ {name}', parts, small))
    if GRAPHS not in args.without:
        found.append(Variant(GRAPHS, f'+ {GRAPHS}', replace(parts, cuda_graphs=True), small))
    if microbatch != small:
        found.append(Variant(MICROBATCH, f'+ microbatch {microbatch}', parts, microbatch))
    for name in args.absent:
        absent = replace(parts, **{name: False})
        found.append(Variant(f'without {name}', f'preset without {name}', absent, microbatch))
    return [*found, *(Variant(f'try {other}', f'preset, microbatch {other}', parts, other) for other in args.others)]


def measure(variants: Sequence[Variant], batch: int, size: int, args: argparse.Namespace) -> None:
    """Run and time the steps of all variants."""
    # On a GPU, whose memory holds only one model, the variants run one after another. On a CPU, whose timings are
    # noisy, they alternate step by step, so that other load slows all of them equally.
    if ON_GPU:
        for each in variants:
            steps = steps_of(each, batch, size, args)
            run(each, steps, args.warmup + args.steps)
            if not each.failed:
                each.gpu = gpu_time(partial(next, steps))
            del steps  # and with it the model
            torch.compiler.reset()
            gc.collect()
            torch.cuda.empty_cache()
    else:
        running = [steps_of(each, batch, size, args) for each in variants]
        for _ in range(args.warmup + args.steps):
            for each, steps in zip(variants, running, strict=True):
                run(each, steps, 1)
    for each in variants:
        del each.seconds[: args.warmup], each.stages[: args.warmup]


def run(variant: Variant, steps: Iterator[dict[str, float]], count: int) -> None:
    """Run and time this many steps."""
    if ON_GPU:
        torch.cuda.reset_peak_memory_stats()
    try:
        for _ in range(count):
            started = time.perf_counter()
            variant.stages.append(next(steps))
            variant.seconds.append(time.perf_counter() - started)
    except torch.OutOfMemoryError:
        variant.failed, variant.seconds = 'does not fit', []
    if ON_GPU:
        variant.peak_gib = torch.cuda.max_memory_allocated() / 2**30


def steps_of(variant: Variant, batch: int, size: int, args: argparse.Namespace) -> Iterator[dict[str, float]]:
    """Run a step of a variant and yield the seconds of its stages, again and again, until the generator is deleted."""
    parts = variant.parts
    model = make_model(args.millions)
    apply_speed(model, parts, shapes=1)
    model.to(DEVICE)
    set_backends(parts, on_gpu=ON_GPU)
    fused = True if parts.fused_optimizer else None
    optimizer = torch.optim.AdamW(model.denoiser.parameters(), lr=1e-4, weight_decay=0.01, fused=fused)
    microbatches = [batch_of(model, variant.microbatch, size) for _ in range(-(-batch // variant.microbatch))]
    while True:
        clock = StageClock(on_gpu=ON_GPU)
        optimizer.zero_grad(set_to_none=True)
        for microbatch in microbatches:
            with torch.autocast(DEVICE, torch.bfloat16, enabled=ON_GPU):
                loss = model.loss(model(microbatch), microbatch)
            clock.mark('forward')
            (loss / len(microbatches)).backward()
            clock.mark('backward')
        optimizer.step()
        clock.mark('optimizer')
        if ON_GPU:
            torch.cuda.synchronize()
        yield clock.seconds()


def make_model(millions: int) -> LatentDiffusion:
    """Return a model with the U-Net to measure and minimal encoders, which are not used."""
    torch.manual_seed(17)
    if ON_GPU:
        with torch.device(DEVICE):
            unet = UNet2DConditionModel(**sd2_builder.UNET)
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


def table_of(variants: Sequence[Variant], batch: int, size: int, pixels: int) -> dict[str, Any]:
    """Return the figures of a resolution as plain values for JSON: throughput, MFU, memory and stages of each row."""
    flops, peak = 3 * sd2_forward_flops(size), peak_flops()
    rows = []
    for each in variants:
        row: dict[str, Any] = {'row': each.row, 'name': each.name, 'microbatch': each.microbatch, 'failed': each.failed}
        row['settings'] = {name: bool(getattr(each.parts, name)) for name in (*PARTS, GRAPHS)}
        if not each.failed:
            rate = batch / each.step_seconds
            row |= {'step_seconds': each.step_seconds, 'seconds': each.seconds, 'images_per_second': rate}
            row |= {'mfu': rate * flops / peak if peak else None, 'stages': each.stage_seconds()}
            row |= {'gpu_seconds': each.gpu.seconds, 'kernels': each.gpu.kernels} if each.gpu else {}
            row |= {'peak_gib': each.peak_gib if ON_GPU else None}
        # Only the small U-Net runs on a CPU, and the plan is for SD2's.
        row['planned_gib'] = planned_gib(pixels, asdict(each.parts), each.microbatch, batch) if ON_GPU else None
        rows.append(row)
    table = {'pixels': pixels, 'batch': batch, 'latent_side': size, 'flops_per_image': flops, 'peak_flops': peak}
    return table | {'on_gpu': ON_GPU, 'rows': rows}


def print_table(variants: Sequence[Variant], batch: int, size: int, pixels: int) -> None:
    """Print throughput, MFU and speedup over the first variant."""
    peak = peak_flops()
    flops = batch * 3 * sd2_forward_flops(size)
    print(f'\n{pixels} px, batch {batch}, latents {size}x{size}\n')
    print('| | microbatch | ms/step | GPU busy, ms | kernels | images/s | MFU, % | speedup | GiB |')
    print('|---|---|---|---|---|---|---|---|---|')
    plain = variants[0]
    for each in variants:
        if each.failed:
            print(f'| {each.name} | {each.microbatch} | {each.failed} | | | | | | |')
            continue
        seconds = each.step_seconds
        mfu = f'{100 * flops / seconds / peak:.1f}' if peak else ''
        times = f'{plain.step_seconds / seconds:.2f}' if plain.seconds else ''
        gpu = f'{1e3 * each.gpu.seconds:.1f} | {each.gpu.kernels}' if each.gpu else ' | '
        row = f'{1e3 * seconds:.1f} | {gpu} | {batch / seconds:.1f} | {mfu} | {times} | {each.peak_gib:.1f}'
        print(f'| {each.name} | {each.microbatch} | {row} |')


def sd2_forward_flops(size: int) -> int:
    """Return the FLOPs per sample of a forward pass of Stable Diffusion 2's U-Net."""
    with torch.device('meta'):
        unet = UNet2DConditionModel(**sd2_builder.UNET)
    return FlopCount(unet)(size, size, 77)


def peak_flops() -> float | None:
    """Return the peak FLOP/s of this GPU in bfloat16, or None if it is unknown."""
    return peak_flops_of(torch.cuda.get_device_name()) if ON_GPU else None


if __name__ == '__main__':
    main()
