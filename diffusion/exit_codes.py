"""Exit statuses that a scheduler acts on, and the exception of a run that was told to stop."""

USAGE_ERROR = 2
"""The `diffusion` command was used wrongly: the convention of argparse."""

FAILED = 1
"""Exit status of what a further try may mend, or not: a crash, data that could not be had."""

CONFIG_ERROR = 78
"""Exit status for what another try will not mend (sysexits.h: EX_CONFIG)."""

PREEMPTED = 75
"""Exit status for what another try goes on with (sysexits.h: EX_TEMPFAIL)."""

BAD_HARDWARE = 76
"""Exit status of a node that is not fit to train on: another node may be."""


class Preempted(Exception):
    """A run was told to stop, and has saved what it had."""
