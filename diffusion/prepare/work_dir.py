"""Work folder that makes a preparation resumable: layout and lock.

Several machines can work in the same folder, each on a share of the input such as 3/16.
"""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion.errors import ExternalError, GaveUp, UserError
from diffusion.storage import locks
from diffusion.storage.atomic import UNFINISHED, remove, remove_unfinished, write_atomically
from diffusion.storage.places import StorePlace
from diffusion.storage.retry import DISK_FULL_ERRORS

LOCK = 'lock'
BUSY = 'another process is preparing this dataset; wait until it ends, or give another --out'


@dataclass(frozen=True)
class Share:
    """Share of the input converted by one of several machines: parts whose number modulo `of` equals `index`."""

    index: int
    of: int

    @classmethod
    def parse(cls, text: str) -> 'Share':
        index, _, of = text.partition('/')
        if not (index.isdecimal() and of.isdecimal() and int(index) < int(of)):
            raise UserError(f'--share: {text!r} is not a share; use 0/16, 1/16, up to 15/16')
        return cls(int(index), int(of))

    def __str__(self) -> str:
        return f'{self.index}/{self.of}'

    def includes(self, number: int) -> bool:
        return number % self.of == self.index


@contextmanager
def share_lock(folder: Path, share: Share | None, busy: str) -> Iterator[None]:
    """Lock a work folder in the `with` block, for one share of the input or, if `share` is None, for a full run.

    Different shares can be locked at the same time. If the lock is taken, raise UserError with the text `busy`.
    """

    def fail() -> None:
        raise UserError(f'{folder}: {busy}')

    folder.mkdir(parents=True, exist_ok=True)
    with ExitStack() as stack:
        # A share takes the main lock in shared mode, which excludes full runs but not other shares, and its own lock in
        # exclusive mode.
        own = [] if share is None else [f'{LOCK}-{share.index}-of-{share.of}']
        for name in (LOCK, *own):
            if not stack.enter_context(locks.hold_lock(folder / name, fail, shared=name == LOCK and share is not None)):
                raise UserError(
                    f'{folder}: the file system does not support locks (flock); give another one with --work DIR'
                )
        yield


class Staging:
    """Folder that holds a dataset until it is complete and moved to the output."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.dataset = path / 'dataset'
        """Folder for the final dataset; it is renamed to the output folder if the output is local."""
        self.packed = path / 'packed'
        """Folder with one file per finished final shard, containing the shard's entry for index.json."""
        self.uploading = path / 'uploading'
        self.replaced = path / 'replaced'
        """Path to which the output's existing dataset is moved while it is being replaced."""


class WorkFolder:
    """Folder with the state of a preparation, so that the preparation can resume after an interruption."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.plan = path / 'plan.json'
        """File with the settings and the list of input parts, written first."""
        self.parts = path / 'parts'
        self.stored_parts = path / 'stored-parts.txt'
        """File with the URLs of object store folders that contain shards of converted parts, one per line."""
        self.duplicates = path / 'duplicates.npy'
        """Array with the result of the duplicate search, written once all parts are converted."""
        self.train = Staging(path)
        self.held_out = Staging(path / 'held-out')
        self.complete = path / 'complete'
        """Copy of the report; exists once the datasets are complete and only need to be moved to the outputs."""
        self.append = path / 'append'
        """Empty file that marks the work as an addition to a dataset (`prepare --append`); created before the plan."""

    def store_parts(self, url: str) -> None:
        """Record an object store folder for shards of converted parts; `remove` and `clear` delete its content."""
        known = self.stored_parts.read_text(encoding='utf-8').splitlines() if self.stored_parts.exists() else []
        if url not in known:
            write_atomically(self.stored_parts, ''.join(f'{each}\n' for each in (*known, url)))

    def check_kind(self, *, is_append: bool) -> None:
        """Raise UserError if the unfinished work here is an addition and `is_append` is False, or vice versa."""
        if self.plan.exists() and self.append.exists() != is_append:
            raise UserError(
                f'{self.path}: has an unfinished {"preparation" if is_append else "addition to a dataset"}; finish it '
                f'{"without" if is_append else "with"} --append, or remove the folder'
            )

    @contextmanager
    def locked(self, share: Share | None = None) -> Iterator[None]:
        """Lock the folder in the `with` block (different shares may run together); add the path to OSErrors.

        Afterward, unless for a share, remove the folder if it has neither a plan nor complete datasets.

        Raises:
            ExternalError: In place of an OSError for a store that does not respond, or a full disk.
        """
        try:
            with share_lock(self.path, share, BUSY):
                try:
                    yield
                finally:
                    if share is None and self.path.exists() and not self.plan.exists() and not self.complete.exists():
                        self.remove()  # the block has written no plan, so remove the empty folder
        except OSError as error:
            what = f'{self.path}: {error}; fix the cause and run the same command again; finished work is kept'
            if isinstance(error, GaveUp) or error.errno in DISK_FULL_ERRORS:
                raise ExternalError(what) from error
            raise OSError(what) from error

    def clear_unfinished(self, share: Share | None = None) -> None:
        """Remove unfinished files of killed processes, for one share or all; the caller must hold the lock."""
        if share is None:
            remove_unfinished(self.path)
            remove_unfinished(self.parts)
            for staging in (self.train, self.held_out):
                remove_unfinished(staging.packed, below=True)
                remove_unfinished(staging.dataset, below=True)
            return
        # Processes with other shares may be writing to this folder, so touch only our own share's parts.
        for path in self.parts.glob(f'*{UNFINISHED}*'):
            if share.includes(int(path.name.partition('.')[0])):
                remove(path)

    @contextmanager
    def cleared_after_errors(self, share: Share | None) -> Iterator[None]:
        """Call `clear_unfinished` before the `with` block and, since the disk may be full, after an error in it."""
        self.clear_unfinished(share)
        try:
            yield
        except BaseException:
            self.clear_unfinished(share)
            raise

    def clear(self) -> None:
        """Remove stored parts and the folder's content, except locks and `append`, to start over; requires the lock."""
        self._remove_stored_parts()
        # Remove the plan last, since its presence tells the next start that there is something to clear.
        for path in sorted(self.path.iterdir(), key=lambda path: path == self.plan):
            if path != self.append and not path.name.startswith(LOCK):
                remove(path)

    def remove(self) -> None:
        """Remove the folder with everything in it, and shards of converted parts in object stores."""
        self._remove_stored_parts()
        # Remove `complete` and the lock last: if this process is killed, the next start finds `complete` and continues
        # removing, rather than finding an incomplete work folder and preparing the dataset again.
        for path in sorted(self.path.iterdir(), key=lambda path: (path.name == LOCK, path == self.complete)):
            remove(path)
        self.path.rmdir()

    def _remove_stored_parts(self) -> None:
        if self.stored_parts.exists():
            for url in self.stored_parts.read_text(encoding='utf-8').splitlines():
                place = StorePlace(url)
                place.delete(place.sizes())


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding='utf-8'))
