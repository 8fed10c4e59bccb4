"""Write numbered MDS shards resumably, in any order and with any number of processes.

A shard is complete once its index entry, which is written after it, exists. After an interruption, shards without an
entry are written again. The dataset's index is assembled last. A plan file records the dataset's settings, so that
shards of different datasets are never mixed.
"""

import json
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from diffusion.errors import UserError
from diffusion.storage.mds import ShardFormat, shard_name
from diffusion.storage.places import Place

PLAN = 'plan.json'
FETCHES = 16
"""Number of index entries to read in parallel: in an object store, each entry takes a request."""
DIFFERENCES_SHOWN = 5


@dataclass(frozen=True)
class ShardWriter:
    """Writes the shards in one folder of a dataset.

    Attributes:
        data: Folder of the shards.
        entries: Folder of the index entries, one file per shard; may be the same as `data`.
        token: Included in shard names, to distinguish the shards of one change to a dataset from others.
    """

    data: Place
    entries: Place
    format: ShardFormat
    token: str = ''

    def name(self, number: int) -> str:
        return shard_name(number, self.token)

    def done(self) -> set[int]:
        """Return the numbers of complete shards, which have both a file and an index entry."""
        entries = self.entries.sizes()
        # Listing a large object store folder takes many requests, so skip it if no shard can be complete.
        if not any(name.endswith('.mds.json') for name in entries):
            return set()
        return {int(name.split('.')[1]) for name in self.data.sizes() if f'{name}.json' in entries}

    def write(self, number: int, samples: Iterable[bytes], sizes: Sequence[int]) -> None:
        """Write a shard of encoded samples (may be a generator) and its index entry; sizes are in bytes."""
        name = self.name(number)
        with self.data.writing(name) as path:
            entry = self.format.write_shard(path, samples, sizes, name=name)
        # Write the entry last: it marks the shard as complete.
        self.entries.write(f'{name}.json', json.dumps(entry, sort_keys=True))

    def read_entries(self, numbers: Iterable[int]) -> list[dict[str, Any]]:
        """Return the index entries of complete shards, in the order of `numbers`."""

        def read_entry(number: int) -> dict[str, Any]:
            return json.loads(self.entries.read(f'{self.name(number)}.json') or b'')

        with ThreadPoolExecutor(FETCHES) as threads:
            return list(threads.map(read_entry, numbers))


def pin_plan(folder: Place, plan: Mapping[str, Any], *, where: str, alone: bool = True) -> None:
    """Write a new dataset's plan to a folder; raise UserError if the folder has another plan, from unfinished work.

    Args:
        plan: All settings that determine the bytes of the result, as JSON types.
        where: Key of the setting that specifies the folder, for messages.
        alone: True if only one process calls this per folder; otherwise, the store needs conditional writes.
    """
    text = json.dumps(plan, indent=1) + '\n'
    # With `alone`, this is not a conditional write, which Google does not support with HMAC keys.
    folder.create(PLAN, text, alone=alone)
    # Convert the plan to JSON and back, like the saved one; for example, tuples become lists.
    now = json.loads(text)
    # Read the plan back even after writing: if several processes start together, only one of them writes it.
    try:
        saved = json.loads(folder.read(PLAN) or b'')
    except ValueError as error:
        raise damaged_plan(folder, error, where=where) from error
    if saved != now:
        raise other_plan(folder, saved, now, where=where)


def damaged_plan(folder: Place | Path, error: ValueError, *, where: str) -> UserError:
    """Return the error for an unreadable plan in a folder of unfinished work."""
    return UserError(f'{where}: {folder}/{PLAN} is damaged ({error}); remove {folder} to start over')


def other_plan(folder: Place | Path, saved: Mapping[str, Any], now: Mapping[str, Any], *, where: str) -> UserError:
    """Return the error for unfinished work with a different plan, with the differences; see `pin_plan`."""
    lines = differences(saved, now, saved_in='at the start')
    lines = lines or ['the order of the input, or the location that it is read from']
    if len(lines) > DIFFERENCES_SHOWN:
        lines[DIFFERENCES_SHOWN:] = [f'and {len(lines) - DIFFERENCES_SHOWN} more']
    return UserError(
        f'{where}: {folder} was started with other settings or another input:\n  ' + '\n  '.join(lines) + '\n'
        f'restore the settings and the input to resume, or remove {folder} to start over'
    )


def differences(
    saved: Mapping[str, Any], now: Mapping[str, Any], *, saved_in: str = 'in the checkpoint', prefix: str = ''
) -> list[str]:
    """Return a line per changed setting in `now`'s order, such as `streams.a.choose: 96 in the checkpoint, 128 now`."""
    lines: list[str] = []
    for key in [*now, *(key for key in saved if key not in now)]:
        path = prefix + key
        if key not in saved or key not in now:
            lines.append(f'{path}: {_format_value(saved, key)} {saved_in}, {_format_value(now, key)} now')
        elif isinstance(saved[key], Mapping) and isinstance(now[key], Mapping):
            lines += differences(saved[key], now[key], saved_in=saved_in, prefix=f'{path}.')
        elif saved[key] != now[key]:
            lines.append(f'{path}: {saved[key]} {saved_in}, {now[key]} now')
    return lines


def _format_value(values: Mapping[str, Any], key: str) -> str:
    """Return the value of a setting as text; 'present' for a mapping, 'missing' if the key does not exist."""
    if key not in values:
        return 'missing'
    return 'present' if isinstance(values[key], Mapping) else str(values[key])
