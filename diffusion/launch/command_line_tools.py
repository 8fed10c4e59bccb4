"""Calls of the command-line tools of schedulers, such as sbatch and kubectl."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from diffusion.errors import ExternalError, UserError


def call(
    command: Sequence[str],
    *,
    install: str,
    timeout_seconds: float = 120,
    env: Mapping[str, str] | None = None,
    stdin: str | None = None,
) -> str:
    """Run a command-line tool and return its standard output.

    Args:
        install: Advice for a user who does not have the tool.
        env: Additional environment variables.

    Raises:
        UserError: The tool is not on PATH.
        ExternalError: The tool failed, or did not respond in time; the message includes its own error message.
    """
    if shutil.which(command[0]) is None:
        raise UserError(f'{command[0]} is not on PATH; {install}')
    try:
        result = subprocess.run(
            command,
            capture_output=True,
            text=True,
            timeout=timeout_seconds,
            check=False,
            env={**os.environ, **(env or {})},
            input=stdin,
        )
    except subprocess.TimeoutExpired as error:
        raise ExternalError(
            f'{" ".join(command[:3])}: no response in {timeout_seconds:.0f} s; check that its server is up'
        ) from error
    if result.returncode:
        message = (result.stderr or result.stdout).strip() or f'exit status {result.returncode}'
        raise ExternalError(f'{" ".join(command[:3])}: {message}')
    return result.stdout.strip()
