"""Keep the checkpoints that `checkpointing.keep` selects and remove the others.

Hours and days are counted from the `saved` times (UTC) in the receipts, not from the current time, so a clock jump
removes no checkpoints, and a paused run keeps its hourly and daily checkpoints from before the pause.
"""

import datetime
import math
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, islice
from pathlib import Path
from typing import Any

from diffusion.checkpointing import checkpoint_store
from diffusion.checkpointing.checkpoint_lookup import claimed_batches
from diffusion.checkpointing.checkpoint_store import batch_number, checkpoint_name, list_checkpoints, read_receipt
from diffusion.config.checkpointing import KeepConfig
from diffusion.storage.atomic import new_unfinished, sync_folder


@dataclass(frozen=True)
class CheckpointInfo:
    """A checkpoint's batch, save time and claim, which decide if it is kept."""

    batch: int
    saved: float | None = None
    """Time of the save in seconds since 1970; if unknown (None), the rules for hours and days skip the checkpoint."""
    claimed: bool = False
    """True if another process is reading the checkpoint, or if it is pinned."""


def kept(checkpoints: Iterable[CheckpointInfo], rules: KeepConfig) -> set[int]:
    """Return the batches of the checkpoints that the rules keep or that are `claimed`; the newest is always kept.

    Pruning after each save leaves the same checkpoints as pruning once after the last save: once a rule stops keeping a
    checkpoint, it never keeps it again.
    """
    newest_first = sorted(checkpoints, key=lambda each: each.batch, reverse=True)
    found = {each.batch for each in newest_first if each.claimed}
    found |= {each.batch for each in newest_first[: max(1, rules.last)]}
    timed = [(each.batch, each.saved) for each in newest_first if each.saved is not None]
    for seconds, count in ((3600, rules.hourly), (86400, rules.daily)):
        # Group by hour or day in batch order: if the clock was set back or forward, a new period begins there.
        periods = groupby(timed, key=lambda each, seconds=seconds: math.floor(each[1] / seconds))
        found |= {next(period)[0] for _, period in islice(periods, count)}
    if every := rules.every_batches:
        multiples = groupby(reversed(newest_first), key=lambda each: each.batch // every)
        found |= {next(after).batch for multiple, after in multiples if multiple}
    return found


def select_removable(checkpoints: Sequence[CheckpointInfo], rules: KeepConfig) -> list[int]:
    """Return the batches of the checkpoints that the rules do not keep and that are not claimed, oldest first."""
    return sorted({each.batch for each in checkpoints} - kept(checkpoints, rules))


def prune(folder: Path, rules: KeepConfig) -> list[Path]:
    """Remove the checkpoints of a run that the rules do not keep and nobody claims; return the removed paths."""
    return _remove(folder, select_removable(read_infos(folder, rules), rules))


def make_room(folder: Path, rules: KeepConfig, batch: int) -> list[Path]:
    """Remove the checkpoints that the rules would no longer keep after a save of `batch`, except the newest one."""
    infos = read_infos(folder, rules)
    newest = max((each.batch for each in infos), default=batch)
    after = [*(each for each in infos if each.batch != batch), CheckpointInfo(batch, time.time())]
    return _remove(folder, [each for each in select_removable(after, rules) if each != newest])


def read_infos(folder: Path, rules: KeepConfig) -> list[CheckpointInfo]:
    """Return a `CheckpointInfo` for each checkpoint of a run; reads receipts only if a rule needs the save times."""
    claimed = claimed_batches(folder)
    needs_times = bool(rules.hourly or rules.daily)
    return [
        CheckpointInfo(batch, _saved(path) if needs_times else None, batch in claimed)
        for path in list_checkpoints(folder)
        if (batch := batch_number(path)) is not None
    ]


def _saved(checkpoint: Path) -> float | None:
    """Return the `time_of_receipt` of a checkpoint; None if its receipt is damaged or has no time."""
    try:
        return time_of_receipt(read_receipt(checkpoint))
    except checkpoint_store.DamagedCheckpoint:
        return None


def time_of_receipt(receipt: Mapping[str, Any]) -> float | None:
    """Return when a checkpoint was saved according to its receipt, in seconds since 1970; None if it has no time."""
    try:
        saved = datetime.datetime.fromisoformat(receipt['saved'])
    except (KeyError, TypeError, ValueError):
        return None
    return (saved if saved.tzinfo else saved.replace(tzinfo=datetime.timezone.utc)).timestamp()


def _remove(folder: Path, batches: Iterable[int]) -> list[Path]:
    """Remove checkpoints of a run, except those that have just been claimed; return the removed paths."""
    removed = []
    for batch in batches:
        path = folder / checkpoint_name(batch)
        aside = new_unfinished(path)
        try:
            path.rename(aside)
        except FileNotFoundError:  # another process has removed it
            continue
        # A claim made before the rename is seen here; a process that claims the checkpoint later does not find it.
        if batch in claimed_batches(folder):
            aside.rename(path)
            continue
        sync_folder(folder)
        # On NFS, a file that a process has open (.nfsXXXX) makes rmtree fail; the next start removes the rest.
        shutil.rmtree(aside, ignore_errors=True)
        removed.append(path)
    return removed
