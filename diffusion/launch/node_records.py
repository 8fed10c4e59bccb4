"""A node's records of a run's attempts: attempts.jsonl, hardware faults, and progress in the exit file."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path

from diffusion.launch.exit_file import BEGIN, append_exit_line
from diffusion.runs import attempts, environment, heartbeats
from diffusion.runs.attempts import Attempt, Clock
from diffusion.runs.bounded_call import storage_problem, within_limit
from diffusion.runs.run_status import newest_batch
from diffusion.runs.stop_signals import describe_loss
from diffusion.storage.places import files_of_run


class NodeRecords:
    """Records of the attempts that a node runs.

    All access to the run's folder has a time limit, because the node entry point must be able to end hanging ranks even
    if the storage does not respond.

    Args:
        owns_run: True on the first node of a training run; only that node records the attempts.
    """

    def __init__(
        self, run: Path | str, environ: Mapping[str, str], *, owns_run: bool, say: Callable[[str], None]
    ) -> None:
        self.run, self.environ, self.owns_run, self.say = run, environ, owns_run, say
        self.clock = Clock(run if owns_run else None)
        self.furthest: int | None = None
        """Latest batch from which any earlier attempt resumed; None if no earlier attempt began a batch."""

    def append(self, event: str, attempt: Attempt) -> None:
        """If this node owns the run, append an attempt's state to attempts.jsonl; `event`: begin, progress or end."""
        if self.owns_run:
            append = partial(attempts.append_attempt, self.run, event, replace(attempt), self.clock)
            if self._write(attempts.ATTEMPTS, append) and event == 'begin':
                append_exit_line(self.environ, f'0 {environment.machine_name(self.environ)} {BEGIN}')

    def add_fault(self, detail: str) -> None:
        """Record bad hardware of this node in the run's folder, where the first node reads it in the next attempt."""
        machine = environment.machine_name(self.environ)
        self._write(attempts.FAULTS, partial(attempts.record_fault, self.run, machine, detail))

    def report_progress(self, attempt: Attempt) -> None:
        """Write `progress` to the exit file, once, if this attempt resumed from a newer checkpoint than any before."""
        if not self.owns_run or self.furthest is None or attempt.first is None or attempt.first <= self.furthest:
            return
        self.furthest = attempt.first
        append_exit_line(self.environ, f'0 {environment.machine_name(self.environ)} progress')

    def take_beats(self, folder: Path, attempt: Attempt) -> None:
        """Copy batch numbers and times from the last heartbeat of a rank to the record of the attempt."""
        beats = heartbeats.last_beats(folder)
        if beats:
            # Use one rank for the whole node, since ranks are at most one batch apart.
            first = beats[min(beats)]
            attempt.first, attempt.first_at = first.first, self.clock.at(first.first_at)
            attempt.last, attempt.last_at = first.batch, self.clock.at(first.at)

    def describe_loss(self, attempt: Attempt) -> str:
        """Describe the batches that are lost if the attempt ends without another checkpoint."""
        saved = [attempt.first or 0]

        def list_checkpoints() -> None:
            files = files_of_run(self.run)
            saved.append(newest_batch(files, files.list()) or 0)

        within_limit(list_checkpoints)
        return describe_loss(attempt.last or 0, max(saved))

    def _write(self, name: str, write: Callable[[], object]) -> bool:
        """Write to a file of the run; if that fails, print a message and return False."""
        problem = storage_problem(write)
        if problem:
            place = files_of_run(self.run).locate(name)
            self.say(f'{place} cannot be written ({problem}); continuing without it')
        return not problem
