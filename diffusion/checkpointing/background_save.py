"""Writing a checkpoint in a thread while training continues, and choosing what to save when a run must stop."""

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
"""Least time between two collectives that ask if a save has been written."""
ABANDON_SECONDS = 2.0
"""Longest wait for the thread of an abandoned save, which ends at its next write to a file."""

CORES_PER_RANK = 4
"""A save pauses between its writes if there are fewer cores per rank, since it takes them from training."""
PAUSE = 4.0
"""Seconds that such a save pauses per second of CPU time of its thread."""

Choice = Literal['both', 'replace', 'finish']


class BackgroundSave:
    """A save whose files a thread writes; its methods are collectives unless they say otherwise.

    Args:
        save: The save, which has a snapshot.
        batch: Composer's number of the batch that it saves.
        stall_seconds: Time that it has blocked training so far.
        pause: Seconds to pause per second of CPU time of the thread, until `wait` or `choose` is called.
    """

    def __init__(self, save: SaveInProgress, batch: Time, *, stall_seconds: float, pause: float = 0.0) -> None:
        self.save, self.batch, self.stall_seconds = save, batch, stall_seconds
        self.after_making_room = False
        """True if the previous save found a full disk, and room was made for this one."""
        save.progress.pace(pause)
        self._began = time.monotonic()
        self._polled_at = float('-inf')
        self._written = threading.Event()
        # A daemon thread lets this process end while the file system does not respond.
        self._thread = threading.Thread(target=self._write, name=f'save {save.name}', daemon=True)
        self._thread.start()

    def start_copy(self) -> None:
        """Start to copy the snapshot, while the next batch is loaded and computed; not a collective."""
        self.save.start_copy()

    def end_copy(self) -> None:
        """Wait for the copies of the snapshot, since the optimizer changes the weights next; not a collective."""
        began = time.monotonic()
        self.save.end_copy()
        self.stall_seconds += time.monotonic() - began

    def poll(self, state: State) -> bool:
        """Return True if the save is written, as `is_written` does, but ask at most once per second; a collective."""
        # Composer's clock has the time of rank 0 on every rank.
        now = state.timestamp.total_wct.total_seconds()
        if now - self._polled_at < POLL_SECONDS:
            return False
        self._polled_at = now
        return self.is_written()

    def is_written(self) -> bool:
        """Return True if all ranks have written their files, or failed to; a collective."""
        return all(dist.all_gather_object(self._written.is_set()))

    def wait(self) -> None:
        """Wait until all ranks have written their files, or failed to; a collective."""
        self._hurry()
        wait_for_all_ranks(self._written)

    def elapsed_seconds(self) -> float:
        """Return the seconds since the start of this rank's thread, without its pauses; not a collective."""
        return time.monotonic() - self._began - self.save.progress.paused_seconds

    def remaining_seconds(self, expected_seconds: float | None) -> float:
        """Return the expected seconds until all ranks have written their files; a collective.

        Args:
            expected_seconds: Duration of the previous save; None if there was none.
        """
        own = 0.0
        if not self._written.is_set():
            elapsed, progress = self.elapsed_seconds(), self.save.progress
            # The bytes underestimate the rest: the last flush to the disk can take most of the time.
            fraction = min(1.0, progress.written_bytes / max(1, progress.total_bytes))
            by_bytes = elapsed * (1 - fraction) / max(fraction, 0.01)
            own = max(by_bytes, (expected_seconds or 0.0) - elapsed, 0.1 * elapsed)
        return max(dist.all_gather_object(own))

    def choose(self, notice_seconds: float | None, expected_seconds: float | None) -> Choice:
        """Return what to save before the run stops, by `choose_when_stopping`; a collective.

        Args:
            notice_seconds: Seconds until this process is killed; None if it is not, or not known on this rank.
            expected_seconds: Duration of the previous save; None if there was none.
        """
        self._hurry()
        notice = min((each for each in dist.all_gather_object(notice_seconds) if each is not None), default=None)
        remaining = self.remaining_seconds(expected_seconds)
        # Assume that a new save takes as long as the previous one, or, if there was none, as the running one in total.
        synchronous = max(dist.all_gather_object(expected_seconds or self.elapsed_seconds() + remaining))
        choice = choose_when_stopping(remaining=remaining, synchronous=synchronous, notice=notice)
        if choice != 'both' and dist.get_global_rank() == 0:
            message = 'stopping within %.3g s: %s needs %.3g s more and a new save %.3g s; %s'
            what = 'it is abandoned for a new one' if choice == 'replace' else 'no new one is saved'
            log.warning(message, notice, self.save.name, remaining, synchronous, what)
        return choice

    def abandon(self) -> None:
        """Stop the threads of all ranks and remove their files; a collective."""
        self.save.abandon()
        if not self._written.wait(ABANDON_SECONDS):
            log.warning('%s: the thread of this save does not end; its file system may not respond', self.save.name)
        dist.barrier()  # no rank writes into the folder that rank 0 removes
        self.save.discard()

    def _hurry(self) -> None:
        """Write without pauses and copy at once, since training waits."""
        self.save.progress.hurry()
        self.save.start_copy()

    def _write(self) -> None:
        """Write the files with a low priority, so that training has the processor first; runs in the thread."""
        try:
            lower_priority()
            self.save.write()
        finally:
            self._written.set()


def pause_for_training() -> float:
    """Return the seconds that a save on this machine pauses per second of CPU time of its thread."""
    return PAUSE if cores_per_rank() < CORES_PER_RANK else 0.0


def choose_when_stopping(*, remaining: float, synchronous: float, notice: float | None) -> Choice:
    """Return which saves fit between a stop signal and the end of the process.

    `both` finishes the running save and saves the present batch; `replace` abandons the running save for one of the
    present batch; `finish` only finishes the running one, because a new one would not be complete in time.

    Args:
        remaining: Expected seconds until the running save is complete.
        synchronous: Expected seconds of a save of the present batch.
        notice: Seconds until the process is killed; None if it is not.
    """
    if notice is None or remaining + synchronous <= notice:
        return 'both'
    return 'replace' if synchronous <= notice else 'finish'
