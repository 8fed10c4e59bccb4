"""Storage faults (a full disk, a lost mount) among the causes of a failed save or load, and their description."""

import errno
import shutil
from pathlib import Path

from torch.distributed.checkpoint.api import CheckpointException

from diffusion.errors import DataError, ExternalError, RankFailed, UserError
from diffusion.storage.retry import DISK_FULL_ERRORS


class SaveFailed(OSError):
    """Error for a checkpoint that could not be written because of a storage fault; raised on every rank.

    Training may continue to the next save. `errno` is that of the fault.
    """

    def __str__(self) -> str:
        return self.strerror or super().__str__()  # without the errno's number, since the message says it in words


def storage_fault(error: BaseException) -> OSError | None:
    """Return the OSError that caused an error, the error itself included; None if no storage fault caused it."""
    # torch.save and torch.distributed.checkpoint raise errors of their own, which have the OSError as a cause or as the
    # context. A UserError may have an OSError as its cause too, but was raised as the user's mistake on purpose. A
    # RankFailed reports the error of another rank.
    if isinstance(error, UserError | DataError | ExternalError | RankFailed):
        return None
    if isinstance(error, CheckpointException):
        # The same failures are raised on every rank, so that all ranks make the same decision.
        faults = [storage_fault(each) for each, _ in error.failures.values()]
        return faults[0] if faults and None not in faults else None
    if isinstance(error, OSError):
        return error
    cause = error.__cause__ or error.__context__
    return None if cause is None else storage_fault(cause)


def describe_fault(fault: OSError, folder: Path, *, needed_bytes: int) -> str:
    """Return a storage fault in words, such as `no space left on runs/a: 13.85 GiB needed, 2.10 GiB free`.

    Args:
        needed_bytes: Size of the checkpoint.
    """
    if fault.errno not in DISK_FULL_ERRORS:
        reason = fault.strerror or str(fault)
        return f'{reason}: {fault.filename}' if fault.filename is not None else reason
    what = 'the disk quota is used up on' if fault.errno == errno.EDQUOT else 'no space left on'
    try:
        free = f', {_gib(shutil.disk_usage(folder).free)} free'
    except OSError:  # the file system no longer answers
        free = ''
    return f'{what} {folder}: {_gib(needed_bytes)} needed{free}'


def way_out(number: int | None) -> str:
    """Return the user's next step after a save that failed with this errno."""
    if number in DISK_FULL_ERRORS:
        return 'free some space and start the same command again'
    return 'check the storage of the run and start the same command again'


def _gib(size: float) -> str:
    return f'{size / 2**30:.2f} GiB'
