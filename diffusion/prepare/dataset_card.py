"""Dataset card of a Hugging Face dataset: the YAML header of its README.md, with its license and configurations."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import yaml

from diffusion.config.schema import did_you_mean
from diffusion.errors import UserError
from diffusion.prepare.dataset_splits import TRAIN
from diffusion.prepare.file_listing import is_inside
from diffusion.prepare.sorted_files import File

CARD = 'README.md'
MAX_HEADER_BYTES = 2**20
"""Size of a header beyond which it is refused: YAML of others is parsed here."""


@dataclass(frozen=True)
class DataFiles:
    """Files of one configuration of a dataset."""

    config: str | None = None
    """Name of the configuration; None if the card has none."""
    folder: str = ''
    """Folder of the files, relative to the dataset."""
    patterns: Mapping[str, list[str]] = field(default_factory=dict)
    """Patterns of the files by split; empty if the names of the files decide."""

    def splits_of(self, files: Sequence[File]) -> dict[str, list[File]]:
        """Return the files that the patterns name, by split, without splits that have none."""
        prefix = f'{self.folder}/' if self.folder else ''
        inside = [file for file in files if file.name.startswith(prefix)]
        splits: dict[str, list[File]] = {}
        for split, patterns in self.patterns.items():
            wanted = [pattern.removeprefix('./').rstrip('/') for pattern in patterns]
            found = [file for file in inside if any(is_inside(file.name.removeprefix(prefix), each) for each in wanted)]
            if found:
                splits[split] = found
        return splits


def read_card(text: bytes | None, where: str) -> dict[str, Any]:
    """Return the YAML header of a dataset card; empty if there is no card or no header.

    Raises:
        UserError: The header is not valid YAML.
    """
    lines = (text or b'').decode('utf-8-sig', 'replace').splitlines()
    if not lines or lines[0].rstrip() != '---':
        return {}
    end = next((number for number, line in enumerate(lines[1:], start=1) if line.rstrip() == '---'), None)
    if end is None:
        return {}
    header = '\n'.join(lines[1:end])
    if len(header) > MAX_HEADER_BYTES:
        raise UserError(f'{where}: its YAML header has {len(header)} characters; shorten a local copy')
    try:
        # Aliases could expand to gigabytes, and no card needs them.
        if any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(header, yaml.SafeLoader)):
            raise UserError(f'{where}: its YAML header has aliases; remove them from a local copy')
        content = yaml.safe_load(header)
    except (yaml.YAMLError, RecursionError, ValueError) as error:
        raise UserError(f'{where}: its YAML header is not valid ({" ".join(str(error).split())})') from error
    return content if isinstance(content, dict) else {}


def license_of(card: Mapping[str, Any]) -> str | None:
    """Return the license that a card states, such as `cc-by-4.0`, with its name and link if it is `other`."""
    value = card.get('license')
    names = [str(name) for name in (value if isinstance(value, list) else [value]) if name]
    further = [str(card[name]) for name in ('license_name', 'license_link') if card.get(name)]
    return ', '.join([*names, *further]) or None


def choose_config(card: Mapping[str, Any], wanted: str | None, where: str) -> DataFiles:
    """Return the files of the configuration to read: the one that the user named, the only one, or the default one.

    Raises:
        UserError: There is no such configuration, there are several without a default, or the card is invalid.
    """
    listed = card.get('configs')
    if not listed:
        return DataFiles()
    if not isinstance(listed, list) or not all(isinstance(each, dict) and each.get('config_name') for each in listed):
        raise UserError(f'{where}: `configs` of its card is no list of objects with `config_name`; correct a copy')
    configs = {str(each['config_name']): each for each in listed}
    defaults = [name for name, each in configs.items() if each.get('default') is True or name == 'default']
    if wanted is None and (len(configs) == 1 or defaults):
        wanted = defaults[0] if defaults else next(iter(configs))
    if wanted is None:
        names = ', '.join(configs)
        example = next(iter(configs))
        raise UserError(f'{where}: has the configurations {names}; choose one with --config, such as {example}')
    if wanted not in configs:
        raise UserError(f'{where}: has no configuration {wanted!r}; {did_you_mean(wanted, configs)}')
    config = configs[wanted]
    folder = str(config.get('data_dir') or '').strip('/').removeprefix('./')
    return DataFiles(wanted, folder, _patterns(config.get('data_files'), f'{where}: config {wanted}'))


def _patterns(value: Any, where: str) -> dict[str, list[str]]:
    """Return the patterns of a card's `data_files` by split; files without a split are for training."""
    if value is None:
        return {}
    if isinstance(value, str):
        return {TRAIN: [value]}
    if isinstance(value, dict):
        value = [{'split': split, 'path': path} for split, path in value.items()]
    if isinstance(value, list) and all(isinstance(each, str) for each in value):
        return {TRAIN: value}
    found: dict[str, list[str]] = {}
    for each in value if isinstance(value, list) else [value]:
        paths = each.get('path') if isinstance(each, dict) else None
        paths = [paths] if isinstance(paths, str) else paths
        if not isinstance(paths, list) or not all(isinstance(path, str) for path in paths):
            raise UserError(f'{where}: `data_files` of its card is invalid at {each!r}; correct a local copy')
        found.setdefault(str(each.get('split', TRAIN)), []).extend(paths)
    return found
