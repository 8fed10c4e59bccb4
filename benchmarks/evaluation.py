"""Benchmark of an evaluation: time and memory for many images, and images per second beside a loop of diffusers.

    python benchmarks/evaluation.py [images [images of the comparison]]

Trains yamls/quickstart.yaml for one batch and evaluates the checkpoint with `diffusion evaluate` and the EfficientNet
distance, whose network needs no download, in a process whose time and peak memory are measured. Then it generates
images with the same weights, sampler and steps in turns: as an evaluation does, in batches that are written to PNG
files, and by the exported pipeline of diffusers, prompt by prompt as in its documentation, and in equal batches. All
with one thread, on the CPU unless there is a GPU.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from diffusers.pipelines.stable_diffusion_3.pipeline_stable_diffusion_3 import StableDiffusion3Pipeline
from machine import heading, interleaved_medians
from quickstart_models import RECIPES, environment
from quickstart_models import prepare as prepare_images

from diffusion.config.load import load
from diffusion.evaluation.generated_images import GeneratedImages, Sampling
from diffusion.evaluation.prompts import own_prompts
from diffusion.models.families.adapter import adapter_of
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.tasks.evaluate import trained_model
from diffusion.tasks.export import export

ROOT = Path(__file__).parents[1]
STEPS, GUIDANCE, BATCH = 25, 3.0, 50


def main(images: str = '1000', compared: str = '100') -> None:
    """Run the benchmark and print its tables."""
    with tempfile.TemporaryDirectory() as name:
        home = Path(name)
        prepare_images(home)
        train = [str(ROOT / 'run.py'), str(RECIPES['today']), 'trainer.max_duration=1ba', 'callbacks=null']
        subprocess.run([sys.executable, *train], cwd=home, env=environment(), check=True, stdout=sys.stderr)
        seconds, peak_gb = measured_evaluation(home, int(images))
        rates = rates_of_generation(home, int(compared))
    print(heading())
    print()
    print('| evaluation | images | s | images/s | peak memory, GB |')
    print('|---|---|---|---|---|')
    print(f'| whole process | {images} | {seconds:.0f} | {int(images) / seconds:.2f} | {peak_gb:.2f} |')
    print()
    print(f'| {compared} images of 64 px, {STEPS} steps | images/s | ratio |')
    print('|---|---|---|')
    for kind, rate in rates.items():
        print(f'| {kind} | {rate:.2f} | {rates["evaluation"] / rate:.2f} |')


def measured_evaluation(home: Path, images: int) -> tuple[float, float]:
    """Evaluate a checkpoint in a process of its own; return its wall time in seconds and its peak memory in GB."""
    code = 'import sys; from diffusion.cli import main; sys.exit(main(sys.argv[1:]))'
    options = ['--metrics', 'efficientnet_distance', '--images', str(images), '--steps', str(STEPS)]
    options += ['--guidance', str(GUIDANCE), '--batch-size', str(BATCH)]
    # 200 captions: several images of each.
    words = [f'evaluators.image_metrics.images_per_prompt={-(-images // 200)}']
    words += ['evaluators.image_metrics.noise_scheduler=euler']
    began = time.perf_counter()
    command = [sys.executable, '-c', code, 'evaluate', 'runs/quickstart', *words, *options]
    process = subprocess.Popen(command, cwd=home, env=environment(), stdout=sys.stderr)
    _, status, usage = os.wait4(process.pid, 0)
    if status:
        raise SystemExit('the evaluation failed; see above')
    results = json.loads((home / 'runs' / 'quickstart' / 'evaluations' / 'ba1.json').read_text())
    assert results['images'] == images
    return time.perf_counter() - began, usage.ru_maxrss * 1024 / 1e9


def rates_of_generation(home: Path, images: int) -> dict[str, float]:
    """Return the images per second of each way to generate images with the same weights."""
    torch.set_num_threads(1)
    os.chdir(home)  # the recipe's paths are relative
    recipe = load('runs/quickstart/recipe.yaml', ['task=evaluate'])
    recipe.checkpoint = 'runs/quickstart/ba1'
    model = trained_model(recipe).model
    assert isinstance(model, LatentDiffusion)
    model.eval()
    export('runs/quickstart/ba1', 'export')
    pipeline: Any = StableDiffusion3Pipeline.from_pretrained('export', text_encoder_3=None, tokenizer_3=None)
    pipeline.set_progress_bar_config(disable=True)
    settings = adapter_of(pipeline.transformer).call_arguments(pipeline, negative='', guidance=GUIDANCE) | {
        'num_inference_steps': STEPS
    }
    own = [prompt.text for prompt in own_prompts()]
    prompts = [own[index % len(own)] for index in range(images)]
    sampling = Sampling(GUIDANCE, STEPS, 'euler', batch_size=min(BATCH, images))
    rounds = iter(range(10**6))

    def evaluation() -> None:
        generated = GeneratedImages(Path(f'images-{next(rounds)}'), prompts, sampling, 'ba1')
        assert sum(len(indices) for indices, _ in generated.own_batches(model)) == images

    def by_pipeline(size: int) -> Callable[[], None]:
        def generate() -> None:
            folder = Path(f'images-{next(rounds)}')
            folder.mkdir()
            for start in range(0, images, size):
                batch = prompts[start : start + size]
                generators = [torch.Generator().manual_seed(start + index) for index in range(len(batch))]
                for index, image in enumerate(pipeline(batch, generator=generators, **settings).images):
                    image.save(folder / f'{start + index}.png')

        return generate

    kinds = {
        'evaluation': evaluation,
        'diffusers, prompt by prompt': by_pipeline(1),
        f'diffusers, batches of {sampling.batch_size}': by_pipeline(sampling.batch_size),
    }
    medians = interleaved_medians(*kinds.values(), repeats=2)
    return {kind: images / seconds for kind, seconds in zip(kinds, medians, strict=True)}


if __name__ == '__main__':
    main(*sys.argv[1:])
