"""Files of a Hugging Face dataset, on the Hub or in a folder, with its card."""

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from diffusion.errors import UserError
from diffusion.prepare.dataset_card import CARD, read_card
from diffusion.prepare.file_listing import is_pattern, is_remote, list_files, local_copy
from diffusion.prepare.hub_repository import HubRepository, parse_name
from diffusion.prepare.sorted_files import File
from diffusion.prepare.source import PassedOver, is_hidden


@dataclass(frozen=True)
class DatasetListing:
    """The listed files of a dataset."""

    title: str
    """Name for the report, with the commit if it is on the Hub."""
    files: list[File]
    """Files that are not hidden."""
    hidden: list[PassedOver]
    card: dict[str, Any]
    path: str
    """Path or pattern in the dataset that the user named; empty for all of it."""
    repository: HubRepository | None

    @classmethod
    def open(cls, location: str, token_variable: str | None, commit: str | None = None) -> 'DatasetListing':
        """List the files of a dataset, and read its card.

        Args:
            location: A folder, or the name of a dataset on the Hub; a folder takes precedence.
            token_variable: Name of the environment variable with the token for the Hub.
            commit: Commit to list on the Hub instead of the revision in the location.

        Raises:
            UserError: There is no such dataset, access is denied, or the card is invalid.
            OSError: The Hub does not respond.
        """
        location = location.removeprefix('file://')
        name = None if os.path.exists(location) else parse_name(location)
        is_folder = os.path.exists(location) or is_pattern(location) or is_remote(location)
        if name is None and is_folder and not location.startswith(('http://', 'https://')):
            return _local_dataset(location)
        if name is None:
            raise UserError(
                f'{location}: is neither a folder nor the name of a dataset on the Hub; use ORG/NAME, '
                'ORG/NAME@REVISION, hf://datasets/ORG/NAME/PATH or a folder'
            )
        repository = HubRepository.list(name.repository, commit or name.revision, token_variable)
        title = f'{name.repository} at commit {repository.commit}'
        return cls.make(title, repository.files, path=name.path, repository=repository)

    @classmethod
    def make(
        cls, title: str, listed: Sequence[File], *, path: str = '', repository: HubRepository | None = None
    ) -> 'DatasetListing':
        """Return a dataset of listed files, with its card."""
        files = [file for file in listed if not is_hidden(file.name)]
        hidden = [PassedOver(file.name) for file in listed if is_hidden(file.name)]
        dataset = cls(title, files, hidden, {}, path, repository)
        card = next((file for file in files if file.name == CARD), None)
        text = None if card is None else dataset.read(card)
        return replace(dataset, card=read_card(text, f'{title}: {CARD}'))

    @property
    def is_repository(self) -> bool:
        """True if the dataset is on the Hub, or has a card."""
        return self.repository is not None or any(file.name == CARD for file in self.files)

    def read(self, file: File) -> bytes:
        """Return the content of a small file of the dataset."""
        if self.repository is not None:
            return self.repository.read(file)
        with local_copy(file.url, size=file.size) as path:
            return path.read_bytes()

    @contextmanager
    def copy(self, url: str) -> Iterator[Path]:
        """Yield a local copy of a file of the dataset, given its URL."""
        if self.repository is None:
            with local_copy(url) as path:
                yield path
            return
        file = next(file for file in self.files if file.url == url)
        with self.repository.local_copies([file]) as paths:
            yield paths[file.name]


def _local_dataset(location: str) -> DatasetListing:
    """List a local folder, or one in an object store."""
    if os.path.isdir(os.path.join(location, 'snapshots')) and os.path.isdir(os.path.join(location, 'blobs')):
        snapshots = sorted(os.listdir(os.path.join(location, 'snapshots')))
        raise UserError(
            f'{location}: is the cache of a repository, with every file twice; give a snapshot in it, such as '
            f'{os.path.join(location, "snapshots", snapshots[0] if snapshots else "COMMIT")}'
        )
    listed, hidden = list_files(location, None)
    dataset = DatasetListing.make(location, listed)
    return replace(dataset, hidden=[*dataset.hidden, *hidden])
