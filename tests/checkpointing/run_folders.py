"""Folders of runs with small checkpoints, without a Trainer."""

import datetime
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from diffusion.checkpointing import checkpoint_store


def records_of(folder: Path, names: Iterable[str]) -> dict[str, checkpoint_store.FileRecord]:
    """Return the size and hash of each named file in a folder, by name."""
    return {name: checkpoint_store.hash_file(folder / name) for name in names}


def write(folder: Path, batch: int, content: bytes = b'weights', **about: Any) -> Path:
    """Write a checkpoint into a run's folder and return its path; `about` are fields of its receipt."""
    work = checkpoint_store.unfinished_path(folder, batch)
    work.mkdir()
    (work / 'state.pt').write_bytes(content)
    final = folder / checkpoint_store.checkpoint_name(batch)
    checkpoint_store.publish(work, final, records_of(work, ['state.pt']), {'batch': batch} | about)
    return final


def write_at(folder: Path, batch: int, hours: float) -> Path:
    """Write a checkpoint that was saved this many hours after 2026-01-01."""
    began = datetime.datetime(2026, 1, 1, tzinfo=datetime.timezone.utc)
    saved = began + datetime.timedelta(hours=hours)
    return write(folder, batch, saved=saved.isoformat(timespec='seconds'))


def names(folder: Path) -> list[str]:
    """Return the names of a run's checkpoints, oldest first."""
    return [path.name for path in reversed(checkpoint_store.list_checkpoints(folder))]
