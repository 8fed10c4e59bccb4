"""Checkpoints of a run, and statistics of the saves into its storage and its tiers."""

import json
import re
from collections.abc import Mapping
from typing import Any

from diffusion.launch.run_status import RECEIPT
from diffusion.report.metric_reader import Series
from diffusion.storage.places import Listing, Place

MAX_CHECKPOINTS = 100
"""Number of newest checkpoints to read the receipts of."""
TIERS = {'': 'storage of the run', 'memory_': 'memory of the nodes', 'disk_': 'disks of the nodes'}
"""Places of checkpoints by the prefix of their metrics."""
_NAME = re.compile(r'ba(\d{1,15})')
_PIN = re.compile(r'ba(\d{1,15})\.pinned')
_DAMAGED = re.compile(r'ba(\d{1,15})\.damaged')


class CheckpointReader:
    """Reader of the receipts of a run's checkpoints, which never change."""

    def __init__(self, files: Place) -> None:
        self.files = files
        self._known: dict[int, dict[str, Any]] = {}

    def read(self, listing: Listing, notes: list[str]) -> list[dict[str, Any]]:
        """Return batch, time, bytes, devices, kind and state of the newest checkpoints, newest first.

        Args:
            notes: List that gets a text for each receipt that cannot be read.

        Raises:
            OSError: The storage fails.
        """
        batches = sorted((int(each[1]) for name in listing.folders if (each := _NAME.fullmatch(name))), reverse=True)
        pinned = {int(each[1]) for name in listing.files if (each := _PIN.fullmatch(name))}
        if len(batches) > MAX_CHECKPOINTS:
            notes.append(f'Of {len(batches)} checkpoints, the newest {MAX_CHECKPOINTS} are shown.')
        found = []
        for batch in batches[:MAX_CHECKPOINTS]:
            if batch not in self._known:
                content = self.files.read(f'ba{batch}/{RECEIPT}')
                if content is None:
                    notes.append(f'ba{batch} has no {RECEIPT}: it is still being written, or damaged.')
                    found.append({'batch': batch, 'state': 'incomplete', 'pinned': batch in pinned})
                    continue
                self._known[batch] = _receipt(content, f'ba{batch}', notes)
            found.append({'batch': batch, **self._known[batch], 'pinned': batch in pinned})
        damaged = [int(each[1]) for name in listing.folders if (each := _DAMAGED.fullmatch(name))]
        return found + [{'batch': batch, 'state': 'damaged', 'pinned': False} for batch in sorted(damaged)]


def _receipt(content: bytes, name: str, notes: list[str]) -> dict[str, Any]:
    """Return state, time, bytes, devices and kind of a checkpoint from its receipt."""
    try:
        receipt = json.loads(content)
        size = sum(int(record['bytes']) for record in receipt['files'].values())
        devices = receipt.get('world_size')
        return {
            'state': 'complete',
            'saved': str(receipt.get('saved', '')),
            'bytes': min(size, 2**60),
            'devices': devices if isinstance(devices, int) and 0 < devices < 10**7 else None,
            'kind': str(receipt.get('kind', '')),
        }
    except (ValueError, TypeError, KeyError, AttributeError, RecursionError):
        notes.append(f'{name}/{RECEIPT} is not a receipt: the checkpoint may be damaged.')
        return {'state': 'damaged'}


def saves_by_place(series: Mapping[str, Series]) -> list[dict[str, Any]]:
    """Return the number of saves, their times and their failures for each place that a run has saved to."""
    found = []
    for prefix, place in TIERS.items():
        seconds, stalls = (series.get(f'checkpoint/{prefix}{name}') for name in ('save_seconds', 'stall_seconds'))
        failed = series.get(f'checkpoint/{prefix}failed_saves')
        if seconds is None and failed is None:
            continue
        values = [*(seconds.values if seconds else ())]
        found.append(
            {
                'place': place,
                'saves': len(values),
                'last_batch': seconds.steps[-1] if seconds and seconds.steps else None,
                'mean_seconds': sum(values) / len(values) if values else None,
                'stall_seconds': sum(stalls.values) if stalls else None,
                'failed': failed.values[-1] if failed and failed.values else 0,
            }
        )
    return found
