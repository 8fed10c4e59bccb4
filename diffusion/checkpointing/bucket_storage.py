"""Checkpoints of a run in an object store, with the same receipts, checks and fallback as checkpoints in a folder.

The run's URL contains run.json, ba100/, ba200/, ..., and `latest`, an object that names the newest checkpoint. Each
rank writes its files into its node's working folder and uploads them. Rank 0 uploads receipt.json last, with a
conditional write that fails if one exists. A checkpoint exists if its receipt does.

Nodes need no shared folder. Each node's working folder keeps the files that its ranks wrote for the newest checkpoint.
A run that resumes on the same nodes compares the hashes of these files with the receipt, and downloads only what is
missing.
"""

import errno
import logging
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from composer.utils import dist

from diffusion.checkpointing import bucket_checkpoints, checkpoint_store, retention
from diffusion.checkpointing.checkpoint_lookup import PIN
from diffusion.checkpointing.checkpoint_store import LATEST, RECEIPT, DamagedCheckpoint, FileRecord, checkpoint_name
from diffusion.checkpointing.rank_agreement import from_rank_zero, raise_on_all_ranks, run_on_each_rank
from diffusion.checkpointing.retention import CheckpointInfo
from diffusion.config.checkpointing import KeepConfig
from diffusion.errors import ExternalError, UserError
from diffusion.runs.evaluation_claims import EvaluationClaims
from diffusion.runs.run_id import check_run_id, claim_working_folder, open_bucket_run
from diffusion.storage import object_store, transfers
from diffusion.storage.atomic import remove, replace_folder
from diffusion.storage.local_files import working_folder
from diffusion.storage.places import StorePlace
from diffusion.storage.retry import RetryPolicy

log = logging.getLogger(__name__)


class BucketStorage:
    """Storage of a run's checkpoints in an object store; see `RunStorage` for the methods."""

    def __init__(self, url: str, folder: Path | None = None) -> None:
        self.place = url.rstrip('/')
        self.folder = working_folder(self.place) if folder is None else folder
        self._store = StorePlace(self.place)
        self.run_id = ''
        self.before_publish: Callable[[], object] = lambda: None
        """Called on rank 0 before a checkpoint is published, to upload files that must not be older than it."""
        self._node_ranks = [dist.get_global_rank()]
        """Ranks of this node, ascending. They share the working folder; the first one creates and cleans it."""
        self._published: set[int] | None = None
        """Batches of the checkpoints in the store, on rank 0; None until they are listed."""
        self._saved: dict[int, float | None] = {}
        """Save time of each checkpoint whose receipt was read, by batch, in seconds since 1970; None if unknown."""
        self._maybe_published: set[int] = set()
        """Batches whose receipt may have been written even though the store returned an error."""

    def open(self) -> str:
        # Group ranks by folder instead of by Composer's nodes, since the nodes of a local job may share a folder.
        here = f'{os.uname().nodename} {self.folder.absolute()}'
        self._node_ranks = [rank for rank, folder in enumerate(dist.all_gather_object(here)) if folder == here]
        self.run_id = from_rank_zero(lambda: open_bucket_run(self.place), self.place)
        with raise_on_all_ranks(str(self.folder)):
            if self._owns_folder():
                claim_working_folder(self.folder, self.run_id)
        return self.run_id

    def resume_point(self) -> Path | None:
        damages: list[str] = []
        batches = from_rank_zero(self.list_batches, self.place)
        for batch in batches:
            try:
                found = self._restore(batch)
            except DamagedCheckpoint as error:
                damages.append(str(error))
                if dist.get_global_rank() == 0:
                    log.warning('damaged checkpoint, trying an earlier one: %s', error)
                continue
            with raise_on_all_ranks(self.place), _as_storage_fault():
                if dist.get_global_rank() == 0:
                    self._set_aside([each for each in batches if each > batch], batch)
            return found
        if damages:
            raise checkpoint_store.all_damaged(self.place, damages)
        return None

    def remove_unfinished(self) -> None:
        with raise_on_all_ranks(self.place), _as_storage_fault():
            if self._owns_folder():
                checkpoint_store.remove_unfinished_saves(self.folder)
            if dist.get_global_rank() == 0:
                # Delete the objects of incomplete saves: no other process saves to this run now.
                for batch, names in bucket_checkpoints.object_names(self.place).items():
                    if not names & {RECEIPT, bucket_checkpoints.DAMAGED_RECEIPT}:
                        bucket_checkpoints.delete_checkpoint(self.name_of(batch))
                # Also abort unfinished uploads: their parts are billed but not listed as objects.
                object_store.abort_uploads(f'{self.place}/', older_than_seconds=0.0)

    def name_of(self, batch: int) -> str:
        return f'{self.place}/{checkpoint_name(batch)}'

    def work_folder(self, batch: int) -> Path:
        return checkpoint_store.unfinished_path(self.folder, batch)

    def begin(self, batch: int, *, every_rank: bool) -> None:
        work = self.work_folder(batch)
        with raise_on_all_ranks(self.name_of(batch), logs=False), _as_storage_fault():
            if self._owns_folder():
                check_run_id(self.folder, self.run_id)
                remove(work)
                work.mkdir()
            if dist.get_global_rank() == 0 and batch in self._batches() | self._maybe_published:
                # Delete the receipt first: the checkpoint is incomplete until all of its objects have been overwritten.
                self._store.delete([f'{checkpoint_name(batch)}/{RECEIPT}'])
                self._batches().discard(batch)
                self._maybe_published.discard(batch)

    def upload(self, work: Path, files: Mapping[str, FileRecord], batch: int, check: Callable[[], None]) -> None:
        def write(name: str, policy: RetryPolicy) -> None:
            # `check` raises if the save has been abandoned; `policy.wait` raises if another upload has failed.
            def wait() -> None:
                check()
                policy.wait()

            object_store.write(f'{self.name_of(batch)}/{name}', work / name, retry=replace(policy, wait=wait))

        with _as_storage_fault():
            transfers.run_all([partial(write, name) for name in files], replace(object_store.DEFAULT, wait=check))

    def publish(self, work: Path, batch: int, files: Mapping[str, FileRecord], about: Mapping[str, Any]) -> None:
        url = self.name_of(batch)
        with _as_storage_fault():
            sizes = StorePlace(url).sizes()
            different = sorted(name for name, record in files.items() if sizes.get(name) != record.bytes)
            if different:
                name = different[0]
                what = f'has {sizes[name]} of {files[name].bytes} bytes' if name in sizes else 'does not exist'
                raise OSError(errno.EIO, f'the object {url}/{name} {what} after it was uploaded')
            self.before_publish()
            receipt = checkpoint_store.receipt_text(files, about)
            self._maybe_published.add(batch)
            if not self._store.create(f'{checkpoint_name(batch)}/{RECEIPT}', receipt):
                raise ExternalError(
                    f'{url}/{RECEIPT} exists already: another job saves to this URL; end one of the two, or give '
                    'this run another name'
                )
            self._maybe_published.discard(batch)
            self._batches().add(batch)
            self._saved[batch] = retention.time_of_receipt(about)
            try:
                self._store.write(LATEST, checkpoint_name(batch))
            except (OSError, UserError) as error:  # the checkpoint is complete and can be found without `latest`
                log.warning('%s: is saved, but %s still names an older checkpoint (%s)', url, LATEST, error)

    def finish(self, work: Path, batch: int) -> None:
        if not self._owns_folder():
            return
        # Keep the newest checkpoint's files for a restart on this node.
        try:
            replace_folder(work, self.folder / checkpoint_name(batch), create_folder=False)
            checkpoint_store.remove_others(self.folder / checkpoint_name(batch))
        except OSError as error:  # not an error, since the checkpoint is in the store
            log.warning('%s: the local copy of %s is not kept (%s)', self.folder, checkpoint_name(batch), error)

    def discard(self, work: Path) -> None:
        # Leave the uploaded objects, which have no receipt: the next save of this batch or the next start removes them.
        if self._owns_folder():
            shutil.rmtree(work, ignore_errors=True)

    def list_batches(self) -> list[int]:
        return sorted(self._batches(), reverse=True)

    def prune(self, rules: KeepConfig) -> None:
        with _as_storage_fault():
            for batch in retention.select_removable(self._infos(rules), rules):
                bucket_checkpoints.delete_checkpoint(self.name_of(batch))
                self._batches().discard(batch)

    def _infos(self, rules: KeepConfig) -> list[CheckpointInfo]:
        """Return batch, save time (if a rule needs it) and claim of each checkpoint in the store, for retention."""
        # Keep the checkpoints that `diffusion watch` is evaluating.
        held = EvaluationClaims(self.place, lease_seconds=0.0).held()
        pinned = {int(pin[1]) for name in self._store.list().files if (pin := PIN.fullmatch(name))}
        batches, claimed = self.list_batches(), pinned | {int(name[2:]) for name in held}
        if rules.hourly or rules.daily:
            for batch in batches:
                if batch not in self._saved:
                    self._saved[batch] = _saved_time(self.name_of(batch))
        return [CheckpointInfo(batch, self._saved.get(batch), batch in claimed) for batch in batches]

    def make_room(self, rules: KeepConfig | None, batch: int) -> bool:
        # Only the working folder's disk can be full. Its checkpoints are copies of those in the store: remove them.
        copies = checkpoint_store.list_checkpoints(self.folder) if self._owns_folder() else []
        for path in copies:
            remove(path)
        return bool(copies)

    def fetch(self, checkpoint: Path, names: Collection[str]) -> None:
        """Download files of the checkpoint that this run resumes from, unless this node already has them."""
        with _as_storage_fault():
            receipt = checkpoint_store.parse_receipt((checkpoint / RECEIPT).read_bytes(), str(checkpoint))
            wanted = {name: receipt['files'][name] for name in names}
            bucket_checkpoints.download_missing_files(f'{self.place}/{checkpoint.name}', checkpoint, wanted)

    def _owns_folder(self) -> bool:
        return self._node_ranks[0] == dist.get_global_rank()

    def _batches(self) -> set[int]:
        """Return the batches of checkpoints in the store; list them only once, since only this process adds more."""
        if self._published is None:
            with _as_storage_fault():
                self._published = set(bucket_checkpoints.published_batches(self.place))
        return self._published

    def _restore(self, batch: int) -> Path:
        """Download and verify a checkpoint on the nodes that need its files; return the local folder. A collective."""
        url, checkpoint = self.name_of(batch), self.folder / checkpoint_name(batch)

        def read() -> bytes:
            with _as_storage_fault():
                return bucket_checkpoints.read_checked_receipt(url, self.run_id)

        text = from_rank_zero(read, url, logs=False)
        with raise_on_all_ranks(str(checkpoint)):
            if self._owns_folder():
                checkpoint_store.remove_others(checkpoint)
                checkpoint.mkdir(exist_ok=True)
                (checkpoint / RECEIPT).write_bytes(text)
        receipt = checkpoint_store.parse_receipt(text, url)

        def download() -> None:
            with _as_storage_fault():
                bucket_checkpoints.download_missing_files(url, checkpoint, files_of_rank(receipt, self._node_ranks))

        run_on_each_rank(download, url, logs=False)
        return checkpoint

    def _set_aside(self, damaged: Collection[int], newest: int) -> None:
        """Rename the receipts of damaged checkpoints, and point `latest` to the newest intact checkpoint."""
        renamed = bucket_checkpoints.DAMAGED_RECEIPT
        if (self._store.read(LATEST) or b'').decode() != checkpoint_name(newest):
            self._store.write(LATEST, checkpoint_name(newest))
        for batch in damaged:
            receipt = f'{checkpoint_name(batch)}/{RECEIPT}'
            content = self._store.read(receipt)
            if content is not None:
                self._store.write(f'{checkpoint_name(batch)}/{renamed}', content)
                self._store.delete([receipt])
            self._batches().discard(batch)
            log.warning('%s: damaged, its receipt is renamed to %s', self.name_of(batch), renamed)


def files_of_rank(receipt: Mapping[str, Any], node_ranks: Sequence[int]) -> dict[str, FileRecord]:
    """Return, by name, the checkpoint files that this rank downloads to its node and verifies.

    To load the checkpoint, a node needs the shards of its own ranks and those of rank 0, which include the unsharded
    tensors. The ranks of a node divide these downloads, and all ranks together verify the whole checkpoint. If the
    number of ranks has changed, this step only verifies each shard, on one rank: the shards that a rank reads are known
    only once the model is built (`sharded_state.read_tensors`).
    """
    files: dict[str, FileRecord] = receipt['files']
    rank, world_size = dist.get_global_rank(), dist.get_world_size()
    largest_first = sorted(files, key=lambda name: (-files[name].bytes, name))
    if receipt.get('kind') != 'sharded':
        names = largest_first[node_ranks.index(rank) :: len(node_ranks)]
    else:
        common = {checkpoint_store.STATE, checkpoint_store.INDEX, checkpoint_store.RECIPE}
        if receipt.get('world_size') == world_size:
            common |= {name for name in files if name.startswith('__0_')}
            names = [name for name in files if name.startswith(f'__{rank}_')]
        else:
            shards = [name for name in largest_first if name not in common]
            names = shards[rank::world_size]
        names += [name for name in files if name in common and rank == node_ranks[0] and name not in names]
    return {name: files[name] for name in names}


def _saved_time(url: str) -> float | None:
    """Return when the checkpoint at a URL was saved, in seconds since 1970; None if unknown."""
    text = StorePlace(url).read(RECEIPT)
    try:
        return None if text is None else retention.time_of_receipt(checkpoint_store.parse_receipt(text, url))
    except DamagedCheckpoint:
        return None


@contextmanager
def _as_storage_fault() -> Iterator[None]:
    """Inside the block, raise OSError instead of UserError if the store refuses a request or credentials are missing.

    The store accepted such requests when the run was opened: expired credentials are not a mistake in the recipe.
    """
    try:
        yield
    except UserError as error:
        # Only convert errors caused by an error of the store's client (`RetryPolicy.run` chains them); a UserError
        # without a cause was raised by this library.
        if isinstance(error, DamagedCheckpoint) or error.__cause__ is None:
            raise
        raise OSError(errno.EACCES, str(error)) from error
