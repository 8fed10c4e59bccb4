"""Progress of a run as far as its files tell, for runs without a record of attempts."""

import json
import time
from pathlib import Path

from omegaconf import OmegaConf

from diffusion.errors import UserError
from diffusion.launch import run_lock

# Files that training writes. The modules that write them import PyTorch, which this package does not.
METRICS, TRAIN_LOSS, RECIPE = 'metrics.jsonl', 'loss/train/total', 'recipe.yaml'
_TAIL_BYTES = 2**16
"""Part of metrics.jsonl that is read; it has the metrics of many batches."""


def report(run: Path) -> str:
    """Return the last batch and loss of a run, its newest checkpoint, its process, and when it was last alive.

    Raises:
        UserError: The folder has no files of a run.
    """
    batches = [int(path.name[2:]) for path in run.glob('ba*') if path.is_dir() and path.name[2:].isdigit()]
    newest = run / f'ba{max(batches)}' if batches else None
    traces = [path for path in (run / METRICS, run / run_lock.LOCK, newest) if path is not None and path.exists()]
    if not traces:
        raise UserError(
            f'status: {run} has no {METRICS}, {run_lock.LOCK} or checkpoint; give the folder of a run, such as '
            'runs/phase1, or a job YAML'
        )
    last = last_loss(run / METRICS)
    alive = max(path.stat().st_mtime for path in traces)
    batch = str(last[0]) if last is not None else f'{max(batches)} or later' if batches else 'unknown'
    values = {
        'batch': batch + _of_duration(run / RECIPE),
        'last loss': 'unknown' if last is None else f'{last[1]:.4f}',
        'newest checkpoint': 'none' if newest is None else str(newest),
        'process': _describe_process(run / run_lock.LOCK),
        'last sign of life': f'{time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(alive))}, {_format_age(alive)} ago',
    }
    return '\n'.join(
        [f'{run}: not started by diffusion launch', *(f'  {key:18s} {each}' for key, each in values.items())]
    )


def last_loss(metrics: Path) -> tuple[int, float] | None:
    """Return the number of trained batches and the last training loss of a metrics file; None if it has no loss."""
    if not metrics.exists():
        return None
    with metrics.open('rb') as file:
        file.seek(max(0, metrics.stat().st_size - _TAIL_BYTES))
        lines = file.read().splitlines()
    for line in reversed(lines):
        try:
            values = json.loads(line)
            return values['step'] + 1, values[TRAIN_LOSS]
        except (ValueError, KeyError, TypeError):
            continue  # other metrics, or a line that is incomplete
    return None


def _of_duration(recipe: Path) -> str:
    duration = OmegaConf.select(OmegaConf.load(recipe), 'trainer.max_duration') if recipe.exists() else None
    return '' if duration is None else f' of {duration}'


def _describe_process(lock: Path) -> str:
    """Return the process that holds a run's lock, and if it still runs."""
    if not lock.exists():
        return 'none, the run has ended'
    owner = run_lock.owner_of(lock)
    if owner is None:
        return 'unknown'
    state = {True: 'running', False: 'ended without releasing the run', None: 'not visible from this machine'}
    return f'{owner}: {state[owner.is_alive()]}'


def _format_age(alive: float) -> str:
    seconds = max(0.0, time.time() - alive)
    if seconds < 120:
        return f'{seconds:.0f} s'
    return f'{seconds / 60:.0f} min' if seconds < 7200 else f'{seconds / 3600:.0f} h'
