"""Places where the lock of a run is kept: a file in the run's folder, or an object in a bucket.

`run_lock` decides who holds the lock; these classes read, write and release its content. An object is written only if
it still is as it was read (compare-and-set), a file always.
"""

import os
from pathlib import Path
from typing import NamedTuple, Protocol

from diffusion.errors import UserError
from diffusion.storage import object_store
from diffusion.storage.own_files import open_own_file
from diffusion.storage.retry import RetryPolicy, status_of
from diffusion.storage.shared_files import PATIENT, is_url

LOCK = 'run.lock'
RELEASED = '{"owner": null, "released": true}\n'
"""Content of the lock object of a run that no job holds."""
ONCE = RetryPolicy(tries=1, timeout_seconds=5.0)
"""For refreshes: the next one is the next try, and a store that hangs must not make the owner look dead."""
_MAX_CHARACTERS = 2**16
"""Characters of a lock that are read; it has a few hundred."""


class LockContent(NamedTuple):
    """Content of a lock as it was read."""

    text: str
    tag: str = ''
    """The etag of the object, by which a conditional write recognizes this content; empty for a file."""
    readable: bool = True
    """False if the storage did not respond, so that the content is unknown."""


UNREADABLE = LockContent('', readable=False)


class LockPlace(Protocol):
    """Interface of the file or object that holds a lock."""

    @property
    def path(self) -> Path | str:
        """Path or URL."""
        ...

    def read(self, *, patient: bool = False) -> LockContent | None:
        """Return the content, or None if there is no lock; UNREADABLE for a file whose storage fails.

        Args:
            patient: True to retry.

        Raises:
            OSError: Every try failed.
            UserError: The store refuses the request.
        """
        ...

    def poll(self, content: LockContent) -> LockContent | None:
        """Return the current content, UNREADABLE after a fault; cheaper than `read` if it still is `content`."""
        ...

    def write(self, text: str, expected: LockContent | None, *, patient: bool = False) -> None:
        """Write the content.

        Args:
            text: The new content.
            expected: The content that it replaces, or None if there was no lock.
            patient: True to retry.

        Raises:
            PreconditionFailed: The lock has changed since `expected` was read; only for an object.
            OSError: The storage failed; the content may have been written.
            UserError: The store refuses the request.
        """
        ...

    def release(self, expected: LockContent) -> None:
        """Free the lock, whose content is `expected`; raises as `write` does."""
        ...


class LockFile:
    """Lock in a file. Without file locks, a write cannot depend on the content: two jobs may both find the lock free.

    Args:
        path: Path of run.lock.
    """

    def __init__(self, path: Path) -> None:
        self.path = path

    def read(self, *, patient: bool = False) -> LockContent | None:
        try:
            with open(open_own_file(self.path, os.O_RDONLY), encoding='utf-8', errors='replace') as file:
                return LockContent(file.read(_MAX_CHARACTERS))
        except FileNotFoundError:
            return None
        except OSError:  # for example ESTALE while a network file system fails over
            return UNREADABLE

    def poll(self, content: LockContent) -> LockContent | None:
        return self.read()

    def write(self, text: str, expected: LockContent | None, *, patient: bool = False) -> None:
        # In place, unlike a heartbeat: clients of a network file system see a changed file sooner than a new one of the
        # same name. A reader may see a partial write, which counts as a change without an owner.
        content = text.encode()
        # No O_TRUNC: the file would be empty until the write, and a reader would see no owner.
        descriptor = open_own_file(self.path, os.O_CREAT | os.O_WRONLY)
        try:
            os.pwrite(descriptor, content, 0)
            os.ftruncate(descriptor, len(content))
            os.fsync(descriptor)
        finally:
            os.close(descriptor)

    def release(self, expected: LockContent) -> None:
        self.path.unlink(missing_ok=True)


class LockObject:
    """Lock in an object of a store, which changes only from the content that this process has read.

    Args:
        url: URL of run.lock.
    """

    def __init__(self, url: str) -> None:
        self.path = url

    def read(self, *, patient: bool = False) -> LockContent | None:
        retry = PATIENT if patient else ONCE
        try:
            # The etag first: if the object changes between the two requests, a write with this etag fails. In the other
            # order it could replace content that was never read. No content occurs twice, so no etag does.
            found = object_store.head(self.path, retry=retry)
            span = None if found.size <= _MAX_CHARACTERS else (0, _MAX_CHARACTERS)
            text = object_store.read(self.path, span=span, retry=retry)
        except UserError as error:
            if status_of(error) == 404:
                return None
            raise
        return LockContent(text.decode(errors='replace'), found.tag)

    def poll(self, content: LockContent) -> LockContent | None:
        try:
            if object_store.head(self.path, retry=ONCE).tag == content.tag:
                return content
            return self.read()
        except (OSError, UserError) as error:
            return None if status_of(error) == 404 else UNREADABLE

    def write(self, text: str, expected: LockContent | None, *, patient: bool = False) -> None:
        retry = PATIENT if patient else ONCE
        tag = None if expected is None else expected.tag
        object_store.write(self.path, text.encode(), if_absent=expected is None, if_tag=tag, retry=retry)

    def release(self, expected: LockContent) -> None:
        # Overwritten, since stores cannot delete an object on the condition of its etag: between the last look and the
        # deletion, a later attempt of this job may have taken the lock.
        self.write(RELEASED, expected)


def lock_place(path: Path | str) -> LockPlace:
    """Return the place of the lock with a path or URL."""
    return LockObject(str(path)) if is_url(path) else LockFile(Path(path))


def lock_path(run: Path | str) -> Path | str:
    """Return the path or URL of the lock of the run in a folder or at a URL."""
    return f'{str(run).rstrip("/")}/{LOCK}' if is_url(run) else Path(run, LOCK)
