"""Read the signature of a class or function from its source file, without importing it."""

import ast
import functools
import importlib.util
import inspect
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, Union

from diffusion.config.declarations import (
    CONSTRAINTS,
    MEANINGS,
    NAMED_MEANINGS,
    Constraint,
    Default,
    Meaning,
    NotArchitecture,
    OnResume,
    WeightsOf,
    declared,
    full_signature,
    plain_type,
)
from diffusion.config.schema import doc_strings
from diffusion.errors import UserError

ADDRESS = re.compile(r'[\w.]+:\w+')
"""Pattern of the address of a class or function, `module:name`."""
# Types of YAML values. Values of arguments with any other type are not checked.
_SIMPLE = {'int': int, 'float': float, 'str': str, 'bool': bool, 'None': type(None), 'list': list, 'dict': dict}


class SourceText(str):
    """Source text of a default that is not a plain value, such as `Time(1, 'ba')`."""


@dataclass(frozen=True)
class Parameter:
    """Argument that a component accepts: its name, its default, and the declarations in its annotation."""

    name: str
    annotation: str
    """Source text of the annotation without constraints; empty if the argument has no annotation."""
    required: bool
    """True if the argument has no default."""
    constraints: tuple[Constraint, ...] = ()
    """Constraints that the annotation declares, as in `Annotated[int, MultipleOf(8)]`."""
    default: Any = None
    """Default value: None if the argument is required, and a `SourceText` if the default is not a plain value."""
    meanings: tuple[Meaning, ...] = ()
    """Meanings that the annotation declares, as in `Annotated[int, NotArchitecture()]`."""
    doc: str = ''
    """Doc string under the declaration of the argument in a dataclass or a TypedDict."""

    @property
    def on_resume(self) -> OnResume | None:
        """Effect of changing the value before a run resumes, if the annotation declares one."""
        return next((each for each in self.meanings if isinstance(each, OnResume)), None)

    @property
    def changes_architecture(self) -> bool:
        """False if the annotation declares that the argument affects no parameters, FLOPs or activations of a model."""
        return not any(isinstance(each, NotArchitecture) for each in self.meanings)

    @property
    def weights_of(self) -> tuple[str, ...]:
        """Parts of the model that are loaded from the folder or repository in this argument; else empty."""
        return next((each.parts for each in self.meanings if isinstance(each, WeightsOf)), ())


@dataclass(frozen=True)
class Signature:
    """Arguments that a component's class or function accepts."""

    parameters: tuple[Parameter, ...]
    open_ended: bool
    """True if the component also accepts any other argument (`**kwargs`)."""
    nested: Mapping[str, str]
    """Addresses (`module:attribute`) of this package's dataclasses that the component's file imports, by local name."""
    on_resume: OnResume | None = None
    """Effect of adding or removing the component before a run resumes, if its class declares one."""

    def names(self) -> set[str]:
        return {parameter.name for parameter in self.parameters}

    def nested_signature(self, parameter: Parameter) -> 'Signature | None':
        """Return the signature of the dataclass in an argument's annotation, to check a mapping; None without one."""
        names = words(parameter.annotation)
        return next((of_source(*home.split(':')) for name, home in self.nested.items() if name in names), None)

    def defaults(self) -> dict[str, Any]:
        return {each.name: each.default for each in self.parameters if not each.required}

    def accepted(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return only those values whose names are arguments that the component accepts."""
        names = self.names()
        return {name: value for name, value in values.items() if name in names}


def of_object(target: Any) -> Signature:
    found = full_signature(target).parameters.values()
    named = [p for p in found if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    parameters = tuple(
        Parameter(
            p.name,
            '' if p.annotation is p.empty else inspect.formatannotation(plain_type(p.annotation)),
            required=p.default is p.empty,
            constraints=declared(p.annotation),
            default=None if p.default is p.empty else p.default,
        )
        for p in named
    )
    is_open = any(p.kind == p.VAR_KEYWORD for p in found)
    return Signature(parameters, is_open, {})


@functools.cache
def of_source(module: str, attribute: str) -> Signature:
    """Return the signature of a class or function, parsed from its module's source file.

    Raises:
        UserError: The module cannot be found, or does not define the attribute.
    """
    tree = _source(module)
    definitions = _definitions(tree)
    node = definitions.get(attribute)
    if node is None:
        raise UserError(f'{module} defines no {attribute}; register it with the module that defines it')
    on_resume = _class_on_resume(node, tree)
    # Follow a class without __init__ to its first base class, in the same file or in this package.
    while isinstance(node, ast.ClassDef):
        inits = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == '__init__']
        if inits:
            found = _of_function(inits[0], module)
            return replace(found, parameters=found.parameters[1:], on_resume=on_resume)
        if _is_dataclass(node):
            return Signature(_entries(module, node.name), False, _dataclasses_of(module), on_resume)
        bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in definitions]
        if not bases:
            imported = {name: (home, original) for name, home, original in _imports(tree)}
            homes = [imported[base.id] for base in node.bases if isinstance(base, ast.Name) and base.id in imported]
            if homes:
                return of_source(*homes[0])
            return Signature((), False, _dataclasses_of(module), on_resume)
        node = definitions[bases[0]]
        on_resume = on_resume or _class_on_resume(node, tree)
    return _of_function(node, module)


def _of_function(node: ast.FunctionDef, module: str) -> Signature:
    """Return the signature of a function, with the arguments of a TypedDict in place of `**keywords: Unpack[...]`."""
    parameters, nested = _arguments(node, module), _dataclasses_of(module)
    kwarg = node.args.kwarg
    if kwarg is None:
        return Signature(parameters, False, nested)
    name = _unpacked_name(kwarg.annotation)
    home, original = _home(name, module) if name is not None else ('', '')
    if home:
        defaults = _decorated(node, 'defaults', module)
        parameters += tuple(
            replace(each, default=defaults.get(each.name, each.default)) for each in _entries(home, original)
        )
        return Signature(parameters, False, {**_dataclasses_of(home), **nested})
    # This package's classes take **kwargs only for values that the program sets, such as StreamingDataset's arguments.
    # Accepting any argument from a recipe would hide typos and bypass the `loader` section.
    return Signature(parameters, not module.startswith('diffusion.'), nested)


def _unpacked_name(annotation: ast.expr | None) -> str | None:
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value).split('.')[-1] == 'Unpack':
        return ast.unparse(annotation.slice)
    return None


def _home(name: str, module: str) -> tuple[str, str]:
    """Return the module of this package that defines a name used in `module`, and its name there; ('', '') if none."""
    if name in _definitions(_source(module)):
        return module, name
    return next(((home, original) for local, home, original in _imports(_source(module)) if local == name), ('', ''))


def _entries(module: str, name: str) -> tuple[Parameter, ...]:
    """Return the entries of a TypedDict or a dataclass, preceded by those of its base classes in the same file."""
    node = _definitions(_source(module))[name]
    assert isinstance(node, ast.ClassDef)
    known = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in _definitions(_source(module))]
    found = [entry for base in known for entry in _entries(module, base)]
    return (*found, *_fields(node, module))


def _decorated(node: ast.FunctionDef, name: str, module: str) -> dict[str, Any]:
    """Return the keyword arguments of a function's decorator `name(...)`, written out or stored in a constant."""
    calls = [_call(each, _source(module)) for each in node.decorator_list]
    return {
        str(keyword.arg): ast.literal_eval(keyword.value)
        for call in calls
        if call is not None and ast.unparse(call.func) == name
        for keyword in call.keywords
    }


def _call(node: ast.expr, tree: ast.Module) -> ast.Call | None:
    """Return the expression if it is a call, or the call assigned to it if it is a constant's name; otherwise None."""
    if isinstance(node, ast.Name):
        found = (each.value for each in tree.body if isinstance(each, ast.Assign) and _assigns(each, node.id))
        node = next(found, node)
    return node if isinstance(node, ast.Call) else None


def _assigns(node: ast.Assign, name: str) -> bool:
    return ast.unparse(node.targets[0]) == name


def _class_on_resume(node: ast.ClassDef | ast.FunctionDef, tree: ast.Module) -> OnResume | None:
    for statement in node.body if isinstance(node, ast.ClassDef) else ():
        if isinstance(statement, ast.Assign) and _assigns(statement, 'on_resume'):
            found = _meaning(statement.value, tree)
            assert isinstance(found, OnResume), f'{node.name}.on_resume'
            return found
    return None


@functools.cache
def simple_type(annotation: str) -> Any:
    """Parse an annotation to a type that YAML values can have, such as `list[int]`; return None for other types."""
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
    """Return the union of those types of an annotation that YAML can represent, to check a recipe's values.

    Known classes such as Path are left out. The result is None (no check) if any other member cannot be represented in
    YAML, or if only None is left.
    """
    kinds = [_simple(member) for member in members if not _is_class(member)]
    return None if not kinds or None in kinds or kinds == [type(None)] else Union[tuple(kinds)]  # noqa: UP007


def _is_class(node: ast.expr) -> bool:
    """Return True if a member of a union is a known class, such as Path, whose instances YAML cannot represent."""
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, 'id', '')
    return name in ('Tensor', 'Time', 'Precision', 'Device', 'Callable', 'Path')


@functools.cache
def words(annotation: str) -> set[str]:
    """Return the identifiers in the text of an annotation."""
    return {node.id for node in ast.walk(ast.parse(annotation or 'None')) if isinstance(node, ast.Name)}


def source_file(module: str) -> Path:
    """Return the path of a module's source file, found without importing the module or its packages."""
    top, *rest = module.split('.')
    spec = importlib.util.find_spec(top)
    if spec is None or spec.origin is None:
        raise UserError(f'{module}: the package {top} cannot be found; install it, or put it on PYTHONPATH')
    path = Path(spec.origin)
    if rest:
        path = Path(path.parent, *rest)
        path = path / '__init__.py' if path.is_dir() else path.with_suffix('.py')
    if not path.is_file():
        raise UserError(f'{module}: {path} does not exist; register it with the name of an existing module')
    return path


@functools.cache
def _source(module: str) -> ast.Module:
    return ast.parse(source_file(module).read_text(encoding='utf-8'))


def _definitions(tree: ast.Module) -> dict[str, ast.ClassDef | ast.FunctionDef]:
    return {node.name: node for node in tree.body if isinstance(node, ast.ClassDef | ast.FunctionDef)}


@functools.cache
def _dataclasses_of(module: str) -> Mapping[str, str]:
    """Return the dataclasses that a file imports from this package, as in `Signature.nested`."""
    found = _imports(_source(module))
    return {
        name: f'{home}:{original}'
        for name, home, original in found
        if _is_dataclass(_definitions(_source(home)).get(original))
    }


def _imports(tree: ast.Module) -> list[tuple[str, str, str]]:
    """List imports from this package as (name in the file, module, name in that module)."""
    return [
        (alias.asname or alias.name, statement.module, alias.name)
        for statement in tree.body
        if isinstance(statement, ast.ImportFrom) and statement.module and statement.module.startswith('diffusion.')
        for alias in statement.names
    ]


def _value(node: ast.expr, tree: ast.Module) -> Any:
    """Evaluate a default value: a literal, or a constant of the file, such as `PRETRAINED`."""
    if isinstance(node, ast.Name):
        constants = (each.value for each in tree.body if isinstance(each, ast.Assign) and _assigns(each, node.id))
        node = next(constants, node)
    return ast.literal_eval(node)


@functools.cache
def _aliases(module: str) -> Mapping[str, ast.expr | None]:
    """Return own and imported type aliases of a file, such as `Side = Literal['a', 'b']`; other imports map to None."""
    imported = {name: _own_aliases(_source(home)).get(original) for name, home, original in _imports(_source(module))}
    return _own_aliases(_source(module)) | imported


def _own_aliases(tree: ast.Module) -> dict[str, ast.expr]:
    return {
        target.id: statement.value
        for statement in tree.body
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Subscript)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }


def _parameter(
    name: str, annotation: ast.expr | None, default: ast.expr | None, module: str, doc: str = ''
) -> Parameter:
    """Return a parameter, with type aliases in its annotation replaced by their definitions."""
    extras: list[ast.expr] = []
    # Replace aliases and unwrap Annotated, which may contain each other.
    while True:
        if isinstance(annotation, ast.Name):
            annotation = _aliases(module).get(annotation.id) or annotation
        if not isinstance(annotation, ast.Subscript) or ast.unparse(annotation.value).split('.')[-1] != 'Annotated':
            break
        assert isinstance(annotation.slice, ast.Tuple)
        annotation, *more = annotation.slice.elts
        extras += more
    tree = _source(module)
    constraints = tuple(found for extra in extras if (found := _constraint(extra)) is not None)
    meanings = tuple(meaning for extra in extras if (meaning := _meaning(extra, tree)) is not None)
    # An entry of a TypedDict cannot have a default value, so its annotation declares the default.
    values = [each.value for each in meanings if isinstance(each, Default)]
    values += [] if default is None else [_plain(default, tree)]
    text = ast.unparse(annotation) if annotation else ''
    return Parameter(name, text, not values, constraints, values[0] if values else None, meanings, doc)


def _plain(node: ast.expr, tree: ast.Module) -> Any:
    """Evaluate a default value, or return its source text if it is not a plain value."""
    try:
        return _value(node, tree)
    except ValueError:
        return SourceText(ast.unparse(node))


def _constraint(node: ast.expr) -> Constraint | None:
    if not isinstance(node, ast.Call) or ast.unparse(node.func) not in CONSTRAINTS:
        return None
    return CONSTRAINTS[ast.unparse(node.func)](*(ast.literal_eval(argument) for argument in node.args))


def _meaning(node: ast.expr, tree: ast.Module) -> Meaning | None:
    """Evaluate a meaning in an annotation, such as `NotArchitecture()` or `FROZEN_PARTS`; None for anything else."""
    call = _call(node, tree)
    if call is None:
        return NAMED_MEANINGS.get(node.id) if isinstance(node, ast.Name) else None
    make = MEANINGS.get(ast.unparse(call.func))
    return None if make is None else make(*(ast.literal_eval(argument) for argument in call.args))


def _arguments(node: ast.FunctionDef, module: str) -> tuple[Parameter, ...]:
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    missing = len(positional) - len(arguments.defaults)
    found = list(zip(positional, [*[None] * missing, *arguments.defaults], strict=True))
    found += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return tuple(_parameter(argument.arg, argument.annotation, value, module) for argument, value in found)


def _fields(node: ast.ClassDef, module: str) -> tuple[Parameter, ...]:
    docs = doc_strings(node)
    return tuple(
        _parameter(item.target.id, item.annotation, item.value, module, docs.get(item.target.id, ''))
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
        if not ast.unparse(item.annotation).startswith('ClassVar')
    )


def _is_dataclass(node: ast.AST | None) -> bool:
    return isinstance(node, ast.ClassDef) and any(
        'dataclass' in ast.unparse(decorator) for decorator in node.decorator_list
    )
