"""The work folder of a preparation: who may use it, what is done in it, and how things get done in one step."""

import json
import shutil
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion.errors import UserError
from diffusion.storage import locks
from diffusion.storage.atomic import UNFINISHED, new_unfinished

LOCK = 'lock'


@dataclass(frozen=True)
class Share:
    """The parts that one of several machines prepares: those whose number leaves `index` when divided by `of`."""

    index: int
    of: int

    @classmethod
    def parse(cls, text: str) -> 'Share':
        """Of `3/16`."""
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
    """What a preparation leaves behind when it is stopped, and goes on with."""

    path: Path

    @property
    def plan(self) -> Path:
        """Settings and parts, written first."""
        return self.path / 'plan.json'

    @property
    def parts(self) -> Path:
        """A folder a part that is done, by its number."""
        return self.path / 'parts'

    @property
    def packed(self) -> Path:
        """A file a final shard that is done, with its entry of the index."""
        return self.path / 'packed'

    @property
    def duplicates(self) -> Path:
        """Of each picture the earlier one that it repeats, written when all parts are done."""
        return self.path / 'duplicates.npy'

    @property
    def dataset(self) -> Path:
        """What becomes the output."""
        return self.path / 'dataset'

    @property
    def complete(self) -> Path:
        """Is there when the dataset is whole and has but to be put in place."""
        return self.path / 'complete'

    def part(self, number: int) -> Path:
        return self.parts / f'{number:06}'

    @contextmanager
    def locked(self, share: Share | None = None) -> Iterator[None]:
        """Keep others away: everybody, or for a share those that prepare the whole or the same share.

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
        """Remove what killed processes were at. Call it under the lock."""
        for left in self.parts.glob(f'*{UNFINISHED}*'):
            if share is None or share.has(int(left.name.partition('.')[0])):
                remove_work_folder(left)
        if share is None:
            for left in (*self.packed.rglob(f'*{UNFINISHED}*'), *self.dataset.rglob(f'*{UNFINISHED}*')):
                remove_work_folder(left)

    def remove(self) -> None:
        """Remove everything; `complete` and the lock last, so that a start after a kill goes on removing."""
        for path in sorted(self.path.iterdir(), key=lambda path: (path.name == LOCK, path == self.complete)):
            remove_work_folder(path)
        self.path.rmdir()


def remove_work_folder(path: Path) -> None:
    """Remove a file or a folder; half a folder is never seen under its name.

    Its writer may still live for a moment and rename it: one of the two renames wins, and neither gets half of it.
    """
    if not path.is_dir():
        path.unlink(missing_ok=True)
        return
    removed = new_unfinished(path)
    try:
        path.rename(removed)
    except FileNotFoundError:
        return
    shutil.rmtree(removed)


def read_json(path: Path) -> Any:
    return json.loads(path.read_text(encoding='utf-8'))
