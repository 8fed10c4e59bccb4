"""Storage of a run's checkpoints: the interface, and its implementation for a shared folder.

`bucket_storage` has the implementation for object stores.
"""

import logging
import shutil
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, Protocol

from composer.utils import dist

from diffusion.checkpointing import checkpoint_store, retention
from diffusion.checkpointing.bucket_storage import BucketStorage
from diffusion.checkpointing.checkpoint_store import FileRecord, checkpoint_name
from diffusion.checkpointing.rank_agreement import raise_on_all_ranks, run_on_rank_zero
from diffusion.checkpointing.shared_folder import open_run_folder
from diffusion.checkpointing.verification import newest_intact
from diffusion.config.checkpointing import KeepConfig
from diffusion.runs.run_id import check_run_id
from diffusion.storage.atomic import remove
from diffusion.storage.places import is_url

log = logging.getLogger(__name__)


class SaveTarget(Protocol):
    """Destination of a checkpoint: the storage of a run, or a tier of its nodes.

    A save calls `begin` on all ranks, writes its files into the temporary folder, and calls `upload` on each rank with
    the files that it wrote. Then rank 0 calls `publish`, which makes the checkpoint exist, and all ranks `finish`.

    Attributes:
        place: The folder or URL, for messages.
        folder: Local folder: the shared folder, or a folder of this node.
        run_id: The run's id; empty before the storage is open.
    """

    place: str
    folder: Path
    run_id: str

    def name_of(self, batch: int) -> str:
        """Return the path or URL of the checkpoint after this number of batches."""
        ...

    def work_folder(self, batch: int) -> Path:
        """Return the path of the temporary folder of a save; the same on all ranks that share a folder."""
        ...

    def begin(self, batch: int, *, every_rank: bool) -> None:
        """Create the temporary folder of a save; a collective.

        Args:
            every_rank: True if all ranks write into it, False if only rank 0 does.

        Raises:
            OSError: A storage fault; on every rank.
        """
        ...

    def upload(self, work: Path, files: Mapping[str, FileRecord], batch: int, check: Callable[[], None]) -> None:
        """Store files that this rank has written into a temporary folder; not a collective, may run in a thread.

        Every rank calls it, without files if it has none or could not write them.

        Args:
            files: Size and hash of the files by name.
            check: Called while the files are stored; raises an exception if the save has been abandoned.

        Raises:
            OSError: A storage fault.
        """
        ...

    def publish(self, work: Path, batch: int, files: Mapping[str, FileRecord], about: Mapping[str, Any]) -> None:
        """Make a checkpoint exist, after all ranks have stored their files; on rank 0, not a collective.

        Args:
            files: Size and hash of the files of all ranks by name.
            about: Additional fields of the receipt.
        """
        ...

    def finish(self, work: Path, batch: int) -> None:
        """Complete the save on every rank after `publish` has succeeded on rank 0; a collective.

        Raises:
            OSError: The checkpoint does not exist after all; on every rank.
        """
        ...

    def discard(self, work: Path) -> None:
        """Remove the files of a save that failed; every rank calls this, but it is not a collective."""
        ...


class RunStorage(SaveTarget, Protocol):
    """Storage of a run's checkpoints."""

    def open(self) -> str:
        """Create or open the run, and return its id; a collective.

        Raises:
            UserError: The place cannot be the home of a run.
            OSError: The place cannot be read or written.
        """
        ...

    def resume_point(self) -> Path | None:
        """Return the newest undamaged checkpoint as a local folder; None if the run has none; a collective.

        Newer checkpoints, which are damaged, are set aside.

        Raises:
            UserError: All of the run's checkpoints are damaged, or the newest is of another run.
            OSError: A checkpoint cannot be read for minutes, which is not damage: nothing is set aside.
        """
        ...

    def remove_unfinished(self) -> None:
        """Remove incomplete saves that killed processes left; a collective."""
        ...

    def fetch(self, checkpoint: Path, names: Collection[str]) -> None:
        """Make files of the checkpoint that `resume_point` returned available in it; not a collective."""
        ...

    def list_batches(self) -> list[int]:
        """Return the batch numbers of the checkpoints, newest first; on rank 0."""
        ...

    def prune(self, rules: KeepConfig) -> None:
        """Remove the checkpoints that the rules do not keep; on rank 0.

        Raises:
            OSError: A storage fault; what could not be removed stays.
        """
        ...

    def make_room(self, rules: KeepConfig | None, batch: int) -> bool:
        """Free space on a full disk before a save is tried again; on every rank, not a collective.

        Args:
            rules: Checkpoints that the run keeps; None keeps all.

        Returns:
            True if this rank has removed something.
        """
        ...


class FolderStorage:
    """Storage of a run's checkpoints in a folder that all nodes share.

    Args:
        run_id: The run's id if the folder has been opened already.
    """

    def __init__(self, folder: Path, run_id: str = '') -> None:
        self.folder, self.place, self.run_id = folder, str(folder), run_id

    def open(self) -> str:
        self.run_id = open_run_folder(self.folder)
        return self.run_id

    def resume_point(self) -> Path | None:
        # Search on rank 0 alone: it reads and hashes the whole checkpoint, and two ranks must never resume from
        # different ones. The other ranks wait however long reading takes.
        def find() -> Path | None:
            found = newest_intact(self.folder, self.run_id)
            if found is not None:
                checkpoint_store.set_aside(found)
            return found

        broadcast = [run_on_rank_zero(find, 'autoresume')]
        dist.broadcast_object_list(broadcast, src=0)
        return broadcast[0]

    def remove_unfinished(self) -> None:
        with raise_on_all_ranks(self.place):
            if dist.get_global_rank() == 0:
                checkpoint_store.remove_unfinished_saves(self.folder)

    def name_of(self, batch: int) -> str:
        return str(self.folder / checkpoint_name(batch))

    def work_folder(self, batch: int) -> Path:
        return checkpoint_store.unfinished_path(self.folder, batch)

    def begin(self, batch: int, *, every_rank: bool) -> None:
        work = self.work_folder(batch)
        with raise_on_all_ranks(str(work), logs=False):
            if dist.get_global_rank() == 0 or every_rank:
                check_run_id(self.folder, self.run_id)
            if dist.get_global_rank() == 0:
                remove(work)
                work.mkdir()

    def upload(self, work: Path, files: Mapping[str, FileRecord], batch: int, check: Callable[[], None]) -> None:
        pass  # all ranks write into the shared folder

    def publish(self, work: Path, batch: int, files: Mapping[str, FileRecord], about: Mapping[str, Any]) -> None:
        # If the folder is not shared, rank 0 does not see the files of other nodes.
        missing = sorted(name for name in files if not (work / name).is_file())
        if missing:
            raise FileNotFoundError(f'{work}: files of other ranks are missing: {", ".join(missing[:3])}')
        check_run_id(self.folder, self.run_id)
        checkpoint_store.publish(work, self.folder / checkpoint_name(batch), files, about)

    def finish(self, work: Path, batch: int) -> None:
        pass

    def discard(self, work: Path) -> None:
        # Let one rank remove the folder: a slower rank could remove that of the next try.
        if dist.get_global_rank() == 0:
            shutil.rmtree(work, ignore_errors=True)

    def fetch(self, checkpoint: Path, names: Collection[str]) -> None:
        pass

    def list_batches(self) -> list[int]:
        found = (checkpoint_store.batch_number(path) for path in checkpoint_store.list_checkpoints(self.folder))
        return [batch for batch in found if batch is not None]

    def prune(self, rules: KeepConfig) -> None:
        retention.prune(self.folder, rules)

    def make_room(self, rules: KeepConfig | None, batch: int) -> bool:
        # The newest checkpoint stays in any case.
        if dist.get_global_rank() != 0 or rules is None:
            return False
        return bool(retention.make_room(self.folder, rules, batch))


def run_storage(place: str | Path) -> RunStorage:
    """Return the storage of a run's checkpoints by its path or URL, not opened yet."""
    if is_url(place):
        return BucketStorage(str(place))
    return FolderStorage(Path(place))
