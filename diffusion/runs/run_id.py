"""Identity of a run's folder in `run.json`, used to detect checkpoints and folders of other runs.

The file is written once, at the first start of the run. Each save checks that the path still leads to this file, in
case the file system was unmounted or the folder was moved.
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
    """Write run.json with a new id, or the given one, into a run's existing folder; return the id."""
    run_id = run_id or uuid4().hex
    write_atomically(folder / RUN_FILE, run_file_content(run_id), create_folder=False)
    return run_id


def run_file_content(run_id: str) -> str:
    created = datetime.datetime.now(datetime.timezone.utc).isoformat(timespec='seconds')
    return json.dumps({'version': VERSION, 'id': run_id, 'created': created}) + '\n'


def read_run_id(folder: Path) -> str | None:
    """Return the id in the run.json of a run's folder; None if the file does not exist.

    Raises:
        UserError: The file is not a valid run.json of this version.
        OSError: The file cannot be read.
    """
    path = folder / RUN_FILE
    try:
        return parse_run_id(path.read_text(encoding='utf-8'), str(path))
    except (FileNotFoundError, NotADirectoryError):
        return None


def parse_run_id(text: str, path: str) -> str:
    """Return the id in the content of a run.json; raise a UserError that names `path` if the content is invalid."""
    try:
        content = json.loads(text)
        version, run_id = content['version'], content['id']
        if version == VERSION and not (isinstance(run_id, str) and run_id):
            raise ValueError(f'id is {run_id!r}')
    except (ValueError, KeyError, TypeError) as error:
        raise UserError(
            f'{path}: not the identity of a run ({error!r}); restore the file, or delete it to let the next start '
            'write a new one'
        ) from error
    if version != VERSION:
        raise UserError(f'{path}: version {version}, expected {VERSION}; use the version of diffusion that wrote it')
    return run_id


def check_run_id(folder: Path, run_id: str) -> None:
    """Raise OSError unless a path still leads to the folder of a run.

    The folder may have been moved or replaced, or its file system may no longer be mounted.
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
    """Return the id in run.json of the run at a URL; write the file if it does not exist.

    Raises:
        UserError: The store refuses the request or lacks conditional writes, or the file is not a valid run.json.
        OSError: The store cannot be read or written.
    """
    place = StorePlace(url)
    content = place.read(RUN_FILE)
    if content is None:
        place.create(RUN_FILE, run_file_content(uuid4().hex))  # has no effect if another process wrote it first
        content = place.read(RUN_FILE) or b''
    return parse_run_id(content.decode(errors='replace'), place.locate(RUN_FILE))


def claim_working_folder(folder: Path, run_id: str) -> None:
    """Create a node's working folder for a run, or keep it if it is this run's; a folder of another run is emptied."""
    try:
        found = read_run_id(folder)
    except UserError:  # the file is damaged, for example by a full disk
        found = None
    if found == run_id:
        return
    if found is not None:
        log.warning('%s: removed, since it belongs to an earlier run at the same URL', folder)
    remove(folder)
    folder.mkdir(parents=True)
    create_run_id(folder, run_id)
