"""Write a checkpoint in a thread while training continues, and choose what to save when a run must stop."""

import logging
import threading
import time
from typing import Literal

from composer.core import State, Time
from composer.utils import dist

from diffusion.checkpointing.checkpoint_writer import SaveInProgress
from diffusion.checkpointing.rank_agreement import wait_for_all_ranks
from diffusion.checkpointing.snapshot import cores_per_rank, lower_priority

log = logging.getLogger(__name__)

POLL_SECONDS = 1.0
"""Minimum time between two collectives that check whether a save has been written."""
ABANDON_SECONDS = 2.0
"""Maximum wait for the thread of an abandoned save, which stops at its next write to a file."""

CORES_PER_RANK = 4
"""Saves pause between writes if a rank has fewer CPU cores than this, since they take CPU time from training."""
PAUSE = 4.0
"""Seconds that a save with fewer than CORES_PER_RANK cores pauses per second of its thread's CPU time."""

Choice = Literal['both', 'replace', 'finish']


class BackgroundSave:
    """A save whose files are written by a background thread; the methods are collectives unless noted."""

    def __init__(self, save: SaveInProgress, batch: Time, *, stall_seconds: float, pause: float = 0.0) -> None:
        self.save, self.batch, self.stall_seconds = save, batch, stall_seconds
        self.after_making_room = False
        """True if the previous save failed on a full disk and old checkpoints were removed for this one."""
        save.progress.pause = pause
        self._began = time.monotonic()
        self._polled_at = float('-inf')
        self._written = threading.Event()
        # A daemon thread lets the process exit even if the file system hangs.
        self._thread = threading.Thread(target=self._write, name=f'save {save.name}', daemon=True)
        self._thread.start()

    def start_copy(self) -> None:
        """Start copying the snapshot while the next batch is loaded and computed; not a collective."""
        self.save.start_copy()

    def end_copy(self) -> None:
        """Wait until the snapshot is copied, since the optimizer changes the weights next; not a collective."""
        began = time.monotonic()
        self.save.end_copy()
        self.stall_seconds += time.monotonic() - began

    def poll(self, state: State) -> bool:
        """Return `is_written()`, or False if the last check was less than a second ago; a collective."""
        # All ranks have the same time, since Composer's clock takes it from rank 0.
        now = state.timestamp.total_wct.total_seconds()
        if now - self._polled_at < POLL_SECONDS:
            return False
        self._polled_at = now
        return self.is_written()

    def is_written(self) -> bool:
        """Return True if all ranks have either written their files or failed; a collective."""
        return all(dist.all_gather_object(self._written.is_set()))

    def wait(self) -> None:
        """Wait until all ranks have either written their files or failed; a collective."""
        self._hurry()
        wait_for_all_ranks(self._written)

    def elapsed_seconds(self) -> float:
        """Return the seconds since this rank's thread started, excluding its pauses; not a collective."""
        return time.monotonic() - self._began - self.save.progress.paused_seconds

    def remaining_seconds(self, expected_seconds: float | None) -> float:
        """Estimate the seconds until all ranks have written; a whole save takes `expected_seconds`. A collective."""
        own = 0.0
        if not self._written.is_set():
            elapsed, progress = self.elapsed_seconds(), self.save.progress
            # Do not rely on bytes alone: they ignore the final flush to disk, which can take most of the time.
            fraction = min(1.0, progress.written_bytes / max(1, progress.total_bytes))
            by_bytes = elapsed * (1 - fraction) / max(fraction, 0.01)
            own = max(by_bytes, (expected_seconds or 0.0) - elapsed, 0.1 * elapsed)
        return max(dist.all_gather_object(own))

    def choose(self, notice_seconds: float | None, expected_seconds: float | None) -> Choice:
        """Choose which saves to complete before the run stops; a collective.

        Returns the result of `choose_when_stopping` for the shortest `notice` and the longest save times of all ranks.
        """
        self._hurry()
        notice = min((each for each in dist.all_gather_object(notice_seconds) if each is not None), default=None)
        remaining = self.remaining_seconds(expected_seconds)
        # Assume that a new save takes as long as the previous one or, if that is unknown, as the running one in total.
        synchronous = max(dist.all_gather_object(expected_seconds or self.elapsed_seconds() + remaining))
        choice = choose_when_stopping(remaining=remaining, synchronous=synchronous, notice=notice)
        if choice != 'both' and dist.get_global_rank() == 0:
            message = 'stopping within %.3g s: %s needs %.3g s more and a new save %.3g s; %s'
            what = 'it is abandoned for a new one' if choice == 'replace' else 'no new one is saved'
            log.warning(message, notice, self.save.name, remaining, synchronous, what)
        return choice

    def abandon(self) -> None:
        """Stop the threads on all ranks and remove their files; a collective."""
        self.save.abandon()
        if not self._written.wait(ABANDON_SECONDS):
            log.warning(
                '%s: the thread of this save has not finished; its file system may not be responding', self.save.name
            )
        dist.barrier()  # rank 0 may remove the folder only when no rank writes into it
        self.save.discard()

    def _hurry(self) -> None:
        self.save.progress.hurry()
        self.save.start_copy()

    def _write(self) -> None:
        """Write the files at low priority, so that training gets the CPU first; runs in the thread."""
        try:
            lower_priority()
            self.save.write()
        finally:
            self._written.set()


def pause_for_training() -> float:
    """Return the seconds that a save on this machine should pause per second of its thread's CPU time."""
    return PAUSE if cores_per_rank() < CORES_PER_RANK else 0.0


def choose_when_stopping(*, remaining: float, synchronous: float, notice: float | None) -> Choice:
    """Choose which saves to complete between a stop signal and the end of the process.

    `both` completes the running save and then saves the current batch. `replace` abandons the running save and saves
    the current batch. `finish` only completes the running save, because a new save would take too long.

    Args:
        remaining: Seconds until the running save is complete.
        synchronous: Seconds that a save of the current batch takes.
        notice: Seconds until the process is killed; None if it will not be killed, or if that is unknown.
    """
    if notice is None or remaining + synchronous <= notice:
        return 'both'
    return 'replace' if synchronous <= notice else 'finish'
