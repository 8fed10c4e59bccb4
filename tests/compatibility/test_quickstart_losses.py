"""The quickstart with the newest torch: 20 batches with the losses of the tested versions."""

import math
import os
import subprocess
import sys
from pathlib import Path

import pytest

from diffusion.loggers.metrics_file import read_metrics

ROOT = Path(__file__).parents[2]
REFERENCE = os.environ.get('REFERENCE_PYTHON')
"""Interpreter of an environment with the versions of constraints.txt; set by `make test-newest`."""


def run(python: str, *words: str) -> None:
    environment = os.environ | {'PYTHONPATH': str(ROOT), 'HF_HUB_OFFLINE': '1', 'CUDA_VISIBLE_DEVICES': ''}
    result = subprocess.run([python, *words], cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-4000:]


def losses(path: Path) -> dict[tuple[int, str], float]:
    """Return each loss of a metrics file by batch and name."""
    metrics = read_metrics(path)
    return {(batch, name): value for name in metrics if 'loss' in name for batch, value in metrics[name].items()}


@pytest.mark.skipif(REFERENCE is None, reason='compares two environments: run `make test-newest`')
def test_quickstart_has_equal_losses_in_both_environments(tmp_path):
    images, latents = tmp_path / 'images', tmp_path / 'latents'
    places = [f'precompute.streams.openmoji.local={images}/64px', f'precompute.out={latents}']
    places += [f'streams.openmoji.local={latents}/openmoji', f'eval_streams.openmoji.local={images}/64px']
    recipe = 'yamls/quickstart.yaml'
    run(
        sys.executable, '-m', 'diffusion', 'prepare', 'openmoji', '--out', str(images), '--sizes', '64', '--limit', '64'
    )
    run(sys.executable, 'run.py', recipe, 'task=precompute', *places)
    short = ['trainer.max_duration=20ba', 'callbacks.image_grid=false', 'algorithms.ema.ema_start=5ba']
    found = []
    for python in (str(REFERENCE), sys.executable):
        name = f'run{len(found)}'
        run(python, 'run.py', recipe, *places, *short, f'runs_dir={tmp_path}', f'name={name}')
        found.append(losses(tmp_path / name / 'metrics.jsonl'))
    expected, ours = found
    print(
        *(f'{batch:3} {name:32} {value:.6f} {ours[batch, name]:.6f}' for (batch, name), value in expected.items()),
        sep='\n',
    )
    assert len({batch for batch, _ in expected}) >= 20
    assert ours.keys() == expected.keys()
    different = {
        key: (value, ours[key]) for key, value in expected.items() if not math.isclose(value, ours[key], rel_tol=5e-5)
    }
    assert not different, 'they differ within 4 digits'
