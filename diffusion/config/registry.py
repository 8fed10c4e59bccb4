"""Registry of the components that a recipe can name; it also checks their arguments and builds them.

The signature of a component's class or function is the schema of its arguments. It is parsed from the source file, so
that `diffusion check` finds a typo without importing torch.
"""

import importlib
import inspect
import sys
from collections.abc import Collection, Mapping
from dataclasses import is_dataclass
from typing import Any, get_args

from diffusion.config.declarations import keyword_hints, plain_type
from diffusion.config.families import Family, add, built_in
from diffusion.config.recipe import Component
from diffusion.config.schema import MISSING, Gatherer, Problem, did_you_mean, join
from diffusion.config.schema import build_dataclass as build_value
from diffusion.config.signatures import (
    ADDRESS,
    Parameter,
    Signature,
    SourceText,
    of_object,
    of_source,
    simple_type,
    source_file,
)
from diffusion.errors import UserError

TARGETS: dict[str, dict[str, Any]] = {
    'model': {
        **{name: target for family in built_in() for name, target in family.models.items()},
        'autoencoder': 'diffusion.models.autoencoder:tiny_autoencoder',
    },
    'dataset': {
        'image_text': 'diffusion.data.image_text:ImageTextDataset',
        'latents': 'diffusion.data.latents:LatentsDataset',
        'preference_pairs': 'diffusion.data.preference_pairs:PreferencePairsDataset',
    },
    'optimizer': {
        'adamw': 'diffusion.training.adamw:AdamW',
        'decoupled_adamw': 'composer.optim.decoupled_weight_decay:DecoupledAdamW',
        'muon': 'diffusion.training.muon:Muon',
    },
    'scheduler': {
        'constant': 'composer.optim.scheduler:ConstantScheduler',
        'linear': 'composer.optim.scheduler:LinearScheduler',
        'cosine': 'composer.optim.scheduler:CosineAnnealingScheduler',
        'constant_with_warmup': 'composer.optim.scheduler:ConstantWithWarmupScheduler',
        'linear_with_warmup': 'composer.optim.scheduler:LinearWithWarmupScheduler',
        'cosine_with_warmup': 'composer.optim.scheduler:CosineAnnealingWithWarmupScheduler',
        'multi_step_with_warmup': 'composer.optim.scheduler:MultiStepWithWarmupScheduler',
    },
    'algorithm': {
        'ema': 'diffusion.algorithms.ema:EMA',
        'post_hoc_ema': 'diffusion.algorithms.post_hoc_ema:PostHocEMA',
        'low_precision_groupnorm': 'diffusion.algorithms.low_precision_norms:DenoiserLowPrecisionGroupNorm',
        'low_precision_layernorm': 'diffusion.algorithms.low_precision_norms:DenoiserLowPrecisionLayerNorm',
        'contrastive_flow_matching': 'diffusion.algorithms.contrastive_flow_matching:ContrastiveFlowMatching',
        'diffusion_dpo': 'diffusion.algorithms.diffusion_dpo:DiffusionDPO',
        'tread': 'diffusion.algorithms.tread:TREAD',
        'gradient_clipping': 'diffusion.algorithms.gradient_clipping:GradientClipping',
    },
    'callback': {
        'breakdown': 'diffusion.profiling.breakdown:Breakdown',
        'image_grid': 'diffusion.callbacks.image_grid:ImageGrid',
        'loss_guard': 'diffusion.callbacks.loss_guard:LossGuard',
        'lr_monitor': 'composer.callbacks.lr_monitor:LRMonitor',
        'memory_monitor': 'composer.callbacks.memory_monitor:MemoryMonitor',
        'nan_guard': 'diffusion.callbacks.nan_guard:NaNGuard',
        'nan_monitor': 'composer.callbacks.nan_monitor:NaNMonitor',
        'node_health': 'diffusion.callbacks.node_health:NodeHealth',
        'optimizer_monitor': 'composer.callbacks.optimizer_monitor:OptimizerMonitor',
        'runtime_estimator': 'composer.callbacks.runtime_estimator:RuntimeEstimator',
        'speed_monitor': 'composer.callbacks.speed_monitor:SpeedMonitor',
    },
    'logger': {
        'console_lines': 'diffusion.loggers.progress_lines:ConsoleLines',
        'json_lines': 'diffusion.loggers.prometheus:JSONLines',
        'metrics_file': 'diffusion.loggers.metrics_file:MetricsFile',
        'prometheus_file': 'diffusion.loggers.prometheus:PrometheusFile',
        'file': 'composer.loggers.file_logger:FileLogger',
        'mlflow': 'composer.loggers.mlflow_logger:MLFlowLogger',
        'tensorboard': 'composer.loggers.tensorboard_logger:TensorboardLogger',
        'wandb': 'composer.loggers.wandb_logger:WandBLogger',
    },
    'evaluator': {
        'image_metrics': 'diffusion.evaluation.image_metrics:ImageMetrics',
        'retrieval': 'diffusion.evaluation.retrieval:Retrieval',
    },
    'guidance': {
        'apg': 'diffusion.models.guidance:AdaptiveProjected',
        'autoguidance': 'diffusion.models.guidance:Autoguidance',
        'cfg': 'diffusion.models.guidance:ClassifierFree',
        'cfg_zero_star': 'diffusion.models.guidance:ZeroStar',
        'interval': 'diffusion.models.guidance:LimitedInterval',
        'sparse': 'diffusion.models.guidance:Sparse',
    },
    'trainer': {'composer': 'composer.trainer.trainer:Trainer'},
}
"""Registered components by kind and name: a class or function, or its address `'module:attribute'`."""
PROGRAM_DEFAULTS = {'model': ('seed',), **dict.fromkeys(('algorithm', 'callback', 'logger'), ('folder',))}
"""Arguments for which the program passes the run's seed or folder if the recipe omits them, by kind of component."""


DATASET_KEYWORDS = ('buckets', 'batch_size', 'tokenizers', 'seed')
"""Arguments that a dataset must take, in addition to those that it passes on to StreamingDataset."""
BASE_CLASSES = {
    'algorithm': ('composer.Algorithm', ''),
    'callback': ('composer.Callback', ''),
    'dataset': (
        'diffusion.BucketedDataset',
        ': the constructor takes buckets, batch_size, tokenizers, seed and **streaming, and item(sample, index) '
        'returns a dict with image, uint8 [3, H, W], and input_ids, int64 [E, L] (docs/extending.md)',
    ),
    'guidance': ('diffusion.models.guidance.Guidance', ''),
    'logger': ('composer.loggers.LoggerDestination', ''),
    'optimizer': ('torch.optim.Optimizer', ''),
}
"""Base class that each kind of component must have, and the other requirements of the kind as text for messages."""


def register(kind: str, name: str, target: Any) -> None:
    """Register a component of your own under a name that recipes can use.

    Args:
        kind: `model`, `dataset`, `optimizer`, `scheduler`, `algorithm`, `callback`, `logger`, `evaluator` or
            `guidance`.
        name: The component's `name:` in a recipe.
        target: The class or function, or its address `'module:attribute'`, which is imported on first use.

    Raises:
        UserError: An argument is wrong, or another component of this kind already has this name.
    """
    table = _table(kind)
    _check_address(f'register: {kind} {name!r}', target)
    if not isinstance(name, str):
        raise UserError(f'register: {name!r} cannot be the name of a component; pass a string')
    if table.get(name, target) != target:
        raise UserError(f'register: {kind} {name!r} is already {table[name]!r}; choose another name')
    table[name] = target


def _check_address(where: str, target: Any) -> None:
    """Raise UserError unless a target is a class or a function, or the address of one in an existing module."""
    address = target if isinstance(target, str) and ADDRESS.fullmatch(target) else None
    if address is None and not (callable(target) and hasattr(target, '__name__')):
        way_out = "pass the class or function itself, or its address 'module:attribute'"
        raise UserError(f'{where}: {target!r} is not a component; {way_out}')
    if address is not None and (module := address.partition(':')[0]) not in sys.modules:
        try:
            source_file(module)
        except UserError as error:
            raise UserError(f'{where}: {error}') from None


def register_family(family: Family) -> None:
    """Register a model family of your own, which takes precedence over all others, and its models.

    Call this in the module that declares the family, and list that module under `imports` in recipes.

    Raises:
        UserError: The argument is not a family, or one of its models has the name of a registered model.
    """
    if not isinstance(family, Family):
        raise UserError(f'register_family: {family!r} is not a family; pass diffusion.Family(...)')
    for name, target in family.models.items():
        register('model', name, target)
    add(family)


def names(kind: str) -> list[str]:
    return sorted(_table(kind))


def unknown(kind: str, name: str) -> str | None:
    """Return an error message if no component of this kind has this name, else None."""
    table = _table(kind)
    if name in table:
        return None
    return f'no {kind} is called {name!r}; {did_you_mean(name, table)}'


def contract_problem(kind: str, name: str) -> str | None:
    """Return an error message if a class that a user registered cannot be a component of its kind, else None."""
    if kind not in BASE_CLASSES or is_own(kind, name):
        return None
    base, contract = BASE_CLASSES[kind]
    found = _loaded(_table(kind)[name])
    if inspect.isclass(found) and base.split('.')[-1] not in {each.__name__ for each in found.__mro__}:
        return f'{name} is not a subclass of {base}{contract}'
    if kind != 'dataset':
        return None
    if getattr(getattr(found, 'item', None), '__qualname__', '') == 'BucketedDataset.item':
        return f'{name} has no method item(sample, index){contract}'
    if inspect.isclass(found) and found.__init__.__module__.startswith('diffusion.'):
        return None
    takes = signature(kind, name)
    missing = [each for each in DATASET_KEYWORDS if each not in takes.names()]
    if takes.open_ended or (found is None and not missing):  # may inherit the constructor of this package's
        return None
    return f'{name} does not take {", ".join([*missing, "**streaming"])}{contract}'


def _loaded(target: Any) -> Any:
    """Return a registered class or function; None if it is registered by address and its module is not loaded yet."""
    if not isinstance(target, str):
        return target
    module, _, attribute = target.partition(':')
    return getattr(sys.modules.get(module), attribute, None)


def is_own(kind: str, name: str) -> bool:
    """Return True if the component registered under a name is one of this package's own."""
    target = _table(kind).get(name)
    return isinstance(target, str) and target.startswith('diffusion.')


def saved_defaults(kind: str, name: str, given: Mapping[str, Any], *, supplied: Collection[str] = ()) -> dict[str, Any]:
    """Return the defaults of the arguments that a recipe omits for a component, to save them with the recipe.

    The result is empty for a component that users register, so that they can remove an argument and still load their
    saved recipes. An argument is left out if its default is null or not a plain value, or if the program chooses it. A
    mapping that the recipe gives for a dataclass is returned with its missing fields filled in.
    """
    target = _table(kind).get(name)
    if not isinstance(target, str) or not target.startswith(('diffusion.', 'composer.')):
        return {}
    return _added_defaults(signature(kind, name), given, {*supplied, *PROGRAM_DEFAULTS.get(kind, ())})


def _added_defaults(found: Signature, given: Mapping[str, Any], left_out: Collection[str]) -> dict[str, Any]:
    """Return the plain defaults of arguments not in `given` or `left_out`; complete given mappings with defaults."""
    added = {}
    for parameter in found.parameters:
        value, nested = given.get(parameter.name), found.nested_signature(parameter)
        if nested is not None and isinstance(value, Mapping):
            added[parameter.name] = {**value, **_added_defaults(nested, value, ())}
        elif parameter.name not in {*given, *left_out} and not isinstance(parameter.default, SourceText | None):
            default = parameter.default
            added[parameter.name] = [*default] if isinstance(default, tuple) else default
    return added


def resolve(kind: str, name: str) -> Any:
    if (problem := unknown(kind, name)) is not None:
        raise UserError(problem)
    target = _table(kind)[name]
    if not isinstance(target, str):
        return target
    module, attribute = target.split(':')
    return getattr(importlib.import_module(module), attribute)


def build(kind: str, component: Component, *, offered: Mapping[str, Any] | None = None, **supplied: Any) -> Any:
    """Build a component from its arguments in the recipe and from values that the program supplies.

    If the type of an argument is a dataclass, a mapping given for it is converted to that dataclass.

    Args:
        offered: Default values by argument. Those that the recipe sets or the component does not accept are ignored.
        supplied: Arguments that only the program may set; the component gets all of them.

    Raises:
        UserError: The name is not registered, or the recipe sets a supplied argument.
    """
    name, kwargs = component.name, component.kwargs
    target = resolve(kind, name)
    if both := set(kwargs) & set(supplied):
        raise UserError(f'{kind} {name}: {", ".join(sorted(both))} is set by the program; remove it from the recipe')
    values = signature(kind, name).accepted(offered or {}) | kwargs
    # The annotation may be `Objective | None`, so look at the union's members too.
    for key, value in kwargs.items():
        if isinstance(value, Mapping):
            hint = plain_type(keyword_hints(target.__init__ if inspect.isclass(target) else target).get(key))
            choices = [choice for choice in (hint, *get_args(hint)) if is_dataclass(choice)]
            values[key] = choices[0](**value) if choices else value  # type: ignore[operator]
    return target(**values, **supplied)


def keywords(kind: str, component: Component) -> dict[str, Any]:
    """Return the values of a component's arguments: its defaults, overridden by the recipe's values."""
    parameters = inspect.signature(resolve(kind, component.name)).parameters.values()
    return {each.name: each.default for each in parameters if each.default is not each.empty} | component.kwargs


def signature(kind: str, name: str) -> Signature:
    """Return a registered component's signature, parsed from its source if it is registered by address."""
    target = _table(kind)[name]
    return of_source(*target.split(':')) if isinstance(target, str) else of_object(target)


def settings_of(kind: str, component: Any, keyword: str | None = None) -> dict[str, Any]:
    """Return the arguments of one of this package's components: its defaults, overridden by the given values.

    Args:
        component: The component. If it belongs to another package, or is not a component, such as `???`, the result is
            empty.
        keyword: An argument whose type is a dataclass: return the values of its fields instead. The result is the
            defaults if the argument is missing or null, and empty if the component does not accept it.
    """
    if not isinstance(component, Component) or not is_own(kind, component.name):
        return {}
    found = signature(kind, component.name)
    if keyword is None:
        return found.defaults() | component.kwargs
    given = component.kwargs.get(keyword)
    nested = next((found.nested_signature(each) for each in found.parameters if each.name == keyword), None)
    if nested is None:
        return {}
    return nested.defaults() | (dict(given) if isinstance(given, Mapping) else {})


def annotations(kind: str, name: str) -> dict[str, str]:
    """Return the annotations of a component's arguments as text; empty if the component cannot be found."""
    try:
        return {each.name: each.annotation for each in signature(kind, name).parameters}
    except (KeyError, UserError):  # `check_keywords` reports that the component cannot be found
        return {}


def check_keywords(
    where: str, kind: str, name: str, kwargs: Mapping[str, Any], *, supplied: Collection[str] = ()
) -> list[Problem]:
    """Return a problem for each argument of a component that is unknown, missing, of a wrong type or out of range."""
    try:
        found = signature(kind, name)
    except UserError as error:
        return [Problem(where, str(error))]
    return _check(where, found, kwargs, supplied)


def _check(where: str, found: Signature, kwargs: Mapping[str, Any], supplied: Collection[str] = ()) -> list[Problem]:
    problems = []
    allowed = [parameter.name for parameter in found.parameters if parameter.name not in supplied]
    for key in kwargs:
        if key in supplied:
            problems.append(Problem(join(where, key), 'is set by the program; remove it from the recipe'))
        elif key not in allowed and not found.open_ended:
            problems.append(Problem(join(where, key), f'unknown key; {did_you_mean(key, allowed)}'))
    for parameter in found.parameters:
        path = join(where, parameter.name)
        if parameter.name in supplied:
            continue
        if parameter.name not in kwargs:
            if parameter.required:
                meaning = f' ({parameter.annotation})' if parameter.annotation else ''
                problems.append(Problem(path, f'is missing and has no default; set it{meaning}'))
            continue
        value = kwargs[parameter.name]
        # If an annotation names a dataclass of this package, check the mapping against the dataclass's fields.
        nested = found.nested_signature(parameter)
        if isinstance(value, Mapping) and nested is not None:
            problems += _check(path, nested, value)
        else:
            problems += _check_type(path, parameter, value, nested=nested is not None)
    return problems


def _check_type(where: str, parameter: Parameter, value: Any, *, nested: bool) -> list[Problem]:
    kind = simple_type(parameter.annotation)
    if value == MISSING or (nested and value is None):
        return []
    if nested:
        return [Problem(where, f'{value!r} is not a mapping (key: value)')]
    gather = Gatherer()
    if kind is not None:
        build_value(kind, value, where, gather)
    if not gather.problems:
        found = [constraint.problem(value) for constraint in parameter.constraints]
        gather.problems += [Problem(where, problem) for problem in found if problem is not None]
    return gather.problems


def _table(kind: str) -> dict[str, Any]:
    if kind not in TARGETS:
        raise UserError(f'no kind of component is called {kind!r}; {did_you_mean(kind, TARGETS)}')
    return TARGETS[kind]
