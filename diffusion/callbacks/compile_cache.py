"""Compiled code stored in the run's folder, so that restarts do not compile the blocks again."""

import logging
import os
import platform
import re
from pathlib import Path

import torch
from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from diffusion.compatibility.private_names import counters
from diffusion.storage.atomic import write_atomically
from diffusion.storage.local_files import open_own_file

log = logging.getLogger(__name__)


class CompileCache(Callback):
    """Callback that saves what torch.compile has compiled, and loads it when a run starts again.

    The first node writes `folder/RELEASE-PYTHON-DEVICE-gpuN.bin` for each of its devices N, after a batch that compiles
    nothing if earlier ones did, and at the end of training. Each process reads the file for its device. Files of other
    releases of PyTorch or Python, or other GPU models, are not read. If a file cannot be used, a warning is logged and
    the blocks are compiled.

    Args:
        folder: Folder on a file system that all nodes share, such as the run's.
    """

    # The files contain pickled objects, so only files owned by this user are read. Each device has its own file because
    # compiled code depends on the device's index.

    def __init__(self, folder: Path) -> None:
        self.path = folder / file_name()
        self._saved = self._seen = 0

    def init(self, state: State, logger: Logger) -> None:
        # Load the file before the first batch, in which the blocks are compiled.
        load(self.path)
        self._saved = self._seen = compiled_graphs()

    def batch_end(self, state: State, logger: Logger) -> None:
        # Save only after a batch that compiled nothing: until then, a batch may compile code for another image shape.
        before, self._seen = self._seen, compiled_graphs()
        if self._seen == before and self._seen != self._saved:
            self._save()

    def fit_end(self, state: State, logger: Logger) -> None:
        if compiled_graphs() != self._saved:
            self._save()

    def _save(self) -> None:
        """Save this process's compiled code if it is on the first node and has compiled something new."""
        self._saved = self._seen = compiled_graphs()
        if dist.get_node_rank() or not counters['inductor']['fxgraph_cache_miss']:
            return
        artifacts = torch.compiler.save_cache_artifacts()
        if artifacts is None:
            return
        try:
            write_atomically(self.path, artifacts[0])
        except OSError as error:
            # The cache only saves time: a full disk must not end the run.
            log.warning('compiled code was not saved, so a restart compiles it again: %s', error)
            return
        log.info('%s: compiled code saved, %.1f MB', self.path, len(artifacts[0]) / 1e6)


def load(path: Path) -> None:
    """Load compiled code from a file, if it exists and this user owns it; failures are only logged."""
    try:
        with os.fdopen(open_own_file(path, os.O_RDONLY), 'rb') as file:
            if os.fstat(file.fileno()).st_uid != os.getuid():
                log.warning('%s: belongs to another user, so it is not read; the blocks are compiled again', path)
                return
            content = file.read()
    except FileNotFoundError:
        return
    except OSError as error:
        log.warning('%s: cannot be read, so the blocks are compiled again: %s', path, error)
        return
    if torch.compiler.load_cache_artifacts(content) is None:  # torch has logged the reason
        log.warning('%s: is damaged, so the blocks are compiled again', path)


def compiled_graphs() -> int:
    return counters['stats']['unique_graphs']


def file_name() -> str:
    """Return this process's file name: PyTorch's and Python's version, GPU model (else CPU type), device index."""
    on_gpu = torch.cuda.is_available()
    device = torch.cuda.get_device_name() if on_gpu else platform.machine()
    parts = (torch.__version__, f'python{platform.python_version()}', device, f'gpu{dist.get_local_rank()}')
    return '-'.join(re.sub(r'[^A-Za-z0-9.+]+', '_', part) for part in parts) + '.bin'
