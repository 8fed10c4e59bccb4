"""Build the objects named in a recipe: model, datasets, loaders, optimizer, callbacks.

Only these functions and the tasks take a `Recipe`; the classes they build take plain values.
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import composer.utils.dist as composer_dist
import torch
from composer.models import ComposerModel
from streaming import Stream
from torch import nn
from transformers import PreTrainedTokenizerBase

from diffusion.compatibility.torch_versions import kernels_problem
from diffusion.config import registry
from diffusion.config.checks import SUPPLIED
from diffusion.config.families import family_of_model
from diffusion.config.load import Component, Recipe, StreamConfig, saved_values
from diffusion.config.model_checks import optimizer_problem
from diffusion.config.recipe import LoaderConfig, SpeedConfig, effective_parts
from diffusion.config.signatures import of_object
from diffusion.data.host_limits import check_machine
from diffusion.data.loader import BucketedLoader, default_num_workers, ignore_stop_signals
from diffusion.data.shard_cache import home
from diffusion.data.streams import Bucket, fingerprint
from diffusion.errors import UserError
from diffusion.models import lora
from diffusion.models.latent_diffusion import LatentDiffusion
from diffusion.storage.local_files import user_folder
from diffusion.training.expand_streams import by_shape
from diffusion.training.performance import FUSED_ALTERNATIVES

DETERMINISTIC = {'crop': 'center', 'flip': False, 'caption_choice': 'first', 'caption_weights': None}
"""Keyword arguments that make a training dataset return the same samples in every evaluation."""
QUARANTINE = 'quarantine.jsonl'
"""File in the run's folder with one JSON line per replaced sample."""


def build_model(recipe: Recipe) -> ComposerModel:
    """Build a recipe's model; the denoiser's initial weights depend only on the recipe's seed.

    Raises:
        UserError: The argument is not a recipe, or its model cannot be built.
    """
    _check_is_recipe(recipe)
    # fork_rng restores the generator's state, so that building a model does not affect other random numbers.
    with torch.random.fork_rng():
        torch.manual_seed(recipe.seed)
        return registry.build('model', recipe.model, offered={'seed': recipe.seed})


def _check_is_recipe(recipe: object) -> None:
    """Raise UserError unless a value is a recipe; for functions that users call."""
    if not isinstance(recipe, Recipe):
        is_path = isinstance(recipe, str | Path)
        way_out = f'diffusion.load({str(recipe)!r})' if is_path else 'the result of diffusion.load'
        shown = repr(recipe) if is_path else f'a {type(recipe).__name__}'
        raise UserError(f'recipe: {shown} is not a recipe; pass {way_out}')


def add_lora(recipe: Recipe, model: ComposerModel) -> None:
    """Add a recipe's LoRA to its model's denoiser, and freeze the denoiser's other weights.

    Raises:
        UserError: The model has no denoiser, the model trains its text encoder, or a LoRA target matches no layer.
    """
    assert recipe.lora is not None
    if not isinstance(model, LatentDiffusion):
        raise UserError('lora: the model has no denoiser to train; remove the section')
    if model.train_text_encoder:
        raise UserError('lora: only trains the denoiser; set model.train_text_encoder: false')
    lora.add_lora(model.denoiser, recipe.lora, seed=recipe.seed)
    model.denoiser_is_frozen = True


def build_tokenizers(recipe: Recipe) -> list[PreTrainedTokenizerBase]:
    """Build the tokenizers of a recipe's model without the model; an empty list if the model takes no text."""
    make = getattr(registry.resolve('model', recipe.model.name), 'tokenizers', None)
    return [] if make is None else make(**of_object(make).accepted(recipe.model.kwargs))


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
    """Build a dataset from some of a recipe's streams.

    Args:
        batch_size: Samples per device per batch.
        elastic: Yield the same global batches, all of them full, on any number of devices; used for training.
        substitute: Replace samples that cannot be decoded.
    """
    settings = recipe.loader
    cache = cache_folder(settings)
    streams = {name: _with_local(stream, cache) for name, stream in streams.items()}
    streams = by_shape(streams, smallest=recipe.global_batch if elastic else 1)
    streaming: dict[str, Any] = {
        'shuffle': shuffle,
        'shuffle_algo': settings.shuffle_algo,
        'shuffle_seed': recipe.seed if settings.shuffle_seed is None else settings.shuffle_seed,
        'shuffle_block_size': settings.shuffle_block_size,
        'num_canonical_nodes': settings.num_canonical_nodes if elastic else None,
        # For a single stream, `random` and `per_stream` give the same order, but `per_stream` drops samples that do not
        # fill a batch, and with workers Streaming warns about that even if none are dropped.
        'batching_method': settings.batching_method if len(streams) > 1 else 'random',
        'epoch_size': settings.epoch_size if elastic else None,
        'elastic': elastic,
        'predownload': settings.predownload,
        'cache_folder': str(cache),
        'cache_limit': settings.cache_limit,
        'substitute': substitute,
    }
    buckets = [Bucket(name, _stream(stream), stream.image_shape) for name, stream in streams.items()]
    supplied = {'tokenizers': build_tokenizers(recipe), 'batch_size': batch_size, 'seed': recipe.seed}
    if family_of_model(recipe.model.name).image_sizes:
        # Pass `image_sizes` only for models that need it: a user's dataset class for other models may not accept it.
        if not registry.signature('dataset', component.name).accepted({'image_sizes': True}):
            raise UserError(
                f'dataset.name: {component.name} takes no keyword image_sizes, but the model {recipe.model.name} is '
                'conditioned on image sizes; add the keyword, or use image_text or latents'
            )
        supplied['image_sizes'] = True
    # In training with representation alignment, request stored image features from datasets that accept the argument.
    if elastic and recipe.model.kwargs.get('representation_alignment'):
        supplied |= registry.signature('dataset', component.name).accepted({'image_features': True})
    return registry.build('dataset', component, buckets=buckets, **supplied, **streaming)


def cache_folder(settings: LoaderConfig) -> Path:
    """Return the local cache folder for shards of a recipe's remote streams that have no `local` folder."""
    folder = settings.cache_folder
    return user_folder() / 'shards' if folder is None else Path(folder).absolute()


def build_loader(
    recipe: Recipe, split: Literal['train', 'eval'] = 'train', *, kind: type[BucketedLoader] = BucketedLoader
) -> BucketedLoader:
    """Build the loader for a recipe's `streams`, or for its `eval_streams` (by default center crops, no shuffle).

    Raises:
        UserError: An argument is wrong, the recipe has no such streams, or the number of devices does not divide the
            global batch.
    """
    _check_is_recipe(recipe)
    if split not in ('train', 'eval'):
        raise UserError(f"split: {split!r} is unknown; use 'train' for streams or 'eval' for eval_streams")
    settings, evaluating = recipe.loader, split == 'eval'
    streams = recipe.eval_streams if evaluating else recipe.streams
    if not streams:
        raise UserError(f'{"eval_streams" if evaluating else "streams"}: the recipe has none; name at least one')
    world_size = composer_dist.get_world_size()
    if recipe.global_batch % world_size:
        raise UserError(
            f'global_batch={recipe.global_batch} is not divisible by {world_size} devices; '
            f'use a multiple of {world_size}'
        )
    batch_size = recipe.global_batch // world_size
    # Evaluation has no microbatches, so limit its batch size to a size that fits into memory in training.
    if evaluating and isinstance(recipe.device_train_microbatch_size, int):
        batch_size = min(batch_size, recipe.device_train_microbatch_size)
    dataset = build_dataset(
        recipe,
        streams=streams,
        component=evaluation_dataset(recipe) if evaluating else recipe.dataset,
        batch_size=batch_size,
        shuffle=settings.shuffle and not evaluating,
        elastic=not evaluating,
        substitute=settings.max_bad_samples > 0,
    )
    workers = settings.num_workers
    if workers is None:
        workers = default_num_workers(composer_dist.get_local_world_size())
    objective = recipe.model.kwargs.get('objective') or {}
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
        worker_init_fn=ignore_stop_signals if workers else None,
        drop_last=not evaluating,
        stratified=not evaluating and objective.get('timesteps') == 'stratified',
    )
    check_machine(loader)
    return loader


def run_identity(recipe: Recipe, loader: BucketedLoader) -> dict[str, Any]:
    """Return a run's `seed` and a fingerprint of its training data as `data`; `SameRun` compares both on resume."""
    keywords = registry.keywords('dataset', recipe.dataset)
    settings = {name: value for name, value in keywords.items() if name not in SUPPLIED['dataset']}
    # The fingerprint is saved in every checkpoint, so it contains the name of an environment variable, not its value.
    texts = saved_values(recipe)['dataset']
    variables = {str(path[1]) for path in recipe.from_environment if path[0] == 'dataset' and len(path) > 1}
    settings |= {key: texts[key] for key in variables}
    return {'seed': recipe.seed, 'data': fingerprint(loader.dataset, {'name': recipe.dataset.name} | settings)}


def evaluation_dataset(recipe: Recipe) -> Component:
    """Return the dataset component for evaluation: `eval_dataset` or, if not set, `dataset` without random choices."""
    if recipe.eval_dataset is not None:
        return recipe.eval_dataset
    fixed = registry.signature('dataset', recipe.dataset.name).accepted(DETERMINISTIC)
    return Component(recipe.dataset.name, recipe.dataset.kwargs | fixed)


def build_optimizer(recipe: Recipe, model: ComposerModel) -> torch.optim.Optimizer:
    """Build a recipe's optimizer for the trained parameters, fused if `speed` and the optimizer's arguments allow it.

    An optimizer class may have a function `parameter_groups(model, ...)`, such as `Muon.parameter_groups`, that returns
    parameter groups and can take some optimizer arguments. Other classes get a list of parameters. If the model
    scales learning rates by width (muP), there is one group per learning rate instead, see `width_groups`.
    """
    component = recipe.optimizer
    factors = getattr(model, 'learning_rate_factors', {})
    choose = getattr(registry.resolve('optimizer', component.name), 'parameter_groups', None)
    if factors:
        settings = registry.keywords('optimizer', component)
        rates = {key: settings.get(key, 0.0) for key in ('lr', 'weight_decay')}
        params = width_groups(model, optimizer=component.name, factors=factors, **rates)
    elif choose is None:
        params = [parameter for parameter in model.parameters() if parameter.requires_grad]
    else:
        params = choose(model, **of_object(choose).accepted(component.kwargs))
    defaults = registry.keywords('optimizer', Component(component.name))
    other = any(component.kwargs[key] != defaults.get(key) for key in FUSED_ALTERNATIVES & component.kwargs.keys())
    fused = effective_speed(recipe).fused_optimizer and not other
    return registry.build('optimizer', component, offered={'fused': True} if fused else {}, params=params)


def build_all(kind: str, components: Mapping[str, Component], run_dir: Path) -> list[Any]:
    """Build algorithms, callbacks or loggers; a component with a `folder` argument gets the run's folder by default."""
    return [registry.build(kind, each, offered={'folder': str(run_dir)}) for each in components.values()]


def on_gpu(trainer: Mapping[str, Any]) -> bool:
    """Return True if a Trainer with these arguments computes on a GPU of this machine."""
    return torch.cuda.is_available() and trainer.get('device') in (None, 'gpu')


def check_device(recipe: Recipe) -> None:
    """Check that this machine can run a recipe's `trainer.device` and `trainer.precision`, before its model is built.

    Raises:
        UserError: The recipe needs a GPU, but the machine has none, CUDA_VISIBLE_DEVICES hides it, or torch has no
            kernels for it. A failing GPU driver is left to Composer, so that the job may be retried on another machine.
    """
    device, precision = recipe.trainer.get('device'), recipe.trainer.get('precision') or 'fp32'
    if on_gpu(recipe.trainer):
        problem = kernels_problem(int(os.environ.get('LOCAL_RANK', '0')))
        if problem is not None:
            raise UserError(f'trainer.device: {problem}')
    if torch.cuda.is_available() or _gpu_is_broken():
        return
    if device == 'gpu':
        raise UserError(
            'trainer.device: gpu, but PyTorch finds no CUDA GPU on this machine (is there one, and does '
            'CUDA_VISIBLE_DEVICES include it?); for a CPU set trainer.device=cpu trainer.precision=fp32'
        )
    if device is None and recipe.task in ('train', 'evaluate') and precision.lower() != 'fp32':
        raise UserError(
            f'trainer.precision: {precision} needs a GPU, and PyTorch finds none on this machine (is there one, and '
            'does CUDA_VISIBLE_DEVICES include it?); for a CPU set trainer.precision=fp32'
        )


def _gpu_is_broken() -> bool:
    """Return True if the machine has an NVIDIA GPU that is not hidden; call this if PyTorch finds no GPU."""
    hidden = os.environ.get('CUDA_VISIBLE_DEVICES') in ('', '-1')
    return not hidden and any(Path('/dev').glob('nvidia[0-9]*'))


def effective_speed(recipe: Recipe) -> SpeedConfig:
    """Return a recipe's `speed` settings with the preset applied, and those that cannot work here turned off."""
    return effective_parts(recipe.speed, on_gpu=on_gpu(recipe.trainer), strategy=recipe.parallelism.strategy)


def _with_local(config: StreamConfig, cache: Path) -> StreamConfig:
    if config.remote is None or config.local is not None:
        return config
    return replace(config, local=str(home(cache, config.remote)))


def _stream(config: StreamConfig) -> Stream:
    values = asdict(config)
    for name in ('resolution', 'shape', 'aspects', 'enlarge', 'remote'):
        del values[name]
    if config.remote is not None and config.local is not None:
        Path(config.local).mkdir(parents=True, exist_ok=True)
    stream = Stream(**{key: value for key, value in values.items() if value is not None})
    # Set the remote after construction. The constructor would create a storage client, which is never used because
    # diffusion.storage downloads the shards, and it would reject az:// URLs.
    stream.remote = config.remote
    return stream


def width_groups(
    model: nn.Module, *, optimizer: str, lr: float, weight_decay: float, factors: dict[str, float]
) -> list[dict[str, Any]]:
    """Return a model's parameter groups, one per learning rate factor; the group with factor 1 comes first.

    Args:
        optimizer: Name of the optimizer, `adamw` or `decoupled_adamw`. AdamW multiplies the weight decay by the
            learning rate, so the weight decay is divided by the factor to keep the decay per step equal in all groups.
        factors: Learning rate factors by parameter name; 1 for others. See `scale_for_width`.

    Raises:
        UserError: Scaling by width is not supported for this optimizer.
    """
    problem = optimizer_problem(optimizer)
    if problem is not None:
        raise UserError(f'optimizer.name: {problem}')
    by_factor: dict[float, list[nn.Parameter]] = {}
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            by_factor.setdefault(factors.get(name, 1.0), []).append(parameter)
    groups = []
    for factor in sorted(by_factor, key=lambda each: (each != 1, each)):
        decay = weight_decay / factor if optimizer == 'adamw' else weight_decay
        groups.append({'params': by_factor[factor], 'lr': lr * factor, 'weight_decay': decay})
    return groups
