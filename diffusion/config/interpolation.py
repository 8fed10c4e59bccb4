"""Interpolations `${...}` in the values of a recipe, resolved by OmegaConf.

A value that depends on an environment variable may be a secret. The program uses it, but everything saved, printed or
rendered contains the interpolation from `Resolved.from_environment` instead.
"""

import re
import threading
import uuid
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

from omegaconf import OmegaConf
from omegaconf.basecontainer import BaseContainer
from omegaconf.errors import OmegaConfBaseException, UnsupportedInterpolationType
from omegaconf.resolvers import oc

from diffusion.errors import UserError

_registry_lock = threading.Lock()

KeyPath = tuple[str | int, ...]
"""Path of keys and list indexes to a value, such as `('generate', 'prompts', 0)`."""


class Interpolation(str):
    """Text with `${...}` that is written to YAML unchanged; in plain strings, `${` is escaped."""


class InvalidInterpolation(UserError):
    """Error for an interpolation that cannot be resolved; its message starts with the path of the value."""


@dataclass(frozen=True)
class Resolved:
    """Values after interpolation, and the original text of those that depend on environment variables."""

    values: dict[str, Any]
    """The values. A value that needs an unset environment variable stays the text of its interpolation."""
    from_environment: dict[KeyPath, Interpolation]
    """Text of each value that depends on an environment variable, such as `${oc.env:KEY}`. The text refers to no other
    key of the file, so it has the same meaning in another file."""
    unset: dict[KeyPath, tuple[str, ...]]
    """Unset environment variables that a value needs, by the value's path; only values that need any have an entry."""
    dropped: dict[str, dict[str, Any]] = field(default_factory=dict)
    """Components of extended files that a component with another `name` replaced, by path such as `model`."""


def resolve(raw: dict[str, Any], environ: Mapping[str, str]) -> Resolved:
    """Resolve all interpolations in nested plain values; `environ` is the environment of `oc.env`.

    Raises:
        InvalidInterpolation: An interpolation is malformed or circular, or its target does not exist.
    """
    if '${' not in str(raw):  # without interpolations, skip OmegaConf, which is slow
        return Resolved(raw, {}, {})
    # Resolve everything twice. In the first pass, `oc.env` returns placeholders, which mark every value that depends on
    # the environment, however it is composed; the second pass uses the real environment.
    hidden, actual = _Pass(raw, None), _Pass(raw, environ)
    from_environment = {path: hidden.expression(text) for path, text in hidden.leaves_with_placeholder()}
    unset = {path: actual.variables(text) for path, text in actual.leaves_with_placeholder()}
    for path in unset:
        parent: Any = actual.values
        for key in path[:-1]:
            parent = parent[key]
        parent[path[-1]] = actual.expression(parent[path[-1]])
    return Resolved(actual.values, from_environment, unset)


def escaped(value: Any) -> Any:
    """Return a plain value with every `${` escaped, to be read literally; leave an `Interpolation` unchanged."""
    if isinstance(value, dict):
        return {key: escaped(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [escaped(item) for item in value]
    # OmegaConf halves the backslashes before `${`, which is escaped if their number is odd: double the backslashes of
    # the text and add one.
    is_literal = isinstance(value, str) and not isinstance(value, Interpolation)
    return re.sub(r'(\\*)\$\{', r'\1\1\\${', value) if is_literal else value


def dotted(path: KeyPath) -> str:
    """Return a path as text for messages, such as `generate.prompts[0]`."""
    return ''.join(f'[{key}]' if isinstance(key, int) else f'.{key}' for key in path).removeprefix('.')


class _Pass:
    """One pass that resolves all interpolations; if `environ` is None, every variable becomes a placeholder."""

    def __init__(self, raw: dict[str, Any], environ: Mapping[str, str] | None) -> None:
        self._environ = environ
        # Use letters and digits only, so that a placeholder passes unchanged through every kind of interpolation.
        self._tag = f'environment{uuid.uuid4().hex}x'
        self._placeholder = re.compile(f'{self._tag}(\\d+)z')
        self._expressions: list[tuple[str, tuple[str, ...]]] = []
        """Interpolation text and environment variables of each placeholder, by the placeholder's number."""
        try:
            with _only_resolvers({'oc.env': self._env, 'oc.decode': self._decode, 'oc.select': self._select}):
                self.values: Any = OmegaConf.to_container(OmegaConf.create(raw), resolve=True)
        except OmegaConfBaseException as error:
            raise InvalidInterpolation(f'{error.full_key or "the file"}: {self._explained(error)}') from error
        except RecursionError as error:
            what = 'the file: interpolations refer to each other in a circle; remove one'
            raise InvalidInterpolation(what) from error

    def leaves_with_placeholder(self) -> list[tuple[KeyPath, str]]:
        return [(path, text) for path, text in _texts(self.values, ()) if self._tag in text]

    def expression(self, text: str) -> Interpolation:
        """Return a text with each placeholder replaced by its interpolation `${...}`, and every other `${` escaped."""
        parts = self._placeholder.split(text)
        # `parts` alternates between text and placeholder numbers, starting and ending with text.
        # A backslash directly before an interpolation must be doubled.
        literal = [re.sub(r'(\\+)$', r'\1\1', escaped(part)) for part in parts[:-1:2]] + [escaped(parts[-1])]
        parts[::2] = literal
        parts[1::2] = [self._expressions[int(number)][0] for number in parts[1::2]]
        return Interpolation(''.join(parts))

    def variables(self, text: str) -> tuple[str, ...]:
        numbers = [int(number) for number in self._placeholder.findall(text)]
        return tuple(dict.fromkeys(name for number in numbers for name in self._expressions[number][1]))

    def _explained(self, error: OmegaConfBaseException) -> str:
        what = re.sub(r'^\w+ (raised )?while resolving interpolation: ', '', str(error).splitlines()[0])
        if self._tag in what:
            return 'an environment variable cannot name a key or another variable; write the value itself'
        if isinstance(error, UnsupportedInterpolationType):
            return f'{what}; use oc.env, oc.decode or oc.select'
        return f'{what}; correct the interpolation, or write \\${{ for a literal ${{'

    # OmegaConf passes each resolver the root, the parent and the node of the interpolation, the values of its
    # arguments, and their texts.
    def _env(self, _root: Any, _parent: Any, _node: Any, args: tuple[Any, ...], texts: tuple[str, ...]) -> Any:
        """Return an environment variable's value or default; in the first pass, or if it has neither, a placeholder."""
        name, default = str(args[0]) if args else '', args[1:]
        if len(default) > 1 or not re.fullmatch(r'[^\W\d]\w*', name) or self._tag in name:
            raise ValueError(f'oc.env takes the name of an environment variable and one default, not {name!r}')
        if self._environ is not None and name in self._environ:
            return self._environ[name]
        if self._environ is not None and default:
            return None if default[0] is None else str(default[0])
        # Keep the text of a default without interpolations unchanged.
        text = texts[1] if default and '${' not in texts[1] else None
        if default and text is None:
            text = 'null' if default[0] is None else self._quoted(str(default[0]))
        names = (name, *self.variables(str(default[0]))) if default else (name,)
        return self._new_placeholder(f'${{oc.env:{name}}}' if text is None else f'${{oc.env:{name},{text}}}', names)

    def _decode(self, _root: Any, parent: Any, node: Any, args: tuple[Any, ...], _texts: tuple[str, ...]) -> Any:
        """Return the value that a text represents, or a placeholder if the text depends on an environment variable."""
        if self._tag in str(args[:1]):
            return self._new_placeholder(f'${{oc.decode:{self._quoted(args[0])}}}', self.variables(args[0]))
        try:
            return oc.decode(*args, _parent_=parent, _node_=node)
        except Exception:
            if self._environ is None:
                raise
            # Hide the original error, which quotes the text: in the second pass, this text may contain a secret.
            raise ValueError('oc.decode cannot parse its text as a value') from None

    def _select(self, _root: Any, parent: Any, _node: Any, args: tuple[Any, ...], _texts: tuple[str, ...]) -> Any:
        if self._tag in str(args[:1]):
            raise ValueError(str(args[0]))
        return oc.select(*args, _parent_=parent)

    def _quoted(self, text: str) -> str:
        """Put a text in quotes, as an argument of an interpolation; its placeholders become `${...}` again."""
        if self._placeholder.fullmatch(text):
            return self.expression(text)
        if '\\' in text or ("'" in text and '"' in text):
            raise ValueError('text with ${oc.env:...} must not contain backslashes or both kinds of quotes')
        quote = '"' if "'" in text else "'"
        return f'{quote}{self.expression(text)}{quote}'

    def _new_placeholder(self, text: str, variables: tuple[str, ...]) -> str:
        self._expressions.append((text, variables))
        return f'{self._tag}{len(self._expressions) - 1}z'


@contextmanager
def _only_resolvers(resolvers: dict[str, Any]) -> Iterator[None]:
    """Let interpolations call only the given resolvers, since OmegaConf's `oc.coerce` can import any module."""
    # Swap the private registry: OmegaConf's public functions would drop resolvers that the calling program registered.
    # Threads share the registry: without the lock, one would restore the old resolvers while another is resolving.
    with _registry_lock:
        everywhere = BaseContainer._resolvers
        BaseContainer._resolvers = resolvers
        try:
            yield
        finally:
            BaseContainer._resolvers = everywhere


def _texts(value: Any, path: KeyPath) -> Iterator[tuple[KeyPath, str]]:
    if isinstance(value, str):
        yield path, value
    elif isinstance(value, dict | list):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _texts(item, (*path, key))
