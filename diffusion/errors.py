"""Exceptions, one per cause of an error.

`UserError`: a user's mistake; `DataError`: training data; `ExternalError`: other programs; `GaveUp`: an object store.

Any other exception is a bug or a machine fault: its traceback is printed, and the process exits with status 1.
"""

import errno
import re

from diffusion.exit_codes import CONFIG_ERROR, FAILED

# Errors that last until the user corrects the path or its permissions. ESTALE, EIO, ENOSPC and timeouts are left out:
# they may be temporary, so a scheduler should retry after them.
_WRONG_PATH = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM),
    *(errno.EROFS, errno.ELOOP, errno.ENAMETOOLONG),
}


class UserError(ValueError):
    """A mistake that the user can correct, such as an invalid recipe, argument, file or folder.

    The message states where the mistake is, what it is and how to fix it, in one to three lines. Programs print it
    without a traceback and exit with `exit_codes.CONFIG_ERROR`, so that the scheduler does not retry. Raise it from an
    explicit check before the work begins, or later only if every retry would fail in the same way, as in
    `loss_guard.BadLoss`. Never raise it for a storage or network fault.
    """

    exit_status = CONFIG_ERROR


class DataError(RuntimeError):
    """Training data cannot be read or does not match its index. This error is raised on every rank at the same batch.

    Programs print the message without a traceback and exit with `exit_codes.FAILED`, so that the scheduler retries: the
    store may be available again.
    """

    exit_status = FAILED


class ExternalError(RuntimeError):
    """Failure of a program or service that this library calls: a scheduler, a cluster, a secrets manager.

    Programs print the message without a traceback and exit with `exit_status`.
    """

    exit_status = FAILED


class GaveUp(OSError):
    """Raised when all attempts to reach a store have failed; the message has URL, number of attempts and last error.

    Programs print the message without a traceback and exit with `exit_codes.FAILED`, so that the scheduler retries.
    """

    exit_status = FAILED


class RankFailed(RuntimeError):
    """Raised on every rank if any rank fails with an unexpected error: not a user mistake, and not a storage fault."""


def printable(text: str) -> str:
    """Escape the control characters in a text, except line breaks and tabs, to make it safe for a terminal."""
    # File names, captions and other foreign text may contain sequences that change a terminal's key bindings.
    return re.sub(r'[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028\u2029\u202a-\u202e\u2066-\u2069]', _escape, text)


def _escape(found: 're.Match[str]') -> str:
    return found[0].encode('unicode_escape').decode('ascii')


def is_wrong_path(error: OSError) -> bool:
    """Return True if an OSError says that a path is missing, inaccessible or of the wrong type; not for I/O errors."""
    return error.errno in _WRONG_PATH


def exit_status(error: UserError | DataError | ExternalError | GaveUp) -> int:
    """Return the exit status of a program that ends with this error.

    For a `UserError` caused by a possibly temporary fault, such as ESTALE or ENOSPC, this is `exit_codes.FAILED`, so
    that the scheduler retries.
    """
    link = error.__cause__ or (None if error.__suppress_context__ else error.__context__)
    while link is not None and error.exit_status == CONFIG_ERROR:
        if isinstance(link, OSError) and link.errno is not None and not is_wrong_path(link):
            return FAILED
        link = link.__cause__ or (None if link.__suppress_context__ else link.__context__)
    return error.exit_status
