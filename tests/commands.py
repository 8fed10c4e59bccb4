"""Commands of `diffusion` in the process of the tests, and the modules that a program imports."""

import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from diffusion.cli import main


def output_of(capsys: pytest.CaptureFixture[str], *words: Any, status: int = 0) -> str:
    """Run a command that ends with this status, and return what it prints to the standard output."""
    assert main([str(word) for word in words]) == status
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *words: Any) -> str:
    """Run a command with a mistake of the user, which prints only a message, and return the message."""
    try:
        status: Any = main([str(word) for word in words])
    except SystemExit as stop:
        status = stop.code
    printed = capsys.readouterr()
    assert (status, printed.out) == (2, '')
    return printed.err


def refusals(capsys: pytest.CaptureFixture[str], folder: Path, commands: Iterable[str]) -> str:
    """Return commands with mistakes, and their messages, for `check_golden`; `TMP` stands for the folder."""
    shown = []
    for command in commands:
        message = refusal(capsys, *command.replace('TMP', str(folder)).split())
        shown.append(f'{f"diffusion {command}".strip()}\n{message}'.replace(str(folder), 'TMP'))
    return '\n'.join(shown)


def modules_of(program: str) -> set[str]:
    """Run a Python program in a new process, and return the names of the modules that it has imported at its end."""
    command = [sys.executable, '-c', f'{program}\nimport sys; print(*sys.modules, file=sys.stderr)']
    return {*subprocess.run(command, capture_output=True, text=True, check=True).stderr.split()}
