"""Handling of saves that fail because of a storage fault: count and report them, make room on a full disk."""

import logging
from collections.abc import Callable

from composer.loggers import Logger
from composer.utils import dist

from diffusion.checkpointing.run_storage import RunStorage
from diffusion.checkpointing.storage_faults import SaveFailed, way_out
from diffusion.config.checkpointing import KeepConfig
from diffusion.storage.retry import DISK_FULL_ERRORS

log = logging.getLogger(__name__)

MAX_FAILED_SAVES = 3
"""Number of saves in a row that may fail; the last of them ends the run."""


class FailedSaves:
    """Counts the failed saves of a process, the same on all ranks, and reports them on rank 0.

    Args:
        on_failure: Called on rank 0 with the message of each failed save.
    """

    def __init__(self, on_failure: Callable[[str], None]) -> None:
        self.on_failure = on_failure
        self.total = 0
        self._in_a_row = 0

    @property
    def next_is_last(self) -> bool:
        """True if the run ends unless the next save succeeds."""
        return self._in_a_row + 1 >= MAX_FAILED_SAVES

    def succeeded(self) -> None:
        """Reset the count of failed saves in a row."""
        self._in_a_row = 0

    def continue_after(self, error: SaveFailed, logger: Logger) -> None:
        """Count and report a failed save after which training continues."""
        self._count(logger)
        count = f'failed save {self._in_a_row} of {MAX_FAILED_SAVES}'
        self._report(f'{error}; training continues to the next save ({count})')

    def end_after(self, error: SaveFailed, logger: Logger, newest: str) -> SaveFailed:
        """Count and report a failed save that ends the run; return the error to raise.

        Args:
            newest: The run's newest checkpoint, for the message.
        """
        self._count(logger)
        row = f' ({self._in_a_row} saves in a row have failed)' if self._in_a_row > 1 else ''
        message = f'{error}{row}; newest checkpoint: {newest}; {way_out(error.errno)}'
        self._report(message)
        return SaveFailed(error.errno, message)

    def _count(self, logger: Logger) -> None:
        self.total += 1
        self._in_a_row += 1
        logger.log_metrics({'checkpoint/failed_saves': self.total})

    def _report(self, message: str) -> None:
        if dist.get_global_rank() == 0:
            log.error('%s', message)
            self.on_failure(message)


def make_room_after(error: SaveFailed, storage: RunStorage, keep: KeepConfig | None, batch: int) -> bool:
    """Remove checkpoints that the run would not keep after a save, if the save failed on a full disk; a collective.

    Args:
        keep: Checkpoints that the run keeps; None keeps all.

    Returns:
        True if something was removed on any rank, so that another try may succeed.
    """
    # The ranks may have met different faults, but only together can they make room and try again.
    if not any(dist.all_gather_object(error.errno in DISK_FULL_ERRORS)):
        return False
    removed = False
    try:
        removed = storage.make_room(keep, batch)
    except OSError as fault:
        log.warning('%s: old checkpoints are not removed (%s)', storage.place, fault)
    return any(dist.all_gather_object(removed))
