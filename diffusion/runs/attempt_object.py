"""Record of a run's attempts in an object store: attempts.jsonl, with a copy on a local disk of the node.

An object cannot be appended to, so the whole file is uploaded after each record. Only the process that holds the run's
lock records attempts.
"""

import json
import threading
from pathlib import Path
from typing import Any

from diffusion.storage.atomic import write_atomically
from diffusion.storage.json_lines import parse_json_lines
from diffusion.storage.places import files_of_run
from diffusion.storage.working_folder import LAUNCH, working_folder

ATTEMPTS = 'attempts.jsonl'
_update = threading.Lock()
"""Held while a record is appended to the local copy."""
_upload = threading.Lock()
"""Held while the local copy is uploaded: the upload of a caller that no longer waits for a slow store may still run."""
_reconciled: set[Path] = set()
"""Local copies that this process has compared with the object."""


def append_to_object(url: str, record: dict[str, Any]) -> None:
    """Append a record to the attempts.jsonl of the run at a URL.

    A record of progress replaces the previous one of the same attempt, so that the object stays small: a year of
    records every 30 s would be hundreds of megabytes, each uploaded again.

    Raises:
        OSError: The object or its local copy cannot be read or written. The next call uploads this record too if it is
            in the local copy.
    """
    path, files = working_folder(url, LAUNCH) / ATTEMPTS, files_of_run(url)
    with _update:
        path.parent.mkdir(parents=True, exist_ok=True)
        if record['event'] == 'begin' or path not in _reconciled or not path.exists():
            # Include the records in the store, which the upload replaces.
            records = newer_records(files.read(ATTEMPTS), path.read_bytes() if path.exists() else b'')
            _reconciled.add(path)
        else:
            records = parse_json_lines(path.read_bytes())
        if records and _is_progress_of(records[-1], record):
            records.pop()
        content = ''.join(json.dumps(each) + '\n' for each in [*records, record])
        write_atomically(path, content)
    # Use a separate lock: a slow upload must not keep a later record from the local copy.
    with _upload:
        files.write(ATTEMPTS, path.read_bytes())


def newer_records(stored: bytes | None, local: bytes) -> list[dict[str, Any]]:
    """Return the records to continue from: those in the store, or the local ones if they continue those in the store.

    The local copy is ahead if this node was lost before it could upload it. It is older or differs if the run continued
    on another node, or if the object was deleted or edited.

    Args:
        stored: Content of the object, or None if it does not exist.
    """
    if stored is None:
        return []
    in_store, on_disk = parse_json_lines(stored), parse_json_lines(local)
    common = in_store[:-1] if in_store and in_store[-1].get('event') == 'progress' else in_store
    if len(on_disk) < len(in_store) or on_disk[: len(common)] != common:
        return in_store
    # Both may end with a record of progress of the same attempt.
    times = [records[-1].get('at') if records else 0.0 for records in (in_store, on_disk)]
    stored_at, local_at = (time if isinstance(time, int | float) else 0.0 for time in times)
    return on_disk if local_at >= stored_at else in_store


def _is_progress_of(last: dict[str, Any], record: dict[str, Any]) -> bool:
    """Return True if the last record is of progress, and the next one is of the same attempt."""
    same = all(last.get(key) == record.get(key) for key in ('number', 'begin'))
    return last.get('event') == 'progress' and same
