"""Both sets of versions: one loads what the other exports, and resumes its quickstart, whose losses are equal."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from diffusion.loggers.metrics_file import read_metrics

ROOT = Path(__file__).parents[2]
OTHER_PYTHON = os.environ.get('OTHER_PYTHON')
"""Interpreter of the environment with the current versions. `make test-resolvable` sets it."""
PROGRAM = """
import sys
from pathlib import Path
import torch
from diffusers import DiffusionPipeline
from diffusion.config.registry import TARGETS
from diffusion.models.families.mmdit.builder import tiny_mmdit
from diffusion.models.families.prx.builder import tiny_prx
from diffusion.models.families.sd2.builder import tiny
from diffusion.models.families.sdxl.builder import tiny_sdxl
from diffusion.tasks.export import write_folder

mode, root, vae = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
MODELS = {'sd2': tiny, 'sdxl': tiny_sdxl, 'mmdit': tiny_mmdit, 'prx': tiny_prx}
CAPTION = 'A red fox, jumping! 3 cats'  # transformers 5 reads curly quotes in another way than training


def draw(pipeline, name):
    pipeline.set_progress_bar_config(disable=True)
    size = {'height': 32, 'width': 32, 'num_inference_steps': 2, 'output_type': 'pt'}
    if name == 'prx':
        size |= {'skip_text_cleaning': True, 'use_resolution_binning': False}
    if name == 'mmdit':
        size['max_sequence_length'] = 16
    torch.manual_seed(1)
    return pipeline(CAPTION, latents=torch.randn(1, 4, 4, 4), **size).images


for name, build in MODELS.items():
    folder = root / name
    if mode == 'write':
        torch.manual_seed(0)
        model = build(32, vae=vae)
        with torch.no_grad():  # layers that begin at zero would hide the text
            for parameter in model.denoiser.parameters():
                parameter.add_(0.05 * torch.randn_like(parameter))
        folder.mkdir(parents=True)
        write_folder(model, None, folder, torch.float32, lora=False)
        torch.save(draw(model.adapter.pipeline(model), name), folder / 'images.pt')
    else:
        pipeline = DiffusionPipeline.from_pretrained(folder, local_files_only=True, low_cpu_mem_usage=False)
        torch.testing.assert_close(draw(pipeline, name), torch.load(folder / 'images.pt'), rtol=1e-4, atol=1e-4)
    print(mode, name)
"""


def run(python: str, *words: str) -> None:
    environment = os.environ | {'PYTHONPATH': str(ROOT), 'HF_HUB_OFFLINE': '1', 'CUDA_VISIBLE_DEVICES': ''}
    result = subprocess.run([python, *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]


@pytest.mark.cpu_seconds(60)
@pytest.mark.skipif(OTHER_PYTHON is None, reason='compares two environments: run `make test-resolvable`')
@pytest.mark.parametrize('writes', ['other', 'this'])
def test_export_draws_the_same_images_in_the_other_environment(tmp_path, small_vae, writes):
    pythons = [str(OTHER_PYTHON), sys.executable]
    writer, reader = pythons if writes == 'other' else reversed(pythons)
    run(writer, '-c', PROGRAM, 'write', str(tmp_path), str(small_vae))
    run(reader, '-c', PROGRAM, 'read', str(tmp_path), str(small_vae))


def losses(path: Path) -> dict[tuple[int, str], float]:
    """Return each loss of a metrics file by batch and name."""
    metrics = read_metrics(path)
    return {(batch, name): value for name in metrics if 'loss' in name for batch, value in metrics[name].items()}


@pytest.mark.cpu_seconds(300)
@pytest.mark.skipif(OTHER_PYTHON is None, reason='compares two environments: run `make test-resolvable`')
def test_quickstart_has_equal_losses_in_both_environments_and_resumes_in_the_other(tmp_path):
    images, latents = tmp_path / 'images', tmp_path / 'latents'
    places = [f'precompute.streams.openmoji.local={images}/64px', f'precompute.out={latents}']
    places += [f'streams.openmoji.local={latents}/openmoji', f'eval_streams.openmoji.local={images}/64px']
    recipe = 'yamls/quickstart.yaml'
    run(
        sys.executable, '-m', 'diffusion', 'prepare', 'openmoji', '--out', str(images), '--sizes', '64', '--limit', '64'
    )
    run(sys.executable, 'run.py', recipe, 'task=precompute', *places)
    places += [f'runs_dir={tmp_path}', 'callbacks.image_grid=false', 'algorithms.ema.ema_start=5ba']
    # transformers 5 draws initial weights in another order than transformers 4, so both runs start from one checkpoint.
    run(str(OTHER_PYTHON), 'run.py', recipe, *places, 'trainer.max_duration=1ba', 'name=weights')
    start = ['trainer.max_duration=20ba', f'init_from={tmp_path}/weights']
    found, pythons = [], (str(OTHER_PYTHON), sys.executable)
    for number, python in enumerate(pythons):
        name = f'run{number}'
        run(python, 'run.py', recipe, *places, *start, f'name={name}')
        # The other one resumes it for two more batches.
        run(pythons[1 - number], 'run.py', recipe, *places, *start, 'trainer.max_duration=22ba', f'name={name}')
        found.append(losses(tmp_path / name / 'metrics.jsonl'))
    others, ours = found
    print(
        *(f'{batch:3} {name:32} {value:.6f} {ours[batch, name]:.6f}' for (batch, name), value in others.items()),
        sep='\n',
    )
    assert len({batch for batch, _ in others}) >= 22
    assert ours.keys() == others.keys()
    different = {
        key: (value, ours[key]) for key, value in others.items() if not math.isclose(value, ours[key], rel_tol=1e-6)
    }
    assert not different, 'they differ within 6 digits'
