"""Pool of idle clients of object stores, since creating a client takes 0.1 to 0.5 s."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

from diffusion.storage.bucket_clients import CLIENTS
from diffusion.storage.bucket_interface import Client, Location
from diffusion.storage.retry import RetryPolicy, status_of

GRACE_SECONDS = 5.0
"""A client's own timeout is longer than the policy's by this time; it ends the thread of an abandoned download."""

idle: dict[tuple[Any, ...], list[Client]] = {}
"""Clients that no thread uses, by process, store and timeout."""


def client_of(location: Location, retry: RetryPolicy) -> contextlib.AbstractContextManager[Client]:
    """Return a context manager that yields a client of a store, and afterwards returns the client to the pool."""
    return release_after(acquire_client(location, retry), location, retry)


@contextlib.contextmanager
def release_after(client: Client, location: Location, retry: RetryPolicy) -> Iterator[Client]:
    """Yield a client, then return it to the pool of idle clients; drop it after HTTP 400, 401 or 403."""
    # Drop the client after a refusal: its credentials may have expired, and a new client reads them again.
    keep = True
    try:
        yield client
    except Exception as error:
        keep = status_of(error) not in (400, 401, 403)
        raise
    finally:
        if keep:
            _idle_clients(location, retry).append(client)


def acquire_client(location: Location, retry: RetryPolicy) -> Client:
    """Return an idle client from the pool, or a new client if there is none."""
    # Call pop() without a check: another thread may take the last client between a check and the pop.
    client: Client
    try:
        client = _idle_clients(location, retry).pop()
    except IndexError:
        client = CLIENTS[location.scheme](location.scheme, location.account, retry.timeout_seconds + GRACE_SECONDS)
    client.policy = retry
    return client


def _idle_clients(location: Location, retry: RetryPolicy) -> list[Client]:
    """Return the idle clients of a store with this policy's timeout."""
    # The key has the process ID: parent and child would write to the same connections of a client inherited by a fork.
    return idle.setdefault((os.getpid(), location.scheme, location.account, retry.timeout_seconds), [])
