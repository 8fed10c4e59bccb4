"""Content of the lock of a run: how it is read, written and released in a folder and in an object store.

`run_lock` decides who holds the lock. An object is written only if it has not changed since it was read
(compare-and-set). A file is always written, because file locks do not work on the file system of every cluster, so two
jobs may both find the lock free.
"""

from pathlib import Path
from typing import NamedTuple

from diffusion.errors import UserError
from diffusion.storage import object_store
from diffusion.storage.places import PATIENT, Place, files_of_run, is_url
from diffusion.storage.retry import RetryPolicy, status_of

LOCK = 'run.lock'
RELEASED = '{"owner": null, "released": true}\n'
"""Content of the lock object of a run that no job holds."""
ONCE = RetryPolicy(tries=1, timeout_seconds=5.0)
"""Policy of refreshes: the next refresh is the next try, and a store that hangs must not make the owner look dead."""


class LockContent(NamedTuple):
    """Content of a lock as it was read."""

    text: str
    version: str = ''
    """Version by which a conditional write recognizes this content."""
    readable: bool = True
    """False if the storage did not respond, so that the content is unknown."""


UNREADABLE = LockContent('', readable=False)


class RunLock:
    """File or object that holds the lock of a run.

    Args:
        run: The run's folder or URL.

    Attributes:
        in_bucket: True if it is an object.
        path: Its path or URL.
    """

    def __init__(self, run: Path | str) -> None:
        self.run, self.in_bucket = run, is_url(run)
        self.path = self._place().locate(LOCK)

    def read(self, *, patient: bool = False) -> LockContent | None:
        """Return the content, or None if there is no lock; UNREADABLE for a file whose storage fails.

        Args:
            patient: True to retry.

        Raises:
            OSError: Every try failed.
            UserError: The store refuses the request, or the file is a link.
        """
        try:
            found = self._place(patient=patient).read_version(LOCK)
        except OSError:  # for example ESTALE while a network file system fails over
            if self.in_bucket:
                raise
            return UNREADABLE
        return None if found is None else LockContent(found.content.decode(errors='replace'), found.version)

    def poll(self, content: LockContent) -> LockContent | None:
        """Return the current content, UNREADABLE after a fault; cheaper than `read` if it still is `content`."""
        if not self.in_bucket:
            return self.read()
        try:
            return content if object_store.head(self.path, retry=ONCE).tag == content.version else self.read()
        except (OSError, UserError) as error:
            return None if status_of(error) == 404 else UNREADABLE

    def write(self, text: str, expected: LockContent | None, *, patient: bool = False) -> None:
        """Write the content.

        Args:
            expected: The content that it replaces, or None if there was no lock.
            patient: True to retry.

        Raises:
            PreconditionFailed: The lock has changed since `expected` was read; only for an object.
            OSError: The storage failed; the content may have been written.
            UserError: The store refuses the request, or the file is a link.
        """
        place = self._place(patient=patient)
        if self.in_bucket:
            place.replace(LOCK, text.encode(), None if expected is None else expected.version)
        else:
            # A reader may see a partial write, which counts as a change without an owner.
            place.write(LOCK, text, in_place=True)

    def release(self, expected: LockContent) -> None:
        """Free the lock, whose content is `expected`; raises as `write` does."""
        if self.in_bucket:
            # Overwrite the object, since stores cannot delete one on the condition of its etag: a later attempt of this
            # job may take the lock between the last look and the deletion.
            self.write(RELEASED, expected)
        else:
            self._place().delete([LOCK])

    def _place(self, *, patient: bool = False) -> Place:
        return files_of_run(self.run, PATIENT if patient else ONCE, refusal_is_fault=False)
