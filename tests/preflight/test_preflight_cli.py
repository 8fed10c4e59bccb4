"""`diffusion preflight` as somebody types it."""

import os
import subprocess
import sys

import pytest

from diffusion.cli import main
from diffusion.launch import node


@pytest.fixture
def asked(monkeypatch):
    """What the node entry point was asked for, without doing it."""
    found = []

    def preflight(words, environ):
        found.append((list(words), {key: environ.get(f'DIFFUSION_{key}') for key in ('PREFLIGHT', 'GPU')}))
        return 76

    monkeypatch.setattr(node, 'run_node_preflight', preflight)
    return found


def test_levels_and_kinds_are_handed_on_and_the_status_back(asked, write_recipe):
    recipe = str(write_recipe())
    assert main(['preflight', recipe]) == 76
    assert main(['preflight', recipe, '--deep', '--gpu', 'H100-SXM', 'name=other']) == 76
    assert asked == [
        ([recipe], {'PREFLIGHT': 'fast', 'GPU': 'none'}),
        ([recipe, 'name=other'], {'PREFLIGHT': 'deep', 'GPU': 'h100-sxm'}),
    ]


@pytest.mark.parametrize(
    ('words', 'told'),
    [
        (['nosuch.yaml'], 'nosuch.yaml cannot be read'),
        (['RECIPE', 'naem=x'], "naem: unknown key; did you mean 'name'?"),
        (['RECIPE', '--gpu', 'h10'], "--gpu: no GPU is called 'h10'; did you mean h100-sxm or h100-pcie?\n"),
        (['RECIPE', '--processes', '0'], 'DIFFUSION_PROCESSES_PER_NODE: 0 processes per node; use 1 or more'),
    ],
)
def test_mistakes_are_a_line(write_recipe, capsys, words, told):
    recipe = str(write_recipe())
    assert main(['preflight', *[recipe if word == 'RECIPE' else word for word in words]]) == 2
    assert told in capsys.readouterr().err


@pytest.mark.slow
def test_a_machine_is_checked_by_all_its_processes(write_recipe, tmp_path):
    recipe = write_recipe()
    code = 'import sys; from diffusion.cli import main; sys.exit(main())'
    command = [sys.executable, '-c', code, 'preflight', str(recipe), '--processes', '2']
    environ = os.environ | {'CUDA_VISIBLE_DEVICES': ''}
    found = subprocess.run(command, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stderr
    assert 'ok   all-reduce' in found.stdout and 'BAD' not in found.stdout
    run = tmp_path / 'runs' / 'run'
    assert [path.name for path in run.iterdir()] == ['preflight.json'], 'no lock, no account'
