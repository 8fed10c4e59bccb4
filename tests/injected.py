"""Run a program with injected faults: `injected.py TARGET STATEMENT PROGRAM ARGUMENTS...`.

TARGET, such as `diffusion.training.components:build_model`, is replaced by a function that executes STATEMENT. With a
call number, as in `diffusion.models.latent_diffusion:LatentDiffusion.forward@3`, STATEMENT is executed before the third
call only, and with `@3+` before the third and every later call; then the function itself runs, unless STATEMENT raised.
PROGRAM is `run.py` or `diffusion`.
"""

import errno
import functools
import importlib
import os
import signal
import sys
import time
from collections.abc import Sequence
from typing import Any


def inject(target: str, statement: str) -> None:
    """Replace `module:attribute`, or its calls with certain numbers, by a function that executes a statement."""
    module, _, path = target.partition(':')
    path, _, calls = path.partition('@')
    *outer, name = path.split('.')
    owner: Any = importlib.import_module(module)
    for each in outer:
        owner = getattr(owner, each)
    original, count = getattr(owner, name), 0

    @functools.wraps(original)
    def injected(*arguments: object, **keywords: object) -> object:
        nonlocal count
        count += 1
        first = int(calls.rstrip('+') or 1)
        if not calls or count == first or (calls.endswith('+') and count > first):
            import numpy
            import torch

            known = {'os': os, 'errno': errno, 'numpy': numpy, 'torch': torch, 'signal': signal, 'time': time}
            exec(statement, known | {'injected': injected})
        return original(*arguments, **keywords) if calls else None

    setattr(owner, name, injected)


def raising(name: str) -> str:
    """Return a statement that raises the OSError of an errno's name, such as ESTALE."""
    return f'raise OSError(errno.{name}, os.strerror(errno.{name}))'


def shorten_waits() -> None:
    """Shorten pauses between retries, and skip Composer's slow query of the CPU."""
    import cpuinfo

    from diffusion.checkpointing import checkpoint_store, checkpointer
    from diffusion.storage import local_files

    checkpoint_store.RETRY_PAUSES_SECONDS = (0.01, 0.01)
    checkpointer.LAST_SAVE_PAUSES_SECONDS = (0.01, 0.01)
    local_files.VISIBLE_SECONDS = 2.0
    cpuinfo.get_cpu_info = dict  # Composer calls it, which starts a process and takes half a second


def main(target: str, statement: str, program: str, arguments: Sequence[str]) -> int:
    from diffusion import cli
    from diffusion.tasks import run_recipe

    shorten_waits()
    inject(target, statement)
    return {'run.py': run_recipe.main, 'diffusion': cli.main}[program](arguments)


if __name__ == '__main__':
    from diffusion.launch.workers import end_process

    end_process(main(sys.argv[1], sys.argv[2], sys.argv[3], sys.argv[4:]))
