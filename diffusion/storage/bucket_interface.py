"""Interface of object store clients, and types that describe objects and their locations."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from diffusion.storage.retry import RetryPolicy

CHUNK_BYTES = 2**18
CONNECT_SECONDS = 10.0


class ObjectInfo(NamedTuple):
    """Metadata of an object: key (see `Location`), size in bytes, and etag."""

    key: str
    size: int
    tag: str


class Location(NamedTuple):
    """Location of an object, or of all objects whose keys have the prefix `key`.

    `account` is the Azure account, or empty for other stores. The key of an `ObjectInfo` is the part of its URL after
    the first slash; for azure://ACCOUNT.blob.core.windows.net/CONTAINER/KEY, this includes the container.
    `Location.key` never includes the container.
    """

    scheme: str
    account: str
    bucket: str
    key: str


FolderListing = tuple[list[str], list[ObjectInfo]]


class Client(Protocol):
    """Base class of object store clients; a client may be used by one thread at a time, in the process that created it.

    `policy` is the retry policy of the request in progress. The upload of a file to S3 calls `policy.wait` repeatedly,
    and ends if this raises an error.
    """

    policy: RetryPolicy = RetryPolicy()

    def list(self, location: Location) -> Iterator[ObjectInfo]:
        """Yield the metadata of objects whose keys start with the key of `location`."""
        ...

    def list_folder(self, location: Location) -> FolderListing:
        """Return the subfolders (keys without final slash) and objects in a folder (key empty or ending in `/`)."""
        ...

    def head(self, location: Location) -> ObjectInfo:
        """Return an object's key, size and etag; raise an error with status 404 if it does not exist."""
        ...

    def current_version(self, location: Location) -> tuple[int, str]:
        """Return an object's size in bytes, and its version for `read` ('' if the store cannot read by version)."""
        found = self.head(location)
        return found.size, found.tag

    def read(self, location: Location, file: io.BufferedIOBase, span: tuple[int, int] | None, version: str) -> None:
        """Download an object, or its half-open byte range `span`; fail with status 412 if it has another `version`."""
        ...

    def write(self, location: Location, content: bytes | Path, *, if_absent: bool, if_tag: str | None) -> None:
        """Upload an object; raise PreconditionFailed, or an error with status 412, if a condition is not met.

        The condition of `if_absent` is that no object exists; that of `if_tag`, that the object has this etag.
        """
        ...

    def delete(self, location: Location) -> None:
        """Delete an object; some stores raise an error with status 404 if it does not exist."""
        ...

    def abort_uploads(self, location: Location, older_than_seconds: float) -> Iterator[str]:
        """Abort uploads to or below `location` that began at least this long ago (store's clock); yield their keys.

        Only S3 needs this: Google and Azure delete unfinished uploads after a week.
        """
        return iter(())
