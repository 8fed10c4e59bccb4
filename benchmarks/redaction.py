"""Removal of secrets and of names of a machine and its user from results that are sent to others."""

import getpass
import os
import re
import socket
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from diffusion.config.secrets import has_secret_name, secret_format

ROOT = Path(__file__).parents[1]
MIN_CHARACTERS = 5
"""Shorter names and values are not replaced: they would match parts of words."""
SECRET_WORD = re.compile(r'(?i)token|secret|passw|credential|key|auth')
"""Words in the names of environment variables whose values are replaced whatever they look like."""
_ADDRESS = re.compile(r'(?<![\d.])(?:10\.\d+|172\.(?:1[6-9]|2\d|3[01])|192\.168)\.\d+\.\d+(?![\d.])')


class Redaction:
    """Replaces host name, user name, folders, private addresses and values of environment variables in texts.

    Args:
        environ: Environment variables (default: this process's).
        host: Host name (default: this machine's).
        user: User name (default: this process's).
        folders: Names to show in place of folders, by folder.
    """

    def __init__(
        self,
        environ: Mapping[str, str] | None = None,
        *,
        host: str | None = None,
        user: str | None = None,
        folders: Mapping[str, str] | None = None,
    ) -> None:
        environ = os.environ if environ is None else environ
        host = socket.gethostname() if host is None else host
        user = _user() if user is None else user
        names = {environ.get('HOME', str(Path.home())): '~', host: 'HOST', host.partition('.')[0]: 'HOST', user: 'USER'}
        values = {value: f'${name}' for name, value in environ.items() if _is_replaced(name, value)}
        # Keep this order: of two names of one text, a traceback is clearer with the later one.
        replaced = values | names | {sys.prefix: 'PYTHON', str(ROOT): '.'} | dict(folders or {})
        kept = {old: new for old, new in replaced.items() if len(old) >= MIN_CHARACTERS and old != '/root'}
        self._replaced = sorted(kept.items(), key=lambda item: -len(item[0]))

    def clean(self, value: Any) -> Any:
        """Return a text, or plain nested values, with everything replaced that is not for others."""
        if isinstance(value, Mapping):
            return {key: self.clean(each) for key, each in value.items()}
        if isinstance(value, list):
            return [self.clean(each) for each in value]
        return self._clean_text(value) if isinstance(value, str) else value

    def _clean_text(self, text: str) -> str:
        for old, new in self._replaced:
            text = text.replace(old, new)
        text = _ADDRESS.sub('ADDRESS', text)
        # A secret may also come from a file, and be in a message of a library.
        return '\n'.join(
            f'(line removed: it contains what looks like {what})' if (what := secret_format(line)) else line
            for line in text.split('\n')
        )


def _is_replaced(name: str, value: str) -> bool:
    """Return True if the value of an environment variable may be private, such as a secret, a host or a path."""
    if SECRET_WORD.search(name) or has_secret_name(name, value):
        return True
    # Words and versions tell nothing, and would be found in ordinary texts.
    return len(value) >= 8 and not re.fullmatch(r'[\d.]+|[a-z]+|[a-zA-Z_]+\.UTF-8', value)


def _user() -> str:
    try:
        return getpass.getuser()
    except (KeyError, OSError):  # a container with a user id that has no name
        return ''
