"""Shell completion, as bash does it."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from commands import output_of

from diffusion.cli import make_parser

ROOT = Path(__file__).parents[1]


@pytest.mark.skipif(shutil.which('bash') is None, reason='bash is not installed')
@pytest.mark.parametrize(
    ('line', 'expected'),
    [
        ('diffusion ', {*make_parser().commands.choices}),
        ('diffusion da', {'data'}),
        ('diffusion data lo', {'look'}),
        ('diffusion plan --gp', {'--gpu', '--gpus', '--gpus-file'}),
        ('diffusion check yamls/phase1', {'yamls/phase1.yaml', 'yamls/phase1-latents.yaml'}),
    ],
)
def test_bash_completes_commands_options_and_files(capsys, tmp_path, line, expected):
    script = tmp_path / 'completion.bash'
    script.write_text(output_of(capsys, 'completion', 'bash'))
    words = line.split(' ')
    ask = f'source {script}; COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); _shtab_diffusion; echo "${{COMPREPLY[@]}}"'
    # Nothing of Python is on PATH: the script is static.
    environment = {'PATH': os.path.dirname(shutil.which('bash') or '') + ':/usr/bin:/bin'}
    command = ['bash', '-c', ask, 'bash', *words]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=True)
    assert {*done.stdout.split()} - {'-h', '--help', '--version'} == expected
