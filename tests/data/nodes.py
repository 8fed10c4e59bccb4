"""Nodes of one machine: processes with mounts, a host name and temporary folders of their own."""

import ctypes
import gc
import os
import pickle
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from numbered import cached_loader, served
from processes import Forked
from ranks import free_port

from diffusion.data import shared_state

CLONE_NEWNS, CLONE_NEWUTS = 0x20000, 0x4000000
NODES, EPOCHS = 4, 2


def can_isolate() -> bool:
    """Return True if this process may give its children mounts and a host name of their own."""
    command = ['unshare', '--mount', '--uts', 'true']
    return os.geteuid() == 0 and not subprocess.run(command, capture_output=True, check=False).returncode


def isolate(name: str, temporary: Path) -> None:
    """Give this process a host name, a /dev/shm and a temporary folder of its own, as a node has."""
    libc = ctypes.CDLL(None, use_errno=True)
    assert libc.unshare(CLONE_NEWNS | CLONE_NEWUTS) == 0, os.strerror(ctypes.get_errno())
    subprocess.run(['mount', '--make-rprivate', '/'], check=True)
    subprocess.run(['mount', '-t', 'tmpfs', 'tmpfs', '/dev/shm'], check=True)
    subprocess.run(['hostname', name], check=True)
    temporary.mkdir(exist_ok=True)
    os.environ['TMPDIR'] = tempfile.tempdir = str(temporary)
    os.environ['GLOO_SOCKET_IFNAME'] = 'lo'  # the host name has no address
    os.environ['PYTHONWARNINGS'] = 'ignore'  # of shared memory that is not freed by os._exit, but goes with its mount
    shared_state.LOCK = temporary / shared_state.LOCK.name  # of a machine: found at the import


def start_nodes(url: str, folder: Path, *, mounted: Path | None = None, **settings: Any) -> list[Forked]:
    """Read epochs in a job of several nodes with one device each, and a cache each unless they mount one folder."""
    port = free_port()
    folder.mkdir()

    def run(number: int) -> None:
        isolate(f'node{number}', folder / f'tmp-{number}')
        import torch

        os.environ |= {'RANK': str(number), 'NODE_RANK': str(number), 'WORLD_SIZE': str(NODES)}
        os.environ |= {'LOCAL_RANK': '0', 'LOCAL_WORLD_SIZE': '1', 'MASTER_ADDR': '127.0.0.1', 'MASTER_PORT': str(port)}
        cache = folder / f'cache-{number}'
        if mounted is not None:
            cache.mkdir()
            subprocess.run(['mount', '--bind', str(mounted), str(cache)], check=True)
        torch.distributed.init_process_group('gloo')
        loader = cached_loader(url, cache, predownload=24, **settings)
        found = [served(loader) for _ in range(EPOCHS)]
        (folder / f'samples-{number}').write_bytes(pickle.dumps(found))
        torch.distributed.barrier()
        del loader
        gc.collect()  # ends the threads and frees the shared memory; the process ends without finalizers

    return [Forked(lambda number=number: run(number)) for number in range(NODES)]


def samples_of(folder: Path, number: int) -> list[dict[int, int]]:
    return pickle.loads((folder / f'samples-{number}').read_bytes())
