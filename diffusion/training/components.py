"""From a recipe to the objects it names: the border between YAML and classes, which know nothing of recipes."""

import inspect
import os
import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import composer.utils.dist as composer_dist
import torch
from composer.core import Algorithm, Callback
from composer.loggers import LoggerDestination
from composer.models import ComposerModel
from streaming import Stream
from transformers import PreTrainedTokenizerBase

from diffusion.config import registry
from diffusion.config.checks import SUPPLIED
from diffusion.config.load import Component, Recipe, StreamConfig
from diffusion.config.performance_preset import effective_parts
from diffusion.config.recipe import SpeedConfig
from diffusion.data.fingerprint import fingerprint
from diffusion.data.host_limits import check_machine
from diffusion.data.loader import BucketedLoader, default_num_workers, outlive_signals
from diffusion.data.shard_cache import home
from diffusion.data.streams import Bucket
from diffusion.errors import UserError
from diffusion.training.expand_streams import by_shape
from diffusion.training.performance import takes_fused

DETERMINISTIC = {'crop': 'center', 'flip': False, 'caption_choice': 'first'}
"""What evaluation and precomputing change in the training dataset's settings."""
QUARANTINE = 'quarantine.jsonl'
"""In a run's folder: its bad samples, a line each."""


def build_model(recipe: Recipe) -> ComposerModel:
    """The model of a recipe, its denoiser untrained; initial weights depend on the recipe's seed alone."""
    kwargs = dict(recipe.model.kwargs)
    accepted = {parameter.name for parameter in registry.signature('model', recipe.model.name).parameters}
    if 'seed' in accepted:
        kwargs.setdefault('seed', recipe.seed)
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        return registry.build('model', recipe.model.name, kwargs)


def build_tokenizers(recipe: Recipe) -> list[PreTrainedTokenizerBase]:
    """The tokenizers of a recipe's model, without the model; none for a model that reads no text."""
    make = getattr(registry.resolve('model', recipe.model.name), 'tokenizers', None)
    if make is None:
        return []
    accepted = inspect.signature(make).parameters
    return make(**{key: value for key, value in recipe.model.kwargs.items() if key in accepted})


def build_dataset(
    recipe: Recipe,
    *,
    streams: Mapping[str, StreamConfig],
    component: Component,
    batch_size: int,
    shuffle: bool,
    elastic: bool = False,
    substitute: bool = False,
) -> Any:
    """The dataset over some of a recipe's streams; `batch_size` is a device's, `elastic` is what training wants."""
    settings = recipe.loader
    cache = cache_folder(recipe)
    streams = {name: _with_local(stream, cache) for name, stream in streams.items()}
    streams = by_shape(streams, smallest=recipe.global_batch if elastic else 1)
    streaming: dict[str, Any] = {
        'shuffle': shuffle,
        'shuffle_algo': settings.shuffle_algo,
        'shuffle_seed': recipe.seed if settings.shuffle_seed is None else settings.shuffle_seed,
        'shuffle_block_size': settings.shuffle_block_size,
        'num_canonical_nodes': settings.num_canonical_nodes if elastic else None,
        # A single stream has no resolutions to mix: both give it the same order, but per_stream drops what does not
        # fill a batch, and with workers warns that it does even where nothing is dropped.
        'batching_method': settings.batching_method if len(streams) > 1 else 'random',
        'epoch_size': settings.epoch_size if elastic else None,
        'elastic': elastic,
        'predownload': settings.predownload,
        'cache_folder': str(cache),
        'cache_limit': settings.cache_limit,
        'substitute': substitute,
    }
    buckets = [Bucket(name, _stream(stream), stream.picture_shape) for name, stream in streams.items()]
    supplied = {'tokenizers': build_tokenizers(recipe), 'batch_size': batch_size, 'seed': recipe.seed}
    return registry.build('dataset', component.name, component.kwargs, buckets=buckets, **supplied, **streaming)


def cache_folder(recipe: Recipe) -> Path:
    """Where the shards of streams are that have no folder of their own."""
    folder = recipe.loader.cache_folder
    own = Path(tempfile.gettempdir(), f'diffusion-{os.getuid()}', 'shards')
    return own if folder is None else Path(folder).absolute()


def build_loader(
    recipe: Recipe, split: Literal['train', 'eval'] = 'train', *, kind: type[BucketedLoader] = BucketedLoader
) -> BucketedLoader:
    """The loader of a recipe's `streams`, or of its `eval_streams`: centre crops and first captions, in order.

    Raises:
        UserError: The recipe has no such streams, or the global batch does not divide over the devices.
    """
    evaluating = split == 'eval'
    streams = recipe.eval_streams if evaluating else recipe.streams
    if not streams:
        raise UserError(f'{"eval_streams" if evaluating else "streams"}: the recipe has none; name at least one')
    world_size = composer_dist.get_world_size()
    if recipe.global_batch % world_size:
        raise UserError(
            f'global_batch={recipe.global_batch} does not divide over {world_size} devices; '
            f'use a multiple of {world_size}'
        )
    component = recipe.dataset
    if evaluating:
        component = recipe.eval_dataset or deterministic(recipe.dataset)
    batch_size = recipe.global_batch // world_size
    if evaluating and isinstance(recipe.device_train_microbatch_size, int):
        batch_size = min(batch_size, recipe.device_train_microbatch_size)
    dataset = build_dataset(
        recipe,
        streams=streams,
        component=component,
        batch_size=batch_size,
        shuffle=recipe.loader.shuffle and not evaluating,
        elastic=not evaluating,
        substitute=recipe.loader.max_bad_samples > 0,
    )
    settings = recipe.loader
    workers = settings.num_workers
    if workers is None:
        workers = default_num_workers(composer_dist.get_local_world_size())
    loader = kind(
        dataset,
        batch_size=batch_size,
        num_workers=workers,
        prefetch_factor=(settings.prefetch_factor or 2) if workers else None,
        persistent_workers=workers > 0,
        pin_memory=torch.cuda.is_available(),
        timeout=settings.timeout_seconds,
        max_bad_samples=settings.max_bad_samples,
        quarantine=recipe.run_dir / QUARANTINE,
        worker_init_fn=outlive_signals if workers else None,
        drop_last=not evaluating,
        stratified=not evaluating and (recipe.model.kwargs.get('objective') or {}).get('timesteps') == 'stratified',
    )
    check_machine(loader)
    return loader


def run_identity(recipe: Recipe, loader: BucketedLoader) -> dict[str, Any]:
    """What a run is, for `diffusion.callbacks.same_run.SameRun`: its seed, and the data of its training loader."""
    component = recipe.dataset
    parameters = inspect.signature(registry.resolve('dataset', component.name)).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty and p.name not in SUPPLIED['dataset']}
    settings = {'name': component.name} | defaults | component.kwargs
    return {'seed': recipe.seed, 'data': fingerprint(loader.dataset, settings)}


def deterministic(component: Component) -> Component:
    """A dataset's component without what is random about it."""
    accepted = {parameter.name for parameter in registry.signature('dataset', component.name).parameters}
    fixed = {key: value for key, value in DETERMINISTIC.items() if key in accepted}
    return Component(component.name, component.kwargs | fixed)


def build_optimizer(recipe: Recipe, model: ComposerModel) -> torch.optim.Optimizer:
    """The optimizer of a recipe over what the model trains."""
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    name, kwargs = recipe.optimizer.name, recipe.optimizer.kwargs
    accepted = [parameter.name for parameter in registry.signature('optimizer', name).parameters]
    fused = {'fused': True} if effective_speed(recipe).fused_optimizer and takes_fused(accepted, list(kwargs)) else {}
    return registry.build('optimizer', name, kwargs | fused, params=trained)


def on_gpu(recipe: Recipe) -> bool:
    """Whether a recipe's Trainer computes on a GPU here."""
    return torch.cuda.is_available() and recipe.trainer.get('device') in (None, 'gpu')


def effective_speed(recipe: Recipe) -> SpeedConfig:
    """The parts of a recipe's `speed` that apply here."""
    return effective_parts(recipe.speed, on_gpu=on_gpu(recipe), strategy=recipe.parallelism.strategy)


def build_algorithms(recipe: Recipe) -> list[Algorithm]:
    return _build_all('algorithm', recipe.algorithms, {'folder': str(recipe.run_dir)})


def build_callbacks(recipe: Recipe) -> list[Callback]:
    return _build_all('callback', recipe.callbacks, {'folder': str(recipe.run_dir)})


def build_loggers(recipe: Recipe) -> list[LoggerDestination]:
    return _build_all('logger', recipe.loggers, {'folder': str(recipe.run_dir)})


def _build_all(kind: str, components: Mapping[str, Component], offered: Mapping[str, Any] | None = None) -> list[Any]:
    """Build components, handing the offered values to those that take them and were given none."""
    built = []
    for component in components.values():
        accepted = {parameter.name for parameter in registry.signature(kind, component.name).parameters}
        extra = {
            key: value for key, value in (offered or {}).items() if key in accepted and key not in component.kwargs
        }
        built.append(registry.build(kind, component.name, component.kwargs, **extra))
    return built


def _with_local(config: StreamConfig, cache: Path) -> StreamConfig:
    if config.remote is None or config.local is not None:
        return config
    return replace(config, local=str(home(cache, config.remote)))


def _stream(config: StreamConfig) -> Stream:
    values = asdict(config)
    for ours in ('resolution', 'shape', 'aspects', 'remote'):
        del values[ours]
    if config.remote is not None and config.local is not None:
        Path(config.local).mkdir(parents=True, exist_ok=True)
    made = Stream(**{key: value for key, value in values.items() if value is not None})
    # Given to the constructor, Streaming would make a client for it, which is never used, and refuse az://.
    made.remote = config.remote
    return made
