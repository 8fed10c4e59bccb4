"""Reading and downloading the files of a folder in an object store or on a mount."""

import contextlib
import logging
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

from diffusion.errors import UserError
from diffusion.storage import object_store
from diffusion.storage.atomic import write_atomically
from diffusion.storage.retry import GaveUp, RetryPolicy

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class RemoteFolder:
    """A folder in an object store or on a mount, from which files are downloaded with retries.

    Args:
        url: The folder's URL or path.
        retry: Number of tries and timeout of each read.
    """

    url: str
    retry: RetryPolicy = field(default_factory=RetryPolicy)

    def address(self, name: str) -> str:
        """Return the URL or path of a file in the folder."""
        return f'{self.url.rstrip("/")}/{name}'

    def persist(self, make: Callable[[], None], name: str) -> None:
        """Call `make`, which must download and check a file, and repeat it until it succeeds or the tries are used up.

        Raises:
            UserError: The store refuses the request.
            GaveUp: Every try failed.
            OSError: The local disk is full.
        """
        self.retry.run(make, self.address(name))

    def download(self, name: str, path: Path) -> None:
        """Download a file of the folder without retries; call this inside `persist`, which retries."""
        object_store.download_once(self.address(name), path, self.retry)

    def read(self, name: str) -> bytes:
        """Return the content of a small file of the folder, read without retries; call this inside `persist`."""
        return object_store.read_once(self.address(name), self.retry)

    def refresh(self, name: str, path: Path) -> None:
        """Download a small file to `path`; if that fails, log a warning and keep the existing file at `path`.

        Raises:
            UserError: The store refuses the request, and `path` does not exist.
            GaveUp: Every try failed, and `path` does not exist.
        """
        # Always download the file: no index has its size or hash, so a stale copy cannot be recognized.
        try:
            self.persist(lambda: write_atomically(path, self.read(name)), name)
        except (GaveUp, UserError) as error:
            if not path.exists():
                raise
            log.warning('%s; using the existing copy %s', error, path)

    @contextlib.contextmanager
    def files(self, *names: str) -> Iterator[Path]:
        """Yield a local folder with these files: the folder itself if it is local, otherwise a temporary copy.

        Raises:
            FileNotFoundError: The local folder does not exist.
            UserError: The store refuses the request.
            GaveUp: Every try failed.
        """
        if '://' not in self.url:
            if not Path(self.url).is_dir():
                raise FileNotFoundError(f'{self.url} is not a folder')
            yield Path(self.url)
            return
        with tempfile.TemporaryDirectory() as scratch:
            for name in names:
                object_store.download(self.address(name), Path(scratch, name), retry=self.retry)
            yield Path(scratch)
