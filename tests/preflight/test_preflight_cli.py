"""Command line of `diffusion preflight`."""

import os
import subprocess
import sys

import pytest
from commands import refusal

from diffusion.cli import main
from diffusion.launch import node


@pytest.fixture(autouse=True)
def _no_rank_of_an_earlier_training(monkeypatch):
    """Composer leaves rank variables in the environment of a process that has trained."""
    for name in ('RANK', 'WORLD_SIZE', 'LOCAL_RANK', 'LOCAL_WORLD_SIZE', 'NODE_RANK'):
        monkeypatch.delenv(name, raising=False)


def test_level_and_gpu_are_passed_to_the_node_and_its_status_is_returned(monkeypatch, write_recipe):
    calls, recipe = [], str(write_recipe())

    def preflight(words, environ):
        calls.append((list(words), environ['DIFFUSION_PREFLIGHT'], environ['DIFFUSION_GPU']))
        return 76

    monkeypatch.setattr(node, 'run_node_preflight', preflight)
    assert main(['preflight', recipe]) == 76
    assert main(['preflight', recipe, '--deep', '--gpu', 'H100-SXM', 'name=other']) == 76
    assert calls == [([recipe], 'fast', 'none'), ([recipe, 'name=other'], 'deep', 'h100-sxm')]


@pytest.mark.parametrize(
    ('words', 'message'),
    [
        (['nosuch.yaml'], 'nosuch.yaml does not exist'),
        (['RECIPE', 'naem=x'], "naem: unknown key; did you mean 'name'?"),
        (['RECIPE', '--gpu', 'h10'], "--gpu: no GPU is called 'h10'; did you mean h100-sxm or h100-pcie?\n"),
        (['RECIPE', '--processes', '0'], 'DIFFUSION_PROCESSES_PER_NODE: 0 processes per node; use 1 or more'),
    ],
)
def test_error_is_one_line(write_recipe, capsys, words, message):
    recipe = str(write_recipe())
    assert message in refusal(capsys, 'preflight', *[recipe if word == 'RECIPE' else word for word in words])


@pytest.mark.slow
def test_preflight_runs_in_all_processes_of_a_machine(write_recipe, tmp_path):
    recipe = write_recipe()
    code = 'import sys; from diffusion.cli import main; sys.exit(main())'
    command = [sys.executable, '-c', code, 'preflight', str(recipe), '--processes', '2']
    environ = os.environ | {'CUDA_VISIBLE_DEVICES': ''}
    found = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert 'ok   all-reduce' in found.stdout and 'BAD' not in found.stdout
    run = tmp_path / 'runs' / 'run'
    assert [path.name for path in run.iterdir()] == ['preflight.json'], 'no lock and no attempts.jsonl'
