"""Names that a recipe may use, and what they stand for.

The signature of what a name stands for is the schema of its keywords. It is read from the source, so that a typo is
found without importing torch.
"""

import ast
import functools
import importlib
import importlib.util
import inspect
from collections.abc import Collection, Mapping
from dataclasses import dataclass, is_dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_type_hints

from diffusion.schema import Gatherer, Problem, describe, fits, join, nearest
from diffusion.schema import build as build_value

TARGETS: dict[str, dict[str, Any]] = {
    'model': {
        'sd2': 'diffusion.models.builders:sd2',
        'tiny': 'diffusion.models.builders:tiny',
        'autoencoder': 'diffusion.models.autoencoder:tiny_autoencoder',
    },
    'dataset': {
        'image_text': 'diffusion.data.image_text:ImageTextDataset',
        'latents': 'diffusion.data.latents:LatentsDataset',
    },
    'optimizer': {
        'adamw': 'torch.optim.adamw:AdamW',
        'decoupled_adamw': 'composer.optim.decoupled_weight_decay:DecoupledAdamW',
    },
    'scheduler': {
        'constant': 'composer.optim.scheduler:ConstantScheduler',
        'linear': 'composer.optim.scheduler:LinearScheduler',
        'cosine': 'composer.optim.scheduler:CosineAnnealingScheduler',
        'constant_with_warmup': 'composer.optim.scheduler:ConstantWithWarmupScheduler',
        'linear_with_warmup': 'composer.optim.scheduler:LinearWithWarmupScheduler',
        'cosine_with_warmup': 'composer.optim.scheduler:CosineAnnealingWithWarmupScheduler',
    },
    'algorithm': {
        'ema': 'diffusion.algorithms.ema:EMA',
        'low_precision_groupnorm': 'diffusion.algorithms.low_precision_norms:DenoiserLowPrecisionGroupNorm',
        'low_precision_layernorm': 'diffusion.algorithms.low_precision_norms:DenoiserLowPrecisionLayerNorm',
        'gradient_clipping': 'composer.algorithms.gradient_clipping.gradient_clipping:GradientClipping',
    },
    'callback': {
        'image_grid': 'diffusion.callbacks.image_grid:ImageGrid',
        'lr_monitor': 'composer.callbacks.lr_monitor:LRMonitor',
        'memory_monitor': 'composer.callbacks.memory_monitor:MemoryMonitor',
        'nan_monitor': 'composer.callbacks.nan_monitor:NaNMonitor',
        'optimizer_monitor': 'composer.callbacks.optimizer_monitor:OptimizerMonitor',
        'runtime_estimator': 'composer.callbacks.runtime_estimator:RuntimeEstimator',
        'speed_monitor': 'composer.callbacks.speed_monitor:SpeedMonitor',
    },
    'logger': {
        'metrics_file': 'diffusion.loggers.metrics_file:MetricsFile',
        'file': 'composer.loggers.file_logger:FileLogger',
        'mlflow': 'composer.loggers.mlflow_logger:MLFlowLogger',
        'tensorboard': 'composer.loggers.tensorboard_logger:TensorboardLogger',
        'wandb': 'composer.loggers.wandb_logger:WandBLogger',
    },
    'evaluator': {'retrieval': 'diffusion.evaluation.retrieval:Retrieval'},
    'trainer': {'composer': 'composer.trainer.trainer:Trainer'},
}

_SIMPLE = {'int': int, 'float': float, 'str': str, 'bool': bool, 'None': type(None), 'list': list, 'dict': dict}


@dataclass(frozen=True)
class Parameter:
    """A keyword of a component; `annotation` is its source text, empty where there is none."""

    name: str
    annotation: str
    required: bool


@dataclass(frozen=True)
class Signature:
    """The keywords of a component, whether it takes any others, and the dataclasses its file imports from us."""

    parameters: tuple[Parameter, ...]
    open_ended: bool
    nested: Mapping[str, str]

    def names(self) -> set[str]:
        """Names of the keywords."""
        return {parameter.name for parameter in self.parameters}


def register(kind: str, name: str, target: Any) -> None:
    """Give a component of your own a name that recipes may use.

    Args:
        kind: `model`, `dataset`, `optimizer`, `scheduler`, `algorithm`, `callback`, `logger` or `evaluator`.
        name: As in the YAML.
        target: The class or function, or `'module:attribute'`, which is imported when it is used.
    """
    table = _table(kind)
    if table.get(name, target) != target:
        raise ValueError(f'register: {kind} {name!r} is {table[name]!r} already; choose another name')
    table[name] = target


def names(kind: str) -> list[str]:
    """The registered names of a kind."""
    return sorted(_table(kind))


def unknown(kind: str, name: str) -> str | None:
    """What is wrong with a name, or None."""
    table = _table(kind)
    if name in table:
        return None
    return f'no {kind} is called {name!r}; {nearest(name, table)}'


def resolve(kind: str, name: str) -> Any:
    """What a name stands for; imports it."""
    what = unknown(kind, name)
    if what is not None:
        raise ValueError(what)
    target = _table(kind)[name]
    if not isinstance(target, str):
        return target
    module, attribute = target.split(':')
    return getattr(importlib.import_module(module), attribute)


def build(kind: str, name: str, kwargs: Mapping[str, Any], **supplied: Any) -> Any:
    """Make a component of its keywords in a recipe and of what the program supplies.

    A mapping for a keyword whose type is a dataclass becomes that dataclass.
    """
    target = resolve(kind, name)
    both = set(kwargs) & set(supplied)
    if both:
        raise ValueError(f'{kind} {name}: {", ".join(sorted(both))} is set by the program; remove it from the recipe')
    hints = get_type_hints(target.__init__ if inspect.isclass(target) else target)
    values = dict(kwargs)
    for key, value in values.items():
        choices = [choice for choice in (hints.get(key), *get_args(hints.get(key))) if is_dataclass(choice)]
        if isinstance(value, Mapping) and choices:
            values[key] = choices[0](**value)  # type: ignore[operator]
    return target(**values, **supplied)


def signature(kind: str, name: str) -> Signature:
    """The keywords of a component, without importing it where it was registered by its address."""
    target = _table(kind)[name]
    if isinstance(target, str):
        return _from_source(*target.split(':'))
    found = inspect.signature(target).parameters.values()
    parameters = tuple(
        Parameter(p.name, '', p.default is p.empty)
        for p in found
        if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
    )
    return Signature(parameters, any(p.kind == p.VAR_KEYWORD for p in found), {})


def check_keywords(
    where: str, kind: str, name: str, kwargs: Mapping[str, Any], *, supplied: Collection[str] = ()
) -> list[Problem]:
    """Unknown, missing and wrongly typed keywords of a component.

    Args:
        where: Path of the component in the recipe.
        kind: Of the component.
        name: Of the component.
        kwargs: Its keywords in the recipe.
        supplied: Keywords that the program gives.
    """
    return _check(where, signature(kind, name), kwargs, set(supplied))


def _check(where: str, found: Signature, kwargs: Mapping[str, Any], supplied: set[str]) -> list[Problem]:
    problems = []
    allowed = [parameter.name for parameter in found.parameters if parameter.name not in supplied]
    for key in kwargs:
        if key in supplied:
            problems.append(Problem(join(where, key), 'is set by the program; remove it from the recipe'))
        elif key not in allowed and not found.open_ended:
            problems.append(Problem(join(where, key), f'unknown key; {nearest(key, allowed)}'))
    for parameter in found.parameters:
        path = join(where, parameter.name)
        if parameter.name in supplied:
            continue
        if parameter.name not in kwargs:
            if parameter.required:
                problems.append(Problem(path, 'is missing; it has no default'))
            continue
        value = kwargs[parameter.name]
        nested = [target for text, target in found.nested.items() if text in _words(parameter.annotation)]
        if isinstance(value, Mapping) and nested:
            problems += _check(path, _from_source(*nested[0].split(':')), value, set())
        else:
            problems += _check_type(path, parameter, value, nested=bool(nested))
    return problems


def _check_type(where: str, parameter: Parameter, value: Any, *, nested: bool) -> list[Problem]:
    kind = simple_type(parameter.annotation)
    if nested and value is not None:
        return [Problem(where, f'{value!r} is not a mapping (key: value)')]
    if kind is None or value == '???' or fits(kind, value):
        return []
    gather = Gatherer()
    build_value(kind, value, where, gather)
    return gather.problems or [Problem(where, f'{value!r} is not {describe(kind)}')]


def simple_type(annotation: str) -> Any:
    """The type that an annotation's text means, made of simple ones only; None where it is anything else."""
    try:
        return _simple(ast.parse(annotation, mode='eval').body) if annotation else None
    except SyntaxError:
        return None


def _simple(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant) and node.value is None:
        return type(None)
    if isinstance(node, ast.Constant) and isinstance(node.value, str):
        return simple_type(node.value)
    if isinstance(node, ast.Name):
        return _SIMPLE.get(node.id)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return _union([node.left, node.right])
    if not isinstance(node, ast.Subscript) or not isinstance(node.value, ast.Name):
        return None
    inner = node.slice.elts if isinstance(node.slice, ast.Tuple) else [node.slice]
    outer = node.value.id
    if outer == 'Literal':
        values = tuple(item.value for item in inner if isinstance(item, ast.Constant))
        return Literal[values] if len(values) == len(inner) else None  # type: ignore[valid-type]
    if outer == 'Optional':
        return _union([inner[0], ast.Constant(None)])
    if outer == 'Union':
        return _union(inner)
    item = _simple(inner[0])
    return list[item] if item is not None and outer in ('list', 'List', 'Sequence', 'tuple', 'Tuple') else None


def _union(members: list[ast.expr]) -> Any:
    """Classes other than the simple ones are left out: a YAML cannot say them."""
    kinds = [_simple(member) for member in members if not _is_class(member)]
    return None if not kinds or None in kinds or kinds == [type(None)] else Union[tuple(kinds)]  # noqa: UP007


def _is_class(node: ast.expr) -> bool:
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, 'id', '')
    return name in ('Tensor', 'Time', 'Precision', 'Device', 'Callable', 'Path')


def _words(annotation: str) -> set[str]:
    return {node.id for node in ast.walk(ast.parse(annotation or 'None')) if isinstance(node, ast.Name)}


def _table(kind: str) -> dict[str, Any]:
    if kind not in TARGETS:
        raise ValueError(f'no kind of component is called {kind!r}; {nearest(kind, TARGETS)}')
    return TARGETS[kind]


@functools.cache
def _source(module: str) -> ast.Module:
    """The syntax tree of a module, found without importing it or its packages."""
    top, *rest = module.split('.')
    spec = importlib.util.find_spec(top)
    if spec is None or spec.origin is None:
        raise ValueError(f'{module}: the package {top} is not installed')
    path = Path(spec.origin)
    if rest:
        path = Path(path.parent, *rest)
        path = path / '__init__.py' if path.is_dir() else path.with_suffix('.py')
    if not path.is_file():
        raise ValueError(f'{module}: {path} does not exist')
    return ast.parse(path.read_text(encoding='utf-8'))


@functools.cache
def _from_source(module: str, attribute: str) -> Signature:
    tree = _source(module)
    definitions = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)}
    node = definitions.get(attribute)
    if node is None:
        raise ValueError(f'{module} defines no {attribute}')
    nested = {
        alias.asname or alias.name: f'{statement.module}:{alias.name}'
        for statement in tree.body
        if isinstance(statement, ast.ImportFrom) and (statement.module or '').startswith('diffusion.')
        for alias in statement.names
        if _is_dataclass_there(statement.module or '', alias.name)
    }
    while isinstance(node, ast.ClassDef):
        inits = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == '__init__']
        if inits:
            return _of_function(inits[0], nested, module, skip_first=True)
        if _is_dataclass(node):
            return _of_fields(node, nested)
        bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in definitions]
        if not bases:
            return Signature((), False, nested)
        node = definitions[bases[0]]
    return _of_function(node, nested, module, skip_first=False)


def _of_function(node: ast.FunctionDef, nested: Mapping[str, str], module: str, *, skip_first: bool) -> Signature:
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    required = [index < len(positional) - len(arguments.defaults) for index in range(len(positional))]
    found = list(zip(positional, required, strict=True))[1 if skip_first else 0 :]
    found += [(a, default is None) for a, default in zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)]
    parameters = tuple(Parameter(a.arg, ast.unparse(a.annotation) if a.annotation else '', r) for a, r in found)
    # **keywords of ours are what the program supplies, never what a recipe says.
    return Signature(parameters, arguments.kwarg is not None and not module.startswith('diffusion.'), nested)


def _of_fields(node: ast.ClassDef, nested: Mapping[str, str]) -> Signature:
    fields = [item for item in node.body if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)]
    parameters = tuple(Parameter(f.target.id, ast.unparse(f.annotation), f.value is None) for f in fields)  # type: ignore[union-attr]
    return Signature(parameters, False, nested)


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any('dataclass' in ast.unparse(decorator) for decorator in node.decorator_list)


def _is_dataclass_there(module: str, name: str) -> bool:
    classes = [n for n in _source(module).body if isinstance(n, ast.ClassDef) and n.name == name]
    return bool(classes) and _is_dataclass(classes[0])
