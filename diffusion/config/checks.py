"""Checks of a recipe beyond value types: component names, arguments, durations, batch sizes, streams and sampling.

No check imports torch.
"""

import re
from collections.abc import Mapping
from typing import Any, TypeGuard

from diffusion.config import registry
from diffusion.config.byte_sizes import parse_bytes
from diffusion.config.checkpointing import TierConfig, TiersConfig, is_time
from diffusion.config.checkpointing_checks import check_checkpointing, runs_dir_problem
from diffusion.config.device_checks import (
    batching_problem,
    canonical_nodes_problem,
    choose_problem,
    epoch_problem,
    nearest_divisor,
)
from diffusion.config.image_metrics import image_metrics_problems
from diffusion.config.image_shapes import parse_shape
from diffusion.config.model_checks import check_model
from diffusion.config.recipe import (
    Component,
    LoaderConfig,
    NotifyConfig,
    ParallelismConfig,
    Recipe,
    SpeedConfig,
    StreamConfig,
)
from diffusion.config.sampling_checks import check_sampling
from diffusion.config.schema import MISSING, Gatherer, Problem, did_you_mean, join
from diffusion.config.signatures import words
from diffusion.config.weight_sources import check_initial_weights, check_pretrained
from diffusion.errors import UserError

SINGLE_COMPONENT_SECTIONS = ('model', 'dataset', 'eval_dataset', 'optimizer', 'scheduler')
NAMED_COMPONENT_SECTIONS = {
    'algorithms': 'algorithm',
    'callbacks': 'callback',
    'loggers': 'logger',
    'evaluators': 'evaluator',
}
"""Recipe sections that map names to components, each with the kind of its components."""
SUPPLIED = {
    'dataset': ('buckets', 'batch_size', 'tokenizers', 'image_sizes', 'image_features', 'seed'),
    'optimizer': ('params',),
}
"""Arguments that only the program may set, not recipes, by kind of component."""
SET_IN_OTHER_SECTIONS = {
    'model': 'model',
    'train_dataloader': 'streams and dataset',
    'eval_dataloader': 'eval_streams and eval_dataset',
    'optimizers': 'optimizer',
    'schedulers': 'scheduler',
    'algorithms': 'algorithms',
    'callbacks': 'callbacks',
    'loggers': 'loggers',
    'run_name': 'name',
    'seed': 'seed',
    'device_train_microbatch_size': 'device_train_microbatch_size',
    'parallelism_config': 'parallelism',
    'load_path': 'init_from (another run) or trainer.autoresume (this one)',
}
"""Arguments of composer.Trainer that belong in another section of a recipe, with that section's name."""
RUN_NAME = re.compile(r'[A-Za-z0-9_][A-Za-z0-9._-]{0,127}')
"""Pattern of a run's name. It excludes `.`, `..`, and names that a program would take for an option."""
MAX_BATCH = 2**31
"""Upper bound of `global_batch` in samples, far above any batch size in use."""
DURATION = re.compile(r'\d+(\.\d+)?(ba|ep|sp|tok|dur|iter|sec)')
DURATION_KEYS = {
    *('max_duration', 'eval_interval', 'save_interval', 'console_log_interval', 't_warmup', 't_max', 'milestones'),
    *('ema_start', 'half_life', 'update_interval', 'every'),
}
"""Names of those arguments of components and of the Trainer whose values are durations."""
DEVICES = ('cpu', 'gpu')
"""Values of `trainer.device`. Composer supports other devices, but this package is not tested on them."""
PRECISIONS = ('amp_bf16', 'amp_fp16', 'amp_fp8', 'fp32')
"""Values of `trainer.precision` that Composer supports; on a CPU, it supports fp32 only."""


def check_components(recipe: Recipe) -> list[Problem]:
    """Return a problem for each unknown component and for each wrong argument of a component or the Trainer."""
    problems = []
    for where, kind, component in _components(recipe):
        name, kwargs = component.name, component.kwargs
        what = registry.unknown(kind, name) or registry.contract_problem(kind, name)
        if what is not None:
            problems.append(Problem(where, what))
        else:
            problems += registry.check_keywords(where, kind, name, kwargs, supplied=SUPPLIED.get(kind, ()))
    if isinstance(recipe.trainer, dict):
        problems += [
            Problem(join('trainer', key), f'belongs in another section; set {SET_IN_OTHER_SECTIONS[key]}')
            for key in recipe.trainer
            if key in SET_IN_OTHER_SECTIONS
        ]
        rest = {key: value for key, value in recipe.trainer.items() if key not in SET_IN_OTHER_SECTIONS}
        problems += registry.check_keywords('trainer', 'trainer', 'composer', rest, supplied=('model',))
    # Drop type errors of durations that are bare numbers: they advise quotes, whereas `check_recipe` advises a unit.
    numbers = {where for where, value in _durations(recipe) if not isinstance(value, str) and duration_problem(value)}
    return [problem for problem in problems if problem.where not in numbers]


def keyword_types(recipe: Recipe) -> dict[str, str]:
    """Return the annotations, as text, of all arguments that components and Trainer accept, by path (`model.seed`)."""
    places = [*_components(recipe), ('trainer', 'trainer', Component('composer'))]
    return {
        join(where, parameter.name): parameter.annotation
        for where, kind, component in places
        if registry.unknown(kind, component.name) is None
        for parameter in registry.signature(kind, component.name).parameters
    }


def not_inherited(recipe: Recipe, dropped: Mapping[str, Mapping[str, Any]]) -> list[Problem]:
    """Return a note for each component that replaces one of another name in an extended recipe and loses its settings.

    A note lists the lost settings that the new component accepts, does not set, and has a different default for.

    Args:
        dropped: The replaced components of extended recipes, by path; see `interpolation.Resolved`.
    """
    found = []
    for where, kind, component in _components(recipe):
        old = dropped.get(where)
        if old is None or registry.unknown(kind, component.name):
            continue
        defaults = {each.name: each.default for each in registry.signature(kind, component.name).parameters}
        keys = [key for key in defaults.keys() & old if key not in component.kwargs and old[key] != defaults[key]]
        if keys:
            what = f'{component.name} does not inherit {", ".join(sorted(keys))} from {old["name"]}'
            found.append(Problem(where, f'{what}, so its defaults apply; set them here to change that'))
    return found


def check_recipe(recipe: Recipe) -> list[Problem]:
    """Return a recipe's mistakes beyond wrong types, such as values out of range; skip values that are still ???."""
    # The checks test types because a value may be ???, or None if its type was wrong. Both are reported elsewhere.
    gather = Gatherer()
    if _not_positive(recipe.global_batch):
        gather.problem('global_batch', f'{recipe.global_batch} is not positive')
    if isinstance(recipe.global_batch, int) and recipe.global_batch > MAX_BATCH:
        gather.problem('global_batch', f'{recipe.global_batch} is more than {MAX_BATCH} samples; use a smaller batch')
        return gather.problems  # skip the other checks: searching for divisors of a huge batch takes long
    if _not_positive(recipe.device_train_microbatch_size):
        gather.problem('device_train_microbatch_size', f'{recipe.device_train_microbatch_size} is not positive')
    if isinstance(recipe.seed, int) and not 0 <= recipe.seed < 2**32:
        gather.problem('seed', f'{recipe.seed} is not in [0, 2**32)')
    if recipe.name not in (None, MISSING) and not RUN_NAME.fullmatch(recipe.name):
        what = 'use letters, digits, underscores, dots and dashes, no dot or dash first, at most 128'
        gather.problem('name', f'{recipe.name[:200]!r} cannot name a folder; {what}')
    if isinstance(recipe.runs_dir, str) and (problem := runs_dir_problem(recipe.runs_dir)) is not None:
        gather.problem('runs_dir', problem)
    _check_task(recipe, gather)
    for section, streams in stream_sections(recipe):
        _check_streams(section, streams, gather)
    _check_loader(recipe.loader, gather)
    if recipe.task == 'train':
        _check_microbatch(recipe.global_batch, recipe.device_train_microbatch_size, gather)
        _check_order(recipe, gather)
        _check_parallelism(recipe, gather)
        _check_speed(recipe.speed, recipe.parallelism, gather)
        gather.problems += check_checkpointing(recipe)
    if isinstance(recipe.trainer, dict):
        _check_trainer(recipe.task, recipe.trainer, gather)
    if recipe.task == 'train' and isinstance(recipe.trainer, dict) and isinstance(recipe.callbacks, dict):
        _check_loss_guard(recipe.trainer, recipe.callbacks, gather)
    _check_notify(recipe.notify, gather)
    # Check the defaults of arguments too: a run saves them with its recipe, and fails to load it if one is wrong.
    own = {where: registry.settings_of(kind, each) for where, kind, each in _components(recipe)}
    if recipe.task == 'train':
        gather.problems += check_initial_weights(recipe.init_from)
    gather.problems += check_pretrained(recipe.model) + check_model(recipe)
    gather.problems += check_sampling(recipe, own)
    for where, settings in own.items():
        problems = image_metrics_problems(settings) if where.startswith('evaluators.') else {}
        gather.problems += [Problem(join(where, key), what) for key, what in problems.items()]
    if recipe.task == 'train' and recipe.evaluators_interval is not None:
        for key, value in (('evaluators', recipe.evaluators), ('eval_streams', recipe.eval_streams)):
            if not value:
                gather.problem('evaluators_interval', f'needs {key}, which are empty; add one, or remove the interval')
    for where, value in _durations(recipe):
        # Composer's own saver, which `trainer.save_folder` selects, does not accept times.
        of_composer = where == 'trainer.save_interval' and 'save_folder' in recipe.trainer
        may_be_time = where.endswith('.save_interval') and not of_composer
        problem = None if may_be_time and is_time(value) else duration_problem(value)
        if problem is not None:
            gather.problem(where, f'{problem}, a time such as 10m, or auto' if may_be_time else problem)
    return gather.problems


def _check_notify(notify: NotifyConfig, gather: Gatherer) -> None:
    for key, name in (('webhook', notify.webhook), ('command', notify.command)):
        # Do not quote the value: if it is a pasted URL, it is a secret, and this message may end up in a log.
        if isinstance(name, str) and name != MISSING and not re.fullmatch(r'[A-Za-z_][A-Za-z0-9_]*', name):
            what = 'is not the name of an environment variable; export the value in one, such as NOTIFY_'
            gather.problem(f'notify.{key}', f'{what}{key.upper()}, and write its name here')
    bound = notify.goodput_below
    if isinstance(bound, int | float) and not 0 < bound <= 1:
        gather.problem('notify.goodput_below', f'{bound} is not in (0, 1]; use a fraction such as 0.8')


def duration_problem(value: Any) -> str | None:
    """Return an error message if a text or number is not a Composer duration such as `1000ba`; None otherwise."""
    if isinstance(value, str):
        if value == MISSING or DURATION.fullmatch(value):
            return None
        return f'{value!r} is not a duration; write a number and its unit, such as 1000ba or 2ep'
    if not isinstance(value, int | float) or isinstance(value, bool):
        return None
    # Composer would count a bare number in epochs, whereas most durations of a recipe are in batches.
    way_out = f'{value}ba (batches) or {value}ep (epochs)' if isinstance(value, int) else 'it as 1000ba or 2ep'
    return f'{value} has no unit; write {way_out}'


def stream_sections(recipe: Recipe) -> list[tuple[str, dict[str, StreamConfig]]]:
    """Return the streams that a recipe's task reads, as (section, streams by name); skip streams that are still ???."""
    sections = {
        'train': [('streams', recipe.streams), ('eval_streams', recipe.eval_streams)],
        'precompute': [('precompute.streams', recipe.precompute.streams)],
        'evaluate': [('eval_streams', recipe.eval_streams)],
    }
    return [
        (where, {name: stream for name, stream in streams.items() if isinstance(stream, StreamConfig)})
        for where, streams in sections.get(recipe.task, [])
        if isinstance(streams, dict)
    ]


def remote_streams(recipe: Recipe) -> dict[str, StreamConfig]:
    """Return the streams in object stores that a recipe's task reads, by path, such as streams.laion."""
    return {
        f'{section}.{name}': stream
        for section, streams in stream_sections(recipe)
        for name, stream in streams.items()
        if '://' in (stream.remote or '')
    }


def image_streams(recipe: Recipe) -> dict[str, StreamConfig]:
    """Return the image streams that a recipe trains on, by name; for latents, the `precompute.streams` they encode."""
    if recipe.dataset.name != 'latents':
        return recipe.streams
    places = {name: str(stream.remote or stream.local).rstrip('/') for name, stream in recipe.streams.items()}
    return {
        name: stream
        for name, stream in recipe.precompute.streams.items()
        if f'{recipe.precompute.out}/{name}' in places.values() or places.get(name) == MISSING
    }


def _components(recipe: Recipe) -> list[tuple[str, str, Component]]:
    """Return the path, kind and component of every component that a recipe names."""
    found = [
        (section, section.removeprefix('eval_'), getattr(recipe, section)) for section in SINGLE_COMPONENT_SECTIONS
    ]
    for section, kind in NAMED_COMPONENT_SECTIONS.items():
        entries = getattr(recipe, section)
        if isinstance(entries, dict):
            found += [(join(section, key), kind, component) for key, component in entries.items()]
    return [item for item in found if isinstance(item[2], Component) and item[2].name not in (None, '', MISSING)]


def _check_task(recipe: Recipe, gather: Gatherer) -> None:
    if recipe.task == 'train':
        if not recipe.streams:
            gather.problem('streams', 'is empty; training needs at least one stream')
        if 'max_duration' not in recipe.trainer:
            gather.problem('trainer.max_duration', 'is missing; set how long to train, such as 1000ba')
    if recipe.task == 'precompute':
        if not recipe.precompute.streams:
            gather.problem('precompute.streams', 'is empty; add at least one stream of images to encode')
        if not recipe.precompute.out:
            gather.problem('precompute.out', 'is missing; set the output folder for the latents')
    if recipe.task == 'evaluate' and not recipe.eval_streams:
        gather.problem('eval_streams', 'is empty; evaluation needs at least one stream')
    if recipe.task == 'generate' and not recipe.generate.prompts:
        gather.problem('generate.prompts', 'is empty; add at least one prompt')


def _check_streams(section: str, streams: Mapping[str, StreamConfig], gather: Gatherer) -> None:
    for name, stream in streams.items():
        where = join(section, name)
        if stream.remote is None and stream.local is None:
            gather.problem(where, 'has neither remote nor local; give the folder of its MDS shards')
        if isinstance(stream.resolution, int) and (stream.resolution <= 0 or stream.resolution % 8):
            near = max(8, round(stream.resolution / 8) * 8)
            gather.problem(join(where, 'resolution'), f'{stream.resolution} is not a multiple of 8 pixels; use {near}')
        _check_shape(where, stream, gather)
        amounts = [key for key in ('proportion', 'repeat', 'choose') if getattr(stream, key) is not None]
        if len(amounts) > 1:
            gather.problem(where, f'{" and ".join(amounts)} are mutually exclusive; keep one')
        for key in amounts:
            if _not_positive(getattr(stream, key)):
                gather.problem(join(where, key), f'{getattr(stream, key)} is not positive; remove the stream instead')
    with_proportion = [name for name, stream in streams.items() if stream.proportion is not None]
    if with_proportion and len(with_proportion) != len(streams):
        rest = ', '.join(name for name in streams if name not in with_proportion)
        gather.problem(section, f'{rest}: no proportion, but other streams have one; set it for all streams or none')


def _check_loader(loader: LoaderConfig, gather: Gatherer) -> None:
    limit, bad = loader.cache_limit, loader.max_bad_samples
    if limit not in (None, MISSING):
        try:
            parse_bytes(limit)
        except UserError as error:
            gather.problem('loader.cache_limit', str(error))
    if isinstance(loader.shuffle_seed, int) and loader.shuffle_seed < 0:
        gather.problem('loader.shuffle_seed', f'{loader.shuffle_seed} is negative; use 0 or more')
    if isinstance(bad, float) and not 0 <= bad < 1:
        gather.problem('loader.max_bad_samples', f'{bad} is not a fraction of the samples; use at least 0, below 1')


def _check_shape(where: str, stream: StreamConfig, gather: Gatherer) -> None:
    if stream.aspects and stream.shape is not None:
        what = 'an `aspects` stream takes its shapes from its folders; remove shape or aspects'
        gather.problem(join(where, 'shape'), what)
    if stream.aspects and stream.choose is not None:
        what = 'cannot be divided over image shapes; use proportion and loader.epoch_size'
        gather.problem(join(where, 'choose'), what)
    if isinstance(stream.shape, str) and stream.shape != MISSING:
        try:
            parse_shape(stream.shape)
        except UserError as error:
            gather.problem(join(where, 'shape'), str(error))


def _shape_text(stream: StreamConfig) -> str:
    return 'several shapes' if stream.aspects else stream.shape or f'{stream.resolution}x{stream.resolution}'


def _check_microbatch(batch: int, microbatch: int | None, gather: Gatherer) -> None:
    """Report a microbatch size that cannot divide the batch per device, however many devices there are."""
    # It suffices to test the global batch: the batch per device divides it, and is equal to it on one device.
    # `check_devices` is stricter where the number of devices is known.
    if not _positive(batch) or not _positive(microbatch) or batch % microbatch == 0:
        return
    lower = batch // microbatch * microbatch
    batches = ' or '.join(str(choice) for choice in (lower, lower + microbatch) if choice)
    what = (
        f"{microbatch} does not divide a device's part of global_batch={batch} on any number of devices; "
        f'use {nearest_divisor(batch, microbatch)}, or a global_batch of {batches}'
    )
    gather.problem('device_train_microbatch_size', what)


def _check_order(recipe: Recipe, gather: Gatherer) -> None:
    """Report settings of the data's order that conflict, or would make batches depend on the number of devices."""
    streams, batch = dict(stream_sections(recipe)).get('streams', {}), recipe.global_batch
    problems, loader = {}, recipe.loader
    shapes = [_shape_text(stream) for stream in streams.values() if isinstance(stream.resolution, int)]
    if isinstance(loader.batching_method, str):
        problems['loader.batching_method'] = batching_problem(loader.batching_method, shapes)
    if _positive(batch) and isinstance(loader.num_canonical_nodes, int):
        problems['loader.num_canonical_nodes'] = canonical_nodes_problem(loader.num_canonical_nodes, batch)
    if _positive(batch) and isinstance(loader.epoch_size, int):
        problems['loader.epoch_size'] = epoch_problem(loader.epoch_size, batch)
        absolute = [name for name, stream in streams.items() if stream.repeat or stream.choose]
        if absolute:
            what = 'conflicts with loader.epoch_size, which sets the samples per epoch too; use proportion with it'
            gather.problem(f'streams.{absolute[0]}.choose or repeat', what)
    for name, stream in streams.items():
        if _positive(batch) and _positive(stream.choose):
            problems[f'streams.{name}.choose'] = choose_problem(stream.choose, batch)
    for where, what in problems.items():
        if what is not None:
            gather.problem(where, what)


def _check_parallelism(recipe: Recipe, gather: Gatherer) -> None:
    settings = recipe.parallelism
    sharded = settings.strategy != 'ddp'
    if _not_positive(settings.replicas):
        gather.problem('parallelism.replicas', f'{settings.replicas} is not positive; 1 shards over all devices')
    elif settings.replicas != 1 and not sharded:
        gather.problem('parallelism.replicas', 'needs fsdp2; under ddp every device is a replica: remove it')
    if settings.checkpoints == 'sharded' and not sharded:
        gather.problem('parallelism.checkpoints', 'sharded needs strategy: fsdp2, not ddp; use whole')
    if settings.mixed_precision != 'default' and not sharded:
        gather.problem('parallelism.mixed_precision', 'needs fsdp2; ddp follows trainer.precision: remove it')
    # OptimizerMonitor lets the optimizer sum over ranks, which fails in Composer's DecoupledAdamW with fsdp2's
    # DTensors.
    if sharded and isinstance(recipe.optimizer, Component) and recipe.optimizer.name == 'decoupled_adamw':
        for where, kind, component in _components(recipe):
            if kind == 'callback' and component.name == 'optimizer_monitor':
                what = "optimizer_monitor cannot combine the ranks' norms of decoupled_adamw under fsdp2; use "
                gather.problem(where, what + 'loss_guard, which logs the norm of all gradients as grad_norm/total')


def _check_speed(speed: SpeedConfig, parallelism: ParallelismConfig, gather: Gatherer) -> None:
    strategy = parallelism.strategy
    if speed.reduce_once is True and strategy != 'fsdp2':
        gather.problem('speed.reduce_once', f'needs strategy: fsdp2, not {strategy}; remove it')
    if speed.cuda_graphs and strategy != 'ddp':
        what = f'needs weights at fixed addresses, which {strategy} does not provide; use strategy: ddp'
        gather.problem('speed.cuda_graphs', what)
    if speed.cuda_graphs and parallelism.activation_checkpointing:
        what = 'CUDA graphs cannot free the activations that activation checkpointing recomputes; use '
        gather.problem('speed.cuda_graphs', what + 'parallelism.activation_checkpointing: false')
    if _not_positive(speed.encode_batch_size):
        gather.problem('speed.encode_batch_size', f'{speed.encode_batch_size} is not positive; use 1 or more, or null')


def _check_trainer(task: str, trainer: Mapping[str, Any], gather: Gatherer) -> None:
    # Composer accepts these values in upper and lower case.
    device, precision = (str(trainer.get(key) or '').lower() for key in ('device', 'precision'))
    for key, value, known in (('device', device, DEVICES), ('precision', precision, PRECISIONS)):
        if value not in ('', MISSING, *known):
            gather.problem(join('trainer', key), f'{value!r} is not supported; {did_you_mean(value, known)}')
    if task in ('train', 'evaluate') and device == 'cpu' and precision in {*PRECISIONS} - {'fp32'}:
        gather.problem('trainer.precision', f'{precision} needs a GPU in Composer; use fp32 with trainer.device=cpu')


def _check_loss_guard(trainer: Mapping[str, Any], callbacks: Mapping[str, Component], gather: Gatherer) -> None:
    """Report `loss_guard.action: skip` with amp_fp16, which the callback refuses on GPUs when training starts."""
    # On GPUs, Composer's default precision is amp_fp16.
    default = 'amp_fp16' if str(trainer.get('device') or '').lower() == 'gpu' else ''
    if str(trainer.get('precision') or default).lower() != 'amp_fp16':
        return
    for key, callback in callbacks.items():
        is_guard = isinstance(callback, Component) and callback.name == 'loss_guard'
        if is_guard and callback.kwargs.get('action') == 'skip':
            what = 'skip does not support precision amp_fp16, whose loss scaler already skips updates; use stop, or '
            gather.problem(f'callbacks.{key}.action', what + 'trainer.precision=amp_bf16')


def _durations(recipe: Recipe) -> list[tuple[str, Any]]:
    places = [(where, kind, component.name, component.kwargs) for where, kind, component in _components(recipe)]
    if isinstance(recipe.trainer, dict):
        places.append(('trainer', 'trainer', 'composer', recipe.trainer))
    found = []
    for where, kind, name, kwargs in places:
        keys = DURATION_KEYS & kwargs.keys()
        annotations = registry.annotations(kind, name) if keys else {}
        for key in sorted(keys):
            # Some arguments with these names take only numbers, such as `every` of node_health, a number of batches:
            # skip them.
            takes_text = bool({'str', 'Time'} & words(annotations.get(key, '')))
            value = kwargs[key]
            if isinstance(value, list):
                found += [(join(where, key), each) for each in value]
            elif takes_text or isinstance(value, str):
                found.append((join(where, key), value))
    if recipe.evaluators_interval is not None:
        found.append(('evaluators_interval', recipe.evaluators_interval))
    if isinstance(tiers := recipe.checkpointing.tiers, TiersConfig):
        for name, tier in (('memory', tiers.memory), ('disk', tiers.disk)):
            if isinstance(tier, TierConfig):
                found.append((f'checkpointing.tiers.{name}.save_interval', tier.save_interval))
    # 0 turns evaluation off, so it needs no unit.
    return [(where, value) for where, value in found if (where, value) != ('trainer.eval_interval', 0)]


def _positive(value: Any) -> TypeGuard[int]:
    return isinstance(value, int) and value > 0


def _not_positive(value: Any) -> bool:
    return isinstance(value, int | float) and value <= 0
