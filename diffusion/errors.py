"""Errors by their cause: the user's input (`UserError`), training data (`DataError`), other programs (`ExternalError`).

Any other exception is a bug or a fault of the machine: it keeps its traceback, and the process ends with status 1.
"""

import errno

from diffusion.exit_codes import CONFIG_ERROR, FAILED

_WRONG_PATH = {
    *(errno.ENOENT, errno.ENOTDIR, errno.EISDIR, errno.EACCES, errno.EPERM),
    *(errno.EROFS, errno.ELOOP, errno.ENAMETOOLONG),
}


class UserError(ValueError):
    """A mistake that the user can correct: a recipe, an argument, a file or a folder that is not what it should be.

    The message says where, what and the way out, in one to three lines. Programs print it without a traceback and end
    with `exit_codes.CONFIG_ERROR`, which tells a scheduler not to try again. Raise it where an explicit check finds the
    mistake, before the work begins; later only where every retry must meet the same, as `loss_guard.BadLoss`. A fault
    of storage or of the network is never the user's mistake.
    """

    exit_status = CONFIG_ERROR


class DataError(RuntimeError):
    """Training data that cannot be read, or is not what its index says; raised on every rank at the same batch.

    The store may be back on the next try, so programs print the message without a traceback and end with
    `exit_codes.FAILED`.
    """

    exit_status = FAILED


class ExternalError(RuntimeError):
    """A failure of a program or service that this library calls: a scheduler, a cluster, a secrets manager.

    Programs print the message without a traceback and end with `exit_status`.
    """

    exit_status = FAILED


def is_wrong_path(error: OSError) -> bool:
    """Tell a path that is absent, of another kind or not accessible, which its user can correct, from an I/O fault."""
    return error.errno in _WRONG_PATH
