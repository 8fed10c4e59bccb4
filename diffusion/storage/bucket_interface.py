"""Interface of the clients of object stores, and the types that describe objects and their location."""

import io
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple, Protocol

from diffusion.storage.retry import RetryPolicy

CHUNK_BYTES = 2**18
CONNECT_SECONDS = 10.0


class ObjectInfo(NamedTuple):
    """Metadata of an object: its key (see `Location`), its size in bytes, and its etag."""

    key: str
    size: int
    tag: str


class Location(NamedTuple):
    """Location of an object, or of all objects whose keys have the prefix `key`.

    `account` is the Azure account, and empty for other stores. The key of an `ObjectInfo` is the part of its URL after
    the first slash, which for azure://ACCOUNT.blob.core.windows.net/CONTAINER/KEY includes the container;
    `Location.key` never does.
    """

    scheme: str
    account: str
    bucket: str
    key: str


FolderListing = tuple[list[str], list[ObjectInfo]]
"""The keys of the folders and the metadata of the objects directly in a folder of a store."""


class Client(Protocol):
    """Base class of object-store clients; a client serves one thread at a time, in the process that created it.

    Attributes:
        policy: Retry policy of the present user. The upload of a file to S3 calls its `wait`, and ends if that raises.
    """

    policy: RetryPolicy = RetryPolicy()

    def list(self, location: Location) -> Iterator[ObjectInfo]:
        """Yield the metadata of the objects whose keys start with the key of `location`."""
        ...

    def list_folder(self, location: Location) -> FolderListing:
        """Return the keys of the folders and the metadata of the objects directly in a folder of the store.

        The key of `location` is empty or ends with a slash; those of the folders do not.
        """
        ...

    def head(self, location: Location) -> ObjectInfo:
        """Return the key, size and etag of an object in the store; raise an error with status 404 if there is none."""
        ...

    def current_version(self, location: Location) -> tuple[int, str]:
        """Return the size in bytes of an object and its version for `read`; '' if the store cannot pin versions."""
        found = self.head(location)
        return found.size, found.tag

    def read(
        self, location: Location, file: io.BufferedIOBase, span: tuple[int, int] | None, version: str = ''
    ) -> None:
        """Download an object, or only its bytes in the half-open range `span`, to an open file.

        With a version, fail with status 412 if the object has another one.
        """
        ...

    def write(self, location: Location, content: bytes | Path, *, if_absent: bool, if_tag: str | None) -> None:
        """Upload an object to the store.

        Args:
            content: The bytes, or the path of a file.
            if_absent: Fail with status 412 if the object exists.
            if_tag: Fail with status 412 if the object's etag differs from this one.
        """
        ...

    def delete(self, location: Location) -> None:
        """Delete an object from the store; some stores raise an error with status 404 if there is none."""
        ...

    def abort_uploads(self, location: Location, older_than_seconds: float) -> Iterator[str]:
        """Abort unfinished uploads to the object at `location` and to objects below it, and yield their keys.

        Only S3 needs this: Google and Azure delete them after a week.

        Args:
            older_than_seconds: Minimum age by the store's clock.
        """
        return iter(())
