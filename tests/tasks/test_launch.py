"""run.py on several gloo processes, and under the composer launcher."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from diffusion.checkpointing.checkpoint_lookup import find_checkpoint
from diffusion.checkpointing.checkpoint_weights import weights_of
from diffusion.loggers.metrics_file import read_metrics

ROOT = Path(__file__).parents[2]


def start(processes: int, *arguments: str) -> subprocess.Popen[str]:
    launcher = [sys.executable, '-m', 'composer.cli.launcher', '-n', str(processes)]
    environment = os.environ | {'OMP_NUM_THREADS': '1', 'CUDA_VISIBLE_DEVICES': ''}
    return subprocess.Popen(
        [*launcher, str(ROOT / 'run.py'), *arguments],
        cwd=ROOT,
        env=environment,
        start_new_session=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def losses(folder: Path) -> dict[int, float]:
    return read_metrics(folder / 'metrics.jsonl')['loss/train/total']


@pytest.mark.slow
def test_one_process_two_ddp_and_two_fsdp2_processes_train_alike(ranks, write_recipe, tmp_path):
    sections = {
        'algorithms': {'ema': {'ema_start': '3ba', 'smoothing': 0.5}},
        'callbacks': {'image_grid': {'prompts': ['a'], 'every': '8ba', 'num_inference_steps': 1}},
    }
    sharded = {'strategy': 'fsdp2', 'reshard_after_forward': False}
    ranks.run(1, write_recipe('one', **sections))
    ranks.run(2, write_recipe('two', **sections))
    ranks.run(2, write_recipe('sharded', **sections, parallelism=sharded))
    runs = tmp_path / 'runs'
    one = losses(runs / 'one')
    averages = weights_of(find_checkpoint(runs / 'one'), 'ema')[0]
    for name in ('two', 'sharded'):
        other = losses(runs / name)
        assert one.keys() == other.keys()
        assert other[0] == pytest.approx(one[0], rel=1e-6), (
            'noise, timesteps and dropout depend on samples, not on ranks'
        )
        for batch in one:
            assert other[batch] == pytest.approx(one[batch], rel=1e-4)
        weights = weights_of(find_checkpoint(runs / name), 'ema')[0]
        assert weights.keys() == averages.keys()
        assert all(weights[key].shape == averages[key].shape for key in averages)
        distance = sum((weights[key] - averages[key]).square().sum() for key in averages) ** 0.5
        assert distance < 0.02 * sum(averages[key].square().sum() for key in averages) ** 0.5


@pytest.mark.slow
def test_mistake_ends_all_processes_with_one_message(write_recipe):
    process = start(2, str(write_recipe('wrong')), 'global_batch=7')
    output, _ = process.communicate(timeout=100)
    assert process.returncode != 0
    assert output.count('global_batch: 7 does not divide over 2 devices; use 6 or 8') == 1
    assert 'Traceback' not in output
