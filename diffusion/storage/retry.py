"""Retry policy for storage: which errors are retried, which fail immediately, and how long to wait between attempts."""

import errno
import logging
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from diffusion.errors import DataError, GaveUp, UserError

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 2.0
PAUSE_FACTOR = 4.0
LONGEST_PAUSE_SECONDS = 30.0
"""Longest pause. The pauses add up to 5 to 10 s (random) with 3 attempts, and to 20 to 40 s with 4 attempts."""
DEADLINE_SECONDS = 600.0

DISK_FULL_ERRORS = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
LOCAL_DISK_ERRORS = DISK_FULL_ERRORS | {errno.EROFS, errno.EACCES, errno.EISDIR, errno.ENOTDIR}
"""Error numbers of the local disk that would occur again on a retry."""
TRANSIENT_STATUS = frozenset({408, 409, 425, 429})
"""Status codes to retry, in addition to 5xx. S3 and Azure return 409 while another request modifies the object."""
EXPIRED = frozenset(
    {'ExpiredToken', 'ExpiredTokenException', 'RequestExpired', 'RequestTimeout', 'TokenRefreshRequired'}
)
"""S3 error codes with status 400 or 403 to retry: the next attempt's client reads the credentials again."""
NO_CREDENTIALS = frozenset(
    {
        *('NoCredentialsError', 'PartialCredentialsError', 'ProfileNotFound'),  # from botocore
        *('SSOTokenLoadError', 'UnauthorizedSSOTokenError'),  # from botocore, if `aws sso login` is needed
        *('DefaultCredentialsError', 'ConfigFileNotFound', 'InvalidConfig', 'ClientAuthenticationError'),  # others
    }
)
"""Class names of errors for missing credentials, as strings because importing the classes takes seconds."""
INVALID_SETTINGS = frozenset({'ParamValidationError', 'InvalidRegionError', 'HFValidationError'})
MISSING_BUCKET = frozenset({'NoSuchBucket', 'ContainerNotFound'})
CLIENT_PACKAGES = frozenset(
    'azure boto3 botocore google http httpcore2 httpx2 huggingface_hub requests s3transfer urllib3'.split()  # noqa: SIM905
)
"""Packages whose errors, if they have no HTTP status, mean that a request failed on the network."""
_AZURE = 'set AZURE_ACCOUNT_NAME and AZURE_ACCOUNT_ACCESS_KEY'
CREDENTIALS = {
    's3': 'set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE, and S3_ENDPOINT_URL for a store outside AWS',
    'gs': 'set GCS_KEY and GCS_SECRET, or Application Default Credentials',
    'azure': _AZURE,
    'azure-dl': _AZURE,
    'az': _AZURE,
    'hf': 'set HF_TOKEN, or log in with `hf auth login`',
}
"""Advice on providing credentials, by URL scheme; part of error messages."""
Result = TypeVar('Result')


class DamagedDownload(Exception):
    """Raised for a download that was truncated or has the wrong hash; it is retried."""


class PreconditionFailed(Exception):
    """Raised for a failed conditional write: the object already exists, or its etag is not the expected one.

    If the response to an earlier attempt of the same call was lost, that attempt may have written the object.
    """


def _no_wait() -> None:
    pass


@dataclass(frozen=True)
class RetryPolicy:
    """Number of attempts and timeout for an operation on a store.

    Args:
        tries: Maximum number of attempts, including the first.
        timeout_seconds: Time within which a request must be answered, and within which a download must finish or
            receive `transfers.PROGRESS_BYTES`.
        wait: Called every 20 ms during pauses and downloads, and every 10 ms while a file is uploaded to S3; it may
        raise an exception to end them.
    """

    tries: int = 4
    timeout_seconds: float = 60.0
    wait: Callable[[], None] = _no_wait

    def run(self, attempt: Callable[[], Result], url: str, verb: str = 'read') -> Result:
        """Call `attempt`, retrying after transient errors, and return its result.

        Args:
            verb: Past participle for the error message, such as `read` in "cannot be read".

        Raises:
            UserError: The store permanently rejects the request: no permission, no credentials, or no such object.
            PreconditionFailed: The condition of a conditional write is not met.
            GaveUp: Every attempt failed, or the first failure was more than `DEADLINE_SECONDS` ago.
            OSError: The local disk is full or cannot be written.
            Exception: Any other error from `attempt`, without a retry.
        """
        # The deadline counts from the first failure rather than from the call, because an attempt may be a download of
        # many minutes.
        deadline = float('inf')
        for number in range(1, self.tries + 1):
            try:
                return attempt()
            except Exception as error:  # errors of the stores' clients have no common base class
                if not is_transient(error, url):
                    raise
                reason = error_text(error)
                deadline = min(deadline, time.monotonic() + DEADLINE_SECONDS)
                if number == self.tries or time.monotonic() > deadline:
                    times = '1 time' if number == 1 else f'{number} times'
                    raise GaveUp(f'{url}: cannot be {verb}, tried {times} ({reason})') from error
                log.warning('%s: %s; trying again', url, reason)
            self._pause(min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * PAUSE_FACTOR ** (number - 1)))
        raise AssertionError(f'{self.tries} tries')

    def _pause(self, seconds: float) -> None:
        """Sleep for a random 50% to 100% of `seconds`, while calling `wait`."""
        # Jitter prevents thousands of throttled loader workers from retrying at the same time.
        end = time.monotonic() + seconds * random.uniform(0.5, 1.0)
        while time.monotonic() < end:
            self.wait()
            time.sleep(0.02)


def is_transient(error: Exception, url: str) -> bool:
    """Return True if a retry may succeed, False if the error is final or came from neither the store nor the network.

    Raise UserError if the store rejects the request, PreconditionFailed if its condition is not met, and OSError if the
    local disk is full or cannot be written.
    """
    if isinstance(error, DamagedDownload):
        return True
    if isinstance(error, UserError | DataError | PreconditionFailed | GaveUp):
        return False
    # Clients wrap errors from the file to which they write: do not retry a full disk like a network error.
    links = list(_chain(error))
    for link in links:
        if isinstance(link, OSError) and _is_local(link, url):
            raise link
    status = status_of(error)
    if status == 412:
        raise PreconditionFailed(f'{url}: has changed, or exists already') from error
    reason = _refusal(links, status, url.partition('://')[0])
    if reason is not None:
        raise UserError(f'{url}: {reason}') from error
    known = isinstance(error, OSError) or type(error).__module__.partition('.')[0] in CLIENT_PACKAGES
    return known or status is not None


def status_of(error: BaseException) -> int | None:
    return next((status for link in _chain(error) if (status := _status(link)) is not None), None)


def is_missing_object(error: BaseException) -> bool:
    """Return True if an error means that an object does not exist, False if its whole bucket does not exist."""
    # Google sends the same status and code for a missing object and a missing bucket; only the text differs.
    bucket = any(_code(link) in MISSING_BUCKET or 'bucket does not exist' in str(link) for link in _chain(error))
    return status_of(error) == 404 and not bucket


def error_text(error: BaseException) -> str:
    """Return an error as one line of text: class, message, and the cause that boto3 and s3transfer hide.

    The class is left out for truncated and stalled downloads.
    """
    # botocore appends the number of its own retries, which are off; `GaveUp` reports the actual number of attempts.
    text = ' '.join(str(error).split()).replace(' (reached max retries: 0)', '')
    if isinstance(error, DamagedDownload) or type(error) is TimeoutError:
        return text
    cause = getattr(error, 'last_exception', None)
    return f'{type(error).__name__}: {text}'.rstrip(': ') + ('' if cause is None else f' ({error_text(cause)})')


def _is_local(error: OSError, url: str) -> bool:
    """Return True if an error came from the local disk rather than from a mounted file at `url`."""
    # A mounted file at `url` raises the same error numbers, but its errors have `url` as file name. ENOENT without a
    # file name comes from the store's client, since opening a local file adds the name.
    if error.errno == errno.ENOENT:
        return error.filename not in (None, url)
    return error.errno in LOCAL_DISK_ERRORS and error.filename != url


def _refusal(links: list[BaseException], status: int | None, scheme: str) -> str | None:
    """Return why a store would reject every retry and how to fix it; None for other errors, which may be transient."""
    text = error_text(links[0])
    if scheme not in CREDENTIALS:
        return {
            403: f'permission denied ({text}); check the permissions of the file',
            404: 'there is no such file; check the path',
        }.get(status or 0)
    credentials = CREDENTIALS[scheme]
    # Skip errors with an HTTP status: Azure raises ClientAuthenticationError for rejected requests too.
    if any(type(link).__name__ in NO_CREDENTIALS and _status(link) is None for link in links):
        return f'there are no credentials ({text}); {credentials}'
    if any(type(link).__name__ in INVALID_SETTINGS for link in links):
        return f'invalid location or settings ({text}); {credentials}'
    if any(_code(link) in EXPIRED for link in links):
        return None
    if status in (401, 403):
        return f'the store refuses access ({status}): {text}; check the permissions, and the credentials: {credentials}'
    if status == 404:
        return 'there is no such bucket or object (404); check the spelling'
    if status is not None and (300 <= status < 500 or status == 501) and status not in TRANSIENT_STATUS:
        return f'the store refuses ({text}); check the location, and the credentials: {credentials}'
    return None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """Yield an error and its causes, outermost first."""
    link: BaseException | None = error
    while link is not None:
        yield link
        following = link.__cause__ or getattr(link, 'last_exception', None)
        # boto3 raises S3UploadFailedError while handling a ClientError, but not `from` it, so only __context__ has the
        # status. For other packages, __context__ may be an unrelated error from an earlier operation.
        hidden = link.__context__ if type(link).__module__.startswith('boto3') else None
        link = following if isinstance(following, BaseException) else hidden


def _status(error: BaseException) -> int | None:
    if isinstance(error, FileNotFoundError | PermissionError):  # raised by mounts and Hugging Face's file system
        return 404 if isinstance(error, FileNotFoundError) else 403
    response = getattr(error, 'response', None)
    if isinstance(response, dict):  # an error from botocore
        return response.get('ResponseMetadata', {}).get('HTTPStatusCode')
    for holder in (error, response):  # Azure's and Google's errors have a status, or else the response
        for name in ('status_code', 'status', 'code'):
            value = getattr(holder, name, None)
            if isinstance(value, int):
                return int(value)
    return None


def _code(error: BaseException) -> str | None:
    """Return the code of an S3 error, such as `ExpiredToken`, or an Azure error; None for other errors."""
    response = getattr(error, 'response', None)
    if isinstance(response, dict):
        return response.get('Error', {}).get('Code')
    code = getattr(error, 'error_code', None)  # Azure: text, or a member of a string enum
    return str(getattr(code, 'value', code)) if isinstance(code, str) else None
