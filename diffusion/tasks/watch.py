"""`diffusion watch`: evaluate each of a run's checkpoints once, as they appear, with any number of watchers.

A watcher has no state of its own: the checkpoints and results in the run's folder or bucket show what remains to be
done. Each evaluation is a separate process; if it fails, the watcher and the training continue.
"""

import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from diffusion.checkpointing.bucket_checkpoints import published_batches
from diffusion.checkpointing.checkpoint_lookup import holding_claim, still_exists
from diffusion.checkpointing.checkpoint_store import RECEIPT, batch_number, checkpoint_name, list_checkpoints
from diffusion.config.image_metrics import IMAGE_METRICS
from diffusion.errors import ExternalError, UserError
from diffusion.exit_codes import CONFIG_ERROR, USAGE_ERROR
from diffusion.launch.workers import die_with_parent
from diffusion.runs.evaluation_claims import EVALUATIONS, Claim, EvaluationClaims
from diffusion.storage.local_files import working_folder
from diffusion.storage.places import PATIENT, files_of_run, is_url

log = logging.getLogger(__name__)

MAX_TRIES = 3
RENEWALS_PER_LEASE = 5
WATCHED = 'DIFFUSION_WATCHED'
"""Environment variable that makes an evaluation end when the watcher that started it is killed."""
LOG_LINES = 20

Policy = Literal['every', 'latest']


@dataclass(frozen=True)
class WatchSettings:
    """Settings of a watcher: the checkpoints to evaluate, the command and the limits; see `WatchOptions`.

    Args:
        command: Function from the path or URL of a checkpoint to the command that evaluates it.
        metrics: Metrics that a checkpoint's results must have to count as evaluated; empty accepts any results.
        judge: Label of the judge model, with which the names of its metrics end; None without a judge.
        keep_best: Metric and number N: the N checkpoints with the best values are pinned, so that the run keeps them.
        lease_seconds: If an evaluation's claim is not renewed for this time, the evaluation is repeated.
        elsewhere: True if the command submits a job, which continues after the command ends.
    """

    run: str
    command: Callable[[str], list[str]]
    policy: Policy = 'every'
    only: Sequence[str] = ()
    metrics: Sequence[str] = ()
    judge: str | None = None
    jobs: int = 1
    keep_best: tuple[str, int] | None = None
    lease_seconds: float = 600.0
    elsewhere: bool = False
    poll_seconds: float = 30.0
    once: bool = False


@dataclass(frozen=True)
class _Evaluation:
    """An evaluation that this watcher has started."""

    checkpoint: str
    claim: Claim
    process: subprocess.Popen[bytes]
    log: Path
    kept: ExitStack
    """Stack that keeps the run from removing the checkpoint until the stack is closed."""
    renewal: ExitStack
    """Stack that renews the claim until the stack is closed."""


class Watcher:
    """Watcher of a run; the method `run` is its main loop."""

    def __init__(self, settings: WatchSettings) -> None:
        self.settings = settings
        self._place = settings.run.rstrip('/')
        self._files = files_of_run(self._place, PATIENT)
        self._claims = EvaluationClaims(self._place, lease_seconds=settings.lease_seconds, job=settings.elsewhere)
        self._running: list[_Evaluation] = []
        self._submitted: list[_Evaluation] = []
        self._given_up: set[str] = set()

    def run(self) -> None:
        """Evaluate checkpoints until interrupted; with `once`, until all are evaluated or have failed.

        Raises:
            UserError: The evaluation's settings are wrong, or, with `once`, some checkpoints could not be evaluated.
        """
        try:
            while True:
                try:
                    self._collect()
                    open_ones = self._start()
                except (OSError, ExternalError) as error:
                    # The storage failed, but running evaluations continue.
                    log.warning('%s: %s; trying again in %g s', self._place, error, self.settings.poll_seconds)
                    open_ones = True
                if self.settings.once and not (open_ones or self._running or self._submitted):
                    break
                self._wait()
        finally:
            self._stop()
        if self._given_up:
            what = f'watch: {", ".join(sorted(self._given_up))} could not be evaluated; see the messages above'
            raise UserError(what)

    def _checkpoints(self) -> list[str]:
        """Return the names of the complete checkpoints to evaluate, oldest first; policy `latest`: the newest."""
        if is_url(self._place):
            batches = published_batches(self._place)
        else:
            # The receipt is written last: a folder without one is still being copied or was not saved by this library.
            found = [path for path in list_checkpoints(Path(self._place)) if (path / RECEIPT).is_file()]
            batches = [batch for path in found if (batch := batch_number(path)) is not None]
        names = [checkpoint_name(batch) for batch in sorted(batches)]
        names = [name for name in names if not self.settings.only or name in self.settings.only]
        return names[-1:] if self.settings.policy == 'latest' else names

    def results(self, name: str) -> dict[str, Any] | None:
        """Return a checkpoint's results if they include all required metrics, else None."""
        try:
            found = json.loads(self._files.read(f'{EVALUATIONS}/{name}.json') or b'null')
        except ValueError:
            return None
        if not isinstance(found, dict):
            return None
        names, judge = [*found.get('metrics', {})], self.settings.judge
        if judge is not None:  # a judge's metric counts by its name without the judge
            names += [name.partition('/')[0] for name in names if name.endswith(f'/{judge}')]
        return found if set(self.settings.metrics) <= set(names) else None

    def _exists(self, name: str) -> bool:
        if is_url(self._place):
            return self._files.read(f'{name}/{RECEIPT}') is not None
        return still_exists(Path(self._place, name))

    def _start(self) -> bool:
        """Start evaluations of checkpoints without results; return True if any checkpoint still needs an evaluation."""
        own = {each.checkpoint for each in self._running + self._submitted}
        waiting = [name for name in self._checkpoints() if name not in own | self._given_up]
        waiting = [name for name in waiting if self.results(name) is None]
        tries = self._claims.tries() if waiting else {}
        for name in waiting:
            if len(self._running) + len(self._submitted) >= self.settings.jobs:
                break
            if tries.get(name, 0) >= MAX_TRIES:
                if self._claims.has_ended(name, tries[name]):
                    log.error('%s: the evaluation failed %d times; giving up on this checkpoint', name, MAX_TRIES)
                    self._given_up.add(name)
                continue
            if (claim := self._claims.take(name, tries.get(name, 0))) is not None:
                self._start_one(name, claim)
        return bool(set(waiting) - self._given_up)

    def _start_one(self, name: str, claim: Claim) -> None:
        """Start the evaluation of a claimed checkpoint, unless it has results by now or its run has removed it."""
        # Check again: another watcher may have finished between the search for results and the claim.
        if self.results(name) is not None:
            claim.release()
            return
        kept, renewal = ExitStack(), ExitStack()
        checkpoint = f'{self._place}/{name}'
        if not is_url(self._place):  # no file is needed for a run in a bucket, which checks the evaluation's own claim
            kept.enter_context(holding_claim(Path(checkpoint), 'evaluation'))
        if not self._exists(name):
            log.warning('%s: was removed by its run before its evaluation began; skipped', name)
            kept.close()
            claim.release()
            return
        folder = working_folder(self._place) if is_url(self._place) else Path(self._place)
        path = folder / EVALUATIONS / f'{name}.log'
        path.parent.mkdir(parents=True, exist_ok=True)
        with open(path, 'ab') as output:
            # Use a separate process group, so that Ctrl-C reaches only this watcher, which then ends the evaluation and
            # releases the claim.
            process = subprocess.Popen(
                self.settings.command(checkpoint),
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
                # End the evaluation if this watcher dies: another watcher will then repeat it.
                preexec_fn=die_with_parent,
                env=os.environ | {WATCHED: '1'},
            )
        done = threading.Event()
        thread = threading.Thread(target=self._renew, args=(claim, done), daemon=True)
        thread.start()
        renewal.callback(thread.join)
        renewal.callback(done.set)
        self._running.append(_Evaluation(name, claim, process, path, kept, renewal))
        log.info('%s: evaluation started, process %d, log %s', name, process.pid, path)

    def _renew(self, claim: Claim, done: threading.Event) -> None:
        while not done.wait(self.settings.lease_seconds / RENEWALS_PER_LEASE):
            try:
                claim.renew()
            except (OSError, UserError) as error:
                log.warning('%s: the claim cannot be renewed (%s)', claim.place, error)

    def _collect(self) -> None:
        """Report evaluations that have ended; raise UserError if one ended because of wrong settings."""
        for each in [each for each in self._running if each.process.poll() is not None]:
            self._running.remove(each)
            each.renewal.close()
            status = each.process.returncode
            if status == 0 and self.settings.elsewhere:
                # Do not renew the job's claim any more: if the lease ends without results, the evaluation is repeated.
                log.info('%s: job submitted', each.checkpoint)
                self._submitted.append(each)
                continue
            each.kept.close()
            if not self._report(each.checkpoint):
                self._failed(each, status)
        for each in list(self._submitted):
            number = int(each.claim.place.rpartition('-')[2])
            if self._report(each.checkpoint) or self._claims.has_ended(each.checkpoint, number):
                self._submitted.remove(each)
                each.kept.close()

    def _report(self, checkpoint: str) -> bool:
        found = self.results(checkpoint)
        if found is None:
            return False
        values = ', '.join(f'{key} {value:.4f}' for key, value in found.get('metrics', {}).items())
        log.info('%s: evaluated: %s', checkpoint, values or 'validation losses')
        self._pin_best()
        return True

    def _failed(self, each: _Evaluation, status: int) -> None:
        each.claim.release()
        if not self._exists(each.checkpoint):
            log.warning('%s: was removed by its run before its evaluation had read it; skipped', each.checkpoint)
            return
        lines = each.log.read_text(encoding='utf-8', errors='replace').splitlines()[-LOG_LINES:]
        shown = '\n'.join(f'  {line}' for line in lines)
        if status in (CONFIG_ERROR, USAGE_ERROR):
            raise UserError(f'watch: the evaluation of {each.checkpoint} was refused (status {status}):\n{shown}')
        log.error('%s: evaluation failed with status %d, log %s:\n%s', each.checkpoint, status, each.log, shown)

    def _pin_best(self) -> None:
        """Pin the checkpoints with the best values of a metric, so that the run keeps them, and unpin the others."""
        if self.settings.keep_best is None:
            return
        metric, count = self.settings.keep_best
        results = {name: found['metrics'] for name in self._checkpoints() if (found := self.results(name)) is not None}
        # Metrics measured by a judge model are named METRIC/JUDGE.
        names = sorted({key for each in results.values() for key in each if f'{key}/'.startswith(f'{metric}/')})
        if len(names) > 1:
            raise UserError(f'--keep-best: {metric} is {" and ".join(names)} in the results; name one of them')
        values = {name: each[key] for name, each in results.items() for key in names if key in each}
        higher = IMAGE_METRICS[metric.partition('/')[0]].better == 'higher'
        best = sorted(values, key=lambda name: values[name], reverse=higher)[:count]
        for name in values:
            pin = f'{name}.pinned'
            present = self._files.read(pin)
            if name in best and present is None:
                self._files.write(pin, '')
            elif name not in best and present == b'':  # keep the user's pins, which are not empty
                self._files.delete([pin])
        log.info('best by %s: %s', metric, ', '.join(f'{name} ({values[name]:.4f})' for name in best))

    def _wait(self) -> None:
        deadline = time.monotonic() + self.settings.poll_seconds
        while time.monotonic() < deadline:
            if any(each.process.poll() is not None for each in self._running):
                return
            time.sleep(min(0.2, self.settings.poll_seconds))

    def _stop(self) -> None:
        """End this watcher's evaluations and release their claims for other watchers; submitted jobs continue."""
        for each in self._submitted:
            each.kept.close()
        for each in self._running:
            with suppress(ProcessLookupError):
                os.killpg(each.process.pid, signal.SIGTERM)
        for each in self._running:
            try:
                each.process.wait(10)
            except subprocess.TimeoutExpired:
                os.killpg(each.process.pid, signal.SIGKILL)
                each.process.wait()
            each.renewal.close()
            each.kept.close()
            with suppress(OSError, UserError):  # if the storage fails, the claim expires
                if self.results(each.checkpoint) is None:
                    each.claim.release()


def evaluation_command(options: Sequence[str], processes: int) -> Callable[[str], list[str]]:
    """Return the function for `WatchSettings.command`: from a checkpoint to the command that evaluates it here."""
    program = ['-m', 'diffusion', 'evaluate']
    if processes > 1:
        program = ['-m', 'composer.cli.launcher', '-n', str(processes), *program]
    return lambda checkpoint: [sys.executable, *program, checkpoint, *options]


def launch_command(
    spec: str, name: str, run: str, overrides: Sequence[str], nodes: Callable[[], int] | None = None
) -> Callable[[str], list[str]]:
    """Return the function for `WatchSettings.command`: from a checkpoint to the command that submits a job for it.

    Args:
        name: Prefix of the jobs' names, to which the name of the checkpoint is appended.
        nodes: Function that returns the number of nodes for the next job; None means the number in the YAML.
    """
    runs_dir, _, run_name = run.rstrip('/').rpartition('/')

    def command(checkpoint: str) -> list[str]:
        values = {'task': 'evaluate', 'checkpoint': checkpoint, 'runs_dir': runs_dir, 'name': run_name}
        words = [f'overrides.{key}={json.dumps(value)}' for key, value in values.items()]
        words.append(f'name={name}-{Path(checkpoint).name}')
        size = [] if nodes is None else [f'nodes={nodes()}']
        return [sys.executable, '-m', 'diffusion', 'launch', spec, *words, *overrides, *size]

    return command
