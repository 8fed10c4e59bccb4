"""Convert plain YAML values to dataclasses, and collect all mistakes instead of stopping at the first."""

import ast
import dataclasses
import difflib
import functools
import inspect
import math
import re
import textwrap
import types
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

MISSING = '???'
"""Placeholder in a YAML file for a value that the user must fill in."""


@dataclass(frozen=True)
class Problem:
    """Mistake in a YAML file: the path of the wrong value, and a description with the fix."""

    where: str
    """Path of the value, such as `model.resolution`; empty for the whole file."""
    what: str

    def __str__(self) -> str:
        return f'{self.where}: {self.what}' if self.where else self.what


class Gatherer:
    """Collector of the mistakes in a YAML file, and of the values that are still `???`."""

    def __init__(self) -> None:
        self.problems: list[Problem] = []
        self.missing: list[Problem] = []

    def problem(self, where: str, what: str) -> None:
        self.problems.append(Problem(where, what))


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """Return `did you mean 'NAME'?` with the nearest of the choices, or a list of all choices if none is near."""
    known = sorted(choices)
    # An abbreviation is nearer than a word with the same letters: `steps` means num_inference_steps, not seeds.
    longer = [choice for choice in known if len(str(name)) > 3 and str(name) in choice]
    near = difflib.get_close_matches(str(name), known, n=1, cutoff=0.75 if longer else 0.6) or longer[:1]
    return f"did you mean '{near[0]}'?" if near else f'known: {", ".join(known) or "none"}'


def join(where: str, key: object) -> str:
    """Return the dotted path of a key in a section, such as `trainer.device`; the key or the section may be empty."""
    return f'{where}.{key}' if where and key != '' else where or str(key)


def build_dataclass(kind: Any, value: Any, where: str, gather: Gatherer, doc: str = '') -> Any:
    """Convert a plain YAML value to a type, such as a dataclass; on a mistake, add it to `gather` and return None.

    Args:
        kind: A dataclass, a simple type, Literal, a union, `list[...]`, `dict[str, ...]` or Any.
        value: Plain YAML value: mapping, list, string, number, boolean or None; `???` is returned unchanged.
        doc: Description of the value, for the message if it is still `???`.
    """
    if isinstance(value, str) and value == MISSING:
        if dataclasses.is_dataclass(kind) and not _required(kind):
            gather.problem(where, 'is a section; write ??? for single values in it instead')
            return None
        gather.missing.append(Problem(where, f'is still ???; set {_sentence(doc) or "a value"}'))
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
        # Drop entries with mistakes, which are None here, so that later checks see only entries of the right type.
        return {key: item for key, item in entries.items() if item is not None or fits(arguments[1], None)}
    if fits(kind, value):
        return float(value) if kind is float else value
    gather.problem(where, f'{value!r} is not {describe_type(kind)}{_hint(kind, value)}')
    return None


def fits(kind: Any, value: Any) -> bool:
    """Return True if a plain YAML value has this type. An int is also a float, but a bool is not an int."""
    origin, arguments = get_origin(kind), get_args(kind)
    if kind is Any:
        return True
    if origin in (Union, types.UnionType):
        return any(fits(choice, value) for choice in arguments)
    if origin is Literal:
        # Compare types too: in Python, True == 1 == 1.0.
        return any(value == choice and type(value) is type(choice) for choice in arguments)
    if origin is list or kind is list:
        return isinstance(value, list) and all(fits(arguments[0], item) for item in value if arguments)
    if origin is dict or kind is dict:
        return isinstance(value, dict)
    if kind is type(None):
        return value is None
    if kind is float:
        return isinstance(value, int | float) and not isinstance(value, bool) and not math.isnan(value)
    if kind is int:
        return isinstance(value, int) and not isinstance(value, bool)
    return isinstance(value, kind)


def describe_type(kind: Any) -> str:
    origin, arguments = get_origin(kind), get_args(kind)
    if origin in (Union, types.UnionType):
        return ' or '.join(describe_type(choice) for choice in arguments)
    if origin is Literal:
        return 'one of ' + ', '.join(str(choice) for choice in arguments)
    if origin is list:
        return f'a list, each {describe_type(arguments[0])}'
    names = {int: 'an integer', float: 'a number', str: 'a string', bool: 'true or false', type(None): 'null'}
    if origin is dict or kind is dict or dataclasses.is_dataclass(kind):
        return 'a mapping (key: value)'
    return names.get(kind, getattr(kind, '__name__', str(kind)))


def field_docs(kind: type) -> dict[str, str]:
    """Return the first sentence of the doc string under each field of a dataclass, without its period."""
    return {name: doc.split('. ')[0].rstrip('.') for name, doc in attribute_docs(kind).items()}


@functools.cache
def attribute_docs(kind: type) -> dict[str, str]:
    """Return the doc string under each annotated attribute of a class and its base classes."""
    # Python does not keep doc strings of attributes at run time, so parse the source.
    docs = {}
    for each in reversed(kind.__mro__[:-1]):
        tree = ast.parse(textwrap.dedent(inspect.getsource(each))).body[0]
        assert isinstance(tree, ast.ClassDef)
        docs |= doc_strings(tree)
    return docs


def doc_strings(node: ast.ClassDef) -> dict[str, str]:
    """Return the doc string under each annotated attribute of a class that `ast` has parsed."""
    docs = {}
    for statement, following in zip(node.body, node.body[1:], strict=False):
        if not isinstance(statement, ast.AnnAssign) or not isinstance(statement.target, ast.Name):
            continue
        if isinstance(following, ast.Expr) and isinstance(following.value, ast.Constant):
            docs[statement.target.id] = ' '.join(inspect.cleandoc(str(following.value.value)).split())
    return docs


def _dataclass(kind: Any, value: Any, where: str, gather: Gatherer) -> Any:
    if value is None:
        value = {}
    if not isinstance(value, dict):
        gather.problem(where, f'{value!r} is not a mapping (key: value)')
        return None
    fields = {field.name: field.metadata for field in dataclasses.fields(kind) if field.init and field.repr}
    # A field has another name than its key if the key is a Python keyword, such as `from`.
    keys = {name: str(metadata.get('key', name)) for name, metadata in fields.items()}
    hints, docs = get_type_hints(kind), field_docs(kind)
    for key in value:
        if key not in keys.values():
            gather.problem(join(where, key), f'unknown key; {did_you_mean(key, keys.values())}')
    built = {}
    for name, metadata in fields.items():
        path = where if metadata.get('flat') else join(where, keys[name])
        if keys[name] in value:
            before = len(gather.problems)
            built[name] = build_dataclass(hints[name], value[keys[name]], path, gather, docs.get(name, ''))
            if built[name] is None and len(gather.problems) > before and name not in _required(kind):
                del built[name]  # use the default of an optional field, so that the other checks can continue
        elif name in _required(kind):
            gather.problem(path, f'is missing; set {_sentence(docs.get(name, "")) or describe_type(hints[name])}')
            built[name] = None
    return kind(**built)


def _sentence(doc: str) -> str:
    """Return a doc string with a lower-case first letter, for the middle of a sentence."""
    return doc[:1].lower() + doc[1:]


@functools.cache
def _required(kind: Any) -> set[str]:
    return {
        field.name
        for field in dataclasses.fields(kind)
        if field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
    }


def _union(kind: Any, value: Any, where: str, gather: Gatherer, doc: str) -> Any:
    """Convert a value to one of a union's types; if it fits none, add a mistake to `gather` and return None."""
    choices = get_args(kind)
    structured = [
        choice for choice in choices if dataclasses.is_dataclass(choice) or get_origin(choice) in (list, dict)
    ]
    # If no simple type fits, convert to the union's dataclass, list or dict: this reports mistakes inside it by path.
    if value is not None and structured and not any(fits(c, value) for c in choices if c not in structured):
        return build_dataclass(structured[0], value, where, gather, doc)
    if fits(kind, value):
        return value
    gather.problem(where, f'{value!r} is not {describe_type(kind)}{_hint(kind, value)}')
    return None


def _hint(kind: Any, value: Any) -> str:
    """Return advice on how to fix a value of the wrong type, with a leading semicolon; '' if there is none."""
    if get_origin(kind) is Literal and isinstance(value, str):
        near = difflib.get_close_matches(value, [str(choice) for choice in get_args(kind)], n=1)
        return f"; did you mean '{near[0]}'?" if near else ''
    if kind is str or (get_origin(kind) in (Union, types.UnionType) and str in get_args(kind)):
        return '; put it in quotes' if isinstance(value, int | float) else ''
    return _hint_of_text(kind, value) if isinstance(value, str) else ''


def _hint_of_text(kind: Any, text: str) -> str:
    """Return advice on text that YAML 1.1 reads as a number or boolean, with a leading semicolon; '' for other text."""
    kinds = {kind, *get_args(kind)}
    if {int, float} & kinds and re.fullmatch(r'[-+]?0\d+', text):
        return f'; write it without leading zeros: {int(text)}'
    meaning = {'yes': 'true', 'on': 'true', 'no': 'false', 'off': 'false'}.get(text.lower())
    return f'; write {meaning}' if bool in kinds and meaning else ''


def _look_for_missing(value: Any, where: str, gather: Gatherer) -> None:
    if isinstance(value, dict):
        for key, item in value.items():
            build_dataclass(Any, item, join(where, key), gather)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            build_dataclass(Any, item, f'{where}[{index}]', gather)
