"""Checks of a single node: GPUs, shared memory, disks, the run's folder, a shard per stream, and pretrained weights."""

import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cache, partial
from pathlib import Path
from typing import Any

import torch

from diffusion.checkpointing.checkpoint_lookup import find_checkpoint
from diffusion.config import registry
from diffusion.config.byte_sizes import bytes_text
from diffusion.config.image_shapes import BUCKETS
from diffusion.config.model_checks import PIXELS
from diffusion.config.path_checks import reads_initial_weights
from diffusion.config.recipe import Component, InitFrom, Recipe, StreamConfig
from diffusion.config.weight_sources import hub_repository, path_problem
from diffusion.data.shard_cache import INDEX
from diffusion.errors import ExternalError, GaveUp, UserError, exit_status
from diffusion.exit_codes import CONFIG_ERROR, FAILED
from diffusion.launch.gpu_health import Finding, check_gpus
from diffusion.planning.checkpoints import sizes_of
from diffusion.planning.model_costs import ModelCosts
from diffusion.preflight.storage_checks import check_bucket, marker_name
from diffusion.runs import environment
from diffusion.storage.local_files import WORKING_FOLDER_VARIABLE
from diffusion.storage.object_store import read
from diffusion.storage.retry import RetryPolicy

SHM = Path('/dev/shm')
SHM_BYTES = 2**28
"""Bytes that must be free in /dev/shm per process. Docker's default for a whole container is only a quarter of this."""
SCRATCH_BYTES = 2**30
TIMEOUT_SECONDS = 60.0


def check_node(recipe: Recipe, *, kind: str, processes: int, nvml: Any | None) -> list[Finding]:
    """Run all checks of this node, and return their findings.

    Args:
        kind: The required GPU model as in planning/gpus.yaml; `any` accepts all, `none` skips the GPU checks.
        processes: Number of processes on this node, one per GPU.
        nvml: The module pynvml, or a substitute; None without an NVIDIA driver.
    """
    checks: dict[str, Callable[[], Iterable[Finding]]] = {
        'gpu': lambda: check_gpus(nvml, kind, processes),
        'shared memory': lambda: check_shared_memory(processes),
        'disk': lambda: check_disks(recipe),
        'checkpoints': lambda: check_run_folder(recipe),
        'data': lambda: (
            finding for name, stream in recipe.streams.items() for finding in check_first_shard(name, stream)
        ),
        'weights': lambda: check_sources(recipe),
    }
    found: list[Finding] = []
    for name, check in checks.items():
        try:
            found += check()
        except Exception as error:
            # A broken file system or driver can raise any exception. Turn it into a finding, because all other nodes
            # wait in a collective for this node's findings.
            found.append(Finding(name, False, f'check failed ({error!r})'))
    host = environment.machine_name(os.environ)
    return [replace(finding, where=host) for finding in found]


def check_shared_memory(processes: int) -> Iterator[Finding]:
    """Check that /dev/shm, through which data loader workers pass batches, has enough free memory."""
    if SHM.is_dir():
        free, needed = shutil.disk_usage(SHM).free, SHM_BYTES * processes
        way_out = '' if free >= needed else f' of {bytes_text(needed)}; use docker run --shm-size or a Memory volume'
        yield Finding('shared memory', free >= needed, f'{bytes_text(free)} free{way_out}', CONFIG_ERROR)


def check_disks(recipe: Recipe) -> Iterator[Finding]:
    """Check the free disk space for temporary files, and for a new checkpoint in addition to the previous one."""
    # Do not use tempfile.gettempdir(), which silently chooses another folder if this folder is full.
    temporary = Path(os.environ.get('TMPDIR', '/tmp'))
    folders = {temporary: SCRATCH_BYTES, recipe.run_dir: 2 * (checkpoint_bytes(recipe) or SCRATCH_BYTES // 2)}
    for folder, needed in folders.items():
        # Use the nearest existing parent: disk_usage needs an existing path, but the run's folder may not exist yet.
        existing = next(path for path in (folder, *folder.absolute().parents) if path.exists())
        free = shutil.disk_usage(existing).free
        way_out = '' if free >= needed else f' of {bytes_text(needed)}; delete files'
        if way_out and recipe.run_url is not None and folder == recipe.run_dir:
            way_out += f', or set {WORKING_FOLDER_VARIABLE} to a folder on a larger disk'
        yield Finding('disk', free >= needed, f'{folder}: {bytes_text(free)} free{way_out}')


def checkpoint_bytes(recipe: Recipe) -> int | None:
    """Return the size of a checkpoint with averaged weights in bytes, or None if the model's size is unknown."""
    try:
        model = ModelCosts(recipe.model, recipe.imports, recipe.lora)
    except UserError:  # the run itself reports the broken configuration of a part
        return None
    # Do not count parameters now: the whole job would wait for a process that imports torch and runs the model.
    return sizes_of(recipe, model).with_averages if model.is_counted else None


def check_run_folder(recipe: Recipe) -> Iterator[Finding]:
    """Check that this node can write to the run's folder; for a run in a bucket, to a local folder and the bucket."""
    marker = recipe.run_dir / marker_name()
    try:
        recipe.run_dir.mkdir(parents=True, exist_ok=True)
        marker.write_text('written by a preflight')
        marker.unlink()
    except OSError as error:
        way_out = 'check that it is mounted'
        if recipe.run_url is not None:
            way_out = f'set {WORKING_FOLDER_VARIABLE} to a folder on a local disk'
        yield Finding('checkpoints', False, f'{recipe.run_dir} cannot be written ({error}); {way_out}')
    else:
        yield Finding('checkpoints', True, f'{recipe.run_dir}: test file written and deleted')
    if recipe.run_url is not None:
        yield from check_bucket(recipe.run_url)


def check_first_shard(name: str, stream: StreamConfig) -> Iterator[Finding]:
    """Check that the first shard of a data stream can be read from `remote` or, if that is not set, from `local`."""
    origin = stream.remote or stream.local or ''
    try:
        shard = first_shard(origin, aspects=bool(stream.aspects))
    except (GaveUp, UserError) as error:
        yield Finding('data', False, f'streams.{name}: {error}', FAILED)
    except (ValueError, LookupError) as error:
        yield Finding('data', False, f'streams.{name}: {origin}: its index cannot be read ({error!r})', CONFIG_ERROR)
    else:
        yield Finding('data', True, f'streams.{name}: read {shard}')


def first_shard(folder: str, *, aspects: bool) -> str:
    """Read a dataset's first shard and return its URL or path; `aspects` means one subfolder per image shape."""
    retry = RetryPolicy(tries=2, timeout_seconds=TIMEOUT_SECONDS)
    folder = folder.rstrip('/')
    if aspects:
        folder += f'/{next(iter(json.loads(read(f"{folder}/{BUCKETS}", retry=retry))["buckets"]))}'
    entry = json.loads(read(f'{folder}/{INDEX}', retry=retry))['shards'][0]
    file = entry.get('zip_data') or entry['raw_data']
    shard = f'{folder}/{file["basename"]}'
    size = len(read(shard, retry=retry))
    if size != file['bytes']:
        raise GaveUp(f'{shard}: read {size} of {file["bytes"]} bytes')
    return shard


CHECK = 'weights'
POLICY = RetryPolicy(tries=3, timeout_seconds=10.0)
"""Retries of requests to the Hub. It is reported as unreachable after 40 seconds; in a run, after three minutes."""
EXTRAS = ('representation_alignment', 'perceptual_losses')
"""Settings of models whose key `encoder` may name a further pretrained network, an image encoder."""


@dataclass(frozen=True)
class Source:
    """A key of a recipe that names pretrained weights."""

    where: str
    value: str
    check: Callable[[], str]
    """Function that returns where the weights are ('' if `checking_weights` lists it), or raises UserError or
    ExternalError."""


def check_sources(recipe: Recipe) -> list[Finding]:
    """Check the pretrained weights that a recipe names, for this package's models; stop if the Hub is unreachable."""
    if not registry.is_own('model', recipe.model.name):
        return []
    sources = _sources(recipe)
    if not sources:
        return []
    # Import these here: that takes many seconds, and recipes without pretrained weights do not need it.
    from diffusion.models import hub_files
    from diffusion.models.pretrained import checking_weights

    findings = []
    with hub_files.retrying(POLICY), checking_weights() as checked, torch.device('meta'):
        for source in sources:
            checked.clear()
            try:
                place = source.check()
            except (UserError, ExternalError) as error:
                message = f'{source.where}: {str(error).removeprefix(f"{source.where}: ")}'
                findings.append(Finding(CHECK, False, message, exit_status(error)))
                if isinstance(error, ExternalError):
                    break  # skip the other sources, which would wait for the Hub again
            else:
                places = ', '.join(checked) or place
                findings.append(Finding(CHECK, True, f'{source.where}: {source.value} ({places})'))
    return findings


def _sources(recipe: Recipe) -> list[Source]:
    """Return the keys of a recipe that name pretrained weights, starting with those that are never on the Hub."""
    kwargs = registry.settings_of('model', recipe.model)
    parts = {key: each for key, each in recipe.model.kwargs.items() if key not in EXTRAS}
    build = cache(partial(registry.build, 'model', Component(recipe.model.name, parts)))
    sources = []
    backbone = (kwargs.get('perceptual_losses') or {}).get('lpips_backbone')
    if backbone:
        where = 'model.perceptual_losses.lpips_backbone'
        sources.append(Source(where, str(backbone), partial(_check_file, str(backbone))))
    named = {key: kwargs[key] for key in ('pretrained', 'vae') if kwargs.get(key) not in (None, PIXELS)}
    if named:
        # Check these keys together by building the model, which requests only the weights that it needs.
        where = ', '.join(f'model.{key}' for key in named)
        sources.append(Source(where, ', '.join(map(str, named.values())), partial(_check_model, build)))
    for key in EXTRAS:
        settings = kwargs.get(key) or {}
        if settings.get('encoder'):
            where = f'model.{key}.encoder'
            sources.append(Source(where, settings['encoder'], partial(_check_encoder, where, settings)))
    start = recipe.initial_weights if reads_initial_weights(recipe) else None
    if start is not None:
        sources.append(Source('init_from', start.source, partial(_check_initial_weights, build, start)))
    return sources


def _check_model(build: Callable[[], Any]) -> str:
    build()
    return ''  # `checking_weights` has listed the parts


def _check_encoder(where: str, settings: Mapping[str, Any]) -> str:
    from diffusion.models.representation_alignment import load_feature_encoder

    load_feature_encoder(settings['encoder'], settings.get('revision'), where=where)
    return ''


def _check_file(path: str) -> str:
    if not Path(path).is_file():
        raise UserError(f'{path} does not exist on this machine; copy it there, or correct the path')
    return 'found'


def _check_initial_weights(build: Callable[[], Any], start: InitFrom) -> str:
    from diffusion.models.diffusers_weights import check_hub_denoiser, check_local_denoiser
    from diffusion.models.hub_files import missing_size
    from diffusion.training import initial_weights

    if (problem := path_problem(start)) is not None:
        raise UserError(problem)
    reader, path = initial_weights.reader_of(start), Path(start.source)
    if reader is initial_weights.read_single_file:
        return _check_file(start.source)
    if reader is initial_weights.read_checkpoint:
        return str(find_checkpoint(path))
    built, repository = initial_weights.with_denoiser(build(), start), hub_repository(start)
    if repository is None:
        check_local_denoiser(built.denoiser, path)
        return 'found'
    assert start.revision is not None, 'the check of the recipe requires a revision'
    if (name := initial_weights.original_on_hub(built, start)) is not None:
        size = missing_size(repository, name, revision=start.revision)
    else:
        size = check_hub_denoiser(built.denoiser, repository, start.revision)
    return f'{bytes_text(size)} to download' if size else 'in the cache'
