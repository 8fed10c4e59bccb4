"""Pauses of a save that a thread writes, and how they end."""

import threading
import time
from collections.abc import Callable

import pytest

from diffusion.checkpointing.checkpoint_store import SaveAbandoned, WriteProgress

PIECE_SECONDS = 0.02
PIECES = 20


def compute() -> None:
    """Take a while of the processor."""
    end = time.thread_time() + PIECE_SECONDS
    while time.thread_time() < end:
        pass


def write(progress: WriteProgress, work: Callable[[], None] = compute) -> None:
    """Write pieces that take a while each."""
    for _ in range(PIECES):
        progress.add(10)
        work()


def test_a_paced_save_pauses_in_proportion_to_what_it_computes() -> None:
    progress = WriteProgress()
    progress.pace(2.0)
    began = time.thread_time()
    write(progress)
    assert progress.paused_seconds == pytest.approx(2 * (time.thread_time() - began), rel=0.3)
    assert progress.written_bytes == 10 * PIECES


def test_a_paced_save_that_waits_for_the_disk_does_not_pause() -> None:
    progress = WriteProgress()
    progress.pace(2.0)
    write(progress, work=lambda: time.sleep(PIECE_SECONDS))
    assert progress.paused_seconds < PIECE_SECONDS


def test_a_save_without_pace_does_not_pause() -> None:
    progress = WriteProgress()
    write(progress)
    assert progress.paused_seconds == 0


@pytest.mark.parametrize('end', ['hurry', 'abandon'])
def test_a_pause_ends_when_the_save_is_waited_for_or_abandoned(end: str) -> None:
    progress = WriteProgress()
    progress.pace(1e6)  # the first pause would last for hours
    errors: list[type[BaseException]] = []

    def run() -> None:
        try:
            write(progress)
        except SaveAbandoned as error:
            errors.append(type(error))

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    time.sleep(5 * PIECE_SECONDS)
    assert progress.written_bytes == 10
    getattr(progress, end)()
    thread.join(30)
    assert not thread.is_alive()
    assert errors == ([SaveAbandoned] if end == 'abandon' else [])
    assert progress.written_bytes == (10 if end == 'abandon' else 10 * PIECES)
