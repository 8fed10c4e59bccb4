"""Reading YAML: what a file extends, overrides from the command line, and errors that say where."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException


class UnreadableYAML(ValueError):
    """A file or an override that cannot be read."""


def read_chain(path: Path) -> list[dict[str, Any]]:
    """The contents of a file and of what it extends, the most basic first, `extends` removed."""
    contents: list[dict[str, Any]] = []
    seen: list[Path] = []
    current: Path | None = path
    while current is not None:
        if current.resolve() in [p.resolve() for p in seen]:
            chain = ' -> '.join(str(p) for p in [*seen, current])
            raise UnreadableYAML(f'extends: goes round in a circle: {chain}')
        seen.append(current)
        content = read_yaml(current, extended_by=seen[-2] if len(seen) > 1 else None)
        base = content.pop('extends', None)
        if base is not None and not isinstance(base, str):
            raise UnreadableYAML(f'{current}: extends: {base!r} is not a path; one file can be extended')
        contents.insert(0, content)
        current = current.parent / base if base else None
    return contents


def read_yaml(path: Path, *, extended_by: Path | None = None) -> dict[str, Any]:
    """The mapping in a YAML file; a key that stands twice is an error."""
    try:
        text = path.read_text(encoding='utf-8')
    except OSError as error:
        where = f'{extended_by}: extends: ' if extended_by else ''
        raise UnreadableYAML(f'{where}{path} cannot be read ({error.strerror}); paths in extends are relative to their file') from error
    except UnicodeDecodeError as error:
        raise UnreadableYAML(f'{path}: not UTF-8 text ({error})') from error
    try:
        content = yaml.load(text, Loader=_Loader)  # noqa: S506  (a SafeLoader)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark or error.context_mark
        line = f':{mark.line + 1}:{mark.column + 1}' if mark else ''
        hint = '; indent with spaces' if '\t' in str(error.problem) else ''
        raise UnreadableYAML(f'{path}{line}: {error.problem or error.context}{hint}') from error
    except yaml.YAMLError as error:
        raise UnreadableYAML(f'{path}: {error}') from error
    if not isinstance(content, dict):
        raise UnreadableYAML(f'{path}: is not a mapping of sections (key: value) but {type(content).__name__}')
    return content


def merge(contents: Sequence[dict[str, Any]], overrides: Sequence[str]) -> dict[str, Any]:
    """One mapping of several, later ones first in rank, `key=value` overrides last; interpolations resolved."""
    try:
        merged = OmegaConf.merge(*(OmegaConf.create(content) for content in contents))
        for override in overrides:
            key, equals, value = override.partition('=')
            if not equals or not key.strip():
                raise UnreadableYAML(f'{override!r} is not an override; write key=value, such as trainer.max_duration=20ba')
            OmegaConf.update(merged, key.strip(), _value(override, value), merge=True, force_add=True)
        plain = OmegaConf.to_container(merged, resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        raise UnreadableYAML(str(error).splitlines()[0]) from error
    assert isinstance(plain, dict)
    return plain  # type: ignore[return-value]


def _value(override: str, text: str) -> Any:
    try:
        value = yaml.load(text, Loader=_Loader) if text.strip() else ''  # noqa: S506  (a SafeLoader)
    except yaml.YAMLError as error:
        raise UnreadableYAML(f'{override!r}: its value is not YAML; quote it') from error
    return value


class _Loader(yaml.SafeLoader):
    """YAML with 1e-4 a number, and a key that stands twice an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: dict[Any, yaml.Mark] = {}
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)  # type: ignore[no-untyped-call]
            if isinstance(key, str | int | float) and key in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f'{key!r} stands twice, first in line {seen[key].line + 1}', key_node.start_mark
                )
            if isinstance(key, str | int | float):
                seen[key] = key_node.start_mark
        return super().construct_mapping(node, deep)


_FLOAT = r"""^(?:[-+]?(?:[0-9][0-9_]*)\.[0-9_]*(?:[eE][-+]?[0-9]+)?
    |[-+]?(?:[0-9][0-9_]*)(?:[eE][-+]?[0-9]+)
    |\.[0-9_]+(?:[eE][-+]?[0-9]+)?
    |[-+]?\.(?:inf|Inf|INF)
    |\.(?:nan|NaN|NAN))$"""


def _add_float_resolver() -> None:
    import re

    _Loader.add_implicit_resolver('tag:yaml.org,2002:float', re.compile(_FLOAT, re.X), list('-+0123456789.'))


_add_float_resolver()
