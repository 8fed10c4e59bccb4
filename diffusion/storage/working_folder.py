"""Local folder of a node for its part of a run in an object store."""

import os
from pathlib import Path
from urllib.parse import quote

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
