"""Identity of a run whose home is an object store, and the working folder of a node for it."""

import logging
from pathlib import Path
from uuid import uuid4

from diffusion.errors import UserError
from diffusion.runs.run_id import RUN_FILE, create_run_id, parse_run_id, read_run_id, run_file_content
from diffusion.storage.atomic import remove
from diffusion.storage.places import StorePlace

log = logging.getLogger(__name__)


def open_bucket_run(url: str) -> str:
    """Return the id in the run.json of the run at a URL; write the file if it does not exist.

    Raises:
        UserError: The store refuses the request or has no conditional writes, or the file is not a run.json.
        OSError: The store cannot be read or written.
    """
    place = StorePlace(url)
    content = place.read(RUN_FILE)
    if content is None:
        place.create(RUN_FILE, run_file_content(uuid4().hex))  # no effect if another process was faster
        content = place.read(RUN_FILE) or b''
    return parse_run_id(content.decode(errors='replace'), place.locate(RUN_FILE))


def claim_working_folder(folder: Path, run_id: str) -> None:
    """Create a node's working folder for a run; remove what another run at the same URL has left there.

    Raises:
        OSError: The folder cannot be written.
    """
    try:
        found = read_run_id(folder)
    except UserError:  # a full disk has damaged the file
        found = None
    if found == run_id:
        return
    if found is not None:
        log.warning('%s: removed, since it is of an earlier run at the same URL', folder)
    remove(folder)
    folder.mkdir(parents=True)
    create_run_id(folder, run_id)
