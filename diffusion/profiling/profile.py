"""`diffusion profile`: profile a few training batches and print the largest possible speedups."""

import io
import json
import logging
from collections import Counter
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from composer.core import Callback, State
from composer.loggers import Logger
from PIL import Image
from torch.profiler import ProfilerActivity, profile

from diffusion.config import registry
from diffusion.config.load import Component, Recipe, RecipeError, StreamConfig, load
from diffusion.config.path_checks import check_paths
from diffusion.config.recipe import SPEED_PARTS, ParallelismConfig
from diffusion.errors import UserError
from diffusion.profiling.advice import Kernel, Opportunity, ProfileMeasurements, largest_opportunities, seconds_by_kind
from diffusion.profiling.breakdown import Breakdown, BreakdownReport
from diffusion.profiling.device_syncs import Site, find_waits
from diffusion.storage.atomic import write_atomically
from diffusion.storage.local_files import check_writable
from diffusion.storage.mds import write_dataset
from diffusion.training import components
from diffusion.training.train import CHECKPOINTER_KEYWORDS, build_trainer

log = logging.getLogger(__name__)

LEFT_OUT = ('breakdown', 'image_grid', 'speed_monitor')
KEPT = ('console_lines', 'metrics_file')
"""Loggers that a profiling run keeps; other loggers are removed, since they would create runs in external services."""
MICROBATCHES = 4
"""Maximum number of microbatches in a profiled batch: the recipe's global batch is for more than one device."""
BATCHES_WATCHED = 2


class Phases(Callback):
    """Callback that runs the phases of a profile: warm-up, breakdown, PyTorch's profiler, device synchronizations."""

    def __init__(self, breakdown: Breakdown, *, batches: int, on_gpu: bool) -> None:
        self.breakdown = breakdown
        self.batches = batches
        self.report: BreakdownReport | None = None
        self.waits: Counter[Site] = Counter()
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
        self.profiler = profile(activities=activities)
        self._watching = ExitStack()

    @property
    def length(self) -> int:
        return self.breakdown.skip + 2 * self.batches + BATCHES_WATCHED

    def batch_end(self, state: State, logger: Logger) -> None:
        # Run the phases one after another, since they disturb each other: the profiler and the check for
        # synchronizations slow down a step.
        done = state.timestamp.batch.value - self.breakdown.skip
        if done == self.batches:
            # This callback runs after the breakdown, which has just made its report. Make its window longer than the
            # run to prevent a second report, which would cover batches under the profiler.
            self.report = self.breakdown.report
            self.breakdown.window = 2 * self.length
            self.profiler.start()
        elif done == 2 * self.batches:
            self.profiler.stop()
            self.waits = self._watching.enter_context(find_waits())
        elif done == 2 * self.batches + BATCHES_WATCHED:
            self._watching.close()


def run_profile(
    recipe: str, overrides: Sequence[str], *, batches: int, warmup: int, out: str | None, synthetic: bool
) -> None:
    """Run `diffusion profile` with its options: profile a recipe and print the tables."""
    profiled = load(recipe, overrides, allow_missing=synthetic)
    folder = Path(out or Path('profiles') / profiled.name)
    check_writable(folder, '--out')
    if synthetic:
        profiled = with_synthetic_data(profiled, folder / 'data')
    elif problems := check_paths(replace(profiled, eval_streams={})):
        raise RecipeError(problems, f'{recipe} (use --synthetic to profile without data)')
    print(profile_recipe(profiled, folder, batches=batches, warmup=warmup))


def profile_recipe(recipe: Recipe, out: Path, *, batches: int, warmup: int) -> str:
    """Time `batches` training batches, and run as many under PyTorch's profiler; return the text of profile.md.

    `profile.md`, `profile.json` and `trace.json.gz` are written to `out`.
    """
    breakdown = Breakdown(window=batches, skip=warmup, sampled=batches)
    phases = Phases(breakdown, batches=batches, on_gpu=components.on_gpu(recipe.trainer))
    profiled = for_profiling(recipe, out, batches=phases.length)
    trainer = build_trainer(profiled)
    # The order matters: `phases` reads the report that `breakdown` makes at the end of the same batch.
    trainer.state.callbacks += [breakdown, phases]
    trainer.fit()
    trainer.close()
    assert phases.report is not None
    trace = out / 'trace.json.gz'
    out.mkdir(parents=True, exist_ok=True)
    phases.profiler.export_chrome_trace(str(trace))
    measured = measured_by(phases, profiled)
    opportunities = largest_opportunities(measured)
    text = profile_table(recipe.name, phases, measured, opportunities, trace)
    write_atomically(out / 'profile.md', text)
    write_atomically(out / 'profile.json', json.dumps(summary(phases, measured, opportunities), indent=1))
    return text


def for_profiling(recipe: Recipe, out: Path, *, batches: int) -> Recipe:
    """Return a copy of a recipe for a short run on one device, without checkpoints, evaluation or remote loggers."""
    replaced = (*CHECKPOINTER_KEYWORDS, 'max_duration', 'eval_interval', 'progress_bar')
    trainer = {key: value for key, value in recipe.trainer.items() if key not in replaced}
    trainer |= {'max_duration': f'{batches}ba', 'save_folder': None, 'progress_bar': False}
    microbatch, batch = recipe.device_train_microbatch_size, recipe.global_batch
    if isinstance(microbatch, int) and batch > MICROBATCHES * microbatch:
        batch = MICROBATCHES * microbatch
        log.info('global_batch: reduced to %d, the share of a single device', batch)
    return replace(
        recipe,
        name='profiled',
        runs_dir=str(out),
        init_from=None,
        eval_streams={},
        global_batch=batch,
        loader=replace(recipe.loader, epoch_size=None),
        callbacks={key: each for key, each in recipe.callbacks.items() if each.name not in LEFT_OUT},
        loggers={key: each for key, each in recipe.loggers.items() if each.name in KEPT},
        trainer=trainer,
    )


def with_synthetic_data(recipe: Recipe, folder: Path) -> Recipe:
    """Write shards of noise images; return a copy of the recipe that reads them and uses random encoder weights."""
    if recipe.dataset.name != 'image_text':
        raise UserError(
            f'dataset.name: {recipe.dataset.name} has no synthetic data; use dataset.name=image_text, or precompute '
            'latents and remove --synthetic'
        )
    streams = {}
    for name, stream in recipe.streams.items():
        shape = stream.image_shape
        local = folder / name / str(shape)
        columns = {'image': 'bytes', 'captions': 'json', 'width': 'int', 'height': 'int', 'key': 'str'}
        samples = []  # images of random noise are slow to decode
        for index in range(64):
            pixels = np.random.default_rng(index).integers(0, 256, (shape.height, shape.width, 3), dtype=np.uint8)
            buffer = io.BytesIO()
            Image.fromarray(pixels).save(buffer, format='JPEG', quality=90)
            sample = {'image': buffer.getvalue(), 'captions': [f'noise number {index}'], 'key': f'noise{index}'}
            samples.append(sample | {'width': shape.width, 'height': shape.height})
        write_dataset(local, samples, columns)
        streams[name] = StreamConfig(resolution=stream.resolution, shape=str(shape), local=str(local))
    random_weights = registry.signature('model', recipe.model.name).accepted({'pretrained': None})
    return replace(recipe, streams=streams, model=Component(recipe.model.name, recipe.model.kwargs | random_weights))


def measured_by(phases: Phases, recipe: Recipe) -> ProfileMeasurements:
    assert phases.report is not None
    on_gpu, parts = components.on_gpu(recipe.trainer), components.effective_speed(recipe)
    # Leave out Composer's code, which the user cannot change.
    ours = {site: count for site, count in phases.waits.items() if not site.file.startswith('composer/')}
    return ProfileMeasurements(
        shares=phases.report.shares,
        step_seconds=phases.report.step_seconds,
        kernels=kernels_of(phases.profiler, phases.batches, on_gpu=on_gpu),
        waits={str(site): count / BATCHES_WATCHED for site, count in ours.items()},
        on_gpu=on_gpu,
        precision=str(recipe.trainer.get('precision', 'amp_fp16' if on_gpu else 'fp32')),
        microbatches=microbatches_of(recipe.global_batch, recipe.device_train_microbatch_size),
        off=[
            part
            for part in SPEED_PARTS
            if not getattr(parts, part) and (part != 'cuda_graphs' or can_use_graphs(recipe.parallelism))
        ],
    )


def can_use_graphs(parallelism: ParallelismConfig) -> bool:
    return parallelism.strategy == 'ddp' and not parallelism.activation_checkpointing


def microbatches_of(batch: int, microbatch: int | None) -> int:
    return -(-batch // microbatch) if isinstance(microbatch, int) else 1


def kernels_of(profiler: profile, batches: int, *, on_gpu: bool) -> list[Kernel]:
    """Return the GPU kernels in a profiled step, or operators without a GPU, in descending order of time."""
    found = []
    for event in profiler.key_averages():
        is_kernel = event.device_type.name == 'CUDA'
        # Annotations, and ranges such as `Optimizer.step#AdamW.step`, contain other events and would count them twice.
        if is_kernel != on_gpu or event.is_user_annotation or '#' in event.key:
            continue
        microseconds = event.self_device_time_total if on_gpu else event.self_cpu_time_total
        found.append(Kernel(event.key, microseconds / 1e6 / batches, max(1, event.count // batches)))
    return sorted(found, key=lambda kernel: -kernel.seconds)


def profile_table(
    name: str, phases: Phases, measured: ProfileMeasurements, opportunities: Sequence[Opportunity], trace: Path
) -> str:
    report = phases.report
    assert report is not None
    events = 'kernels' if measured.on_gpu else 'operators'
    lines = [f'# {name}: {report.line()}', '', '| stage | ms/step | share, % |', '|---|---|---|']
    shares = sorted(report.shares.items(), key=lambda item: -item[1])
    lines += [_row(stage, share * report.step_seconds, share) for stage, share in shares if share]
    lines += ['', f'| {events} by kind | ms/step | share, % |', '|---|---|---|']
    kinds = seconds_by_kind(measured.kernels)
    lines += [_row(kind, seconds, seconds / measured.step_seconds) for kind, seconds in kinds.items()]
    lines += ['', f'| {events} | calls/step | ms/step | share, % |', '|---|---|---|---|']
    for kernel in measured.kernels[:15]:
        row = f'{kernel.name[:80]} | {kernel.calls}'
        lines.append(_row(row, kernel.seconds, kernel.seconds / measured.step_seconds))
    lines += ['', '| source line that waits for the device | times/step |', '|---|---|']
    lines += [f'| {site} | {count / BATCHES_WATCHED:g} |' for site, count in phases.waits.most_common()]
    lines += ['', 'Largest opportunities:']
    lines += [f'{i}. Up to {100 * each.share:.0f}%: {each.text}.' for i, each in enumerate(opportunities, 1)]
    if not opportunities:
        lines.append('None above 1% of step time.')
    lines += ['', f'Trace: {trace} (chrome://tracing or ui.perfetto.dev)']
    return '\n'.join(lines)


def summary(phases: Phases, measured: ProfileMeasurements, opportunities: Sequence[Opportunity]) -> dict[str, Any]:
    assert phases.report is not None
    return {
        'torch': torch.__version__,
        'metrics': phases.report.metrics(),
        'kernels': [kernel._asdict() for kernel in measured.kernels[:100]],
        'waits': {str(site): count / BATCHES_WATCHED for site, count in phases.waits.items()},
        'opportunities': [each._asdict() for each in opportunities],
    }


def _row(name: str, seconds: float, share: float) -> str:
    return f'| {name} | {1e3 * seconds:.2f} | {100 * share:.1f} |'
