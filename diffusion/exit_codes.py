"""Exit statuses of the programs, and the exceptions that end a run after it has saved: stop request, hardware fault.

`run.py` and the node entry point (`diffusion.launch.node`) exit with 0, FAILED, PREEMPTED, BAD_HARDWARE or
CONFIG_ERROR, to which a scheduler can react, or with INTERRUPTED. The `diffusion` command, for interactive use, exits
with 0; FAILED; USAGE_ERROR for every user error, as argparse does for a wrong option; 3 if the data that it checked is
not valid (`data verify`, `prepare`); INTERRUPTED; or CLOSED_PIPE.

User errors (`errors.UserError`) and unreadable data (`errors.DataError`) are printed in one to three lines, or one line
per mistake in a recipe. All other errors are printed with a traceback and exit with FAILED: bugs, and faults of
storage, network and machine after the work has begun. DIFFUSION_TRACEBACK=1 adds the traceback in every case.
"""

FAILED = 1
"""Unexpected failure, or training data that cannot be read. A retry may succeed."""
USAGE_ERROR = 2
"""Exit status of the `diffusion` command for an error that the user must correct."""
PREEMPTED = 75
"""Stopped on request, or ended after a hang. A restart resumes from the newest checkpoint (sysexits.h: EX_TEMPFAIL)."""
BAD_HARDWARE = 76
"""Hardware fault of this node. Restart on another node."""
CONFIG_ERROR = 78
"""Error that the user must correct; a retry cannot succeed (sysexits.h: EX_CONFIG)."""
INTERRUPTED = 130
"""Interrupted without saving: the `diffusion` command by Ctrl-C, or a training run by a second Ctrl-C (128 + SIGINT).
The first Ctrl-C ends a training run with PREEMPTED after it has saved a checkpoint."""
CLOSED_PIPE = 141
"""Exit status of the `diffusion` command if the reader of its output, such as `head`, has ended (128 + SIGPIPE)."""


class Preempted(Exception):
    """Raised when a run was asked to stop and has saved its state.

    Args:
        by_user: The run was stopped by Ctrl-C.
    """

    def __init__(self, message: str, *, by_user: bool = False) -> None:
        super().__init__(message)
        self.by_user = by_user


class HardwareFault(Exception):
    """Raised on the rank with faulty hardware after all ranks have saved; the other ranks raise `Preempted`.

    Only this rank's node then exits with BAD_HARDWARE, so that the scheduler avoids only this machine.
    """
