"""Shorten the spin of OpenMP threads: how long PyTorch's idle CPU threads check for work before they sleep."""

import os
import sys
from collections.abc import Container, MutableMapping

SPIN_COUNT = 1500
"""Number of checks for work before an idle thread sleeps: about 15 us by the estimate in libgomp's env.c.

benchmarks/busy_machine.py compares values.
"""
SPIN_VARIABLE = 'GOMP_SPINCOUNT'
POLICY_VARIABLE = 'OMP_WAIT_POLICY'


def shorten_spin(environ: MutableMapping[str, str] = os.environ, loaded: Container[str] = sys.modules) -> None:
    """Set GOMP_SPINCOUNT for this process and its children, unless the user has set it or OMP_WAIT_POLICY.

    If torch is already loaded, this does nothing, because libgomp reads the variable only when it is loaded.
    """
    # libgomp's default is 300,000 checks, 3 to 15 ms. If processes share cores, as ranks and loader workers do on GPU
    # machines too, a spinning thread may occupy the core of the very thread that it waits for, and a batch takes
    # several times as long. The short spin does not change results.
    if 'torch' not in loaded and SPIN_VARIABLE not in environ and POLICY_VARIABLE not in environ:
        environ[SPIN_VARIABLE] = str(SPIN_COUNT)


def describe_spin(environ: MutableMapping[str, str] = os.environ) -> str | None:
    """Return a log line if GOMP_SPINCOUNT has this package's value, else None."""
    if environ.get(SPIN_VARIABLE) != str(SPIN_COUNT):
        return None
    return (
        f'{SPIN_VARIABLE}={SPIN_COUNT}: idle CPU threads sleep early, so that other processes can use the cores; '
        f'set {SPIN_VARIABLE} or {POLICY_VARIABLE} to choose another wait'
    )
