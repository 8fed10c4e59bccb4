"""History of a run's recipe: comments at the end of its recipe.yaml, one per value that changed when the run resumed.

A line is `# changed at batch 1200 (2026-11-22T10:00:00+00:00): optimizer.weight_decay 0.01 -> 0.5`.
"""

import datetime
import re
from collections.abc import Sequence
from typing import NamedTuple

from diffusion.config.resume_rules import Change

HISTORY = '# changed at batch '
"""Start of a line of the history, a YAML comment."""
_LINE = re.compile(re.escape(HISTORY) + r'(\d{1,15}) \(([^)]*)\): (\S+) (.*)')


class PastChange(NamedTuple):
    """Change of a recipe's value at a resume."""

    batch: int
    """Number of batches that the run had completed."""
    time: str
    """Time of the resume in ISO 8601."""
    key: str
    """Path of the value in the recipe, such as `optimizer.weight_decay`."""
    change: str
    """Old and new value, such as `0.01 -> 0.5`."""


def history_lines(changes: Sequence[Change], batch: int) -> list[str]:
    """Return the lines of a recipe's history for changes made at a batch now."""
    now = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec='seconds')
    return [f'{HISTORY}{batch} ({now}): {change}' for change in changes]


def read_history(text: str) -> tuple[str, ...]:
    """Return the lines of the history at the end of a recipe's YAML."""
    return tuple(line for line in text.splitlines() if line.startswith(HISTORY))


def past_changes(text: str) -> list[PastChange]:
    """Return the changes that the history at the end of a recipe's YAML records, oldest first."""
    found = [_LINE.fullmatch(line) for line in read_history(text)]
    return [PastChange(int(each[1]), each[2], each[3], each[4]) for each in found if each]
