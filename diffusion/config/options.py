"""Command-line options from the fields of a settings dataclass: `max_rejected: float` becomes `--max-rejected X`.

A field's type and constraints check the value, its doc string is the help text, and an `Option` in its annotation sets
the rest. A command is a function whose arguments are such dataclasses.
"""

import argparse
import dataclasses
import functools
import math
import types
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Annotated, Any, Literal, Union, get_args, get_origin, get_type_hints

from diffusion.config.declarations import AtLeast, Between, Constraint
from diffusion.config.schema import attribute_docs, describe_type


@dataclass(frozen=True)
class Option:
    """Properties of an option that do not follow from the name and type of its field."""

    metavar: str | None = None
    """Name of the value in the help text; None derives it from the type."""
    flag: str | None = None
    """Name of the option; None derives it from the name of the field."""
    positional: bool = False
    """True for a positional argument, without a flag."""
    trailing: bool = False
    """True if values of a positional list may also come after options, which argparse does not support."""
    commas: bool = False
    """True if a list is given as one comma-separated word instead of several words."""
    repeated: bool = False
    """True if a list is given by repeating the flag before each value."""
    files: bool = False
    """True if shell completion suggests file names."""
    const: str | None = None
    """Value of the option if the flag has no value; None requires a value after the flag."""
    excludes: str | None = None
    """Name of the group of mutually exclusive options to which this option belongs; None if it excludes no others."""


FILE, DIR, DIR_OR_URL = (Option(metavar, files=True) for metavar in ('FILE', 'DIR', 'DIR_OR_URL'))
Count = Annotated[int, AtLeast(1)]
Port = Annotated[int, Between(0, 65536)]
RecipeFile = Annotated[str, Option(positional=True, files=True)]
Overrides = Annotated[list[str], Option('KEY=VALUE', positional=True, trailing=True)]


@dataclass(frozen=True)
class _Field:
    """Field of a settings dataclass: its type without Annotated and None, and the metadata of Annotated."""

    name: str
    kind: Any
    option: Option
    constraints: list[Constraint]
    default: Any  # dataclasses.MISSING if the field has no default

    @property
    def flag(self) -> str:
        return self.option.flag or f'--{self.name.replace("_", "-")}'


def add_command(parser: argparse.ArgumentParser, function: Callable[..., int]) -> None:
    """Make a parser run a function whose arguments are dataclasses, and add an option for each field of these."""
    kinds = {name: kind for name, kind in get_type_hints(function).items() if name != 'return'}
    for kind in kinds.values():
        title = str(kind.__doc__).partition('\n')[0].rstrip('.')
        add_options(parser if len(kinds) == 1 else parser.add_argument_group(title), kind)
    parser.set_defaults(call=functools.partial(_call, function, kinds))


def _call(function: Callable[..., int], kinds: Mapping[str, Any], args: argparse.Namespace) -> int:
    return function(**{name: kind(**given_options(kind, args)) for name, kind in kinds.items()})


def add_options(
    target: Any, kind: type, *, only: Collection[str] | None = None, required: Mapping[str, bool] | None = None
) -> None:
    """Add options to a parser or group for the fields of a dataclass, except fields that are dataclasses themselves.

    Args:
        only: Names of the fields to add; None adds all.
        required: True or False by field name: whether the option must be given. Other options are required if their
            fields have no default.
    """
    docs = attribute_docs(kind)
    groups: dict[str | None, Any] = {None: target}
    for each in _fields(kind):
        if dataclasses.is_dataclass(each.kind) or (only is not None and each.name not in only):
            continue
        option, is_required = each.option, (required or {}).get(each.name, each.default is dataclasses.MISSING)
        if option.excludes not in groups:
            groups[option.excludes] = target.add_mutually_exclusive_group()
        words = _keywords(each, is_required) | {'help': _help(docs[each.name], each.default)}
        if not option.positional:
            words |= {'dest': each.name, 'required': is_required}
        name = each.name if option.positional else each.flag
        action = groups[option.excludes].add_argument(name, default=argparse.SUPPRESS, **words)
        action.completes_files = option.files or Path in (each.kind, *get_args(each.kind))
        if option.trailing:
            target.set_defaults(trailing=each.name)


def given_options(kind: type, args: argparse.Namespace) -> dict[str, Any]:
    """Return the values of the options that were given, by the names of a dataclass's fields."""
    given = {each.name: (each.kind, getattr(args, each.name)) for each in _fields(kind) if each.name in args}
    return {name: dict(value) if get_origin(kind) is dict else value for name, (kind, value) in given.items()}


def option_words(settings: Any) -> list[str]:
    """Return a command-line word (--gpus=8) for each field that is not at its default; a mapping has one per entry."""
    words = []
    for each in _fields(type(settings)):
        value = getattr(settings, each.name)
        if isinstance(value, dict):
            words += [f'{each.flag}={key}={item}' for key, item in value.items()]
        elif value != each.default:
            words.append(f'{each.flag}={",".join(map(str, value)) if each.option.commas else value}')
    return words


def _fields(kind: Any) -> list[_Field]:
    hints, found = get_type_hints(kind, include_extras=True), []
    for field in fields(kind):
        hint, option, constraints = hints[field.name], Option(), []
        # Unwrap Annotated and unions, which may contain each other.
        while (origin := get_origin(hint)) in (Annotated, Union, types.UnionType):
            if origin is Annotated:
                hint, *extras = get_args(hint)
                option = next((extra for extra in extras if isinstance(extra, Option)), option)
                constraints += [extra for extra in extras if isinstance(extra, Constraint)]
            else:  # of a union, use the list type, since its items cover the other types, or else a type but None
                hint = max(get_args(hint), key=lambda choice: (get_origin(choice) is list, choice is not type(None)))
        default = field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
        found.append(_Field(field.name, hint, option, constraints, default))
    return found


def _keywords(each: _Field, is_required: bool) -> dict[str, Any]:
    """Return the arguments of `add_argument` with which argparse reads and checks a field's value."""
    if each.kind is bool:
        return {'action': 'store_true'}
    option, is_list, is_dict = each.option, get_origin(each.kind) is list, get_origin(each.kind) is dict
    item = get_args(each.kind)[0] if is_list else each.kind
    if get_origin(item) is Literal:
        words: dict[str, Any] = {'choices': get_args(item)}
    else:
        read = functools.partial(_read, item, each.constraints)
        words = {'type': _pair if is_dict else functools.partial(_read_list, read) if option.commas else read}
        words['metavar'] = option.metavar or {int: 'N', float: 'X', Path: 'FILE'}.get(item, each.name.upper())
    if is_dict or option.repeated:
        words['action'] = 'append'
    elif is_list and not option.commas:
        words['nargs'] = '*' if option.positional and not is_required else '+'
    elif option.const is not None or (option.positional and not is_required):
        words |= {'nargs': '?'} | ({} if option.const is None else {'const': option.const})
    return words


def _read(kind: type, constraints: Sequence[Constraint], text: str) -> Any:
    """Convert the text of an option's value, such as 8, 0.5 or 790e6, and check it."""
    try:
        number = float(text) if kind is int and 'e' in text.lower() else kind(text)
        value = kind(number)
        if kind is int and value != number:
            raise ValueError
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(f'{text!r} is not {describe_type(kind)}') from None
    if constraints and not math.isfinite(value):
        raise argparse.ArgumentTypeError(f'{text!r} is not a finite number')
    if problem := next(filter(None, (constraint.problem(value) for constraint in constraints)), None):
        raise argparse.ArgumentTypeError(problem)
    return value


def _read_list(read: Callable[[str], Any], text: str) -> list[Any]:
    return [read(word.strip()) for word in text.split(',') if word.strip()]


def _pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition('=')
    if not value:
        raise argparse.ArgumentTypeError(f'{text!r} is not NAME=VALUE')
    return name, value


def _help(doc: str, default: Any) -> str:
    """Return the help text of an option: the doc string of its field, and its default if it has one."""
    text = doc.rstrip('.').replace('%', '%%')
    has_default = isinstance(default, str | int | float) and default is not False and default != ''
    return f'{text} (default: {default})' if has_default and '(default' not in text else text
