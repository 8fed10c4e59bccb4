"""What a node can find out by itself: shared memory, disks, the folder of checkpoints, and one real shard."""

import json
import os
import shutil
import tempfile
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
from diffusion.storage.download import GaveUp, RemoteFolder

SHM = Path('/dev/shm')
SHM_BYTES = 2**28
"""Of /dev/shm a process; Docker's default is a quarter of it for the whole container."""
SCRATCH_BYTES = 2**30
TIMEOUT_SECONDS = 60.0


def check_node(recipe: Recipe, *, kind: str, processes: int, nvml: Any | None) -> list[Finding]:
    """All checks of this node.

    Args:
        recipe: What will be trained.
        kind: Of the GPUs, as in planning/gpus.yaml, or `none`.
        processes: Of this node, one a GPU.
        nvml: The module pynvml, or what behaves like it.
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
        except Exception as error:  # a file system that is gone raises anything; the other nodes wait for an answer
            found.append(Finding(name, False, f'cannot be checked ({error!r})'))
    host = environment.machine_name(os.environ)
    return [replace(finding, where=host) for finding in found]


def check_shared_memory(processes: int) -> Iterator[Finding]:
    """What loaders hand their batches over in."""
    if SHM.is_dir():
        free, needed = shutil.disk_usage(SHM).free, SHM_BYTES * processes
        way_out = '' if free >= needed else f' of {bytes_text(needed)}; docker run --shm-size, or a Memory volume'
        yield Finding('shared memory', free >= needed, f'{bytes_text(free)} free{way_out}', CONFIG_ERROR)


def check_disks(recipe: Recipe) -> Iterator[Finding]:
    """Room for temporary files, and for a checkpoint beside the one that it replaces."""
    # Not tempfile's: where this one is full, it goes elsewhere without a word.
    temporary = Path(os.environ.get('TMPDIR', '/tmp'))
    folders = {temporary: SCRATCH_BYTES, recipe.run_dir: 2 * checkpoint_bytes(recipe)}
    for folder, needed in folders.items():
        there = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        free = shutil.disk_usage(there).free
        way_out = '' if free >= needed else f' of {bytes_text(needed)}; clear it'
        yield Finding('disk', free >= needed, f'{folder}: {bytes_text(free)} free{way_out}')


def checkpoint_bytes(recipe: Recipe) -> int:
    """Size of a checkpoint with all averages; half of SCRATCH_BYTES for a model that has not been counted."""
    try:
        model = ModelCosts(recipe.model, recipe.imports)
    except UserError:  # a part's configuration is broken; the run will say so
        return SCRATCH_BYTES // 2
    # Counting imports Composer in another process: too long for all other processes of a job to wait.
    return sizes_of(recipe, model).with_averages if model.is_counted else SCRATCH_BYTES // 2


def check_run_folder(recipe: Recipe) -> Iterator[Finding]:
    """Whether this node can write where checkpoints go."""
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
    """Whether a shard of a stream can be read from its origin."""
    origin = stream.remote or stream.local or ''
    source = RemoteFolder(origin, tries=2, timeout_seconds=TIMEOUT_SECONDS, wait=lambda: None)
    try:
        read = first_shard(source, aspects=bool(stream.aspects))
    except GaveUp as error:
        yield Finding('data', False, f'streams.{name}: {error}', FAILED)
    except (ValueError, LookupError) as error:
        yield Finding('data', False, f'streams.{name}: {origin}: its index cannot be read ({error!r})', CONFIG_ERROR)
    else:
        yield Finding('data', True, f'streams.{name}: {source.address(read)} was read')


def first_shard(source: RemoteFolder, *, aspects: bool) -> str:
    """Read the first shard of a folder of shards, or of one of shapes; its name.

    Raises:
        GaveUp: A file cannot be had, or has not the size that its index says.
    """
    with tempfile.TemporaryDirectory() as folder:
        here = Path(folder, 'file')

        def fetched(name: str) -> bytes:
            try:
                source.refresh(name, here)
            except GaveUp as error:
                raise GaveUp(f'{source.address(name)}: {error}') from error
            content = here.read_bytes()
            here.unlink()  # which would do for the next one that cannot be had
            return content

        inside = f'{next(iter(json.loads(fetched(BUCKETS))["buckets"]))}/' if aspects else ''
        entry = json.loads(fetched(f'{inside}{INDEX}'))['shards'][0]
        file = entry.get('zip_data') or entry['raw_data']
        name = f'{inside}{file["basename"]}'
        size = len(fetched(name))
        if size != file['bytes']:
            raise GaveUp(f'{source.address(name)}: {size} bytes came of {file["bytes"]}')
        return name
