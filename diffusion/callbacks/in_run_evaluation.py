"""Callback that runs a recipe's evaluators during training, at intervals."""

import json
import logging
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from composer.core import Callback, Event, State
from composer.loggers import Logger
from composer.utils import create_interval_scheduler, dist

from diffusion.algorithms.average import unwrapped
from diffusion.algorithms.ema import averaged_weights
from diffusion.callbacks.evaluation_results import EvaluationResults
from diffusion.callbacks.preemption import Preemption
from diffusion.callbacks.status_updates import Heartbeat
from diffusion.errors import ExternalError, UserError
from diffusion.evaluation.evaluated_checkpoint import (
    EvaluatedCheckpoint,
    EvaluationResult,
    RaiseTogether,
    results_of,
    write_results,
)
from diffusion.models.frozen_parts import evaluating

log = logging.getLogger(__name__)

Evaluator = Callable[[EvaluatedCheckpoint], EvaluationResult]
"""Function or object from a recipe's `evaluators` section that measures a checkpoint; calling it is a collective."""


class InRunEvaluation(Callback):
    """Callback that evaluates the current weights at intervals, or their average if available.

    Results and result files are the same as those of `diffusion evaluate` on a checkpoint of the same batch. No GPU
    trains during an evaluation; the log and the metric `evaluation/seconds` report its duration. `diffusion watch`
    evaluates on other GPUs instead. `EvaluationResults` sends the metrics to the loggers.

    A failed evaluation is logged as an error, and training continues. A stop signal such as SIGTERM also aborts an
    evaluation, which may take longer than the time until the kill. Weights are also evaluated at the end of training.
    """

    def __init__(
        self,
        evaluators: Mapping[str, Evaluator],
        *,
        every: str,
        run_dir: Path,
        sharded: bool,
        raise_together: RaiseTogether,
    ) -> None:
        self.evaluators, self.run_dir = evaluators, run_dir
        self.sharded, self.raise_together = sharded, raise_together
        final_events = {Event.BATCH_END, Event.EPOCH_END}
        self.is_due = create_interval_scheduler(every, checkpoint_events=False, final_events=final_events)
        self._last_batch = -1
        self._began = time.monotonic()
        self._seconds = 0.0

    def run_event(self, event: Event, state: State, logger: Logger) -> None:
        if event is Event.FIT_START:
            self._began = time.monotonic()
        batch = state.timestamp.batch.value
        is_end = event in (Event.BATCH_END, Event.EPOCH_END)
        if is_end and self.is_due(state, event) and batch != self._last_batch:
            self._last_batch = batch
            self._evaluate(state, logger)

    def _evaluate(self, state: State, logger: Logger) -> None:
        """Run all evaluators, and write and log the results of those that did not fail; a collective."""
        name, began = f'ba{state.timestamp.batch.value}', time.time()
        model: Any = unwrapped(state.model)
        metrics: dict[str, float] = {}
        details: dict[str, Any] = {}
        with ExitStack() as stack:
            averaged = stack.enter_context(averaged_weights(state))
            stack.enter_context(evaluating(model))
            checkpoint = EvaluatedCheckpoint(
                model,
                state.evaluators[0].dataloader.dataloader.dataset,  # type: ignore[reportAttributeAccessIssue]
                self.run_dir,
                name,
                'ema' if averaged else 'training',
                state.precision,
                sharded=self.sharded,
                on_progress=lambda: _beat(state),
                should_stop=lambda: any(isinstance(each, Preemption) and each.signal for each in state.callbacks),
                raise_together=self.raise_together,
            )
            for key, evaluator in self.evaluators.items():
                try:
                    result = evaluator(checkpoint)
                except (UserError, ExternalError, OSError) as error:  # all ranks raise, so all continue
                    log.error('evaluators.%s: %s; training continues without its results for %s', key, error, name)
                    continue
                metrics |= result.metrics
                details |= result.details
        seconds = time.time() - began
        self._seconds += seconds
        if dist.get_global_rank() == 0 and metrics:
            results = results_of(checkpoint, metrics, details, seconds=seconds)
            try:
                write_results(self.run_dir, name, results)
            except OSError as error:
                log.error('%s: the results could not be written (%s): %s', name, error, json.dumps(metrics))
        share = self._seconds / max(self._seconds, time.monotonic() - self._began)
        log.info(
            '%s: evaluated in %.0f s, during which no GPU trained; evaluations took %.1f%% of the time so far',
            *(name, seconds, 100 * share),
        )
        logger.log_metrics({'evaluation/seconds': seconds})
        for callback in state.callbacks:
            if isinstance(callback, EvaluationResults):
                callback.log_now(logger)


def _beat(state: State) -> None:
    """Update this rank's heartbeat file, so that the node entry point does not mistake a long evaluation for a hang."""
    for callback in state.callbacks:
        if isinstance(callback, Heartbeat):
            callback.beat(state)
