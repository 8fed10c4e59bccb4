"""Running a scheduler's own command-line tools."""

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence

from diffusion.errors import UserError


def call(
    command: Sequence[str], *, install: str, timeout_seconds: float = 120, env: Mapping[str, str] | None = None
) -> str:
    """What a tool prints.

    Args:
        command: The tool and its arguments.
        install: What the user must do where the tool is missing.
        timeout_seconds: After which it is given up.
        env: Further environment variables.

    Raises:
        UserError: The tool is missing, fails, or does not answer; with its own words.
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
        )
    except subprocess.TimeoutExpired as error:
        raise UserError(f'{" ".join(command[:3])}: no answer in {timeout_seconds:.0f} s; is its server up?') from error
    if result.returncode:
        words = (result.stderr or result.stdout).strip() or f'exit status {result.returncode}'
        raise UserError(f'{" ".join(command[:3])}: {words}')
    return result.stdout.strip()
