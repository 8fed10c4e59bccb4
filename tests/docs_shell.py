"""Run the code blocks of documentation pages as a reader would, without network and without waiting for imports.

A block runs in bash. `diffusion`, `composer` and `python` on its PATH are forks of the tests' server (`forkserver.py`);
programs that need a network, a cluster or a container engine are replaced by stand-ins that check their arguments.
"""

import os
import re
import subprocess
import sys
import venv
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from forkserver import ROOT, SOCKET

FENCE = re.compile(r'^```(\w*)\n(.*?)^```$', flags=re.MULTILINE | re.DOTALL)
RUN = {'bash', 'python'}
"""Languages of blocks that are executed."""

# `composer run.py ...` without Composer's launcher, which takes half a minute to import; one process needs none.
STAND_INS = {
    'diffusion': 'exec "$PYTHON" "$FORK" --run -m diffusion "$@"',
    'composer': 'exec "$PYTHON" "$FORK" "${@:2}"',
    'python': """
        case "$1 $2" in
          '-m pytest' | '-m venv') exec "$PYTHON" "$@" ;;
          run.py*) exec "$PYTHON" "$FORK" "${@:2}" ;;
          *) exec "$PYTHON" "$FORK" --run "$@" ;;
        esac
    """,
    'python3': 'exec python "$@"',
    'pip': 'exec "$PYTHON" -m pip --python "$OVERLAY" "$@"',
    'uv': """
        case "$1" in
          venv) exec "$PYTHON" -m venv "${@: -1}" ;;
          pip)
            shift; words=(); python=$OVERLAY
            while [ $# -gt 0 ]; do
              case "$1" in
                --python) python=$2; shift 2 ;;
                --override | --torch-backend) shift 2 ;;
                *) words+=("$1"); shift ;;
              esac
            done
            exec "$PYTHON" -m pip --python "$python" "${words[@]}" ;;
        esac
    """,
    'sbatch': 'bash -n "${@: -1}" && echo 4711',
    'curl': 'echo installer',
    'docker': """
        echo "$*" >> docker.log
        test "$1" != build || test -f docker/Dockerfile
    """,
}


@dataclass(frozen=True)
class Block:
    """A fenced code block of a page."""

    page: Path
    language: str
    text: str
    before: str
    """The text of the page before the block."""

    @property
    def file_name(self) -> str | None:
        """Name under which the page tells the reader to save the block, or None."""
        match = re.search(r'Save this as `(\S+)`[^`]*\Z', self.before)
        return match[1] if match else None


def blocks_of(page: Path) -> list[Block]:
    text = page.read_text(encoding='utf-8')
    return [Block(page, match[1], match[2], text[: match.start()]) for match in FENCE.finditer(text)]


class Reader:
    """Runs the blocks of a page, one after the other, in one folder; `server` is the address of the fork server."""

    def __init__(self, folder: Path, server: str) -> None:
        self.folder = folder
        self.programs = folder / '.programs'
        self.programs.mkdir(parents=True)
        for name, script in STAND_INS.items():
            path = self.programs / name
            path.write_text(f'#!/bin/bash\n{script}\n')
            path.chmod(0o755)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(('PYTEST_', 'MAKE', 'MFLAGS'))}
        own = {'PYTHONPATH': f'{ROOT}:{ROOT / "tests"}', 'PATH': f'{self.programs}:{kept["PATH"]}', SOCKET: server}
        own |= {'PYTHON': sys.executable, 'FORK': str(ROOT / 'tests' / 'forkserver.py')}
        own |= {'OVERLAY': str(make_overlay(folder / '.overlay')), 'CUDA_VISIBLE_DEVICES': '', 'OMP_NUM_THREADS': '1'}
        self.environ = kept | own | {'COLUMNS': '100'}

    def run(self, block: Block, **variables: str) -> str:
        """Run or save a block; return what it printed."""
        if block.file_name is not None:
            (self.folder / block.file_name).parent.mkdir(exist_ok=True)
            (self.folder / block.file_name).write_text(block.text)
            return ''
        script = block.text
        if block.language == 'python':
            (self.folder / 'block.py').write_text(block.text)
            script = 'python block.py'
        return self.shell(script, **variables)

    def shell(self, script: str, **variables: str) -> str:
        """Run a script in bash, which must succeed; return what it printed."""
        done = subprocess.run(
            ['bash', '-euo', 'pipefail', '-c', script],
            cwd=self.folder,
            env=self.environ | variables,
            text=True,
            timeout=400,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
        )
        assert done.returncode == 0, f'{script}\nended with {done.returncode}\n{done.stdout}'
        return done.stdout

    def read(self, page: Path, **variables: str) -> str:
        """Run all blocks of a page; return what they printed."""
        run = [block for block in blocks_of(page) if block.language in RUN or block.file_name is not None]
        return ''.join(self.run(block, **variables) for block in run)


def make_overlay(folder: Path) -> Path:
    """Create an environment that sees this process's packages, and return its Python; pip installs into it alone."""
    venv.create(folder, with_pip=False)
    packages = folder / 'lib' / f'python{sys.version_info.major}.{sys.version_info.minor}' / 'site-packages'
    (packages / 'outer.pth').write_text(f'{site_packages()}\n')
    return folder / 'bin' / 'python'


def site_packages() -> str:
    return next(path for path in sys.path if path.endswith('site-packages'))


def offline(environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables with which pip and git take this repository for REPOSITORY, and fetch nothing else."""
    return {
        'REPOSITORY': 'https://example.com/diffusion.git',
        'GIT_CONFIG_COUNT': '2',
        'GIT_CONFIG_KEY_0': f'url.file://{ROOT}.insteadOf',
        'GIT_CONFIG_VALUE_0': 'https://example.com/diffusion.git',
        'GIT_CONFIG_KEY_1': 'safe.directory',
        'GIT_CONFIG_VALUE_1': '*',
        'PIP_NO_INDEX': '1',
        'PIP_NO_DEPS': '1',
        'PIP_NO_BUILD_ISOLATION': '0',  # pip reads it as the value of `build_isolation`
        'PIP_DISABLE_PIP_VERSION_CHECK': '1',
        'PIP_CONFIG_FILE': os.devnull,
        'PYTHONPATH': f'{environ.get("PYTHONPATH", "")}:{site_packages()}',
    }
