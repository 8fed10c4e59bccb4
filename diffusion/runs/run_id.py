"""Identity of a run's folder in `run.json`, which shows that a checkpoint or a folder belongs to another run.

The file is written once, at the first start of the run. At each save it shows that the path still leads to the run's
folder: a file system that is no longer mounted, or a folder that was moved, leaves a path without the file.
"""

import datetime
import errno
import json
import logging
import os
from pathlib import Path
from uuid import uuid4

from diffusion.errors import UserError
from diffusion.runs import environment
from diffusion.storage.atomic import remove, write_atomically
from diffusion.storage.places import StorePlace

log = logging.getLogger(__name__)

RUN_FILE = 'run.json'
VERSION = 1


def create_run_id(folder: Path, run_id: str = '') -> str:
    """Write run.json into a run's folder, which must exist, with a new id or a given one, and return the run's id."""
    run_id = run_id or uuid4().hex
    write_atomically(folder / RUN_FILE, run_file_content(run_id), create_folder=False)
    return run_id


def run_file_content(run_id: str) -> str:
    """Return the content of the run.json of a run that begins now."""
    created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec='seconds')
    return json.dumps({'version': VERSION, 'id': run_id, 'created': created}) + '\n'


def read_run_id(folder: Path) -> str | None:
    """Return the id in the run.json of a run's folder; None if the file or the folder does not exist.

    Raises:
        UserError: The file is not a run.json of this version.
        OSError: The file cannot be read.
    """
    path = folder / RUN_FILE
    try:
        return parse_run_id(path.read_text(encoding='utf-8'), str(path))
    except (FileNotFoundError, NotADirectoryError):
        return None


def parse_run_id(text: str, path: str) -> str:
    """Return the id in the content of a run.json; raise a UserError with `path` if it is not one of this version."""
    try:
        content = json.loads(text)
        version, run_id = content['version'], content['id']
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f'{path}: not the identity of a run ({error!r}); restore the file, or delete it to let the next start '
            'write a new one'
        ) from error
    if version != VERSION or not isinstance(run_id, str) or not run_id:
        raise UserError(f'{path}: version {version}, expected {VERSION}; use the version of diffusion that wrote it')
    return run_id


def check_run_id(folder: Path, run_id: str) -> None:
    """Check that a path still leads to the folder of a run.

    Raises:
        OSError: run.json is missing, cannot be read or has another id: the folder was moved or replaced, or its file
            system is no longer mounted.
    """
    machine = environment.machine_name(os.environ)
    try:
        found = read_run_id(folder)
    except UserError as error:
        raise OSError(errno.ESTALE, f'{RUN_FILE} is damaged ({error})', str(folder)) from error
    if found is None:
        reason = f'{RUN_FILE} is missing: the folder was moved, or its file system is no longer mounted on {machine}'
        raise OSError(errno.ENOENT, reason, str(folder))
    if found != run_id:
        reason = f'{RUN_FILE} has id {found}, expected {run_id}: another folder is at this path on {machine}'
        raise OSError(errno.ESTALE, reason, str(folder))


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
    """Create a node's working folder for a run; remove what another run at the same URL has left there."""
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
