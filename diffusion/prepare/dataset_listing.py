"""Files of a Hugging Face dataset, on the Hub or in a folder, with the YAML header of its card (README.md)."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml

from diffusion.errors import UserError
from diffusion.prepare.file_listing import is_pattern, is_remote, list_files
from diffusion.prepare.hub_repository import Hub, is_on_hub, parse_name
from diffusion.prepare.sorted_files import File
from diffusion.prepare.source import PassedOver, is_hidden

CARD = 'README.md'
MAX_HEADER_BYTES = 2**20
"""Maximum size of a header; a larger one is refused, since the YAML is written by strangers."""


@dataclass(frozen=True)
class DatasetListing:
    """The listed files of a dataset."""

    title: str
    """Name for the report, with the commit if it is on the Hub."""
    files: list[File]
    """Files that are not hidden."""
    hidden: list[PassedOver]
    path: str
    """Path or pattern in the dataset that the user named; empty for all of it."""
    hub: Hub
    card: dict[str, Any]

    @classmethod
    def open(cls, location: str, hub: Hub, commit: str | None = None) -> 'DatasetListing':
        """List the files of a dataset, and read its card.

        Args:
            location: A folder, or the name of a dataset on the Hub; a folder takes precedence.
            commit: Commit to list on the Hub instead of the revision in the location.

        Raises:
            UserError: There is no such dataset, access is denied, or the card is invalid.
            OSError: The Hub does not respond.
        """
        title = location = location.removeprefix('file://')
        name = None if os.path.exists(location) else parse_name(location)
        others: list[PassedOver] = []
        if name is not None:
            commit, listed = hub.list_repository(name.repository, commit or name.revision)
            title = f'{name.repository} at commit {commit}'
        else:
            _check_folder(location)
            listed, others = list_files(location, None)
        files = [file for file in listed if not is_hidden(file.name)]
        hidden = [PassedOver(file.name) for file in listed if is_hidden(file.name)]
        dataset = cls(title, files, [*hidden, *others], '' if name is None else name.path, hub, {})
        card = next((file for file in files if file.name == CARD), None)
        return dataset if card is None else replace(dataset, card=read_card(dataset.read(card), f'{title}: {CARD}'))

    @property
    def license(self) -> str | None:
        """The license that the card states, such as `cc-by-4.0`, with its name and link if it is `other`.

        Empty if the dataset should have a card, but states none; None for a folder without a card.
        """
        value = self.card.get('license')
        names = [str(name) for name in (value if isinstance(value, list) else [value]) if name]
        names += [str(self.card[name]) for name in ('license_name', 'license_link') if self.card.get(name)]
        has_card = any(file.name == CARD or is_on_hub(file.url) for file in self.files)
        return ', '.join(names) or ('' if has_card else None)

    def read(self, file: File) -> bytes:
        """Return the content of a small file of the dataset."""
        with self.hub.copies([file]) as paths:
            return paths[file.url].read_bytes()

    @contextmanager
    def copy(self, url: str) -> Iterator[Path]:
        """Yield a local copy of a file of the dataset, given its URL."""
        with self.hub.copies([file for file in self.files if file.url == url]) as paths:
            yield paths[url]


def read_card(text: bytes, where: str) -> dict[str, Any]:
    """Return the YAML header of a dataset card; empty if it has none.

    Raises:
        UserError: The header is not valid YAML.
    """
    first, *lines = text.decode('utf-8-sig', 'replace').splitlines() or ['']
    end = next((number for number, line in enumerate(lines) if line.rstrip() == '---'), None)
    if first.rstrip() != '---' or end is None:
        return {}
    header = '\n'.join(lines[:end])
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


def _check_folder(location: str) -> None:
    """Raise UserError if a location cannot be a dataset outside the Hub: no folder, or the cache of a repository."""
    is_elsewhere = (is_pattern(location) or is_remote(location)) and not location.startswith(('http://', 'https://'))
    if not os.path.exists(location) and not is_elsewhere:
        raise UserError(
            f'{location}: is neither a folder nor the name of a dataset on the Hub; use ORG/NAME, '
            'ORG/NAME@REVISION, hf://datasets/ORG/NAME/PATH or a folder'
        )
    if all(os.path.isdir(os.path.join(location, name)) for name in ('snapshots', 'blobs')):
        snapshots = sorted(os.listdir(os.path.join(location, 'snapshots')))
        raise UserError(
            f'{location}: is the cache of a repository, with every file twice; give a snapshot in it, such as '
            f'{os.path.join(location, "snapshots", snapshots[0] if snapshots else "COMMIT")}'
        )
