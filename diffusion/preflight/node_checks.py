"""Checks of a node by itself: GPUs, shared memory, disks, the run's folder, and a shard of each stream."""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from diffusion.config.byte_sizes import bytes_text
from diffusion.config.image_shapes import BUCKETS
from diffusion.config.recipe import Recipe, StreamConfig
from diffusion.data.shard_cache import INDEX
from diffusion.errors import UserError
from diffusion.exit_codes import CONFIG_ERROR, FAILED
from diffusion.launch import environment
from diffusion.launch.findings import Finding
from diffusion.launch.gpu_health import check_gpus
from diffusion.planning.checkpoint_interval import sizes_of
from diffusion.planning.model_costs import ModelCosts
from diffusion.storage.object_store import read
from diffusion.storage.retry import GaveUp, RetryPolicy

SHM = Path('/dev/shm')
SHM_BYTES = 2**28
"""Free /dev/shm that each process needs; Docker's default is a quarter of it for the whole container."""
SCRATCH_BYTES = 2**30
TIMEOUT_SECONDS = 60.0


def check_node(recipe: Recipe, *, kind: str, processes: int, nvml: Any | None) -> list[Finding]:
    """Run all checks of this node.

    Args:
        recipe: The recipe to be trained.
        kind: The required GPU as in planning/gpus.yaml; `any` accepts all, `none` is a CPU.
        processes: Number of processes of this node, one per GPU.
        nvml: The module pynvml, or a substitute; None if there is no driver.
    """
    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        'gpu': lambda: check_gpus(nvml, kind, processes),
        'shared memory': lambda: check_shared_memory(processes),
        'disk': lambda: check_disks(recipe),
        'checkpoints': lambda: check_run_folder(recipe),
        'data': lambda: (
            finding for name, stream in recipe.streams.items() for finding in check_first_shard(name, stream)
        ),
    }
    found: list[Finding] = []
    for name, check in checks.items():
        try:
            found += check()
        except Exception as error:  # a lost file system raises anything, and the other nodes wait for an answer
            found.append(Finding(name, False, f'cannot be checked ({error!r})'))
    host = environment.machine_name(os.environ)
    return [replace(finding, where=host) for finding in found]


def check_shared_memory(processes: int) -> Iterator[Finding]:
    """Check the free memory of /dev/shm, through which loaders pass their batches."""
    if SHM.is_dir():
        free, needed = shutil.disk_usage(SHM).free, SHM_BYTES * processes
        way_out = '' if free >= needed else f' of {bytes_text(needed)}; docker run --shm-size, or a Memory volume'
        yield Finding('shared memory', free >= needed, f'{bytes_text(free)} free{way_out}', CONFIG_ERROR)


def check_disks(recipe: Recipe) -> Iterator[Finding]:
    """Check that there is room for temporary files, and for a new checkpoint beside the one it replaces."""
    # Not tempfile.gettempdir(), which silently takes another folder if this one is full.
    temporary = Path(os.environ.get('TMPDIR', '/tmp'))
    folders = {temporary: SCRATCH_BYTES, recipe.run_dir: 2 * checkpoint_bytes(recipe)}
    for folder, needed in folders.items():
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        free = shutil.disk_usage(there).free
        way_out = '' if free >= needed else f' of {bytes_text(needed)}; clear it'
        yield Finding('disk', free >= needed, f'{folder}: {bytes_text(free)} free{way_out}')


def checkpoint_bytes(recipe: Recipe) -> int:
    """Return the size of a checkpoint with all averages; half of SCRATCH_BYTES for a model that was not counted."""
    try:
        model = ModelCosts(recipe.model, recipe.imports)
    except UserError:  # a part's configuration is broken; the run will say so
        return SCRATCH_BYTES // 2
    # Counting imports Composer in another process: too long for all other processes of a job to wait.
    return sizes_of(recipe, model).with_averages if model.is_counted else SCRATCH_BYTES // 2


def check_run_folder(recipe: Recipe) -> Iterator[Finding]:
    """Check that this node can write into the run's folder."""
    marker = recipe.run_dir / f'.preflight-{environment.machine_name(os.environ)}-{uuid4().hex[:8]}'
    try:
        recipe.run_dir.mkdir(parents=True, exist_ok=True)
        marker.write_text('written by a preflight')
        marker.unlink()
    except OSError as error:
        yield Finding('checkpoints', False, f'{recipe.run_dir}: cannot be written ({error}); is it mounted?')
    else:
        yield Finding('checkpoints', True, f'{recipe.run_dir}: written and removed')


def check_first_shard(name: str, stream: StreamConfig) -> Iterator[Finding]:
    """Check that a shard of a stream can be read from its origin."""
    origin = stream.remote or stream.local or ''
    try:
        shard = first_shard(origin, aspects=bool(stream.aspects))
    except (GaveUp, UserError) as error:
        yield Finding('data', False, f'streams.{name}: {error}', FAILED)
    except (ValueError, LookupError) as error:
        yield Finding('data', False, f'streams.{name}: {origin}: its index cannot be read ({error!r})', CONFIG_ERROR)
    else:
        yield Finding('data', True, f'streams.{name}: {shard} was read')


def first_shard(folder: str, *, aspects: bool) -> str:
    """Read the first shard of a folder of shards, or of one of shapes; returns its URL or path.

    Raises:
        UserError: A file is not there, or may not be read.
        GaveUp: A file cannot be read, or has not the size that its index says.
    """
    retry = RetryPolicy(tries=2, timeout_seconds=TIMEOUT_SECONDS)
    folder = folder.rstrip('/')
    if aspects:
        folder += f'/{next(iter(json.loads(read(f"{folder}/{BUCKETS}", retry=retry))["buckets"]))}'
    entry = json.loads(read(f'{folder}/{INDEX}', retry=retry))['shards'][0]
    file = entry.get('zip_data') or entry['raw_data']
    shard = f'{folder}/{file["basename"]}'
    size = len(read(shard, retry=retry))
    if size != file['bytes']:
        raise GaveUp(f'{shard}: {size} bytes came of {file["bytes"]}')
    return shard
