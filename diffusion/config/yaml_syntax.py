"""YAML reader and writer for recipes, job specs and settings: YAML 1.2 scalars, no duplicate keys."""

import math
import re
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.reader import ReaderError

_TAGS = {f'tag:yaml.org,2002:{name}' for name in ('null', 'bool', 'int', 'float', 'str', 'seq', 'map')}


def parse_yaml(text: str) -> Any:
    """Parse YAML text into plain mappings, lists and scalars.

    Raises:
        yaml.YAMLError: The text is not valid, has duplicate keys or tags, or a number does not fit into 64 bits.
    """
    return yaml.load(text, _Loader)


def yaml_error(error: yaml.YAMLError) -> tuple[str, str]:
    """Return the line and column of a YAML error as `:LINE:COLUMN` (empty if unknown), and its message on one line."""
    if not isinstance(error, yaml.MarkedYAMLError):
        if isinstance(error, ReaderError):
            code = error.character if isinstance(error.character, int) else ord(error.character)
            return '', f'character U+{code:04X} at offset {error.position} is not allowed in YAML; remove it'
        return '', ' '.join(str(error).split())
    mark = error.problem_mark or error.context_mark
    # PyYAML reports a tab as a character that "cannot start any token", without a way to fix it.
    hint = '; indent with spaces' if r"'\t'" in str(error.problem) else ''
    return f':{mark.line + 1}:{mark.column + 1}' if mark else '', f'{error.problem or error.context}{hint}'


class _Loader(yaml.SafeLoader):
    """SafeLoader for YAML 1.2 that rejects duplicate keys.

    PyYAML implements YAML 1.1, in which 1e-4 is a string (unlike 1.0e-4), `no` and `on` are booleans, 010 is 8 and 1:30
    is 90; it keeps the last of duplicate keys. Here numbers with colons are text, and so are numbers with a leading
    zero, since readers disagree about their value.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag == 'tag:yaml.org,2002:merge':
            problem = 'merge keys (<<) are not supported; write the keys, or use extends'
            raise ConstructorError(None, None, problem, node.start_mark)
        if node.tag not in _TAGS:
            problem = f'tag {node.tag!r} is not supported; remove it'
            raise ConstructorError(None, None, problem, node.start_mark)
        try:
            return super().construct_object(node, deep)  # type: ignore[no-untyped-call]
        except (ValueError, IndexError, KeyError, TypeError) as error:  # such as !!int x, or a number of 5000 digits
            kind = node.tag.rpartition(':')[2]
            problem = f'{_shortened(node.value)!r} is not a valid {kind}; correct it, or put it in quotes'
            raise ConstructorError(None, None, problem, node.start_mark) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, yaml.Mark] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if not isinstance(key, str | int | float):  # a bool is an int
                problem = 'a key must be text or a number; put it in quotes'
                raise ConstructorError(None, None, problem, key_node.start_mark)
            if key in seen:
                raise ConstructorError(
                    None, None, f'duplicate key {key!r}, first in line {seen[key].line + 1}', key_node.start_mark
                )
            seen[key] = key_node.start_mark
        return super().construct_mapping(node, deep)  # type: ignore[no-untyped-call]


def _construct_text(loader: _Loader, node: yaml.ScalarNode) -> str:
    """Return the text of a scalar, or raise an error if it has characters that a path or UTF-8 file cannot contain."""
    text = str(loader.construct_scalar(node))
    if bad := re.search('[\0\ud800-\udfff]', text):
        problem = f'the text contains U+{ord(bad[0]):04X}, which no setting can contain; remove it'
        raise ConstructorError(None, None, problem, node.start_mark)
    return text


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    """Return an integer of at most 64 bits."""
    if not _INT.match(str(node.value)):
        raise ValueError('!!int of another form')  # construct_object adds the position
    value = yaml.SafeLoader.construct_yaml_int(loader, node)  # type: ignore[no-untyped-call]
    if abs(value) >= 2**63:
        problem = f'{_shortened(node.value)} does not fit into 64 bits; use a smaller number, or put it in quotes'
        raise ConstructorError(None, None, problem, node.start_mark)
    return value


def _construct_float(loader: _Loader, node: yaml.ScalarNode) -> float:
    """Return a float; digits that overflow to infinity are an error, .inf is not."""
    value = yaml.SafeLoader.construct_yaml_float(loader, node)  # type: ignore[no-untyped-call]
    if math.isinf(value) and 'inf' not in node.value.lower():
        problem = f'{_shortened(node.value)} is too large for a number; use a smaller one, or put it in quotes'
        raise ConstructorError(None, None, problem, node.start_mark)
    return value


def _shortened(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f'{text[:40]}...'


_Loader.add_constructor('tag:yaml.org,2002:str', _construct_text)
_Loader.add_constructor('tag:yaml.org,2002:int', _construct_int)
_Loader.add_constructor('tag:yaml.org,2002:float', _construct_float)


class Interpolation(str):
    """Text of a value with `${...}` that is written to YAML unchanged; in other text, `${` is escaped."""


class Dumper(yaml.SafeDumper):
    """SafeDumper that quotes text which `parse_yaml` would read as another type, and writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Represent a string in YAML, in double quotes if it contains unusual line breaks."""
    # Unescaped, line breaks other than \n would be folded into spaces; double quotes make PyYAML escape them.
    style = '"' if re.search('[\x85\u2028\u2029]', text) else None
    return dumper.represent_scalar('tag:yaml.org,2002:str', text, style=style)


class InlineDumper(Dumper):
    """Dumper that writes line breaks and other unprintable characters as escapes, so that text fits on one line."""


def _represent_inline(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Represent a string on one line of YAML, in double quotes if it contains unprintable characters."""
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar('tag:yaml.org,2002:str', text, style=style)


for _kind in (str, Interpolation):
    Dumper.add_representer(_kind, _represent_text)
    InlineDumper.add_representer(_kind, _represent_inline)

_BOOL = re.compile('^(?:true|True|TRUE|false|False|FALSE)$')
_INT = re.compile('^[-+]?(?:0|[1-9][0-9_]*|0x[0-9a-fA-F_]+|0b[01_]+)$')
# This is PyYAML's pattern, extended to exponents without a decimal point or a sign.
_FLOAT_PATTERN = r"""^(?:[-+]?{digits}(?:\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+)
    |[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?\.(?:inf|Inf|INF)
    |\.(?:nan|NaN|NAN))$"""
_FLOAT = re.compile(_FLOAT_PATTERN.format(digits='(?:0|[1-9][0-9_]*)'), re.X)
_QUOTED_FLOAT = re.compile(_FLOAT_PATTERN.format(digits='[0-9][0-9_]*'), re.X)
"""Pattern of text that is written in quotes, since another program may read it as a float."""


def _forget(schema: Any, *kinds: str) -> None:
    """Remove PyYAML's patterns of kinds of scalars from a loader or dumper."""
    tags = {f'tag:yaml.org,2002:{kind}' for kind in kinds}
    schema.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag not in tags]
        for first, resolvers in schema.yaml_implicit_resolvers.items()
    }


_forget(_Loader, 'timestamp', 'bool', 'int', 'float')
for _tag, _pattern, _first in (
    ('bool', _BOOL, 'tTfF'),
    ('int', _INT, '-+0123456789'),
    ('float', _FLOAT, '-+.0123456789'),
):
    _Loader.add_implicit_resolver(f'tag:yaml.org,2002:{_tag}', _pattern, list(_first))
# The dumper keeps the patterns of YAML 1.1: text such as `no` is written in quotes, for other programs.
_forget(Dumper, 'timestamp')
Dumper.add_implicit_resolver('tag:yaml.org,2002:float', _QUOTED_FLOAT, list('-+.0123456789'))
