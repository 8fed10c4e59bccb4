"""Copy of a run's small files (recipe, metrics, images, ...) between the working folder of rank 0 and an object store.

Checkpoints are not copied here: `bucket_storage` stores them.
"""

import json
import logging
import os
import threading
from collections.abc import Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from diffusion.checkpointing.checkpoint_store import LATEST, batch_number
from diffusion.errors import GaveUp, UserError
from diffusion.runs.attempts import ATTEMPTS
from diffusion.runs.run_id import RUN_FILE, claim_working_folder, open_bucket_run
from diffusion.runs.run_lock import LOCK
from diffusion.storage import object_store
from diffusion.storage.atomic import UNFINISHED, write_atomically
from diffusion.storage.local_files import working_folder
from diffusion.storage.retry import RetryPolicy

log = logging.getLogger(__name__)

STATE_FILE = '.mirror.json'
"""File in the working folder with the size, modification time and etag of each copied file."""
NOT_MIRRORED = frozenset({LATEST, RUN_FILE, ATTEMPTS, LOCK, STATE_FILE})
"""Files that are not copied here, most of them because other modules upload them immediately."""
PUSH_SECONDS = 60.0
"""Interval between uploads of changed files. `diffusion status` and reports of a running run can lag by this much."""
MIRROR_RETRY = RetryPolicy(tries=2, timeout_seconds=30.0)


class Copied(NamedTuple):
    """State of a file when it was last copied: its size, modification time, and the etag of its object in the store."""

    bytes: int
    modified_ns: int
    tag: str


class RunMirror:
    """The small files of a run, in a working folder and in an object store."""

    def __init__(self, folder: Path, url: str, *, exclude: Collection[str] = NOT_MIRRORED) -> None:
        self.folder, self.url, self.exclude = folder, url, {*exclude, STATE_FILE}
        self._copied = self._read_state()
        self._lock = threading.Lock()

    def pull(self, folders: Collection[str] = ()) -> None:
        """Download the files at top level and in `folders` that another node wrote since this node last copied them.

        A file that has only changed on this node is kept: a process may have been killed before uploading it.
        """
        prefix = object_store.split(self.url)[1].rstrip('/') + '/'
        objects = object_store.list_folder(self.url)[1]
        for folder in folders:
            objects = [*objects, *object_store.list_objects(f'{self.url}/{folder}/')]
        for found in objects:
            name = found.key.removeprefix(prefix)
            before, path = self._copied.get(name), self.folder / name
            is_copied = path.exists() and before is not None and before.tag == found.tag
            if name in self.exclude or '..' in name or is_copied:
                continue
            if path.exists() and before != self._stamp(path, '' if before is None else before.tag):
                log.warning('%s: replaced by the newer %s/%s, which another node has written', path, self.url, name)
            unfinished = path.with_name(f'.{path.name}{UNFINISHED}')
            object_store.download(f'{self.url}/{name}', unfinished, size=found.size)
            os.replace(unfinished, path)
            self._copied[name] = self._stamp(path, found.tag)
        self._write_state()

    def push(self, retry: RetryPolicy = object_store.DEFAULT, *, since: float = 0.0) -> None:
        """Upload the files that have changed, except those last modified before `since` (seconds since 1970).

        Raises:
            UserError: The store refuses the request.
            OSError: A file cannot be read (all others are uploaded), or the store does not answer.
        """
        errors: list[OSError] = []
        with self._lock:
            for path in self._files():
                name = path.relative_to(self.folder).as_posix()
                before = self._copied.get(name)
                try:
                    # Read size and time before the upload: if the file grows in the meantime, it is uploaded again.
                    stamp = self._stamp(path, '' if before is None else before.tag)
                    if stamp == before or stamp.modified_ns < since * 1e9:
                        continue
                    # Pass bytes instead of the path: a log may grow during the upload.
                    stored = object_store.write(f'{self.url}/{name}', path.read_bytes(), retry=retry)
                except FileNotFoundError:
                    continue  # the file has just been removed
                except GaveUp as error:  # the store does not respond, so skip the other files
                    errors.append(error)
                    break
                except OSError as error:
                    errors.append(error)
                    continue
                self._copied[name] = stamp._replace(tag=stored.tag)
            self._write_state()
        if errors:
            raise errors[0]

    def _files(self) -> Iterator[Path]:
        def is_hidden(name: str) -> bool:
            return name.startswith('.') or UNFINISHED in name

        for folder, folders, names in os.walk(self.folder):
            folders[:] = [each for each in folders if not is_hidden(each) and batch_number(Path(each)) is None]
            yield from (Path(folder, name) for name in names if not is_hidden(name) and name not in self.exclude)

    @staticmethod
    def _stamp(path: Path, tag: str) -> Copied:
        status = path.stat()
        return Copied(status.st_size, status.st_mtime_ns, tag)

    def _read_state(self) -> dict[str, Copied]:
        """Return the state of the files that the previous process on this node copied, by name; {} if unknown."""
        try:
            content = json.loads((self.folder / STATE_FILE).read_text(encoding='utf-8'))
            return {name: Copied(int(size), int(at), str(tag)) for name, (size, at, tag) in content.items()}
        except (OSError, ValueError, TypeError, AttributeError):
            return {}

    def _write_state(self) -> None:
        if self.folder.is_dir():
            write_atomically(self.folder / STATE_FILE, json.dumps(self._copied), create_folder=False)


@contextmanager
def mirrored(url: str) -> Iterator[RunMirror]:
    """Copy a run's small files from the store before the `with` block, and to the store during and after it.

    If the store does not respond during training, this is logged and retried at the next copy.
    """
    folder = working_folder(url)
    claim_working_folder(folder, open_bucket_run(url))
    mirror, done = RunMirror(folder, url), threading.Event()
    mirror.pull()

    def push_regularly() -> None:
        while not done.wait(PUSH_SECONDS):
            try_to_push(mirror, MIRROR_RETRY)

    thread = threading.Thread(target=push_regularly, name='copy of the run to the store', daemon=True)
    thread.start()
    try:
        yield mirror
    finally:
        done.set()
        thread.join()
        try_to_push(mirror)


def try_to_push(mirror: RunMirror, retry: RetryPolicy = object_store.DEFAULT, *, since: float = 0.0) -> None:
    """Upload the files that have changed, as `RunMirror.push` does; errors of the store are logged."""
    try:
        mirror.push(retry, since=since)
    except (OSError, UserError) as error:
        log.warning('%s: not all files of %s could be uploaded (%s)', mirror.url, mirror.folder, error)
