"""A check of output folders before the work begins, so that hours are not lost on a folder that cannot be written."""

import os
import stat
from pathlib import Path

from diffusion.errors import UserError, is_wrong_path


def check_writable(folder: str | Path, where: str) -> None:
    """Raise a UserError that begins with `where` if a folder cannot be written to, or made."""
    problem = why_not_writable(folder)
    if problem is not None:
        raise UserError(f'{where}: {problem}')


def why_not_writable(folder: str | Path) -> str | None:
    """Say why a folder cannot be written to, or made where it does not exist; None if it can. Nothing is created.

    Raises:
        OSError: An I/O fault.
    """
    folder = Path(folder).absolute()
    for path in (folder, *folder.parents):
        try:
            mode = os.stat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            if not path.is_symlink():
                continue  # mkdir makes it
            return f'{path} is a link to nothing; remove it, or choose another folder'
        except OSError as error:
            if not is_wrong_path(error):
                raise
            return f'{path} cannot be reached ({error.strerror}); choose another folder'
        if not stat.S_ISDIR(mode):
            return f'{path} is not a folder; choose another place'
        if not os.access(path, os.W_OK | os.X_OK):
            return f'{path} cannot be written to (permissions, or a read-only file system); choose another folder'
        return None
    return None
