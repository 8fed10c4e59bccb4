"""Read the signature of a class or function from its source file, without importing it."""

import ast
import functools
import importlib.util
import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from diffusion.config.constraints import CONSTRAINTS, Constraint, declared
from diffusion.errors import UserError

# Types that YAML values can have; keywords of any other type are not checked.
_SIMPLE = {'int': int, 'float': float, 'str': str, 'bool': bool, 'None': type(None), 'list': list, 'dict': dict}


_Aliases = Mapping[str, ast.expr | None]
"""Type aliases of a file by name; None for imported names that are no alias."""


@dataclass(frozen=True)
class Parameter:
    """Keyword that a component accepts: name, type annotation, and if it is required."""

    name: str
    annotation: str
    """Source text of the keyword's annotation without constraints, empty if it has none."""
    required: bool
    """True if the keyword has no default."""
    constraints: tuple[Constraint, ...] = ()
    """Constraints that its annotation declares, as in `Annotated[int, MultipleOf(8)]`."""
    default: Any = None
    """Default value; None if it is required, and the source text of a default that is not a plain value."""


@dataclass(frozen=True)
class Signature:
    """Keywords that a component's class or function accepts."""

    parameters: tuple[Parameter, ...]
    open_ended: bool
    """True if the component takes any other keyword too (`**kwargs`)."""
    nested: Mapping[str, str]
    """Dataclasses that the component's file imports from this package, as `module:attribute`, by name in that file."""

    def names(self) -> set[str]:
        """Return the names of the keywords that the component accepts."""
        return {parameter.name for parameter in self.parameters}

    def defaults(self) -> dict[str, Any]:
        """Return the default of each keyword that has one, by name."""
        return {each.name: each.default for each in self.parameters if not each.required}

    def accepted(self, values: Mapping[str, Any]) -> dict[str, Any]:
        """Return only those values whose names are keywords that the component accepts."""
        names = self.names()
        return {name: value for name, value in values.items() if name in names}


def of_object(target: Any) -> Signature:
    """Return the parameters of an imported class or function, to check or select its keyword arguments by."""
    found = inspect.signature(target).parameters.values()
    named = [p for p in found if p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)]
    parameters = tuple(
        Parameter(
            p.name,
            _format_plain(p.annotation),
            p.default is p.empty,
            declared(p.annotation),
            None if p.default is p.empty else p.default,
        )
        for p in named
    )
    return Signature(parameters, any(p.kind == p.VAR_KEYWORD for p in found), {})


@functools.cache
def of_source(module: str, attribute: str) -> Signature:
    """Return the signature of a class or function, parsed from its module's source file.

    Raises:
        UserError: The module cannot be found, or does not define the attribute.
    """
    tree = _source(module)
    definitions = {n.name: n for n in tree.body if isinstance(n, ast.ClassDef | ast.FunctionDef)}
    node = definitions.get(attribute)
    if node is None:
        raise UserError(f'{module} defines no {attribute}; register it with the module that defines it')
    nested = {name: f'{home}:{original}' for name, home, original in _imports(tree) if _is_dataclass_in(home, original)}
    # Annotations may name type aliases such as CaptionChoice, of this file or of one that it imports them from.
    aliases = _aliases(tree) | {name: _aliases(_source(home)).get(original) for name, home, original in _imports(tree)}
    # Follow a class without __init__ to its first base in the same file; a base from another file is not looked up.
    while isinstance(node, ast.ClassDef):
        inits = [item for item in node.body if isinstance(item, ast.FunctionDef) and item.name == '__init__']
        if inits:
            return Signature(_arguments(inits[0], aliases, tree)[1:], _takes_any(inits[0], module), nested)
        if _is_dataclass(node):
            return Signature(_fields(node, aliases, tree), False, nested)
        bases = [base.id for base in node.bases if isinstance(base, ast.Name) and base.id in definitions]
        if not bases:
            return Signature((), False, nested)
        node = definitions[bases[0]]
    return Signature(_arguments(node, aliases, tree), _takes_any(node, module), nested)


def simple_type(annotation: str) -> Any:
    """Parse an annotation into a type that YAML values can have, such as `list[int]`; return None for other types."""
    try:
        return _simple(ast.parse(annotation, mode='eval').body) if annotation else None
    except SyntaxError:
        return None


def _simple(node: ast.expr) -> Any:
    """Convert the syntax tree of an annotation to a type that YAML values can have; return None for other types."""
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
    """Return the union of those types in an annotation that YAML can hold, to check a recipe's values against.

    Members such as Path or Tensor are left out. Returns None (no check) if another member is not a type that YAML can
    hold, or if nothing but None is left.
    """
    kinds = [_simple(member) for member in members if not _is_class(member)]
    return None if not kinds or None in kinds or kinds == [type(None)] else Union[tuple(kinds)]  # noqa: UP007


def _is_class(node: ast.expr) -> bool:
    """Return True if a member of a union is a known class, such as Path, whose instances YAML cannot hold."""
    name = node.attr if isinstance(node, ast.Attribute) else getattr(node, 'id', '')
    return name in ('Tensor', 'Time', 'Precision', 'Device', 'Callable', 'Path')


def words(annotation: str) -> set[str]:
    """Return the identifiers in the text of an annotation."""
    return {node.id for node in ast.walk(ast.parse(annotation or 'None')) if isinstance(node, ast.Name)}


def source_file(module: str) -> Path:
    """Return a module's source file, found without importing the module or its packages."""
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
    """Return the syntax tree of a module, parsed from its source file."""
    return ast.parse(source_file(module).read_text(encoding='utf-8'))


def _imports(tree: ast.Module) -> list[tuple[str, str, str]]:
    """List imports from this package as (name in the file, module, name in that module)."""
    return [
        (alias.asname or alias.name, statement.module, alias.name)
        for statement in tree.body
        if isinstance(statement, ast.ImportFrom) and statement.module and statement.module.startswith('diffusion.')
        for alias in statement.names
    ]


def _value(node: ast.expr, tree: ast.Module) -> Any:
    """Evaluate a default value: a literal, or a constant of an imported module, such as `sd2_config.PRETRAINED`."""
    if not isinstance(node, ast.Attribute) or not isinstance(node.value, ast.Name):
        return ast.literal_eval(node)
    homes = {name: f'{home}.{original}' for name, home, original in _imports(tree)}
    for statement in _source(homes[node.value.id]).body:
        if isinstance(statement, ast.Assign) and ast.unparse(statement.targets[0]) == node.attr:
            return ast.literal_eval(statement.value)
    raise UserError(f'{homes[node.value.id]}: defines no {node.attr}')


def _aliases(tree: ast.Module) -> dict[str, ast.expr | None]:
    """Return the type aliases of a file, such as `Choice = Literal['first', 'random']`, by name."""
    return {
        target.id: statement.value
        for statement in tree.body
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Subscript)
        for target in statement.targets
        if isinstance(target, ast.Name)
    }


def _parameter(
    name: str, annotation: ast.expr | None, default: ast.expr | None, aliases: _Aliases, tree: ast.Module
) -> Parameter:
    """Return a parameter, with a type alias as annotation replaced by its definition."""
    if isinstance(annotation, ast.Name):
        annotation = aliases.get(annotation.id) or annotation
    constraints: tuple[Constraint, ...] = ()
    if isinstance(annotation, ast.Subscript) and ast.unparse(annotation.value).split('.')[-1] == 'Annotated':
        assert isinstance(annotation.slice, ast.Tuple)
        annotation, *extras = annotation.slice.elts
        constraints = tuple(found for extra in extras if (found := _constraint(extra)) is not None)
    text = ast.unparse(annotation) if annotation else ''
    return Parameter(name, text, default is None, constraints, None if default is None else _plain(default, tree))


def _plain(node: ast.expr, tree: ast.Module) -> Any:
    """Evaluate a default value, or return its source text if it is not a plain value, such as `Time(1, 'ba')`."""
    try:
        return _value(node, tree)
    except (ValueError, KeyError, UserError):
        return ast.unparse(node)


def _constraint(node: ast.expr) -> Constraint | None:
    """Evaluate a constraint of an annotation, such as `MultipleOf(8)`; return None for anything else."""
    if not isinstance(node, ast.Call) or ast.unparse(node.func) not in CONSTRAINTS:
        return None
    return CONSTRAINTS[ast.unparse(node.func)](*(ast.literal_eval(argument) for argument in node.args))


def _format_plain(annotation: Any) -> str:
    """Return the text of an evaluated annotation without its constraints."""
    if annotation is inspect.Parameter.empty:
        return ''
    plain = get_args(annotation)[0] if get_origin(annotation) is Annotated else annotation
    return inspect.formatannotation(plain)


def _arguments(node: ast.FunctionDef, aliases: _Aliases, tree: ast.Module) -> tuple[Parameter, ...]:
    """Return the parameters of a function that `ast` has parsed, without *args and **kwargs."""
    arguments = node.args
    positional = [*arguments.posonlyargs, *arguments.args]
    missing = len(positional) - len(arguments.defaults)
    found = list(zip(positional, [*[None] * missing, *arguments.defaults], strict=True))
    found += zip(arguments.kwonlyargs, arguments.kw_defaults, strict=True)
    return tuple(_parameter(argument.arg, argument.annotation, value, aliases, tree) for argument, value in found)


def _takes_any(node: ast.FunctionDef, module: str) -> bool:
    """Return True if a recipe may set any keyword of a function, because the function takes **kwargs."""
    # Classes of this package take **kwargs only for values that the program sets, such as StreamingDataset's keywords.
    # Accepting them from a recipe would hide typos and bypass the `loader` section.
    return node.args.kwarg is not None and not module.startswith('diffusion.')


def _fields(node: ast.ClassDef, aliases: _Aliases, tree: ast.Module) -> tuple[Parameter, ...]:
    """Return the fields of a dataclass definition as parameters."""
    return tuple(
        _parameter(item.target.id, item.annotation, item.value, aliases, tree)
        for item in node.body
        if isinstance(item, ast.AnnAssign) and isinstance(item.target, ast.Name)
    )


def _is_dataclass(node: ast.ClassDef) -> bool:
    return any('dataclass' in ast.unparse(decorator) for decorator in node.decorator_list)


def _is_dataclass_in(module: str, name: str) -> bool:
    """Return True if a module defines a dataclass of this name."""
    classes = [n for n in _source(module).body if isinstance(n, ast.ClassDef) and n.name == name]
    return bool(classes) and _is_dataclass(classes[0])
