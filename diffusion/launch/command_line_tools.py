"""Running a scheduler's own command-line tools."""

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
    """Run a command-line tool and return what it prints.

    Args:
        command: The tool and its arguments.
        install: Advice for a user who does not have the tool.
        timeout_seconds: Longest time to wait for it.
        env: Further environment variables.
        stdin: Text for its standard input.

    Raises:
        UserError: The tool is missing.
        ExternalError: The tool fails or does not answer; with its own words.
    """
    if shutil.which(command[0]) is None:
        raise UserError(f'{command[0]}: is not on PATH; {install}')
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
            f'{" ".join(command[:3])}: no answer in {timeout_seconds:.0f} s; is its server up?'
        ) from error
    if result.returncode:
        words = (result.stderr or result.stdout).strip() or f'exit status {result.returncode}'
        raise ExternalError(f'{" ".join(command[:3])}: {words}')
    return result.stdout.strip()
