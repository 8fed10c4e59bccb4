"""Interpolations `${...}` in the values of a recipe, in OmegaConf's syntax, and the values that they resolve to.

A value that depends on an environment variable may be a secret. The program uses it, but every text that is saved,
printed or rendered has the interpolation instead; `Resolved.from_environment` has these texts.

OmegaConf parses the interpolations but does not resolve them. Its `oc.coerce` imports any module, it evaluates a value
again for each reference (30 lines of `${a}${a}` take forever), and it cannot tell which values come from `oc.env`.
"""

import re
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf.errors import GrammarParseError, OmegaConfBaseException
from omegaconf.grammar_parser import parse
from omegaconf.grammar_visitor import GrammarVisitor

from diffusion.config.schema import MISSING
from diffusion.config.yaml_syntax import MAX_VALUES, Interpolation
from diffusion.errors import UserError

KeyPath = tuple[str | int, ...]
"""Keys and list indexes that lead to a value, such as `('generate', 'prompts', 0)`."""
MAX_CHARACTERS = 2**22
"""Maximum number of characters that all interpolations of a file may produce."""
MAX_EXPRESSION = 10_000
"""Maximum length of a text with interpolations; OmegaConf's parser takes a second for 50,000 characters."""
MAX_INTERPOLATIONS = 200
"""Maximum number of interpolations in a text; the parser takes 15 seconds for 3,000 that are nested."""
RESOLVERS = ('oc.env', 'oc.decode', 'oc.select')


class InvalidInterpolation(UserError):
    """Error for an interpolation that cannot be resolved; its message starts with the path of the value."""


class _KeyNotFound(InvalidInterpolation):
    """Error for an interpolation whose target does not exist."""


@dataclass(frozen=True)
class Resolved:
    """Values without interpolations, and the source of those that depend on environment variables."""

    values: dict[str, Any]
    """The values. A value that needs an environment variable that is not set is the text of its interpolation."""
    from_environment: dict[KeyPath, Interpolation]
    """Text for each value that depends on an environment variable, such as `${oc.env:KEY}`. It refers to environment
    variables only, so it means the same in another file."""
    unset: dict[KeyPath, tuple[str, ...]]
    """Names of the environment variables that a value needs and that are not set."""


def resolve(raw: dict[str, Any], environ: Mapping[str, str]) -> Resolved:
    """Resolve all interpolations in plain values.

    Args:
        raw: Plain mappings, lists and scalars.
        environ: Environment of `oc.env`.

    Raises:
        InvalidInterpolation: An interpolation is malformed, circular or too large, or its target does not exist.
    """
    # Two passes over the same text: one in which `oc.env` returns a placeholder, which marks every value that depends
    # on it however the value was composed, and one with the real environment.
    hidden = _Pass(raw, None)
    from_environment = {path: hidden.expression(text) for path, text in hidden.leaves_with_placeholder()}
    actual = _Pass(raw, environ)
    unset = {path: actual.variables(text) for path, text in actual.leaves_with_placeholder()}
    values = actual.resolved
    for path in unset:
        parent: Any = values
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] = actual.expression(parent[path[-1]])
    return Resolved(values, from_environment, unset)


def escaped(value: Any) -> Any:
    """Return a plain value with every `${` escaped, so that it is read literally; leave an `Interpolation` as it is."""
    if isinstance(value, dict):
        return {key: escaped(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [escaped(item) for item in value]
    # The backslashes before `${` are halved, and an odd number escapes it: double those there are and add one.
    is_literal = isinstance(value, str) and not isinstance(value, Interpolation)
    return re.sub(r'(\\*)\$\{', r'\1\1\\${', value) if is_literal else value


def dotted(path: KeyPath) -> str:
    """Return the path of a value for messages, such as `generate.prompts[0]`."""
    return ''.join(f'[{key}]' if isinstance(key, int) else f'.{key}' for key in path).removeprefix('.')


class _Pass:
    """One resolution of all interpolations in plain values; each is evaluated once.

    Args:
        raw: The plain values.
        environ: Environment of `oc.env`; None to return a placeholder for every variable.
    """

    def __init__(self, raw: dict[str, Any], environ: Mapping[str, str] | None) -> None:
        self._raw, self._environ = raw, environ
        # Letters and digits only, so that a placeholder passes unchanged through every kind of interpolation.
        self._tag = f'environment{uuid.uuid4().hex}x'
        self._placeholder = re.compile(f'{self._tag}(\\d+)z')
        self._expressions: list[tuple[str, tuple[str, ...]]] = []
        """Text and variables of each placeholder, by its number."""
        self._done: dict[KeyPath, Any] = {}
        self._open: list[KeyPath] = []
        self._produced = 0
        self._count = 0
        self.resolved: dict[str, Any] = {}
        try:
            self.resolved = self._copied(self._at((), raw), ())
        except RecursionError as error:
            raise InvalidInterpolation(
                f'{dotted(self._open[0]) if self._open else "the file"}: too many interpolations refer to each other; '
                'write the value itself'
            ) from error

    def leaves_with_placeholder(self) -> list[tuple[KeyPath, str]]:
        """Return the path and text of each resolved value that contains a placeholder."""
        found: list[tuple[KeyPath, str]] = []
        _collect(self.resolved, (), self._tag, found)
        return found

    def expression(self, text: str) -> Interpolation:
        """Return a text with its placeholders replaced by their interpolations, and every other `${` escaped."""
        parts = self._placeholder.split(text)  # text, number, text, number, ..., text
        # A backslash directly before an interpolation has to be doubled.
        literal = [re.sub(r'(\\+)$', r'\1\1', escaped(part)) for part in parts[:-1:2]] + [escaped(parts[-1])]
        parts[::2] = literal
        parts[1::2] = [self._expressions[int(number)][0] for number in parts[1::2]]
        return Interpolation(''.join(parts))

    def variables(self, text: str) -> tuple[str, ...]:
        """Return the names of the environment variables of the placeholders in a text."""
        numbers = [int(number) for number in self._placeholder.findall(text)]
        return tuple(dict.fromkeys(name for number in numbers for name in self._expressions[number][1]))

    def _at(self, path: KeyPath, raw: Any) -> Any:
        """Return the resolved value of a raw value; the same object for each reference to it."""
        if not isinstance(raw, dict | list) and not (isinstance(raw, str) and '${' in raw):
            return raw
        if path not in self._done:
            if path in self._open:
                chain = ' -> '.join(dotted(each) for each in [*self._open[self._open.index(path) :], path])
                raise self._error(path, f'circular interpolation: {chain}; remove one of these references')
            self._open.append(path)
            try:
                if isinstance(raw, dict):
                    self._done[path] = {key: self._at((*path, key), item) for key, item in raw.items()}
                elif isinstance(raw, list):
                    self._done[path] = [self._at((*path, index), item) for index, item in enumerate(raw)]
                else:
                    self._done[path] = self._evaluate(path, raw)
            finally:
                self._open.pop()
        return self._done[path]

    def _evaluate(self, path: KeyPath, text: str) -> Any:
        """Return the value of a text with interpolations."""
        if len(text) > MAX_EXPRESSION or text.count('${') > MAX_INTERPOLATIONS:
            limits = f'{MAX_EXPRESSION} characters and {MAX_INTERPOLATIONS} interpolations'
            raise self._error(path, f'a text with ${{ has at most {limits}; write \\${{ for a literal ${{')
        return self._visit(path, text, 'configValue', 'DEFAULT_MODE')

    def _visit(self, path: KeyPath, text: str, rule: str, mode: str) -> Any:
        """Parse a text by a rule of OmegaConf's grammar, and return its value."""
        visitor = GrammarVisitor(
            node_interpolation_callback=lambda key, memo: self._reference(path, key),
            resolver_interpolation_callback=lambda name, args, args_str: self._call(path, name, args, args_str),
            memo=None,
        )
        try:
            value = visitor.visit(parse(text, rule, mode))
        except GrammarParseError as error:
            what = str(error).splitlines()[0]
            raise self._error(path, f'{self._without_placeholders(what)}; write \\${{ for a literal ${{') from error
        except (OmegaConfBaseException, ValueError, TypeError, OverflowError) as error:
            if isinstance(error, InvalidInterpolation):
                raise
            what = str(error).splitlines()[0] if str(error) else type(error).__name__
            raise self._error(path, f'cannot be resolved ({self._without_placeholders(what)}); correct it') from error
        return self._counted(path, str(value) if isinstance(value, str) else value)

    def _counted(self, path: KeyPath, value: Any) -> Any:
        """Count the characters that interpolations produce, and refuse a total that could fill the memory."""
        self._produced += len(value) if isinstance(value, str) else 1
        if self._produced > MAX_CHARACTERS:
            raise self._error(path, f'the interpolations produce more than {MAX_CHARACTERS} characters; remove some')
        return value

    def _reference(self, path: KeyPath, key: Any) -> Any:
        """Return the value that `${key}` in the value at `path` refers to."""
        if self._tag in key.raw:
            raise self._error(path, 'an environment variable cannot name a key; write the value itself')
        if key.relative_dots > len(path):
            raise _KeyNotFound(f"{dotted(path)}: Interpolation key '{key.raw}' not found; it starts above the file")
        where: KeyPath = path[: len(path) - key.relative_dots] if key.relative_dots else ()
        value: Any = self._raw
        for part in where:
            value = value[part]
        # Walk the raw values, so that only the target is resolved: ${a.b} in a.c is no circle.
        is_raw = True
        for part in key.parts:
            if is_raw and isinstance(value, str) and '${' in value:
                value, is_raw = self._at(where, value), False
            found = _item(value, part)
            if found is None:
                raise _KeyNotFound(f"{dotted(path)}: Interpolation key '{key.raw}' not found; correct the reference")
            step, value = found
            where = (*where, step)
        value = self._at(where, value) if is_raw else value
        if value == MISSING:
            raise self._error(path, f'refers to {dotted(where)}, which is still ???; set that value')
        return self._counted(path, value)

    def _call(self, path: KeyPath, name: str, args: tuple[Any, ...], args_str: tuple[str, ...]) -> Any:
        """Return the value of `${name:args}`."""
        if name == 'oc.env' and len(args) in (1, 2):
            return self._variable(path, str(args[0]), args[1:], args_str[1:])
        if name == 'oc.select' and len(args) in (1, 2):
            if self._tag in str(args[0]):
                raise self._error(path, 'an environment variable cannot name a key; write the value itself')
            try:
                return self._visit(path, f'${{{args[0]}}}', 'configValue', 'DEFAULT_MODE')
            except _KeyNotFound:
                if len(args) == 1:
                    raise
                return args[1]
        if name == 'oc.decode' and len(args) == 1:
            if args[0] is None:
                return None
            if not isinstance(args[0], str):
                raise self._error(path, f'oc.decode takes text, not {args[0]!r}; remove oc.decode')
            if self._tag in args[0]:
                inner = self._quoted(path, args[0])
                return self._new_placeholder(f'${{oc.decode:{inner}}}', self.variables(args[0]))
            try:
                return self._visit(path, args[0], 'singleElement', 'VALUE_MODE')
            except InvalidInterpolation:
                if self._environ is None:
                    raise
                # Only text that depends on a variable gets here in the second pass, and the error quotes it.
                raise self._error(path, 'oc.decode cannot parse its text as a value; correct the text') from None
        known = ' and '.join(f'${{{each}:...}}' for each in RESOLVERS)
        raise self._error(path, f'${{{name}:...}} with {len(args)} arguments is not supported; use {known}')

    def _variable(self, path: KeyPath, name: str, default: tuple[Any, ...], default_text: tuple[str, ...]) -> Any:
        """Return the value of an environment variable, its default, or a placeholder."""
        if self._tag in name:
            raise self._error(path, 'an environment variable cannot name another one; write its name')
        if not re.fullmatch(r'[^\W\d]\w*', name):
            raise self._error(path, 'oc.env needs the name of an environment variable; correct it')
        if self._environ is not None and name in self._environ:
            return self._environ[name]
        if self._environ is not None and default:
            return None if default[0] is None else str(default[0])
        # Without interpolations, keep the default as it is written.
        text = default_text[0] if default and '${' not in default_text[0] else None
        if default and text is None:
            text = 'null' if default[0] is None else self._quoted(path, str(default[0]))
        names = (name, *self.variables(str(default[0]))) if default else (name,)
        return self._new_placeholder(f'${{oc.env:{name}}}' if text is None else f'${{oc.env:{name},{text}}}', names)

    def _quoted(self, path: KeyPath, text: str) -> str:
        """Return a text with placeholders as an argument of an interpolation."""
        if self._placeholder.fullmatch(text):
            return self.expression(text)
        if '\\' in text or ("'" in text and '"' in text):
            raise self._error(path, 'backslashes, or both kinds of quotes, beside ${oc.env:...} cannot be kept; remove')
        quote = '"' if "'" in text else "'"
        return f'{quote}{self.expression(text)}{quote}'

    def _new_placeholder(self, text: str, variables: tuple[str, ...]) -> str:
        """Return a text that stands for an interpolation that depends on environment variables."""
        self._expressions.append((text, variables))
        return f'{self._tag}{len(self._expressions) - 1}z'

    def _copied(self, value: Any, path: KeyPath) -> Any:
        """Return a deep copy, so that two references do not share an object; count its values."""
        self._count += 1
        if self._count > MAX_VALUES:
            raise self._error(path, f'the interpolations produce more than {MAX_VALUES} values; remove some')
        if isinstance(value, dict):
            for key in value:
                if isinstance(key, str) and self._tag in key:
                    raise self._error(path, 'an environment variable cannot name a key; write the value itself')
            return {key: self._copied(item, (*path, key)) for key, item in value.items()}
        if isinstance(value, list):
            return [self._copied(item, (*path, index)) for index, item in enumerate(value)]
        return value

    def _without_placeholders(self, text: str) -> str:
        return str(self.expression(text)) if self._tag in text else text

    def _error(self, path: KeyPath, what: str) -> InvalidInterpolation:
        return InvalidInterpolation(f'{dotted(path)}: {what}')


def _item(value: Any, part: str) -> tuple[str | int, Any] | None:
    """Return the key or index, and the value, that a part of an interpolation's path selects; None if there is none."""
    if isinstance(value, dict):
        keys = [part, *([int(part)] if part.isdecimal() and len(part) < 19 else [])]
        return next(((key, value[key]) for key in keys if key in value), None)
    if isinstance(value, list) and part.isdecimal() and len(part) < 10 and int(part) < len(value):
        return int(part), value[int(part)]
    return None


def _collect(value: Any, path: KeyPath, tag: str, found: list[tuple[KeyPath, str]]) -> None:
    """Append the path and text of each string that contains a tag to a list."""
    if isinstance(value, dict):
        for key, item in value.items():
            _collect(item, (*path, key), tag, found)
    elif isinstance(value, list):
        for index, item in enumerate(value):
            _collect(item, (*path, index), tag, found)
    elif isinstance(value, str) and tag in value:
        found.append((path, value))
