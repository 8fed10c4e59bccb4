"""Check that output folders are writable before the work starts, so that no hours are lost on one that is not."""

import os
import stat
from pathlib import Path

from diffusion.errors import UserError, is_wrong_path


def check_writable(folder: str | Path, where: str) -> None:
    """Raise a UserError that starts with `where` if a folder cannot be written to or created."""
    problem = why_not_writable(folder)
    if problem is not None:
        raise UserError(f'{where}: {problem}')


def why_not_writable(folder: str | Path) -> str | None:
    """Return why a folder cannot be created or written to, with the way out; None if it can. Creates nothing.

    Raises:
        OSError: An I/O error, such as a stale file handle.
    """
    # The nearest existing ancestor decides: mkdir creates everything below it.
    folder = Path(folder).absolute()
    for path in (folder, *folder.parents):
        try:
            mode = os.stat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            # mkdir creates a missing folder, but fails on a dangling symbolic link.
            if not path.is_symlink():
                continue
            return f'{path} is a dangling link; remove it, or choose another folder'
        except OSError as error:
            if not is_wrong_path(error):
                raise
            return f'{path} cannot be reached ({error.strerror}); choose another folder'
        if not stat.S_ISDIR(mode):
            return f'{path} is not a folder; choose another path'
        if not os.access(path, os.W_OK | os.X_OK):
            return f'{path} cannot be written to (permissions, or a read-only file system); choose another folder'
        return None
    return None
