"""Progress of a save that a thread writes, its pauses for training, and its end before it is complete."""

import threading
import time

SHORTEST_WORK_SECONDS = 0.01
"""Shortest CPU time of a paced save between two pauses."""


class SaveAbandoned(Exception):
    """Error in the thread of a save that has been abandoned."""


class WriteProgress:
    """Number of bytes that a save has written on this rank, its pauses, and a flag that ends it at its next write.

    Args:
        total_bytes: Bytes that the save writes on this rank.
    """

    def __init__(self, total_bytes: int = 0) -> None:
        self.total_bytes = total_bytes
        self.written_bytes = 0
        self.paused_seconds = 0.0
        """Time that the save has paused."""
        self._abandoned = threading.Event()
        self._hurries = threading.Event()
        self._pause = 0.0
        self._resumed_at: float | None = None

    def pace(self, pause: float) -> None:
        """Pause between writes from now on, until `hurry`, so that a thread takes less of the processor from training.

        Args:
            pause: Seconds to pause per second of CPU time of the writing thread.
        """
        self._pause, self._resumed_at = pause, None

    def hurry(self) -> None:
        """Pause no more, because the save is waited for; callable from any thread."""
        self._hurries.set()

    def add(self, count: int) -> None:
        """Count bytes that are to be written, after a pause if the save is paced.

        Raises:
            SaveAbandoned: The save has been abandoned.
        """
        if self._pause and not self._hurries.is_set():
            self._wait()
        if self._abandoned.is_set():
            raise SaveAbandoned
        self.written_bytes += count

    def abandon(self) -> None:
        """End the save at its next write; callable from any thread."""
        self._abandoned.set()
        self.hurry()

    def _wait(self) -> None:
        """Pause in proportion to the CPU time of this thread since the last pause, unless that was too short."""
        # Elapsed time does not count: waiting for the disk, and pauses while pickling, take nothing from training.
        if self._resumed_at is None:
            self._resumed_at = time.thread_time()
        worked = time.thread_time() - self._resumed_at
        if worked >= SHORTEST_WORK_SECONDS:
            began = time.monotonic()
            self._hurries.wait(worked * self._pause)
            self._resumed_at = time.thread_time()
            self.paused_seconds += time.monotonic() - began
