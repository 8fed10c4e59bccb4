"""run.py under the composer launcher: two gloo processes that are killed and resumed."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from diffusion.checkpointing.checkpoint_weights import weights_of
from diffusion.checkpointing.run_folder import find_checkpoint
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


def run(processes: int, *arguments: str) -> str:
    process = start(processes, *arguments)
    output, _ = process.communicate(timeout=400)
    assert process.returncode == 0, output
    return output


def kill_when(process: subprocess.Popen[str], appears: Path) -> None:
    """Send SIGKILL to the launcher and all processes it started, as soon as a file exists."""
    deadline = time.monotonic() + 300
    while not appears.exists():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, f'{appears} does not exist after 300 s'
        time.sleep(0.02)
    os.killpg(process.pid, signal.SIGKILL)
    process.communicate()


def losses(folder: Path) -> dict[int, float]:
    return read_metrics(folder / 'metrics.jsonl')['loss/train/total']


@pytest.mark.slow
def test_two_killed_processes_resume_bit_for_bit(ranks, write_recipe, tmp_path):
    sections = {'algorithms': {'ema': {'ema_start': '3ba', 'smoothing': 0.5}}}
    duration = ['trainer.max_duration=10ba', 'trainer.save_interval=2ba']
    runs = tmp_path / 'runs'
    ranks.run(2, write_recipe('whole', **sections), *duration)
    path = str(write_recipe('killed', **sections))
    kill_when(start(2, path, *duration), runs / 'killed' / 'ba4')
    run(2, path, *duration)
    assert losses(runs / 'killed') == losses(runs / 'whole')
    assert len(losses(runs / 'whole')) == 10
    for which in ('training', 'ema'):
        whole, killed = (weights_of(find_checkpoint(runs / name), which)[0] for name in ('whole', 'killed'))
        assert all((whole[name] == killed[name]).all() for name in whole)


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


def test_mistake_ends_all_processes_with_one_message(write_recipe):
    process = start(2, str(write_recipe('wrong')), 'global_batch=7')
    output, _ = process.communicate(timeout=100)
    assert process.returncode != 0
    assert output.count('global_batch: 7 does not divide over 2 devices; use 6 or 8') == 1
    assert 'Traceback' not in output
