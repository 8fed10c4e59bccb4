"""Exit statuses of our programs, and the exception of a run that was told to stop.

`run.py` and the node entry point end with 0, FAILED, PREEMPTED, BAD_HARDWARE or CONFIG_ERROR, which a scheduler acts
on. The `diffusion` command is typed by people and ends with 0; FAILED; USAGE_ERROR for every mistake of the user, as
argparse does for a wrong option; 3 where what it was asked to check is not sound (`data verify`, `prepare`); 130 when
it was interrupted.

A mistake of the user (`errors.UserError`) is printed in one to three lines, a line for each mistake of a recipe. So is
data that could not be read (`errors.DataError`). Everything else keeps its traceback and ends with FAILED: bugs, and
faults of storage, network and machine once the work has begun. DIFFUSION_TRACEBACK=1 adds the traceback in every case.
"""

FAILED = 1
"""Something unexpected, or data that could not be had: a retry may help."""

USAGE_ERROR = 2
"""The `diffusion` command: the user has to correct something."""

PREEMPTED = 75
"""Told to stop, and saved: start again to go on (sysexits.h: EX_TEMPFAIL)."""

BAD_HARDWARE = 76
"""This node is not fit to train on: start again on another one."""

CONFIG_ERROR = 78
"""The user has to correct something, no retry will help (sysexits.h: EX_CONFIG)."""


class Preempted(Exception):
    """A run was told to stop, and has saved what it had."""
