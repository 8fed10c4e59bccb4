"""Run a program with an injected fault: `injected.py TARGET STATEMENT PROGRAM ARGUMENTS...`.

TARGET, such as `diffusion.training.train:write_atomically`, is replaced by a function that executes STATEMENT. PROGRAM
is `run.py` or `diffusion`.
"""

import errno
import importlib
import os
import sys
from collections.abc import Sequence

import cpuinfo
import numpy
import torch


def inject(target: str, statement: str) -> None:
    """Replace `module:attribute` by a function that executes a statement."""
    module, _, path = target.partition(':')
    *outer, name = path.split('.')
    owner = importlib.import_module(module)
    for each in outer:
        owner = getattr(owner, each)

    def injected(*_: object, **__: object) -> object:
        return exec(statement, {'os': os, 'errno': errno, 'numpy': numpy, 'torch': torch, 'injected': injected})

    setattr(owner, name, injected)


def main(target: str, statement: str, program: str, arguments: Sequence[str]) -> int:
    from diffusion import cli
    from diffusion.checkpointing import checkpoint_store
    from diffusion.tasks import run_recipe

    checkpoint_store.RETRY_PAUSES_SECONDS = (0.01, 0.01)
    cpuinfo.get_cpu_info = dict  # Composer calls it, which starts a process and takes half a second
    inject(target, statement)
    return {'run.py': run_recipe.main, 'diffusion': cli.main}[program](arguments)


if __name__ == '__main__':
    sys.exit(main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]))
