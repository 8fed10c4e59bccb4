"""Exceptions by cause: user input (`UserError`), training data (`DataError`), other programs (`ExternalError`).

Any other exception is a bug or a fault of the machine. It keeps its traceback, and the process exits with status 1.
"""

import errno

from diffusion.exit_codes import CONFIG_ERROR, FAILED

# Errors that stay the same until the user corrects the path or its permissions. ESTALE, EIO, ENOSPC and timeouts are
# left out: they may pass, so a scheduler should retry them.
_WRONG_PATH = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM),
    *(errno.EROFS, errno.ELOOP, errno.ENAMETOOLONG),
}


class UserError(ValueError):
    """A mistake that the user can correct, such as an invalid recipe, argument, file or folder.

    The message states where the mistake is, what it is and how to fix it, in one to three lines. Programs print it
    without a traceback and exit with `exit_codes.CONFIG_ERROR`, so that the scheduler does not retry. Raise it from an
    explicit check, before the work begins; raise it later only if every retry would fail in the same way, as in
    `loss_guard.BadLoss`. Never raise it for a fault of storage or network.
    """

    exit_status = CONFIG_ERROR


class DataError(RuntimeError):
    """Training data that cannot be read or does not match its index; raised on every rank at the same batch.

    The store may be available again at the next attempt, so programs print the message without a traceback and exit
    with `exit_codes.FAILED`.
    """

    exit_status = FAILED


class ExternalError(RuntimeError):
    """Failure of a program or service that this library calls: a scheduler, a cluster, a secrets manager.

    Programs print the message without a traceback and exit with `exit_status`.
    """

    exit_status = FAILED


def is_wrong_path(error: OSError) -> bool:
    """Return True if an OSError means that a path is missing, of the wrong type or not accessible, not an I/O fault."""
    return error.errno in _WRONG_PATH
