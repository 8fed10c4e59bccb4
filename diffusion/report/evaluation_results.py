"""Results of a run's evaluations, from evaluations/ba*.json."""

import json
import math
import re
from typing import Any

from diffusion.config.image_metrics import IMAGE_METRICS
from diffusion.launch.evaluation_claims import EVALUATIONS
from diffusion.storage.places import Place

_RESULTS = re.compile(r'ba\d{1,15}\.json')
HIGHER_IS_BETTER = {'retrieval_top1'}
"""Metrics of other evaluators than `image_metrics` that are better if higher."""


def read_evaluations(files: Place, notes: list[str]) -> list[dict[str, Any]]:
    """Return the results of a run's evaluated checkpoints, in the order of their batches.

    Args:
        notes: List that gets a text for each file that cannot be understood.

    Raises:
        OSError: The storage fails.
    """
    found = []
    for name in files.list(EVALUATIONS).files:
        if _RESULTS.fullmatch(name):
            place = f'{EVALUATIONS}/{name}'
            results = _results(files.read(place) or b'')
            if results is None:
                notes.append(f'{place} is not a file of results, so this evaluation is missing here.')
            else:
                found.append(results | {'checkpoint': name.removesuffix('.json'), 'batch': int(name[2:-5])})
    return sorted(found, key=lambda each: each['batch'])


def better_directions(names: set[str]) -> dict[str, str]:
    """Return the better direction of each metric, `lower` or `higher`, if it is known."""
    found = {name: info.better for name, info in IMAGE_METRICS.items() if name in names}
    found |= dict.fromkeys(names & HIGHER_IS_BETTER, 'higher')
    return found | {name: 'lower' for name in names if name == 'loss' or name.startswith('loss_t')}


def _results(content: bytes) -> dict[str, Any] | None:
    """Return the parts of a results file that a page shows, or None if it is not one."""
    try:
        given = json.loads(content)
    except (ValueError, RecursionError):
        return None
    if not isinstance(given, dict) or not isinstance(given.get('metrics', {}), dict):
        return None
    guidance = given.get('guidance')
    sweep = [each for each in guidance if isinstance(each, dict)] if isinstance(guidance, list) else []
    return {
        'weights': str(given.get('weights', '')),
        'images': _number(given.get('images')),
        'prompts': str(given.get('prompts', '')),
        'finished': _number(given.get('finished')),
        'seconds': _number(given.get('seconds')),
        'metrics': _numbers(given.get('metrics')),
        'losses': _numbers(given.get('losses')),
        'guidance': [
            {'scale': _number(each.get('guidance_scale')), 'metrics': _numbers(each.get('metrics'))}
            for each in sweep
            if _number(each.get('guidance_scale')) is not None
        ],
        'categories': {
            str(metric): _numbers(values)
            for each in sweep[:1]
            if isinstance(each.get('categories'), dict)
            for metric, values in each['categories'].items()
        },
    }


def _number(value: Any) -> float | int | None:
    """Return a finite number, or None for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if abs(value) < 1e300 and math.isfinite(value) else None


def _numbers(values: Any) -> dict[str, float | int]:
    """Return the finite numbers of a mapping by name."""
    items = values.items() if isinstance(values, dict) else ()
    return {str(name): number for name, value in items if (number := _number(value)) is not None}
