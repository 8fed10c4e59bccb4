"""Verification that all ranks share a folder, and opening of the run's folder on all ranks."""

import logging
import os
from contextlib import suppress
from pathlib import Path
from uuid import uuid4

from composer.utils import dist

from diffusion.checkpointing.checkpoint_store import list_checkpoints, read_with_retries, run_id_of
from diffusion.checkpointing.rank_agreement import raise_on_all_ranks
from diffusion.errors import ExternalError, UserError
from diffusion.runs import environment
from diffusion.runs.run_id import RUN_FILE, create_run_id, read_run_id
from diffusion.storage import visibility

log = logging.getLogger(__name__)


def open_run_folder(folder: Path) -> str:
    """Create or open a run's folder, verify that all ranks share it, and return the run's id; a collective.

    The first start writes run.json, and so does a start that finds none beside the checkpoints of a run.

    Raises:
        UserError: A new run's folder is not shared by all ranks.
        ExternalError: A rank does not see the folder of a run that has begun: its file system is not mounted there.
        OSError: The folder cannot be read or written.
    """
    begun = False
    with raise_on_all_ranks(str(folder)):
        begun = read_with_retries(lambda: (folder / RUN_FILE).exists() or bool(list_checkpoints(folder)))
        if dist.get_global_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
    # A run has begun if any rank sees it: the machine without the mount may be that of rank 0.
    check_shared(folder, 'runs_dir', begun=any(dist.all_gather_object(begun)))
    run_id = ['']
    with raise_on_all_ranks(str(folder)):
        if dist.get_global_rank() == 0:
            run_id = [read_with_retries(lambda: read_run_id(folder)) or _first_id(folder)]
    dist.broadcast_object_list(run_id, src=0)
    return run_id[0]


def _first_id(folder: Path) -> str:
    """Write the run.json of a folder that has none, with the id of the run's newest checkpoint that names one."""
    named = (run_id_of(checkpoint) for checkpoint in list_checkpoints(folder))
    return create_run_id(folder, next((run_id for run_id in named if run_id), ''))


def check_shared(folder: Path, where: str, *, begun: bool = False) -> None:
    """Check that a folder is shared by all ranks: each reads a new file of rank 0. A collective.

    Args:
        folder: The folder; rank 0 creates it if it does not exist.
        where: Recipe key that sets the folder, for messages.
        begun: True for the folder of a run that has begun, which was shared by all ranks then.

    Raises:
        UserError: A rank does not see the file, and the run has not begun: the path is the user's mistake.
        ExternalError: A rank does not see the file of a run that has begun: the machine has lost its mount.
    """
    if dist.get_world_size() == 1:
        return
    # Use a new name and content each time: a network file system may cache contents and names, even absent ones.
    first = [f'.shared-{uuid4().hex}', environment.machine_name(os.environ)]
    dist.broadcast_object_list(first, src=0)
    probe, content = folder / first[0], first[0]
    try:
        with raise_on_all_ranks(str(folder)):
            if dist.get_global_rank() == 0:
                folder.mkdir(parents=True, exist_ok=True)
                probe.write_text(content, encoding='utf-8')
        with raise_on_all_ranks(str(folder)):
            if reason := visibility.why_not_visible(probe, content, visibility.VISIBLE_SECONDS):
                raise not_shared(f'{where}: {folder}', first[1], reason, begun=begun)
    finally:
        if dist.get_global_rank() == 0:
            with suppress(OSError):
                probe.unlink(missing_ok=True)


def not_shared(where: str, machine: str, reason: str, *, begun: bool) -> UserError | ExternalError:
    """Return the error of a rank that cannot read a file which rank 0, on `machine`, wrote into a folder."""
    here = f'rank {dist.get_global_rank()} ({environment.machine_name(os.environ)})'
    message = f'{where} is not the same folder on rank 0 ({machine}) and {here}: {reason}'
    if begun:
        return ExternalError(f'{message}. The run has begun; check that its file system is mounted on both machines')
    return UserError(f'{message}; use a folder on a file system that all nodes share')
