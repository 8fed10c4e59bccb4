"""Wait until a file that another machine wrote to a shared folder is visible, since network file systems cache."""

import os
import time
from pathlib import Path

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
