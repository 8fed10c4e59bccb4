"""From plain YAML values to dataclasses, every mistake gathered with the path where it stands."""

import ast
import dataclasses
import difflib
import functools
import inspect
import textwrap
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

MISSING = '???'
"""What a YAML says where only its user knows."""


@dataclass(frozen=True)
class Problem:
    """A mistake: where it is, what it is, and the way out."""

    where: str
    what: str

    def __str__(self) -> str:
        return f'{self.where}: {self.what}' if self.where else self.what


class Gatherer:
    """Problems, and values that are still to be given."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.missing: list[Problem] = []

    def problem(self, where: str, what: str) -> None:
        self.problems.append(Problem(where, what))

    def still_missing(self, where: str, doc: str) -> None:
        self.missing.append(Problem(where, f'is still ???; give {_sentence(doc) or "a value"}'))


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """The name that was meant, as a question, or else all there are."""
    known = sorted(choices)
    near = difflib.get_close_matches(str(name), known, n=1)
    return f"did you mean '{near[0]}'?" if near else f'known: {", ".join(known) or "none"}'


def join(where: str, key: object) -> str:
    """The path of a key under a path."""
    return f'{where}.{key}' if where else str(key)


def build_dataclass(kind: Any, value: Any, where: str, gather: Gatherer, doc: str = '') -> Any:
    """The value as the type says; mistakes go to `gather` and give None.

    Args:
        kind: A dataclass, a simple type, Literal, a union, `list[...]`, `dict[str, ...]` or Any.
        value: Plain YAML: mappings, lists, strings, numbers, booleans, None; `???` stays as it is.
        where: Path of the value.
        gather: Takes the mistakes.
        doc: What the value means, for one that is missing.
    """
    if isinstance(value, str) and value == MISSING:
        if dataclasses.is_dataclass(kind) and not _required(kind):
            gather.problem(where, 'is a section; write ??? for the value in it that its user must give')
            return None
        gather.still_missing(where, doc)
        return value
    if kind is Any:
        _look_for_missing(value, where, gather)
        return value
    if dataclasses.is_dataclass(kind):
        return _dataclass(kind, value, where, gather)
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return _union(kind, value, where, gather, doc)
    if origin is list and isinstance(value, list):
        return [build_dataclass(arguments[0], item, f'{where}[{i}]', gather, doc) for i, item in enumerate(value)]
    if origin is dict and isinstance(value, dict):
        entries = {
            str(key): build_dataclass(arguments[1], item, join(where, key), gather) for key, item in value.items()
        }
        return {key: item for key, item in entries.items() if item is not None or fits(arguments[1], None)}
    if fits(kind, value):
        return float(value) if kind is float else value
    gather.problem(where, f'{value!r} is not {describe_type(kind)}{_hint(kind, value)}')
    return None


def fits(kind: Any, value: Any) -> bool:
    """Whether a plain value is of a simple type; an int is fine for a float, a bool is not an int."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(fits(choice, value) for choice in arguments)
    if origin is Literal:
        return any(value == choice and type(value) is type(choice) for choice in arguments)
    if origin is list or kind is list:
        return isinstance(value, list) and all(fits(arguments[0], item) for item in value if arguments)
    if origin is dict or kind is dict:
        return isinstance(value, dict)
    if kind is type(None):
        return value is None
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def describe_type(kind: Any) -> str:
    """A type in words."""
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return ' or '.join(describe_type(choice) for choice in arguments)
    if origin is Literal:
        return 'one of ' + ', '.join(str(choice) for choice in arguments)
    if origin is list:
        return f'a list, each {describe_type(arguments[0])}'
    words = {int: 'an integer', float: 'a number', str: 'a string', bool: 'true or false', type(None): 'null'}
    if origin is dict or kind is dict or dataclasses.is_dataclass(kind):
        return 'a mapping (key: value)'
    return words.get(kind, getattr(kind, '__name__', str(kind)))


@functools.cache
def field_docs(kind: type) -> dict[str, str]:
    """The doc strings under a dataclass's fields, their first sentence."""
    tree = ast.parse(textwrap.dedent(inspect.getsource(kind))).body[0]
    assert isinstance(tree, ast.ClassDef)
    docs = {}
    for statement, following in zip(tree.body, tree.body[1:], strict=False):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            text = inspect.cleandoc(str(following.value.value))
            docs[statement.target.id] = ' '.join(text.split('. ')[0].rstrip('.').split())
    return docs


def _dataclass(kind: Any, value: Any, where: str, gather: Gatherer) -> Any:
    if value is None:
        value = {}
    if not isinstance(value, dict):
        gather.problem(where, f'{value!r} is not a mapping (key: value)')
        return None
    fields = {field.name: field.metadata for field in dataclasses.fields(kind) if field.init and field.repr}
    hints, docs = get_type_hints(kind), field_docs(kind)
    for key in value:
        if key not in fields:
            gather.problem(join(where, key), f'unknown key; {did_you_mean(key, fields)}')
    built = {}
    for name, metadata in fields.items():
        path = where if metadata.get('flat') else join(where, name)
        if name in value:
            before = len(gather.problems)
            built[name] = build_dataclass(hints[name], value[name], path, gather, docs.get(name, ''))
            if built[name] is None and len(gather.problems) > before and name not in _required(kind):
                del built[name]  # its default lets the other checks go on
        elif name in _required(kind):
            gather.problem(path, f'is missing; give {_sentence(docs.get(name, "")) or describe_type(hints[name])}')
            built[name] = None
    return kind(**built)


def _sentence(doc: str) -> str:
    """A doc string to go on with in the middle of a sentence."""
    return doc[:1].lower() + doc[1:]


def _required(kind: Any) -> set[str]:
    """Fields of a dataclass without a default."""
    return {
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }


def _union(kind: Any, value: Any, where: str, gather: Gatherer, doc: str) -> Any:
    choices = get_args(kind)
    structured = [
        choice for choice in choices if dataclasses.is_dataclass(choice) or get_origin(choice) in (list, dict)
    ]
    if value is not None and structured and not any(fits(c, value) for c in choices if c not in structured):
        return build_dataclass(structured[0], value, where, gather, doc)
    if fits(kind, value):
        return value
    gather.problem(where, f'{value!r} is not {describe_type(kind)}{_hint(kind, value)}')
    return None


def _hint(kind: Any, value: Any) -> str:
    if get_origin(kind) is Literal and isinstance(value, str):
        near = difflib.get_close_matches(value, [str(choice) for choice in get_args(kind)], n=1)
        return f"; did you mean '{near[0]}'?" if near else ''
    if kind is str or (get_origin(kind) in (Union, types.UnionType) and str in get_args(kind)):
        return '; put it in quotes' if isinstance(value, int | float) else ''
    return ''


def _look_for_missing(value: Any, where: str, gather: Gatherer) -> None:
    """Values still to be given inside something without a schema."""
    if isinstance(value, dict):
        for key, item in value.items():
            build_dataclass(Any, item, join(where, key), gather)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            build_dataclass(Any, item, f'{where}[{index}]', gather)
