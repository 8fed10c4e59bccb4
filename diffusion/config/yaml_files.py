"""Read YAML files with `extends` and command-line overrides, reporting errors with line numbers, and write YAML.

Scalars follow YAML 1.2; duplicate keys and tags are errors. Job specs and settings are read in the same way as recipes.
"""

import difflib
import errno
import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from yaml.constructor import ConstructorError
from yaml.reader import ReaderError

from diffusion.config.interpolation import Interpolation, InvalidInterpolation, Resolved, dotted, escaped, resolve
from diffusion.config.schema import did_you_mean
from diffusion.errors import UserError, is_wrong_path

SHIPPED = 'diffusion:'
"""Prefix that marks a name as that of a recipe in this package, where the path of a YAML file is expected."""
RECIPES = Path(__file__).parents[1] / 'recipes'


class UnreadableYAML(UserError):
    """Error for a file or an override that cannot be read."""


def read_chain(path: str | Path) -> list[dict[str, Any]]:
    """Read a YAML file and the files that it extends; return their contents without `extends`, the base file first."""
    contents: list[dict[str, Any]] = []
    seen: list[Path] = []
    current: Path | None = locate_yaml(path)
    while current is not None:
        # Compare resolved paths: a file can extend itself under another spelling, such as deep/../a.yaml.
        if _resolved(current) in [_resolved(p) for p in seen]:
            chain = ' -> '.join(str(p) for p in [*seen, current])
            raise UnreadableYAML(f'extends: circular reference: {chain}; remove one of these extends keys')
        seen.append(current)
        content = read_yaml(current, extended_by=seen[-2] if len(seen) > 1 else None)
        base = content.pop('extends', None)
        if base is not None and not isinstance(base, str):
            raise UnreadableYAML(f'{current}: extends: {base!r} is not a path; a file can extend one other file')
        contents.insert(0, content)
        current = locate_yaml(base, current.parent) if base else None
    return contents


def locate_yaml(path: str | Path, folder: Path = Path()) -> Path:
    """Return the path of a YAML file. A relative path is in `folder`; `diffusion:NAME` means a recipe of this package.

    Raises:
        UnreadableYAML: This package has no recipe called NAME.
    """
    name = str(path)
    if not name.startswith(SHIPPED):
        return folder / path
    name = name.removeprefix(SHIPPED).removesuffix('.yaml')
    if name not in (known := shipped_names()):
        raise UnreadableYAML(f'{path}: no recipe of this package is called {name!r}; {did_you_mean(name, known)}')
    return RECIPES / f'{name}.yaml'


def shipped_names() -> list[str]:
    """Return the names of the recipes in this package, without suffixes."""
    return sorted(path.stem for path in RECIPES.glob('*.yaml'))


def _resolved(path: Path) -> Path:
    """Return a path with symlinks resolved, or unchanged if the links form a loop, which `read_yaml` reports."""
    try:
        return path.resolve()
    except (OSError, RuntimeError, ValueError):  # RuntimeError: a symlink loop in Python 3.11 and 3.12
        return path


def read_yaml(path: Path, *, extended_by: Path | None = None) -> dict[str, Any]:
    """Return the mapping in a YAML file. Messages about a wrong path name `extended_by`, the file that extends it.

    Raises:
        UnreadableYAML: The path is wrong, or the file is not a YAML mapping or has duplicate keys.
    """
    try:
        if path.exists() and not path.is_file():  # do not open a pipe: reading would wait for a writer
            kind = 'folder' if path.is_dir() else 'pipe or device'
            raise UnreadableYAML(f'{path} cannot be read (it is a {kind}); use the path of a YAML file')
        text = path.read_text(encoding='utf-8')
    except UnicodeDecodeError as error:
        raise UnreadableYAML(f'{path}: not UTF-8 text ({error.reason} at offset {error.start})') from error
    except ValueError as error:
        if isinstance(error, UserError):
            raise
        raise UnreadableYAML(f'{str(path)!r} is not a path ({error}); use the path of a YAML file') from error
    except OSError as error:
        if not is_wrong_path(error):
            raise
        is_missing = error.errno == errno.ENOENT
        reason = f'{path} does not exist' if is_missing else f'{path} cannot be read ({error.strerror})'
        own = 'use the path of a YAML file, or diffusion:NAME for a recipe of this package'
        way_out = own if extended_by is None else 'the path is relative to the extending file'
        way_out = (_nearest_yaml(path, extended_by) if is_missing else '') or way_out
        where = '' if extended_by is None else f'{extended_by}: extends: '
        raise UnreadableYAML(f'{where}{reason}; {way_out}') from error
    try:
        content = parse_yaml(text)
    except yaml.YAMLError as error:
        line, what = yaml_error(error)
        raise UnreadableYAML(f'{path}{line}: {what}') from error
    if not isinstance(content, dict):
        kind = 'is empty' if content is None else f'is of type {type(content).__name__}'
        raise UnreadableYAML(f'{path} {kind}; write a mapping of sections (key: value)')
    return content


def _nearest_yaml(path: Path, extended_by: Path | None) -> str:
    """Return a hint about a missing file: the nearest name in its folder or this package, else up to 5 files there."""
    in_folder = sorted(each for each in path.parent.glob('*.y*ml') if each != extended_by)
    known = {name: f'{SHIPPED}{name}' for name in shipped_names()} | {each.stem: str(each) for each in in_folder}
    if near := difflib.get_close_matches(path.stem, known, n=1):
        return f"did you mean '{known[near[0]]}'?"
    files = ', '.join(each.name for each in in_folder[:5])
    return f'its folder has {files}' if files else ''


def merge(contents: Sequence[dict[str, Any]], overrides: Sequence[str]) -> dict[str, Any]:
    """Merge mappings and `key=value` overrides into one, and resolve interpolations.

    Later mappings take precedence over earlier ones, and overrides over all mappings. If a later mapping changes the
    name of a component, the earlier component's arguments are dropped.

    Raises:
        UnreadableYAML: An override or an interpolation cannot be read, or an environment variable is not set.
    """
    resolved = merge_and_resolve(contents, overrides)
    for path, names in resolved.unset.items():
        raise UnreadableYAML(f'{dotted(path)}: {unset_problem(names)}')
    return resolved.values


def merge_and_resolve(
    contents: Sequence[dict[str, Any]], overrides: Sequence[str], environ: Mapping[str, str] | None = None
) -> Resolved:
    """Merge like `merge`, but return unset environment variables instead of raising an error; see `Resolved`.

    Raises:
        UnreadableYAML: An override or an interpolation cannot be read.
    """
    if isinstance(overrides, str):  # a string is also a sequence, of characters
        raise UnreadableYAML(f'overrides: {overrides!r} is one string; pass a list of them: [{overrides!r}]')
    merged: dict[str, Any] = {}
    dropped: dict[str, dict[str, Any]] = {}
    for content in contents:
        dropped |= _drop_renamed(merged, content, '')
        merged = _merged(merged, content, '')
    for override in overrides:
        if not isinstance(override, str):
            raise UnreadableYAML(f'overrides: {override!r} is not a string; write key=value')
        key, equals, value = override.partition('=')
        if not equals or not key.strip():
            raise UnreadableYAML(f'{override!r} is not an override; write key=value, such as trainer.max_duration=20ba')
        _update(merged, override, key.strip(), _value(override, value))
    try:
        return replace(resolve(merged, os.environ if environ is None else environ), dropped=dropped)
    except InvalidInterpolation as error:
        raise UnreadableYAML(str(error)) from error


def unset_problem(names: Sequence[str]) -> str:
    what = f'the environment variable {names[0]}, which is not set; export it'
    if len(names) > 1:
        what = f'the environment variables {" and ".join(names)}, which are not set; export them'
    return f'needs {what}, or give a default: ${{oc.env:{names[0]},DEFAULT}}'


def dump(values: dict[str, Any]) -> str:
    """Return plain values as YAML text that `read_yaml` and `merge` read back unchanged."""
    return yaml.dump(escaped(values), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)


def dump_inline(value: Any) -> str:
    """Return a plain value as one line of YAML, for use in an override `key=value`."""
    style: Any = {'sort_keys': False, 'default_flow_style': True, 'allow_unicode': True, 'width': float('inf')}
    text = yaml.dump(escaped(value), Dumper=InlineDumper, **style)
    return text.removesuffix('...\n').strip()


def _merged(base: Any, later: Any, where: str) -> Any:
    """Return a copy of `base` updated with `later`: mappings merge key by key, and other values are replaced."""
    if isinstance(later, dict) and isinstance(base, dict):
        result = dict(base)
        for key, value in later.items():
            result[key] = _merged(base.get(key), value, f'{where}.{key}'.removeprefix('.'))
        return result
    if (isinstance(later, dict) and isinstance(base, list)) or (isinstance(later, list) and isinstance(base, dict)):
        way_out = 'write both values as lists, or both as mappings (key: value)'
        raise UnreadableYAML(f'{where}: a list and a mapping cannot be merged; {way_out}')
    if isinstance(later, dict):
        return {key: _merged(None, value, where) for key, value in later.items()}
    return list(later) if isinstance(later, list) else later


def _update(merged: dict[str, Any], override: str, key: str, value: Any) -> None:
    """Set a dotted key, such as `streams.laion.remote` or `generate.prompts[0]`, in place; merge mappings."""
    parts = re.sub(r'\[([^\[\]]+)\]', r'.\1', key).split('.')
    if '' in parts:
        raise UnreadableYAML(f'{override!r}: {key!r} is not a key; join the names of sections and keys by single dots')
    parent: Any = merged
    for depth, part in enumerate(parts):
        step = _step(parent, part, override)
        if depth == len(parts) - 1:
            parent[step] = _merged(parent.get(step) if isinstance(parent, dict) else parent[step], value, key)
            return
        # The override replaces a scalar, such as `wandb: false`, by a section.
        if not isinstance(parent.get(step) if isinstance(parent, dict) else parent[step], dict | list):
            parent[step] = {}
        parent = parent[step]


def _step(parent: dict[str, Any] | list[Any], part: str, override: str) -> Any:
    """Return the key or list index in `parent` to which one part of an override's dotted key refers."""
    if isinstance(parent, dict):
        same = [key for key in parent if str(key) == part]  # compare as text: YAML keys may be numbers
        return same[0] if same else part
    if not part.isdecimal() or int(part) >= len(parent):
        raise UnreadableYAML(f'{override!r}: {part!r} is not an index of a list of {len(parent)}; use 0 or more')
    return int(part)


def _drop_renamed(earlier: dict[str, Any], later: dict[str, Any], where: str) -> dict[str, dict[str, Any]]:
    """Empty, in place, each component of `earlier` whose `name` differs in `later`; return their contents by path."""
    dropped = {}
    for key, new in later.items():
        old = earlier.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            path = f'{where}.{key}'.removeprefix('.')
            if 'name' in new and new['name'] != old.get('name', key):
                earlier[key], dropped[path] = {}, {'name': key} | old
            else:
                dropped |= _drop_renamed(old, new, path)
    return dropped


def _value(override: str, text: str) -> Any:
    try:
        return parse_yaml(text) if text.strip() else ''
    except yaml.YAMLError as error:
        _, what = yaml_error(error)
        raise UnreadableYAML(f'{override!r}: its value is not YAML; quote it ({what})') from error


_TAGS = {f'tag:yaml.org,2002:{name}' for name in ('null', 'bool', 'int', 'float', 'str', 'seq', 'map')}


def parse_yaml(text: str) -> Any:
    """Parse YAML text into plain mappings, lists and scalars.

    Raises:
        yaml.YAMLError: The text is not valid, has duplicate keys or tags, or a number does not fit into 64 bits.
    """
    return yaml.load(text, _Loader)


def yaml_error(error: yaml.YAMLError) -> tuple[str, str]:
    """Return the position of a YAML error as `:LINE:COLUMN` (empty if unknown), and its message on one line."""
    if isinstance(error, ReaderError):
        code = error.character if isinstance(error.character, int) else ord(error.character)
        return '', f'character U+{code:04X} at offset {error.position} is not allowed in YAML; remove it'
    assert isinstance(error, yaml.MarkedYAMLError)  # of reading; its other errors are of writing
    mark = error.problem_mark or error.context_mark
    problem = str(error.problem or error.context)
    if r"'\t'" in problem:  # PyYAML reports only that a tab is a character that "cannot start any token"
        problem += '; indent with spaces'
    elif problem == 'but found another document':
        problem = 'a second document begins here; put it in a file of its own'
    return f':{mark.line + 1}:{mark.column + 1}' if mark else '', problem


def _invalid(node: yaml.Node, problem: str) -> ConstructorError:
    return ConstructorError(None, None, problem, node.start_mark)


class _Loader(yaml.SafeLoader):
    """SafeLoader for YAML 1.2 that rejects duplicate keys.

    PyYAML implements YAML 1.1, in which 1e-4 is a string (unlike 1.0e-4), `no` and `on` are booleans, 010 is 8 and 1:30
    is 90, and it keeps the last of duplicate keys. This loader reads numbers with colons or a leading zero as text,
    because YAML parsers disagree about their value.
    """

    def construct_object(self, node: yaml.Node, deep: bool = False) -> Any:
        if node.tag == 'tag:yaml.org,2002:merge':
            raise _invalid(node, 'merge keys (<<) are not supported; write the keys, or use extends')
        if node.tag not in _TAGS:
            raise _invalid(node, f'tag {node.tag!r} is not supported; remove it')
        try:
            return super().construct_object(node, deep)  # type: ignore[no-untyped-call]
        except (ValueError, IndexError, KeyError, TypeError) as error:  # such as `!!int x` or a number with 5000 digits
            kind = node.tag.rpartition(':')[2]
            problem = f'{_shortened(node.value)!r} is not a valid {kind}; correct it, or put it in quotes'
            raise _invalid(node, problem) from error

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, yaml.Mark] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node)
            if not isinstance(key, str | int | float):  # bool is a subclass of int
                raise _invalid(key_node, 'a key must be text or a number; put it in quotes')
            if key in seen:
                raise _invalid(key_node, f'duplicate key {key!r}, first in line {seen[key].line + 1}')
            seen[key] = key_node.start_mark
        return super().construct_mapping(node, deep)  # type: ignore[no-untyped-call]


def _construct_text(loader: _Loader, node: yaml.ScalarNode) -> str:
    text = str(loader.construct_scalar(node))
    if bad := re.search('[\0\ud800-\udfff]', text):
        raise _invalid(node, f'the text contains U+{ord(bad[0]):04X}, which no setting can contain; remove it')
    return text


def _construct_int(loader: _Loader, node: yaml.ScalarNode) -> int:
    if not _INT.match(str(node.value)):
        raise ValueError('!!int of another form')  # construct_object adds the position to the error
    value = yaml.SafeLoader.construct_yaml_int(loader, node)  # type: ignore[no-untyped-call]
    if abs(value) >= 2**63:
        problem = f'{_shortened(node.value)} does not fit into 64 bits; use a smaller number, or put it in quotes'
        raise _invalid(node, problem)
    return value


def _construct_float(loader: _Loader, node: yaml.ScalarNode) -> float:
    value = yaml.SafeLoader.construct_yaml_float(loader, node)  # type: ignore[no-untyped-call]
    if math.isinf(value) and 'inf' not in node.value.lower():
        problem = f'{_shortened(node.value)} is too large for a number; use a smaller one, or put it in quotes'
        raise _invalid(node, problem)
    return value


def _shortened(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 40 else f'{text[:40]}...'


_Loader.add_constructor('tag:yaml.org,2002:str', _construct_text)
_Loader.add_constructor('tag:yaml.org,2002:int', _construct_int)
_Loader.add_constructor('tag:yaml.org,2002:float', _construct_float)


class Dumper(yaml.SafeDumper):
    """SafeDumper that quotes text that would be read as another type, and writes no aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
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
# The dumper keeps the other patterns of YAML 1.1, so that text such as `no` is quoted for other programs.
_forget(Dumper, 'timestamp')
Dumper.add_implicit_resolver('tag:yaml.org,2002:float', _QUOTED_FLOAT, list('-+.0123456789'))
