"""Minimal valid job specs for each backend, as changes of a common base."""

from typing import Any

import pytest

BACKENDS: dict[str, dict[str, Any]] = {
    'local': {'image': None},
    'slurm': {'image': None},
    'kubernetes': {'mounts': {'/workspace/runs': 'pvc://runs'}},
    'sagemaker': {
        'backend': {'role': 'arn:aws:iam::123456789012:role/training', 'output': 's3://bucket/out'},
        'mounts': {'/workspace/runs': 's3://bucket/runs'},
        'schedule': {'time_limit': '5d'},
    },
    'skypilot': {'mounts': {'/workspace/runs': 'volume://runs'}},
    'mcli': {'schedule': {'queue': 'cluster'}},
}
"""Keys that each backend requires."""

SLOW = [pytest.param(each, marks=pytest.mark.slow) for each in BACKENDS if each not in ('slurm', 'kubernetes')]
EVERY_BACKEND = pytest.mark.parametrize('backend', ['slurm', 'kubernetes', *SLOW])
"""Mark for tests of all backends, two of which are not slow."""
ABSENT = object()
"""Value of a change that removes the key."""


def changed(base: Any, change: Any) -> Any:
    """Return a copy of plain values with changes merged in."""
    if not isinstance(base, dict) or not isinstance(change, dict):
        return change
    both = base | {key: changed(base.get(key), value) for key, value in change.items()}
    return {key: value for key, value in both.items() if value is not ABSENT}
