"""Claims on evaluations: of several watchers of a run, one evaluates a checkpoint.

A claim is a file or object `evaluations/ba1600.claim-1` beside the run's checkpoints. It is created only if it does not
exist, which exactly one watcher achieves. Its owner rewrites it; once it has not been rewritten for its lease, or its
owner has released it or is known to be dead, the evaluation has failed, and `ba1600.claim-2` is free to be created. The
number is thus the number of tries.
"""

import json
import logging
import os
import re
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from diffusion.launch.run_lock import Owner, parse_owner
from diffusion.storage import object_store
from diffusion.storage.own_files import open_own_file
from diffusion.storage.retry import PreconditionFailed
from diffusion.storage.shared_files import is_url

log = logging.getLogger(__name__)

EVALUATIONS = 'evaluations'
"""Folder of a run with a file of results, claims, and a folder of images, per evaluated checkpoint."""
_CLAIM = re.compile(r'(ba\d+)\.claim-(\d+)')


@dataclass(frozen=True)
class Claim:
    """Claim on the evaluation of a checkpoint.

    Args:
        place: Path or URL of its file.
        owner: Process that holds it.
        lease_seconds: Time without being rewritten after which it has expired.
        job: True if a job elsewhere evaluates, so that the evaluation may go on without its owner.
    """

    place: str
    owner: Owner
    lease_seconds: float
    job: bool = False

    def renew(self) -> None:
        """Rewrite the claim, so that its lease begins again."""
        _write(self.place, self._text(time.time()))

    def release(self) -> None:
        """Give the evaluation up: it failed, and the next try is free at once."""
        _write(self.place, self._text(0.0))

    def _text(self, renewed: float) -> str:
        content = {
            'owner': asdict(self.owner),
            'renewed': renewed,
            'lease_seconds': self.lease_seconds,
            'job': self.job,
        }
        return json.dumps(content) + '\n'


class EvaluationClaims:
    """Claims on the evaluations of a run.

    Args:
        run: Path or URL of the run.
        lease_seconds: Lease of new claims.
        job: As in `Claim`.
    """

    def __init__(self, run: str, *, lease_seconds: float, job: bool = False) -> None:
        self._folder = f'{run.rstrip("/")}/{EVALUATIONS}'
        self._lease_seconds, self._job = lease_seconds, job

    def tries(self) -> dict[str, int]:
        """Return the number of the last claim on each checkpoint that has one.

        Raises:
            OSError: The storage cannot be read.
        """
        found: dict[str, int] = {}
        for name in _names(self._folder):
            if claim := _CLAIM.fullmatch(name):
                found[claim[1]] = max(found.get(claim[1], 0), int(claim[2]))
        return found

    def take(self, checkpoint: str, tries: int) -> Claim | None:
        """Claim a checkpoint, and return the claim; None if another watcher holds it, or has been faster.

        Args:
            checkpoint: Name of the checkpoint.
            tries: Number of its last claim, 0 if there is none.

        Raises:
            OSError: The storage cannot be read or written.
        """
        if tries and not self.has_ended(checkpoint, tries):
            return None
        owner = Owner.current(os.environ)
        place = f'{self._folder}/{checkpoint}.claim-{tries + 1}'
        claim = Claim(place, owner, self._lease_seconds, self._job)
        return claim if _create(place, claim._text(time.time())) else None

    def held(self) -> set[str]:
        """Return the checkpoints that are being evaluated.

        Raises:
            OSError: The storage cannot be read.
        """
        return {name for name, tries in self.tries().items() if not self.has_ended(name, tries)}

    def has_ended(self, checkpoint: str, tries: int) -> bool:
        """Return True if a claim was released, has expired, or its owner has ended without a job that goes on."""
        place = f'{self._folder}/{checkpoint}.claim-{tries}'
        text = _read(place)
        try:
            content = json.loads(text)
            renewed, lease = float(content['renewed']), float(content['lease_seconds'])
        except (ValueError, KeyError, TypeError):  # half written by a process that was killed, or just being rewritten
            renewed, lease, content = _modified(place), self._lease_seconds, {}
        if time.time() - renewed > lease:
            return True
        owner = parse_owner(text) if isinstance(content, Mapping) and not content.get('job') else None
        return owner is not None and owner.is_alive() is False


def _names(folder: str) -> list[str]:
    if is_url(folder):
        prefix = object_store.split(folder)[1].rstrip('/') + '/'
        return [entry.key.removeprefix(prefix) for entry in object_store.list_folder(f'{folder}/')[1]]
    with suppress(FileNotFoundError):
        return os.listdir(folder)
    return []


def _create(place: str, text: str) -> bool:
    """Create a file or object if it does not exist; return True if this call has created it."""
    if is_url(place):
        try:
            object_store.write(place, text.encode(), if_absent=True)
        except PreconditionFailed:
            return False
        return True
    Path(place).parent.mkdir(parents=True, exist_ok=True)
    try:
        descriptor = os.open(place, os.O_CREAT | os.O_EXCL | os.O_WRONLY | os.O_NOFOLLOW, 0o644)
    except FileExistsError:
        return False
    with open(descriptor, 'w', encoding='utf-8') as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    return True


def _read(place: str) -> str:
    if is_url(place):
        return (object_store.read_if_exists(place) or b'').decode(errors='replace')
    try:
        with open(open_own_file(place, os.O_RDONLY), encoding='utf-8', errors='replace') as file:
            return file.read(2**16)
    except FileNotFoundError:
        return ''


def _write(place: str, text: str) -> None:
    if is_url(place):
        object_store.write(place, text.encode())
        return
    descriptor = open_own_file(place, os.O_WRONLY)
    try:
        os.pwrite(descriptor, text.encode(), 0)
        os.ftruncate(descriptor, len(text.encode()))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _modified(place: str) -> float:
    """Return the time when a file was written; for an object, which is never half written, the current time."""
    if is_url(place):
        return time.time()
    with suppress(FileNotFoundError):
        return os.stat(place).st_mtime
    return time.time()
