"""Resumable writing of numbered MDS shards: each whole, in any order, by any process, and their index last.

A shard counts as done when its entry of the index is there, which is written after it. After an interruption, on any
number of processes, those without an entry are written again. A plan file pins what is being made, so that the shards
of one dataset are never mixed with those of another.
"""

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from diffusion.errors import UserError
from diffusion.storage.differences import differences
from diffusion.storage.folders import Folder
from diffusion.storage.mds import ShardFormat, shard_name

PLAN = 'plan.json'
FETCHES = 16
"""Entries read at once; those in an object store come one by one."""
DIFFERENCES_SHOWN = 5


@dataclass(frozen=True)
class ShardWriter:
    """Writes the shards of one folder of a dataset.

    Attributes:
        data: Takes the shards.
        entries: Takes an entry of the index per shard; `data` itself or another folder.
        format: Columns and size limit of the shards.
    """

    data: Folder
    entries: Folder
    format: ShardFormat

    def done(self) -> set[int]:
        """Return the numbers of the shards that are there."""
        entries = self.entries.sizes()
        if not any(name.endswith('.mds.json') for name in entries):
            return set()
        there = self.data.sizes()
        return {int(name.split('.')[1]) for name in there if f'{name}.json' in entries}

    def write(self, number: int, samples: Iterable[bytes], sizes: Sequence[int]) -> None:
        """Write a shard of encoded samples, whose sizes in bytes are known beforehand."""
        name = shard_name(number)
        with self.data.writing(name) as path:
            entry = self.format.write_shard(path, samples, sizes, name=name)
        self.entries.write_text(f'{name}.json', json.dumps(entry, sort_keys=True))

    def read_entries(self, numbers: Iterable[int]) -> list[dict[str, Any]]:
        """Return the entries of the index of shards that are there."""

        def entry(number: int) -> dict[str, Any]:
            return json.loads(self.entries.fetch(f'{shard_name(number)}.json').read_text(encoding='utf-8'))

        with ThreadPoolExecutor(FETCHES) as threads:
            return list(threads.map(entry, numbers))


def pin_plan(
    folder: Folder,
    plan: Mapping[str, Any],
    *,
    where: str,
    compared: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict,
) -> None:
    """Begin work by writing its plan, or check that the work which was begun has the same plan.

    Args:
        folder: The folder of the unfinished work.
        plan: All that decides the bytes of the result, in JSON's types.
        where: The setting that names the folder, for messages.
        compared: Returns the form of a plan that differences are shown of.

    Raises:
        UserError: The folder holds work of another plan; the message says what differs.
    """
    text = json.dumps(plan, indent=1) + '\n'
    folder.write_first(PLAN, text)
    now = json.loads(text)
    try:
        begun = json.loads(folder.fetch(PLAN).read_text(encoding='utf-8'))
    except ValueError as error:
        raise UserError(f'{where}: {folder}/{PLAN} is damaged ({error}); remove {folder}') from error
    if begun == now:
        return
    lines = differences(compared(begun), compared(now), saved_in='begun with')
    lines = lines or ['the order of the input, or where it is read from']
    if len(lines) > DIFFERENCES_SHOWN:
        lines[DIFFERENCES_SHOWN:] = [f'and {len(lines) - DIFFERENCES_SHOWN} more']
    raise UserError(
        f'{where}: {folder} was begun with other settings or another input:\n  ' + '\n  '.join(lines) + '\n'
        f'undo that and start again to go on with it, or remove {folder} to begin anew'
    )
