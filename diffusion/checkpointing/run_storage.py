"""Storage of a run's checkpoints: the interface, and its implementation for a shared folder.

`bucket_storage` has the implementation for object stores.
"""

import logging
import os
import shutil
from collections.abc import Callable, Collection, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Protocol
from uuid import uuid4

from composer.utils import dist

from diffusion.checkpointing import checkpoint_store, retention
from diffusion.checkpointing.bucket_storage import BucketStorage
from diffusion.checkpointing.checkpoint_store import FileRecord, list_checkpoints, read_receipt, read_with_retries
from diffusion.checkpointing.checkpoint_weights import verify_checkpoint
from diffusion.checkpointing.rank_agreement import from_rank_zero, raise_on_all_ranks
from diffusion.config.checkpointing import KeepConfig
from diffusion.errors import ExternalError, UserError
from diffusion.runs import environment
from diffusion.runs.run_id import RUN_FILE, check_run_id, create_run_id, read_run_id
from diffusion.storage import local_files
from diffusion.storage.atomic import remove
from diffusion.storage.places import is_url

log = logging.getLogger(__name__)


class SaveTarget(Protocol):
    """Destination of a checkpoint: the run's storage, or a tier on the run's nodes.

    A save calls `begin` on all ranks, writes its files into the temporary folder, and calls `upload` on each rank with
    the files that it wrote. Then rank 0 calls `publish`, which makes the checkpoint exist, and all ranks call `finish`.

    Attributes:
        folder: Local folder: the shared folder, or a folder of this node.
    """

    place: str
    folder: Path
    run_id: str

    def name_of(self, batch: int) -> str:
        """Return the path or URL of the checkpoint of a batch; for a tier, only a name to show in messages."""
        ...

    def work_folder(self, batch: int) -> Path:
        """Return the path of a save's temporary folder; it is the same on all ranks that share a folder."""
        return checkpoint_store.unfinished_path(self.folder, batch)

    def begin(self, batch: int, *, every_rank: bool) -> None:
        """Create a save's temporary folder; `every_rank`: all ranks write to it, else only rank 0. A collective."""

    def upload(self, work: Path, files: Mapping[str, FileRecord], batch: int, check: Callable[[], None]) -> None:
        """Store files that this rank has written to a temporary folder; not a collective, can run in a thread.

        Every rank calls it; a rank that has no files or could not write them passes none.

        Args:
            check: Called repeatedly during the upload; raises an exception if the save has been abandoned.
        """

    def publish(self, work: Path, batch: int, files: Mapping[str, FileRecord], about: Mapping[str, Any]) -> None:
        """Complete a checkpoint once all ranks have stored their files; rank 0 calls it. A tier does so in `finish`."""

    def finish(self, work: Path, batch: int) -> None:
        """Complete the save on every rank after `publish` on rank 0, or raise OSError on every rank; a collective."""

    def discard(self, work: Path) -> None:
        """Remove the files of a save that failed; every rank calls this, but it is not a collective."""


class RunStorage(SaveTarget, Protocol):
    """Storage of a run's checkpoints."""

    def open(self) -> str:
        """Create or open the run, and return its id; a collective."""
        ...

    def resume_point(self) -> Path | None:
        """Return the newest undamaged checkpoint as a local folder, or None if there is none; a collective.

        Newer, damaged checkpoints are set aside.

        Raises:
            UserError: All checkpoints of the run are damaged, or the newest belongs to another run.
            OSError: A checkpoint cannot be read for several minutes. This is not damage, so nothing is set aside.
        """
        ...

    def remove_unfinished(self) -> None:
        """Remove incomplete saves left behind by killed processes; a collective."""

    def fetch(self, checkpoint: Path, names: Collection[str]) -> None:
        """Ensure that files of the checkpoint from `resume_point` are present in its folder; not a collective."""

    def list_batches(self) -> list[int]:
        """Return the batch numbers of the checkpoints, newest first; only call it on rank 0."""
        ...

    def prune(self, rules: KeepConfig) -> None:
        """Remove the checkpoints that the rules do not keep; only call it on rank 0."""

    def make_room(self, rules: KeepConfig | None, batch: int) -> bool:
        """Free space for a retried save; return True if this rank removed something. Not a collective."""
        ...


class FolderStorage(RunStorage):
    """Storage of a run's checkpoints in a folder shared by all nodes, into which all ranks write."""

    def __init__(self, folder: Path, run_id: str = '') -> None:
        self.folder, self.place, self.run_id = folder, str(folder), run_id

    def open(self) -> str:
        self.run_id = open_run_folder(self.folder)
        return self.run_id

    def resume_point(self) -> Path | None:
        # Search only on rank 0: it reads and hashes the whole checkpoint, and ranks must never resume from different
        # checkpoints. The other ranks wait as long as it takes.
        def find() -> Path | None:
            found = newest_intact(self.folder, self.run_id)
            if found is not None:
                checkpoint_store.set_aside(found)
            return found

        return from_rank_zero(find, 'autoresume')

    def remove_unfinished(self) -> None:
        with raise_on_all_ranks(self.place):
            if dist.get_global_rank() == 0:
                checkpoint_store.remove_unfinished_saves(self.folder)

    def name_of(self, batch: int) -> str:
        return str(self.folder / checkpoint_store.checkpoint_name(batch))

    def begin(self, batch: int, *, every_rank: bool) -> None:
        work = self.work_folder(batch)
        with raise_on_all_ranks(str(work), logs=False):
            if dist.get_global_rank() == 0 or every_rank:
                check_run_id(self.folder, self.run_id)
            if dist.get_global_rank() == 0:
                remove(work)
                work.mkdir()

    def publish(self, work: Path, batch: int, files: Mapping[str, FileRecord], about: Mapping[str, Any]) -> None:
        # If the folder is not shared, rank 0 does not see other nodes' files.
        missing = sorted(name for name in files if not (work / name).is_file())
        if missing:
            raise FileNotFoundError(f'{work}: files of other ranks are missing: {", ".join(missing[:3])}')
        check_run_id(self.folder, self.run_id)
        checkpoint_store.publish(work, self.folder / checkpoint_store.checkpoint_name(batch), files, about)

    def discard(self, work: Path) -> None:
        # Remove the folder on one rank only: a slower rank could otherwise remove the folder of the next try.
        if dist.get_global_rank() == 0:
            shutil.rmtree(work, ignore_errors=True)

    def list_batches(self) -> list[int]:
        found = (checkpoint_store.batch_number(path) for path in list_checkpoints(self.folder))
        return [batch for batch in found if batch is not None]

    def prune(self, rules: KeepConfig) -> None:
        retention.prune(self.folder, rules)

    def make_room(self, rules: KeepConfig | None, batch: int) -> bool:
        # Without rules all checkpoints are kept, so none can be removed.
        if dist.get_global_rank() != 0 or rules is None:
            return False
        return bool(retention.make_room(self.folder, rules, batch))


def run_storage(place: str | Path) -> RunStorage:
    if is_url(place):
        return BucketStorage(str(place))
    return FolderStorage(Path(place))


def open_run_folder(folder: Path) -> str:
    """Create or open a run's folder, verify that all ranks share it, and return the run's id; a collective.

    If run.json, which contains the id, is missing, it is written, even if the folder already has checkpoints.

    Raises:
        UserError: A new run's folder is not shared by all ranks.
        ExternalError: A rank does not see the folder of a run that has begun: the file system is not mounted there.
        OSError: The folder cannot be read or written.
    """
    begun = False
    with raise_on_all_ranks(str(folder)):
        begun = read_with_retries(lambda: (folder / RUN_FILE).exists() or bool(list_checkpoints(folder)))
        if dist.get_global_rank() == 0:
            folder.mkdir(parents=True, exist_ok=True)
    # A run has begun if any rank sees its folder: rank 0's machine may be the one without the mount.
    check_shared(folder, 'runs_dir', begun=any(dist.all_gather_object(begun)))
    return from_rank_zero(lambda: read_with_retries(lambda: read_run_id(folder)) or _first_id(folder), str(folder))


def _first_id(folder: Path) -> str:
    """Write the missing run.json of a folder, with the id from the run's newest checkpoint that has one."""
    for checkpoint in list_checkpoints(folder):
        with suppress(checkpoint_store.DamagedCheckpoint):
            found = read_with_retries(lambda checkpoint=checkpoint: read_receipt(checkpoint)).get('run')
            if found and isinstance(found, str):
                return create_run_id(folder, found)
    return create_run_id(folder)


def check_shared(folder: Path, where: str, *, begun: bool = False) -> None:
    """Check that all ranks share a folder: each rank reads a new file written by rank 0. A collective.

    Raises:
        UserError: A rank does not see the file and the run has not begun, so the path is the user's mistake.
        ExternalError: A rank does not see the file of a run that has begun, so its machine has lost the mount.
    """
    if dist.get_world_size() == 1:
        return
    # Use a new name and new content each time: network file systems may cache contents, names, and even missing names.
    first = [f'.shared-{uuid4().hex}', environment.machine_name(os.environ)]
    dist.broadcast_object_list(first, src=0)
    probe, content = folder / first[0], first[0]
    try:
        with raise_on_all_ranks(str(folder)):
            if dist.get_global_rank() == 0:
                folder.mkdir(parents=True, exist_ok=True)
                probe.write_text(content, encoding='utf-8')
        with raise_on_all_ranks(str(folder)):
            if reason := local_files.why_not_visible(probe, content, local_files.VISIBLE_SECONDS):
                raise not_shared(f'{where}: {folder}', first[1], reason, begun=begun)
    finally:
        if dist.get_global_rank() == 0:
            with suppress(OSError):
                probe.unlink(missing_ok=True)


def not_shared(where: str, machine: str, reason: str, *, begun: bool) -> UserError | ExternalError:
    """Return the error for a rank that cannot read a file written into a folder by rank 0, which runs on `machine`."""
    here = f'rank {dist.get_global_rank()} ({environment.machine_name(os.environ)})'
    message = f'{where} is not the same folder on rank 0 ({machine}) and {here}: {reason}'
    if begun:
        return ExternalError(f'{message}. The run has begun; check that its file system is mounted on both machines')
    return UserError(f'{message}; use a folder on a file system that all nodes share')


def newest_intact(folder: Path, run_id: str = '') -> Path | None:
    """Return a run's newest undamaged checkpoint, or None if it has no checkpoints; UserError if all are damaged.

    Args:
        run_id: The run's id; a checkpoint of another run is a UserError. If empty, those of any run are accepted.
    """
    damages = []
    for checkpoint in read_with_retries(lambda: list_checkpoints(folder)):
        # Skip only damaged checkpoints. An OSError ends the run with status 1: if the error was transient, a restart
        # resumes from this checkpoint instead of repeating hours of work from an older one.
        try:
            found = read_with_retries(lambda checkpoint=checkpoint: read_receipt(checkpoint)).get('run')
            if run_id and found and found != run_id:
                raise UserError(
                    f'{checkpoint}: it belongs to another run (id {found}, this run has {run_id}); move it out of the '
                    f'folder, or start a new run from its weights with init_from: {checkpoint}'
                )
            verify_checkpoint(checkpoint)
        except checkpoint_store.DamagedCheckpoint as error:
            damages.append(str(error))
            log.warning('damaged checkpoint, trying an earlier one: %s', error)
            continue
        return checkpoint
    if damages:
        if run_id:
            check_run_id(folder, run_id)  # raises an error if the file system has vanished, which is not damage
        raise checkpoint_store.all_damaged(str(folder), damages)
    return None
