"""Claims on evaluations: only one of several watchers of a run evaluates each checkpoint.

A claim is a file or object in the run's folder, such as `evaluations/ba1600.claim-1`. It can be created only if it does
not exist, so exactly one watcher succeeds. The owner keeps rewriting the claim. The evaluation has failed if the
claim's lease has expired without a rewrite, or if the owner has released it or is known to be dead. The next watcher
then creates `ba1600.claim-2`, so the suffix is the number of the try.
"""

import json
import os
import re
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass

from diffusion.runs.run_lock import Owner, parse_owner
from diffusion.storage.object_store import DEFAULT
from diffusion.storage.places import Place, files_of_run

EVALUATIONS = 'evaluations'
"""Subfolder of a run with the results, claims and images of each evaluated checkpoint."""
_CLAIM = re.compile(r'(ba\d+)\.claim-(\d+)')


@dataclass(frozen=True)
class Claim:
    """Claim on the evaluation of a checkpoint.

    Args:
        name: Name of the claim's file.
        lease_seconds: Time after the last rewrite until the claim expires.
        job: True if the evaluation runs as a submitted job, which may continue after the owner has ended.
    """

    files: Place
    name: str
    owner: Owner
    lease_seconds: float
    job: bool = False

    @property
    def place(self) -> str:
        return self.files.locate(self.name)

    def renew(self) -> None:
        self.files.write(self.name, self.text(time.time()), in_place=True)

    def release(self) -> None:
        """Release the claim after a failed evaluation, so that the next try can start immediately."""
        self.files.write(self.name, self.text(0.0), in_place=True)

    def text(self, renewed: float) -> str:
        """Return the content of the claim's file; `renewed` is the time of the last rewrite in seconds since 1970."""
        content = {'owner': asdict(self.owner), 'renewed': renewed, 'lease_seconds': self.lease_seconds}
        return json.dumps({**content, 'job': self.job}) + '\n'


class EvaluationClaims:
    """Claims on the evaluations of a run. The methods raise OSError if the storage fails.

    `lease_seconds` and `job` apply to new claims; see `Claim`.
    """

    def __init__(self, run: str, *, lease_seconds: float, job: bool = False) -> None:
        self._files = files_of_run(run, DEFAULT, refusal_is_fault=False)
        self._lease_seconds, self._job = lease_seconds, job

    def tries(self) -> dict[str, int]:
        """Return the number of tries so far of each checkpoint, which is the number in the name of its newest claim."""
        found: dict[str, int] = {}
        for name in self._files.list(EVALUATIONS).files:
            if claim := _CLAIM.fullmatch(name):
                found[claim[1]] = max(found.get(claim[1], 0), int(claim[2]))
        return found

    def take(self, checkpoint: str, tries: int) -> Claim | None:
        """Claim a checkpoint that has had `tries` claims; return None if another watcher was faster or holds one."""
        if tries and not self.has_ended(checkpoint, tries):
            return None
        name = f'{EVALUATIONS}/{checkpoint}.claim-{tries + 1}'
        claim = Claim(self._files, name, Owner.current(os.environ), self._lease_seconds, self._job)
        return claim if self._files.create(name, claim.text(time.time())) else None

    def held(self) -> set[str]:
        """Return the checkpoints that are being evaluated."""
        return {name for name, tries in self.tries().items() if not self.has_ended(name, tries)}

    def has_ended(self, checkpoint: str, tries: int) -> bool:
        """Return True if claim number `tries` was released or has expired, or its owner is dead and `job` is False."""
        name = f'{checkpoint}.claim-{tries}'
        text = (self._files.read(f'{EVALUATIONS}/{name}') or b'').decode(errors='replace')
        try:
            content = json.loads(text)
            renewed, lease = float(content['renewed']), float(content['lease_seconds'])
        except (ValueError, KeyError, TypeError):  # half written by a process that was killed, or just being rewritten
            listed = self._files.list(EVALUATIONS).files.get(name)
            renewed, lease, content = (listed and listed.modified) or time.time(), self._lease_seconds, {}
        if time.time() - renewed > lease:
            return True
        owner = parse_owner(text) if isinstance(content, Mapping) and not content.get('job') else None
        return owner is not None and owner.is_alive() is False
