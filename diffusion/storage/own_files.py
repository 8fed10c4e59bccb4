"""Safe access to files of fixed names in folders that other users may write to, and private folders.

Files are opened without following links. Otherwise another user of a shared folder could make such a name a link to any
file of this user, which the next write would change, or a pipe, which would block the program.
"""

import os
import stat
import tempfile
from pathlib import Path
from typing import IO, Any

from diffusion.errors import UserError


def open_own_file(path: Path | str, flags: int, mode: int = 0o644) -> int:
    """Open or create a regular file, and return its descriptor.

    Args:
        flags: Flags of os.open, such as `os.O_CREAT | os.O_APPEND | os.O_WRONLY`.
        mode: Permissions of a new file.

    Raises:
        UserError: The path is a symbolic link, a pipe, a device or a folder.
        OSError: The file cannot be opened.
    """
    try:
        # O_NONBLOCK keeps a pipe from waiting for its other end. It has no effect on a regular file.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        # The error is ELOOP for a link, EISDIR for a folder, and ENXIO for a pipe without a reader or a socket.
        if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
            raise UserError(_not_regular(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UserError(_not_regular(path))
    return descriptor


def opener(path: str, flags: int) -> int:
    """Open a regular file without following links; the `opener` argument of the built-in function open()."""
    return open_own_file(path, flags, 0o666)


def append_text(path: Path) -> IO[Any]:
    """Open a text file for appending, without following a link."""
    return open(path, 'a', encoding='utf-8', opener=opener)


def user_folder() -> Path:
    """Create and return this user's private folder in the machine's temporary folder; others cannot write to it.

    Raises:
        UserError: The folder belongs to another user, or is a link.
    """
    folder = Path(tempfile.gettempdir(), f'diffusion-{os.getuid()}')
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    status = folder.lstat()
    if not stat.S_ISDIR(status.st_mode) or status.st_uid != os.getuid():
        raise UserError(
            f'{folder} is a link or belongs to another user (id {status.st_uid}); remove it, or set TMPDIR to a folder '
            'of your own'
        )
    if status.st_mode & 0o022:
        folder.chmod(0o700)
    return folder


def _not_regular(path: Path | str) -> str:
    return f'{path} is a link, a pipe or a folder instead of a regular file; remove it'
