"""Files of a folder in an object store or on a mount."""

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from diffusion.errors import UserError
from diffusion.storage import object_store
from diffusion.storage.atomic import write_whole
from diffusion.storage.retry import GaveUp, RetryPolicy

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RemoteFolder:
    """A folder of an object store, or of a mount.

    Args:
        url: The folder's URL or path.
        retry: How often and how patiently its files are asked for.
    """

    url: str
    retry: RetryPolicy = field(default_factory=RetryPolicy)

    def address(self, name: str) -> str:
        """Return the URL of a file."""
        return f'{self.url.rstrip("/")}/{name}'

    def persist(self, make: Callable[[], None], name: str) -> None:
        """Call `make`, which downloads and checks a file, until it succeeds.

        Raises:
            UserError: The store refuses.
            GaveUp: Every try failed.
            OSError: The local disk is full.
        """
        self.retry.run(make, self.address(name))

    def download(self, name: str, path: Path) -> None:
        """Download a file in a single try, for `persist`."""
        object_store.download_once(self.address(name), path, self.retry)

    def read(self, name: str) -> bytes:
        """Return the content of a small file in a single try, for `persist`."""
        return object_store.read_once(self.address(name), self.retry)

    def refresh(self, name: str, path: Path) -> None:
        """Fetch a small file anew: no index tells whether the one at `path` is still the same.

        Where it cannot be had, the one at `path` holds, and a warning says so.

        Raises:
            UserError: The store refuses, and there is nothing at `path`.
            GaveUp: Every try failed, and there is nothing at `path`.
        """
        try:
            self.persist(lambda: write_whole(path, self.read(name)), name)
        except (GaveUp, UserError) as error:
            if not path.exists():
                raise
            log.warning('%s; going on with the one in %s', error, path)

    @contextlib.contextmanager
    def files(self, *names: str) -> Iterator[Path]:
        """Lend a folder that holds these files: the folder itself where it is local, else a temporary copy.

        Raises:
            FileNotFoundError: There is no such local folder.
            UserError: The store refuses.
            GaveUp: Every try failed.
        """
        if '://' not in self.url:
            if not Path(self.url).is_dir():
                raise FileNotFoundError(f'{self.url} is no folder')
            yield Path(self.url)
            return
        with tempfile.TemporaryDirectory() as scratch:
            for name in names:
                object_store.download(self.address(name), Path(scratch, name), retry=self.retry)
            yield Path(scratch)
