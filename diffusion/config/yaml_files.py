"""Read YAML files with `extends` and command-line overrides, with errors that show the line, and write them."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import GrammarParseError, OmegaConfBaseException

from diffusion.errors import UserError, is_wrong_path


class UnreadableYAML(UserError):
    """Error for a file or an override that cannot be read."""


def read_chain(path: Path) -> list[dict[str, Any]]:
    """Read a YAML file and the files that it extends; return their contents without `extends`, the base file first."""
    contents: list[dict[str, Any]] = []
    seen: list[Path] = []
    current: Path | None = path
    while current is not None:
        # Compare resolved paths: a file can extend itself under another spelling, such as deep/../a.yaml.
        if current.resolve() in [p.resolve() for p in seen]:
            chain = ' -> '.join(str(p) for p in [*seen, current])
            raise UnreadableYAML(f'extends: circular reference: {chain}; remove one of these extends keys')
        seen.append(current)
        content = read_yaml(current, extended_by=seen[-2] if len(seen) > 1 else None)
        base = content.pop('extends', None)
        if base is not None and not isinstance(base, str):
            raise UnreadableYAML(f'{current}: extends: {base!r} is not a path; a file can extend one other file')
        contents.insert(0, content)
        current = current.parent / base if base else None
    return contents


def read_yaml(path: Path, *, extended_by: Path | None = None) -> dict[str, Any]:
    """Return the mapping in a YAML file.

    Args:
        path: The file.
        extended_by: The file whose `extends` names this one, for the error message.

    Raises:
        UnreadableYAML: The path is wrong, or the file is not a YAML mapping without duplicate keys.
    """
    try:
        text = path.read_text(encoding='utf-8')
    except OSError as error:
        if not is_wrong_path(error):
            raise
        reason = f'{path} cannot be read ({error.strerror})'
        if extended_by is None:
            raise UnreadableYAML(f'{reason}; use the path of a YAML file') from error
        way_out = 'the path is relative to the extending file'
        raise UnreadableYAML(f'{extended_by}: extends: {reason}; {way_out}') from error
    except UnicodeDecodeError as error:
        raise UnreadableYAML(f'{path}: not UTF-8 text ({error})') from error
    try:
        content = yaml.load(text, Loader=_Loader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        # PyYAML reports a tab as a character that "cannot start any token", without a way out.
        line = f':{mark.line + 1}:{mark.column + 1}' if mark else ''
        hint = '; indent with spaces' if r"'\t'" in str(error.problem) else ''
        raise UnreadableYAML(f'{path}{line}: {error.problem or error.context}{hint}') from error
    except yaml.YAMLError as error:
        raise UnreadableYAML(f'{path}: {error}') from error
    if not isinstance(content, dict):
        raise UnreadableYAML(f'{path} is not a mapping of sections (key: value) but {type(content).__name__}')
    return content


def merge(contents: Sequence[dict[str, Any]], overrides: Sequence[str]) -> dict[str, Any]:
    """Merge mappings and `key=value` overrides into one, and resolve interpolations.

    Later mappings take precedence over earlier ones, and overrides over all. If a later mapping gives a component
    another name, the earlier component's keywords are dropped.
    """
    for index, content in enumerate(contents):
        for earlier in contents[:index]:
            _drop_renamed(earlier, content)
    try:
        merged = OmegaConf.merge(*(OmegaConf.create(content) for content in contents))
        for override in overrides:
            key, equals, value = override.partition('=')
            if not equals or not key.strip():
                raise UnreadableYAML(
                    f'{override!r} is not an override; write key=value, such as trainer.max_duration=20ba'
                )
            OmegaConf.update(merged, key.strip(), _value(override, value), merge=True, force_add=True)
        # Keep ???, which the caller reports together with the description of the value.
        plain = OmegaConf.to_container(merged, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        where = f'{error.full_key}: ' if getattr(error, 'full_key', None) else ''
        way_out = ''
        if isinstance(error, GrammarParseError):
            way_out = r'; write \${ for a literal ${'
        elif 'incompatible container types' in str(error):
            way_out = '; a list cannot replace a mapping (key: value), or a mapping a list'
        raise UnreadableYAML(f'{where}{str(error).splitlines()[0]}{way_out}') from error
    assert isinstance(plain, dict)
    return plain  # type: ignore[return-value]


def dump(values: dict[str, Any]) -> str:
    """Return plain values as YAML text that `read_yaml` and `merge` read back unchanged."""
    return yaml.dump(_escaped(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=100)


def dump_inline(value: Any) -> str:
    """Return a plain value as one line of YAML, for the value of an override `key=value`."""
    width = float('inf')
    text = yaml.dump(
        _escaped(value), Dumper=_InlineDumper, sort_keys=False, default_flow_style=True, allow_unicode=True, width=width
    )
    return text.removesuffix('...\n').strip()


def _escaped(value: Any) -> Any:
    """Return a value with every `${` escaped, so that OmegaConf reads it literally."""
    if isinstance(value, dict):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_escaped(item) for item in value]
    # OmegaConf halves the backslashes before `${`, and an odd number escapes it: double those there are and add one.
    return re.sub(r'(\\*)\$\{', r'\1\1\\${', value) if isinstance(value, str) else value


def _drop_renamed(earlier: dict[str, Any], later: dict[str, Any]) -> None:
    """Empty, in place, each component of an earlier file that a later file replaces by one of another `name`."""
    for key, new in later.items():
        old = earlier.get(key)
        if isinstance(old, dict) and isinstance(new, dict):
            if 'name' in new and new['name'] != old.get('name', key):
                earlier[key] = {}
            else:
                _drop_renamed(old, new)


def _value(override: str, text: str) -> Any:
    """Parse the value of a `key=value` override as YAML; an empty value is the empty string."""
    try:
        return yaml.load(text, Loader=_Loader) if text.strip() else ''
    except yaml.YAMLError as error:
        raise UnreadableYAML(f'{override!r}: its value is not YAML; quote it') from error


class _Loader(yaml.SafeLoader):
    """SafeLoader that reads 1e-4 as a number and a date as a string, and rejects duplicate keys.

    PyYAML implements YAML 1.1, in which 1e-4 is a string (it wants 1.0e-4), and keeps the last of duplicate keys.
    """

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, yaml.Mark] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)  # type: ignore[no-untyped-call]
            if isinstance(key, str | int | float) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f'duplicate key {key!r}, first in line {seen[key].line + 1}', key_node.start_mark
                )
            if isinstance(key, str | int | float):
                seen[key] = key_node.start_mark
        return super().construct_mapping(node, deep)


class _Dumper(yaml.SafeDumper):
    """SafeDumper that quotes text which _Loader would read as another type, and writes no anchors and aliases."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Represent a string in YAML, in double quotes if it contains unusual line breaks."""
    # Unescaped, line breaks other than \n would be folded into spaces; double quotes make PyYAML escape them.
    style = '"' if re.search('[\x85\u2028\u2029]', text) else None
    return dumper.represent_scalar('tag:yaml.org,2002:str', text, style=style)


_Dumper.add_representer(str, _represent_text)


class _InlineDumper(_Dumper):
    """Dumper that writes line breaks and other unprintable characters as escapes, so that text fits on one line."""


def _represent_inline(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    """Represent a string on one line of YAML, in double quotes if it contains unprintable characters."""
    style = None if text.isprintable() else '"'
    return dumper.represent_scalar('tag:yaml.org,2002:str', text, style=style)


_InlineDumper.add_representer(str, _represent_inline)

# PyYAML's pattern, extended to exponents without a decimal point or a sign.
_FLOAT = re.compile(
    r"""^(?:[-+]?[0-9][0-9_]*(?:\.[0-9_]*(?:[eE][-+]?[0-9]+)?|[eE][-+]?[0-9]+)
    |[-+]?\.[0-9][0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?\.(?:inf|Inf|INF)
    |\.(?:nan|NaN|NAN))$""",
    re.X,
)


def _resolve_as_1_2(schema: Any) -> None:
    """Make a loader or dumper treat floats and dates as YAML 1.2 does: 1e-4 is a float, a date is a string."""
    schema.yaml_implicit_resolvers = {
        first: [(tag, pattern) for tag, pattern in resolvers if tag != 'tag:yaml.org,2002:timestamp']
        for first, resolvers in schema.yaml_implicit_resolvers.items()
    }
    schema.add_implicit_resolver('tag:yaml.org,2002:float', _FLOAT, list('-+0123456789.'))


_resolve_as_1_2(_Loader)
_resolve_as_1_2(_Dumper)
