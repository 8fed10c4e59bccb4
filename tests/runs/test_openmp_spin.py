"""The spin of OpenMP threads reaches libgomp in every program, and never replaces the user's."""

import os
import re
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from diffusion.runs.openmp_spin import SPIN_COUNT, describe_spin, shorten_spin

ROOT = Path(__file__).parents[2]
RECIPE = str(ROOT / 'yamls' / 'quickstart.yaml')
LOAD_LIBGOMP = """
    import ctypes, importlib.util
    from pathlib import Path

    def load_libgomp():
        folder = Path(importlib.util.find_spec('torch').origin).parent / 'lib'
        ctypes.CDLL(str(next(folder.glob('libgomp*'))))
"""
"""Function that loads torch's libgomp without torch, which takes seconds. libgomp prints its settings when loaded."""


def spins(folder: Path, *command: str, **variables: str) -> tuple[list[str], str]:
    """Run Python; return the spin of each libgomp that was loaded, in this process or a child, and stderr."""
    unset = ('GOMP_SPINCOUNT', 'OMP_WAIT_POLICY', 'DIFFUSION_JOB')
    environ = {name: value for name, value in os.environ.items() if name not in unset}
    environ |= {'OMP_DISPLAY_ENV': 'VERBOSE', 'PYTHONPATH': f'{ROOT}:{folder}', 'CUDA_VISIBLE_DEVICES': ''}
    result = subprocess.run(
        [sys.executable, *command], cwd=folder, env=environ | variables, capture_output=True, text=True
    )
    assert result.returncode == 0, result.stderr
    return re.findall(r"GOMP_SPINCOUNT = '(\d+)'", result.stderr), result.stderr


def write(folder: Path, name: str, code: str) -> str:
    (folder / name).write_text(textwrap.dedent(LOAD_LIBGOMP) + textwrap.dedent(code))
    return str(folder / name)


@pytest.mark.slow
def test_rank_of_a_node_spins_shortly(tmp_path):
    program = write(tmp_path, 'program.py', 'load_libgomp()')
    node = ['-m', 'diffusion.launch.node', '--', program, RECIPE]
    one = {'DIFFUSION_NODES': '1', 'DIFFUSION_PROCESSES_PER_NODE': '1', 'DIFFUSION_SCHEDULER': 'local'}
    assert spins(tmp_path, *node, **one)[0] == [str(SPIN_COUNT)]


@pytest.mark.parametrize(
    ('given', 'expected'), [({}, '1500'), ({'GOMP_SPINCOUNT': '70'}, '70'), ({'OMP_WAIT_POLICY': 'PASSIVE'}, '0')]
)
def test_libgomp_has_the_short_spin_unless_the_user_chose_a_wait(tmp_path, given, expected):
    program = write(tmp_path, 'program.py', 'import diffusion\nload_libgomp()')
    assert spins(tmp_path, program, **given)[0] == [expected]


def test_nothing_is_set_or_said_after_torch_is_loaded():
    environ: dict[str, str] = {}
    shorten_spin(environ, loaded=['torch'])
    assert environ == {} and describe_spin(environ) is None
    shorten_spin(environ, loaded=[])
    assert environ == {'GOMP_SPINCOUNT': str(SPIN_COUNT)} and describe_spin(environ)
