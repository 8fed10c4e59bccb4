"""Recent checkpoints on the nodes themselves, in memory or on a local disk, which outlive a run's processes.

Each node has a folder, such as /dev/shm/diffusion-1000/<run>, with ba120/. It contains the files written by the node's
ranks and the receipt of the whole checkpoint; with `replicate` also copies of another node's files. No node needs all
files. A checkpoint can be loaded if all nodes together have all files intact (`tier_restore`).
"""

import errno
import fcntl
import hashlib
import logging
import os
import shutil
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any
from uuid import uuid4

from composer.utils import dist

from diffusion.checkpointing import checkpoint_store
from diffusion.checkpointing.checkpoint_store import INDEX, RECEIPT, FileRecord, checkpoint_name
from diffusion.checkpointing.rank_agreement import raise_on_all_ranks
from diffusion.checkpointing.tiers.peers import Peers, choose_peers, exchange_files, new_group
from diffusion.config.checkpointing import TiersConfig
from diffusion.errors import UserError, is_wrong_path
from diffusion.storage.atomic import remove, replace_folder

log = logging.getLogger(__name__)

DOMAIN_VARIABLE = 'DIFFUSION_FAILURE_DOMAIN'
"""Environment variable that names this node's failure domain, such as its rack."""
EXCHANGE_FAILED = errno.EPROTO
"""Error number for a failed exchange of files: the run stops using the tier, since its process group may be broken."""
LOCK = 'in_use.lock'
STALE_SECONDS = 3600.0
"""If a run no longer runs on this node, its tier folder is removed this long after the folder's last change."""


class NodeTier:
    """Recent checkpoints of a run, in a folder on each node; a `SaveTarget` for `SaveInProgress`.

    Args:
        folder: The run's folder on this node; it must not be on a file system shared by nodes.
        replicate: True keeps a copy of each file on another node.
        recipe_text: The resolved recipe. If the checkpoint to resume from was saved with another recipe, each node gets
            all of the checkpoint's files.
    """

    def __init__(self, name: str, folder: Path, run_id: str, *, replicate: bool = False, recipe_text: str = '') -> None:
        self.name, self.folder, self.run_id = name, folder, run_id
        self.place = f'{name} tier'
        self.recipe_text = recipe_text
        self.base: int | None = None
        """Batch of the newest checkpoint in the run's storage (None: none yet), set on rank 0 before each save. It is
        recorded in the receipt of the tier's checkpoint, which is not used after the checkpoint in the storage has been
        deleted."""
        self.nodes: list[list[int]] = []
        """The ranks of each node, after `open`."""
        self.group = None
        self._replicate = replicate
        self._peers: Peers | None = None
        self._receipt = b''
        self._lock: IO[str] | None = None

    @property
    def node_ranks(self) -> list[int]:
        """The ranks of this node, in ascending order; the first one creates and cleans the folder."""
        return next(ranks for ranks in self.nodes if dist.get_global_rank() in ranks)

    @property
    def owns_folder(self) -> bool:
        """True on one rank of each node, which creates and cleans the folder."""
        return self.node_ranks[0] == dist.get_global_rank()

    def kept_bytes(self, written: Sequence[int]) -> int:
        """Return the bytes stored by this rank, for itself and its peer, given the bytes that each rank writes."""
        return written[dist.get_global_rank()] + (0 if self._peers is None else written[self._peers.source])

    def open(self, *, begun: bool) -> None:
        """Create the folder on each node, and choose the peers for replication; a collective.

        Raises:
            UserError: The folder's path is wrong and the run has not `begun`, or others may write to the folder.
            OSError: A node's disk is broken, or the path no longer works. Both are raised on every rank.
        """
        # The prefix of a Slurm address, such as core.rack2 in `core.rack2.node7`, is shared by neighboring nodes.
        block = os.environ.get('SLURM_TOPOLOGY_ADDR', '').rpartition('.')[0]
        domain = os.environ.get(DOMAIN_VARIABLE) or block
        places = dist.all_gather_object((f'{os.uname().nodename} {self.folder.absolute()}', domain))
        names = list(dict.fromkeys(place for place, _ in places))
        self.nodes = [[rank for rank, (place, _) in enumerate(places) if place == name] for name in names]
        with raise_on_all_ranks(self.place):
            if self.owns_folder:
                self._lock = _take_folder(self.folder, begun=begun)
                checkpoint_store.remove_unfinished_saves(self.folder)
                _remove_stale(self.folder.parent, self.folder)
        self.group = new_group()
        if self._replicate:
            domains = [places[ranks[0]][1] for ranks in self.nodes]
            self._peers = choose_peers(self.nodes, domains, dist.get_global_rank())
            if self._peers is None and dist.get_global_rank() == 0:
                log.warning(
                    '%s: files are not copied to another node, since the run has %s. To fix: '
                    'checkpointing.tiers.%s.replicate: false',
                    *(self.place, 'one node' if len(self.nodes) == 1 else 'nodes with different numbers of ranks'),
                    self.name,
                )

    def name_of(self, batch: int) -> str:
        return f'{self.place}, {checkpoint_name(batch)}'

    def work_folder(self, batch: int) -> Path:
        return checkpoint_store.unfinished_path(self.folder, batch)

    def begin(self, batch: int, *, every_rank: bool) -> None:
        work = self.work_folder(batch)
        with raise_on_all_ranks(self.name_of(batch), logs=False):
            if self.owns_folder:
                remove(work)
                work.mkdir()  # do not create parents: the disk's mount may have vanished

    def upload(self, work: Path, files: Mapping[str, FileRecord], batch: int, check: Callable[[], None]) -> None:
        # Do not exchange the index: only rank 0 has it, and `finish` sends it to all nodes.
        if self._peers is None or INDEX in files:
            return
        try:
            exchange_files(work, files, self._peers, self.group, check)
        except (RuntimeError, ValueError) as error:  # from gloo, or because a message was not as expected
            raise OSError(EXCHANGE_FAILED, f'the exchange of files with another node failed: {error}') from error

    def publish(self, work: Path, batch: int, files: Mapping[str, FileRecord], about: Mapping[str, Any]) -> None:
        more = {'save': uuid4().hex, 'base': self.base, 'recipe': recipe_hash(self)}
        self._receipt = checkpoint_store.receipt_text(files, {**about, **more}).encode()

    def finish(self, work: Path, batch: int) -> None:
        index = work / INDEX
        content: list[Any] = [None]
        error: OSError | None = None
        if dist.get_global_rank() == 0:
            try:
                content = [(self._receipt, index.read_bytes() if index.exists() else None)]
            except OSError as caught:
                error = caught
        dist.broadcast_object_list(content, src=0)
        final = self.folder / checkpoint_name(batch)
        if self.owns_folder and content[0] is not None:
            try:
                receipt, shard_index = content[0]
                if shard_index is not None and not index.exists():
                    index.write_bytes(shard_index)
                (work / RECEIPT).write_bytes(receipt)
                replace_folder(work, final, create_folder=False)
            except OSError as caught:
                error = caught
        # Keep the previous checkpoint until this one is complete on all nodes.
        errors = [str(each) for each in dist.all_gather_object(None if error is None else str(error)) if each]
        if errors:
            self.discard(work)
            raise OSError(errno.EIO, f'not complete on all nodes ({errors[0]})')
        if self.owns_folder:
            try:
                checkpoint_store.remove_others(final)
            except OSError as caught:  # the next save tries again
                log.warning('%s: older checkpoints are not removed (%s)', self.folder, caught)

    def discard(self, work: Path) -> None:
        if self.owns_folder:
            shutil.rmtree(work, ignore_errors=True)

    def clear(self) -> None:
        """Remove this tier's folder on this node, to free memory or disk space; not a collective."""
        if self.owns_folder:
            try:
                remove(self.folder)
            except OSError as error:
                log.warning('%s: not removed (%s)', self.folder, error)

    def close(self) -> None:
        """Release the folder's lock, so that another run on this node can remove the checkpoints later."""
        if self._lock is not None:
            with suppress(OSError):
                os.utime(self.folder)
            self._lock.close()
            self._lock = None


def open_tiers(config: TiersConfig, run_id: str, recipe_text: str, *, begun: bool) -> list[tuple[NodeTier, str]]:
    """Open a recipe's tiers; return those on intact disks, fastest first, with their save intervals; a collective."""
    opened: list[tuple[NodeTier, str]] = []
    for name, tier in (('memory', config.memory), ('disk', config.disk)):
        if tier is None:
            continue
        root = Path(tier.folder or '/dev/shm') / f'diffusion-{os.getuid()}'
        found = NodeTier(name, root / run_id, run_id, replicate=tier.replicate, recipe_text=recipe_text)
        try:
            found.open(begun=begun)
        except OSError as error:  # a node's disk is broken; all ranks raise the error
            if dist.get_global_rank() == 0:
                log.warning('%s: not used in this run (%s)', found.place, error)
            continue
        opened.append((found, tier.save_interval))
    return opened


def recipe_hash(tier: NodeTier) -> str:
    return hashlib.sha256(tier.recipe_text.encode()).hexdigest()


def _take_folder(folder: Path, *, begun: bool) -> IO[str]:
    """Create a run's folder and lock it while this process lives; raise UserError if others may write to it."""
    try:
        # Do not create parents: the disk's mount may be missing.
        folder.parent.mkdir(mode=0o700, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        for each in (folder.parent, folder):
            if each.stat().st_uid != os.getuid() or each.stat().st_mode & 0o022:
                raise UserError(
                    f'{each}: belongs to another user, or others may write to it, so the checkpoints in it cannot be '
                    'trusted; remove it, or choose another folder for this tier (checkpointing.tiers)'
                )
        lock = (folder / LOCK).open('w', encoding='utf-8')
    except OSError as error:
        # A read-only disk (EROFS) is a fault, not the user's mistake: Linux remounts a disk with errors as read-only.
        if begun or error.errno == errno.EROFS or not is_wrong_path(error):
            raise
        where = error.filename if error.errno != errno.ENOENT else folder.parent.parent
        raise UserError(
            f'{where}: {error.strerror}; create it on each node, or choose another folder for this tier '
            '(checkpointing.tiers)'
        ) from error
    with suppress(OSError):  # some file systems do not support locks
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return lock


def _remove_stale(root: Path, own: Path) -> None:
    """Remove checkpoints of other runs that no longer run on this node, since they take up the node's memory."""
    for folder in sorted(root.iterdir()):
        if folder == own or not (folder / LOCK).exists():
            continue
        with suppress(OSError), (folder / LOCK).open('w', encoding='utf-8') as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if time.time() - folder.stat().st_mtime > STALE_SECONDS:
                log.warning('%s: removed the checkpoints of a run that no longer runs here', folder)
                remove(folder)
