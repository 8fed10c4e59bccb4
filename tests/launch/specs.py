"""What a sound job spec of each back end holds."""

from typing import Any

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
"""What each back end needs to be content."""

ABSENT = object()
"""As a value of a change: the key goes."""


def changed(base: Any, change: Any) -> Any:
    """A copy of plain values with others on top."""
    if not isinstance(base, dict) or not isinstance(change, dict):
        return change
    both = base | {key: changed(base.get(key), value) for key, value in change.items()}
    return {key: value for key, value in both.items() if value is not ABSENT}
