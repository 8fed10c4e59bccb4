"""Access to local and shared folders: files with fixed names, private folders, and access checks.

Files are opened without following links. Otherwise, another user of a shared folder could replace them: by a link to
one of this user's files, which the next write would then change, or by a pipe, which would block the program.
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
    """Open or create a regular file with the flags and mode of os.open; reject a link, a pipe, a device or a folder."""
    try:
        # With O_NONBLOCK, opening a pipe does not wait for its other end. It has no effect on regular files.
        descriptor = os.open(path, flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    except OSError as error:
        # The error is ELOOP for a link, EISDIR for a folder, and ENXIO for a socket or a pipe without a reader.
        if os.path.lexists(path) and not stat.S_ISREG(os.lstat(path).st_mode):
            raise UserError(_not_regular(path)) from error
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise UserError(_not_regular(path))
    return descriptor


def opener(path: str, flags: int) -> int:
    """Open a regular file without following links; pass this as `opener` to the built-in open()."""
    return open_own_file(path, flags, 0o666)


def append_text(path: Path) -> IO[Any]:
    """Open a text file for appending, without following a link."""
    return open(path, 'a', encoding='utf-8', opener=opener)


def user_folder() -> Path:
    """Create and return this user's folder in the machine's temporary folder; other users cannot write to it.

    Raise UserError if the path is a link or belongs to another user.
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
    """Return why a folder cannot be created or written to, and how to fix this; None if it can. Create nothing."""
    # Check the nearest existing ancestor, because mkdir creates everything below it.
    folder = Path(folder).absolute()
    for path in (folder, *folder.parents):
        try:
            mode = os.stat(path).st_mode
        except (FileNotFoundError, NotADirectoryError):
            # A missing folder is not a problem, since mkdir will create it, but mkdir will fail on a dangling link.
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
"""Time in seconds within which a file from another machine must become visible. NFS clients may cache for up to 60 s
that a folder does not exist."""


def why_not_visible(path: Path, content: str, seconds: float) -> str:
    """Wait at most `seconds` until a file has this content; return '' if it has, otherwise the reason why not."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            # Listing the folder makes an NFS client query the server again.
            os.listdir(path.parent)
            found = path.read_text(encoding='utf-8', errors='replace')
            reason = '' if found == content else f'{path.name} has another content'
        except OSError as error:
            reason = f'{path.name}: {error.strerror}'
        if not reason or time.monotonic() > deadline:
            return reason
        time.sleep(min(0.5, seconds))


WORKING_FOLDER_VARIABLE = 'DIFFUSION_WORKING_FOLDER'
"""Environment variable with the parent folder of all working folders, such as /local/nvme."""
LAUNCH = 'launch'
"""Value of `purpose` in `working_folder` for files of the process that starts a node's workers. They are separate
because a new run at the same URL empties the folder of the earlier run."""


def working_folder(url: str, purpose: str = 'runs') -> Path:
    """Return the working folder on this node's local disk for the run at a URL; it may not exist yet.

    The path is ROOT/`purpose`/SCHEME/BUCKET/..., with ROOT from `working_root`. `purpose` separates the files of
    training from others, such as read-only downloads.
    """
    scheme, _, rest = url.partition('://')
    parts = [quote(part, safe=' =+,') for part in rest.split('/') if part]
    # `quote` does not change names such as `..`, which would lead outside the folder.
    parts = [part.replace('.', '%2E') if set(part) == {'.'} else part for part in parts]
    return working_root() / purpose / scheme / Path(*parts)


def working_root() -> Path:
    """Return $DIFFUSION_WORKING_FOLDER, or by default a folder for this machine in ~/.cache/diffusion."""
    if chosen := os.environ.get(WORKING_FOLDER_VARIABLE):
        return Path(chosen)
    cache = os.environ.get('XDG_CACHE_HOME') or Path.home() / '.cache'
    # Add the machine's name, since the nodes of a cluster may share the home folder but must not share working folders.
    return Path(cache, 'diffusion', os.uname().nodename)
