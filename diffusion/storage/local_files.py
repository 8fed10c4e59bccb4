"""Access to local and shared folders: files of fixed names, private and working folders, and checks of access.

Files are opened without following links. Otherwise another user of a shared folder could make such a name a link to any
file of this user, which the next write would change, or a pipe, which would block the program.
"""

import os
import stat
import tempfile
import time
from pathlib import Path
from typing import IO, Any
from urllib.parse import quote

from diffusion.errors import UserError, is_wrong_path


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


VISIBLE_SECONDS = 75.0
"""Time within which a file of another machine must be visible. NFS clients cache for up to 60 s that a folder does not
exist."""


def why_not_visible(path: Path, content: str, seconds: float) -> str:
    """Wait until a file can be read with this content; return '', or after so many seconds the reason why it cannot."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            # Listing the folder makes an NFS client ask the server for it again.
            os.listdir(path.parent)
            found = path.read_text(encoding='utf-8', errors='replace')
            reason = '' if found == content else f'{path.name} has another content'
        except OSError as error:
            reason = f'{path.name}: {error.strerror}'
        if not reason or time.monotonic() > deadline:
            return reason
        time.sleep(min(0.5, seconds))


WORKING_FOLDER_VARIABLE = 'DIFFUSION_WORKING_FOLDER'
"""Environment variable with the folder below which the working folders are, such as /local/nvme."""
LAUNCH = 'launch'
"""Purpose of the folder of the node entry point; the folder of training is emptied for a new run."""


def working_folder(url: str, purpose: str = 'runs') -> Path:
    """Return the working folder of the run at a URL, on a local disk of this node; it may not exist yet.

    It is below $DIFFUSION_WORKING_FOLDER, or else below ~/.cache/diffusion.

    Args:
        purpose: Name of the folder above, which separates training from downloads that are only read.
    """
    scheme, _, rest = url.partition('://')
    parts = [quote(part, safe=' =+,') for part in rest.split('/') if part]
    # `quote` does not change names such as `..`, which would lead out of the folder.
    parts = [part.replace('.', '%2E') if set(part) == {'.'} else part for part in parts]
    return working_root() / purpose / scheme / Path(*parts)


def working_root() -> Path:
    """Return the folder of all working folders of this machine."""
    if chosen := os.environ.get(WORKING_FOLDER_VARIABLE):
        return Path(chosen)
    cache = os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'
    # Add the machine's name, since the nodes of a cluster may share the home folder, but not the parts that they hold.
    return Path(cache, 'diffusion', os.uname().nodename)
