"""Callback that sends the results of evaluations outside the training process to the training run's loggers."""

import json
import logging
import re
import threading
from pathlib import Path
from typing import Any

from composer.core import Callback, State
from composer.loggers import Logger
from composer.utils import dist

from diffusion.evaluation.evaluated_checkpoint import parse_results
from diffusion.runs.evaluation_claims import EVALUATIONS
from diffusion.storage.places import files_of_run

log = logging.getLogger(__name__)

INTERVAL_SECONDS = 30.0
LOGGED = f'{EVALUATIONS}/logged.json'
RESULTS = re.compile(r'ba\d+\.json')


class EvaluationResults(Callback):
    """Callback that logs new result files in a run's `evaluations` folder as `evaluation/fid` and so on.

    Loggers do not accept past steps, so results are logged at the current batch, together with `evaluation/batch`, the
    batch of the evaluated checkpoint, as the x axis for plots. `evaluations/logged.json` lists the logged results, so
    that a resumed run does not log them again. A background thread reads the files, since storage can hang.

    Args:
        run_url: URL of a run in an object store, where external evaluations write their results; None for a local run.
    """

    def __init__(self, run_dir: Path, run_url: str | None = None) -> None:
        # Read both: evaluations of this job write to the run's folder, which is uploaded to the URL only later.
        self.places = [files_of_run(run_dir), *([files_of_run(run_url)] if run_url else [])]
        self._logged: dict[str, float] | None = None
        self._found: list[dict[str, Any]] = []
        self._lock, self._looking = threading.Lock(), threading.Lock()
        self._done = threading.Event()
        self._thread: threading.Thread | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        if self._thread is None and dist.get_global_rank() == 0:
            self._thread = threading.Thread(target=self._look, daemon=True)
            self._thread.start()

    def batch_end(self, state: State, logger: Logger) -> None:
        # Log the results of only one checkpoint per batch: loggers keep a single value per metric and step.
        self._log(logger, 1)

    def fit_end(self, state: State, logger: Logger) -> None:
        self.log_now(logger)

    def log_now(self, logger: Logger) -> None:
        """Read the files in the calling thread and log all new results."""
        if self._thread is not None:
            self._try_to_look()
            self._log(logger, None)

    def close(self, state: State, logger: Logger) -> None:
        self._done.set()

    def _log(self, logger: Logger, count: int | None) -> None:
        """Log the results of up to `count` checkpoints, oldest first; None logs all."""
        with self._lock:
            found = self._found[:count]
            del self._found[:count]
        for results in found:
            metrics = {f'evaluation/{name}': value for name, value in results['metrics'].items()}
            logger.log_metrics({'evaluation/batch': results['batch'], **metrics})

    def _look(self) -> None:
        while not self._done.wait(INTERVAL_SECONDS):
            self._try_to_look()

    def _try_to_look(self) -> None:
        try:
            with self._looking:
                self._look_once()
        except OSError as error:  # training continues; a later try logs the results
            log.warning('%s: cannot be read (%s); the results are logged later', EVALUATIONS, error)

    def _look_once(self) -> None:
        """Queue new or changed result files for `_log`, oldest checkpoint first, and list them in logged.json."""
        home = self.places[-1]
        if self._logged is None:
            self._logged = parse_results(home.read(LOGGED), home.locate(LOGGED)) or {}
        new = []
        for place in self.places:
            for name in place.list(EVALUATIONS).files:
                path = f'{EVALUATIONS}/{name}'
                if not RESULTS.fullmatch(name):
                    continue
                results = parse_results(place.read(path), place.locate(path))
                if results is None or not isinstance(results.get('batch'), int) or not results.get('metrics'):
                    continue
                if self._logged.get(name, -1.0) < (finished := float(results.get('finished', 0.0))):
                    self._logged[name] = finished
                    new.append(results)
        if new:
            with self._lock:
                self._found += sorted(new, key=lambda results: results['batch'])
            home.write(LOGGED, json.dumps(self._logged) + '\n')
