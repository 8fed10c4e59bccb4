"""The retry policy for storage: which faults are tried again, which are refused at once, and how long to wait."""

import errno
import logging
import random
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import TypeVar

from diffusion.errors import DataError, UserError

log = logging.getLogger(__name__)

FIRST_PAUSE_SECONDS = 2.0
PAUSE_FACTOR = 4.0
LONGEST_PAUSE_SECONDS = 30.0
"""Three tries outlast an outage of 5 to 10 s, four one of 20 to 40 s."""
DEADLINE_SECONDS = 600.0

NO_ROOM = frozenset({errno.ENOSPC, errno.EDQUOT, errno.EFBIG})
LOCAL = NO_ROOM | {errno.EROFS, errno.EACCES, errno.EISDIR, errno.ENOTDIR}
"""Errors of the local disk, which the next try would meet again."""
TRANSIENT_STATUS = frozenset({408, 409, 425, 429})
"""Besides 5xx. 409 is S3's and Azure's answer while another request works on the same object."""
EXPIRED = frozenset(
    {'ExpiredToken', 'ExpiredTokenException', 'RequestExpired', 'RequestTimeout', 'TokenRefreshRequired'}
)
"""S3 codes of 400 and 403 that the next try, whose client reads the credentials again, may not meet."""
NO_CREDENTIALS = frozenset(
    {
        *('NoCredentialsError', 'PartialCredentialsError', 'ProfileNotFound'),  # botocore
        *('SSOTokenLoadError', 'UnauthorizedSSOTokenError'),  # botocore's too, of `aws sso login`
        *('DefaultCredentialsError', 'ConfigFileNotFound', 'InvalidConfig', 'ClientAuthenticationError'),  # others
    }
)
"""Error names; importing the packages for their classes takes seconds."""
INVALID_SETTINGS = frozenset({'ParamValidationError', 'InvalidRegionError', 'HFValidationError'})
CLIENT_PACKAGES = frozenset(
    {'azure', 'boto3', 'botocore', 'google', 'http', 'huggingface_hub', 'oci', 'requests', 's3transfer', 'urllib3'}
)
"""Packages whose errors without an HTTP status mean that a request failed on its way."""
_GOOGLE = 'set GCS_KEY and GCS_SECRET, or Application Default Credentials'
_AZURE = 'set AZURE_ACCOUNT_NAME and AZURE_ACCOUNT_ACCESS_KEY'
CREDENTIALS = {
    's3': 'set AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY or AWS_PROFILE, and S3_ENDPOINT_URL for another than AWS',
    'gs': _GOOGLE,
    'azure': _AZURE,
    'azure-dl': _AZURE,
    'az': _AZURE,
    'oci': 'write ~/.oci/config',
    'hf': 'set HF_TOKEN, or log in with `hf auth login`',
}
Result = TypeVar('Result')


class DamagedDownload(Exception):
    """A download that was cut short, or has another hash than it should have; the next try may be sound."""


class GaveUp(OSError):
    """Every try failed; the message has the URL, the reason and the number of tries."""


class PreconditionFailed(Exception):
    """An object was not written since it is there already, or has another etag than the one demanded.

    After a lost answer the object may be there because an earlier try of the same call wrote it.
    """


def _no_wait() -> None:
    pass


@dataclass(frozen=True)
class RetryPolicy:
    """How often and how patiently an operation on a store is tried.

    Args:
        tries: Attempts, with the first.
        timeout_seconds: Time in which a request must be answered, and a download must end or bring
            `object_store.PROGRESS_BYTES`.
        wait: Called every few milliseconds during a pause or a download; an exception that it raises ends the wait.
    """

    tries: int = 4
    timeout_seconds: float = 60.0
    wait: Callable[[], None] = _no_wait

    def run(self, attempt: Callable[[], Result], url: str, verb: str = 'read') -> Result:
        """Return the result of `attempt`, which is called again after a fault that may pass.

        Args:
            attempt: Does the whole operation; may be called several times.
            url: Named in messages.
            verb: Past participle for the message "cannot be read".

        Raises:
            UserError: The store refuses, and would do so again: no permission, no credentials, no such object.
            PreconditionFailed: A conditional write came too late.
            GaveUp: Every try failed, or the first failure is `DEADLINE_SECONDS` ago.
            OSError: The local disk is full, or cannot be written.
            Exception: Any other error of `attempt`, at once.
        """
        deadline = float('inf')
        for number in range(1, self.tries + 1):
            try:
                return attempt()
            except Exception as error:  # every client raises errors of its own
                if not is_transient(error, url):
                    raise
                reason = told(error)
                deadline = min(deadline, time.monotonic() + DEADLINE_SECONDS)
                if number == self.tries or time.monotonic() > deadline:
                    times = '1 time' if number == 1 else f'{number} times'
                    raise GaveUp(f'{url}: cannot be {verb}, tried {times} ({reason})') from error
                log.warning('%s: %s; trying again', url, reason)
            self._pause(min(LONGEST_PAUSE_SECONDS, FIRST_PAUSE_SECONDS * PAUSE_FACTOR ** (number - 1)))
        raise AssertionError(f'{self.tries} tries')

    def _pause(self, seconds: float) -> None:
        # Jitter: thousands of loader workers that a store turned away must not come back together.
        end = time.monotonic() + seconds * random.uniform(0.5, 1.0)
        while time.monotonic() < end:
            self.wait()
            time.sleep(0.02)


def is_transient(error: Exception, url: str) -> bool:
    """Return whether the next try may succeed; False for errors that are neither the store's nor the network's.

    Raises:
        UserError: The store refuses; the message says what to do.
        PreconditionFailed: The store has another version of the object than a conditional write demanded.
        OSError: The error is of the local disk.
    """
    if isinstance(error, DamagedDownload):
        return True
    if isinstance(error, UserError | DataError | PreconditionFailed | GaveUp):
        return False
    links = list(_chain(error))
    for link in links:
        if isinstance(link, OSError) and _is_local(link, url):
            raise link
    status = status_of(error)
    if status == 412:
        raise PreconditionFailed(f'{url}: has changed, or is there already') from error
    reason = _refusal(links, status, url.partition('://')[0])
    if reason is not None:
        raise UserError(f'{url}: {reason}') from error
    known = isinstance(error, OSError) or type(error).__module__.partition('.')[0] in CLIENT_PACKAGES
    return known or status is not None


def status_of(error: BaseException) -> int | None:
    """Return the HTTP status that an error, or one that explains it, carries."""
    return next((status for link in _chain(error) if (status := _status(link)) is not None), None)


def told(error: BaseException) -> str:
    """Return an error as one line: its class and message, with the cause that boto3 and s3transfer hide."""
    text = ' '.join(str(error).split()).replace(' (reached max retries: 0)', '')  # botocore's, which makes one try
    if isinstance(error, DamagedDownload) or type(error) is TimeoutError:
        return text
    cause = getattr(error, 'last_exception', None)
    return f'{type(error).__name__}: {text}'.rstrip(': ') + ('' if cause is None else f' ({told(cause)})')


def _is_local(error: OSError, url: str) -> bool:
    # A read of a mount raises the same errors, with the file's name, which is the URL then.
    if error.errno == errno.ENOENT:
        return error.filename not in (None, url)
    return error.errno in LOCAL and error.filename != url


def _refusal(links: list[BaseException], status: int | None, scheme: str) -> str | None:
    """Return why a store will go on refusing, and the way out; None for what may pass."""
    text = told(links[0])
    if scheme not in CREDENTIALS:
        return {403: f'may not be read ({text})', 404: 'there is no such file'}.get(status or 0)
    credentials = CREDENTIALS[scheme]
    if any(type(link).__name__ in NO_CREDENTIALS and _status(link) is None for link in links):
        return f'there are no credentials ({text}); {credentials}'
    if any(type(link).__name__ in INVALID_SETTINGS for link in links):
        return f'cannot be used ({text}); {credentials}'
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
    """Yield an error and the errors that explain it."""
    link: BaseException | None = error
    while link is not None:
        yield link
        following = link.__cause__ or getattr(link, 'last_exception', None)
        # S3UploadFailedError is raised while a ClientError is handled, not from it. Other contexts may be of an
        # operation before this one.
        hidden = link.__context__ if type(link).__module__.startswith('boto3') else None
        link = following if isinstance(following, BaseException) else hidden


def _status(error: BaseException) -> int | None:
    """Return the HTTP status that a client's error carries."""
    if isinstance(error, FileNotFoundError | PermissionError):  # of a mount, and of Hugging Face's file system
        return 404 if isinstance(error, FileNotFoundError) else 403
    response = getattr(error, 'response', None)
    if isinstance(response, dict):  # botocore
        return response.get('ResponseMetadata', {}).get('HTTPStatusCode')
    for holder in (error, response):  # Azure, Oracle, Google; Hugging Face and Google's media requests
        for name in ('status_code', 'status', 'code'):
            value = getattr(holder, name, None)
            if isinstance(value, int):
                return int(value)
    return None


def _code(error: BaseException) -> str | None:
    """Return the code of an S3 error, such as `ExpiredToken`."""
    response = getattr(error, 'response', None)
    return response.get('Error', {}).get('Code') if isinstance(response, dict) else None
