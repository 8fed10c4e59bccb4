"""Summary of the results of a GPU check: counts of tests, rows of the step benchmark, largest losses of time."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from slice_runner import FAILED, PASSED, Result
from step_settings import MICROBATCH, PARTS

COMPUTING = ('forward', 'backward', 'encode')
"""Stages of a training step whose FLOPs count towards MFU."""
ADVICE = {
    'data_wait': 'waiting for data: more loader.num_workers, faster storage, see diffusion data bench',
    'h2d': 'copies to the GPU: speed.copy_ahead',
    'encode': 'frozen encoders: precompute the latents',
    'optimizer': 'the optimizer step: speed.fused_optimizer, larger batches per GPU, or sharding',
    'ema': 'weight averaging: a longer update_interval',
    'logging': 'callbacks and loggers: a longer interval',
    'checkpoint': 'saves: checkpointing.asynchronous, or a longer save_interval',
    'evaluation': 'evaluations: a longer eval_interval',
    'other': 'everything between the stages, mostly waits of the host',
}
"""What the time of each stage is lost to, and how to reduce it."""
NOTICEABLE = 0.01
"""Fraction of a step below which a setting that slows it is not named."""


@dataclass(frozen=True)
class Loss:
    """Time of a step that does not advance training at the GPU's peak.

    Attributes:
        name: What takes the time.
        seconds: Seconds per step.
        share: Fraction of the step.
        source: Name of the slice, or of the row of the step benchmark, that measured it.
    """

    name: str
    seconds: float
    share: float
    source: str


def count_tests(results: Sequence[Result]) -> Counter[str]:
    """Return the number of tests by outcome: passed, failed, skipped."""
    return Counter(test['outcome'] for result in results if result.kind == 'tests' for test in result.data or ())


def failed_slices(results: Sequence[Result]) -> list[Result]:
    """Return the results that are not passed."""
    return [result for result in results if result.status != PASSED]


def failed_tests(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return the tests that failed."""
    tests = (test for result in results if result.kind == 'tests' for test in result.data or ())
    return [test for test in tests if test['outcome'] == FAILED]


def step_tables(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return the step benchmark's figures by resolution, with the rows of all slices together."""
    tables: dict[int, dict[str, Any]] = {}
    for result in results:
        for table in (result.data or ()) if result.kind == 'step' else ():
            merged = tables.setdefault(table['pixels'], table | {'rows': []})
            merged['rows'] = [*merged['rows'], *table['rows']]
    return [tables[pixels] for pixels in sorted(tables)]


def training_runs(results: Sequence[Result]) -> list[dict[str, Any]]:
    """Return the figures of the training runs."""
    return [result.data | {'slice': result.name} for result in results if result.kind == 'training' and result.data]


def full_row(table: dict[str, Any]) -> dict[str, Any] | None:
    """Return the row with all settings, with the larger microbatch if it fits; None if it has no figures."""
    rows = {row['row']: row for row in table['rows'] if not row['failed']}
    return rows.get(MICROBATCH) or rows.get(PARTS[-1])


def absences(table: dict[str, Any]) -> list[tuple[str, float]]:
    """Return each setting with the seconds per step that its absence costs, the most costly first.

    Negative seconds mean that the step is faster without the setting.
    """
    full = full_row(table)
    if full is None:
        return []
    without = {part: row for row in table['rows'] for part in PARTS if row['row'] == f'without {part}'}
    found = [
        (part, row['step_seconds'] - full['step_seconds'])
        for part, row in without.items()
        if not row['failed'] and row['microbatch'] == full['microbatch']
    ]
    return sorted(found, key=lambda item: -item[1])


def largest_losses(results: Sequence[Result], count: int = 3) -> list[Loss]:
    """Return the largest losses of time, the largest first.

    They come from the breakdown of the fastest training run, or of the step benchmark if there is none, and from
    settings that slow the step.
    """
    runs, tables = training_runs(results), step_tables(results)
    found: list[Loss] = []
    if runs:
        found += _losses_of_run(max(runs, key=lambda run: run['metrics']['throughput/samples_per_sec']))
    for table in tables:
        row = full_row(table)
        if row is None:
            continue
        step, source = row['step_seconds'], f'step at {table["pixels"]} px'
        if not runs:
            found += _losses(row['stages'], step, row['mfu'], source)
        slower = [(part, -seconds) for part, seconds in absences(table) if -seconds > NOTICEABLE * step]
        found += [Loss(f'speed.{part}, which slows the step', cost, cost / step, source) for part, cost in slower]
    return sorted(found, key=lambda loss: -loss.share)[:count]


def _losses_of_run(run: dict[str, Any]) -> list[Loss]:
    metrics = run['metrics']
    step = metrics['throughput/step_seconds']
    prefix = 'time_share/'
    stages = {name.removeprefix(prefix): step * share for name, share in metrics.items() if name.startswith(prefix)}
    return _losses(stages, step, metrics.get('throughput/device/mfu'), run['slice'])


def _losses(stages: dict[str, float], step: float, mfu: float | None, source: str) -> list[Loss]:
    """Return the losses of a step from the seconds of its stages."""
    found = {ADVICE.get(stage, stage): seconds for stage, seconds in stages.items() if stage not in COMPUTING}
    if mfu is not None:
        computing = sum(stages.get(stage, 0.0) for stage in COMPUTING)
        name = 'forward and backward passes and encoders below the peak: kernels that wait for memory, and small ones'
        found[name] = max(0.0, computing - mfu * step)
    else:
        found[ADVICE['encode']] = stages.get('encode', 0.0)
    return [Loss(name, seconds, seconds / step, source) for name, seconds in found.items() if seconds > 0]
