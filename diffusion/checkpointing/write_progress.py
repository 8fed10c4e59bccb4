"""Progress of a save that a thread writes, and its end before it is complete."""

import threading


class SaveAbandoned(Exception):
    """Error in the thread of a save that has been abandoned."""


class WriteProgress:
    """Number of bytes that a save has written on this rank, and a flag that ends it at its next write.

    Args:
        total_bytes: Bytes that the save writes on this rank.
    """

    def __init__(self, total_bytes: int = 0) -> None:
        self.total_bytes = total_bytes
        self.written_bytes = 0
        self._abandoned = threading.Event()

    def add(self, count: int) -> None:
        """Count bytes that are to be written.

        Raises:
            SaveAbandoned: The save has been abandoned.
        """
        if self._abandoned.is_set():
            raise SaveAbandoned
        self.written_bytes += count

    def abandon(self) -> None:
        """End the save at its next write; callable from any thread."""
        self._abandoned.set()
