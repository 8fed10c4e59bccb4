"""The work folder of a preparation: its files, its lock, and shares of several machines."""

import json
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion.errors import UserError
from diffusion.storage import locks
from diffusion.storage.atomic import UNFINISHED, remove, remove_unfinished

LOCK = 'lock'


@dataclass(frozen=True)
class Share:
    """The parts that one of several machines prepares: those whose number leaves `index` when divided by `of`."""

    index: int
    of: int

    @classmethod
    def parse(cls, text: str) -> 'Share':
        """Parse `3/16`."""
        index, _, of = text.partition('/')
        if not (index.isdecimal() and of.isdecimal() and int(index) < int(of)):
            raise UserError(f'--share: {text!r} is no share; write 0/16, 1/16, up to 15/16')
        return cls(int(index), int(of))

    def __str__(self) -> str:
        return f'{self.index}/{self.of}'

    def has(self, number: int) -> bool:
        return number % self.of == self.index


@dataclass(frozen=True)
class WorkFolder:
    """The folder that a stopped preparation leaves, and continues with."""

    path: Path

    @property
    def plan(self) -> Path:
        """Settings and parts, written first."""
        return self.path / 'plan.json'

    @property
    def parts(self) -> Path:
        """Holds a folder per part that is done, named by its number."""
        return self.path / 'parts'

    @property
    def packed(self) -> Path:
        """Holds a file per final shard that is done, with its entry of the index."""
        return self.path / 'packed'

    @property
    def duplicates(self) -> Path:
        """An array with the earlier image that each image repeats, written when all parts are done."""
        return self.path / 'duplicates.npy'

    @property
    def dataset(self) -> Path:
        """The folder that becomes the output."""
        return self.path / 'dataset'

    @property
    def complete(self) -> Path:
        """A file that is there when the dataset is whole and only needs to be put in place."""
        return self.path / 'complete'

    def part(self, number: int) -> Path:
        return self.parts / f'{number:06}'

    @contextmanager
    def locked(self, share: Share | None = None) -> Iterator[None]:
        """Lock the folder against all others; for a share, against those that prepare the whole or the same share.

        Raises:
            UserError: Somebody else is at it.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with ExitStack() as stack:
            self._lock(LOCK, stack, shared=share is not None)
            if share is not None:
                self._lock(f'{LOCK}-{share.index}-of-{share.of}', stack)
            try:
                yield
            finally:
                if share is None and self.path.exists() and not self.plan.exists() and not self.complete.exists():
                    self.remove()  # nothing was begun

    def _lock(self, name: str, stack: ExitStack, *, shared: bool = False) -> None:
        def taken() -> None:
            raise UserError(
                f'{self.path}: another process is preparing this dataset; wait for it, or give another --out'
            )

        if not stack.enter_context(locks.held(self.path / name, taken, shared=shared)):
            raise UserError(f'{self.path}: is on a file system without locks (flock); set work to a folder on another')

    def clear_unfinished(self, share: Share | None = None) -> None:
        """Remove what killed processes left unfinished. Call it under the lock."""
        if share is None:
            remove_unfinished(self.path)
            remove_unfinished(self.parts)
            remove_unfinished(self.packed, below=True)
            remove_unfinished(self.dataset, below=True)
            return
        for left in self.parts.glob(f'*{UNFINISHED}*'):
            if share.has(int(left.name.partition('.')[0])):
                remove(left)

    def remove(self) -> None:
        """Remove everything; `complete` and the lock last, so that a start after a kill continues removing."""
        for path in sorted(self.path.iterdir(), key=lambda path: (path.name == LOCK, path == self.complete)):
            remove(path)
        self.path.rmdir()


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding='utf-8'))
