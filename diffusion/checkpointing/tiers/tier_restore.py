"""Find the newest checkpoint that the nodes still have in a tier, and exchange its files between nodes."""

import logging
import os
import re
import time
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from composer.utils import dist

from diffusion.checkpointing import checkpoint_store
from diffusion.checkpointing.bucket_storage import files_of_rank
from diffusion.checkpointing.checkpoint_store import RECEIPT, DamagedCheckpoint, FileRecord, checkpoint_name
from diffusion.checkpointing.rank_agreement import from_rank_zero, run_on_each_rank
from diffusion.checkpointing.run_storage import RunStorage
from diffusion.checkpointing.tiers.node_tier import NodeTier, recipe_hash
from diffusion.checkpointing.tiers.peers import receive_file, send_file

log = logging.getLogger(__name__)

SHARD = re.compile(r'__(\d+)_')
"""Start of a shard file's name, which contains the rank that wrote it."""


class _Candidate(NamedTuple):
    """A checkpoint in a tier; `save` identifies the save, since a batch may be saved several times."""

    batch: int
    save: str


class _Transfer(NamedTuple):
    name: str
    source: int
    to: int


def find_resume_point(storage: RunStorage, tiers: Sequence[NodeTier]) -> Path | None:
    """Return the local folder of a run's newest intact checkpoint in a tier or the storage, or None; a collective."""
    if not tiers:
        return storage.resume_point()
    stored = stored_batches(storage)
    found = newest_in_tiers(tiers, stored, at_least=max(stored, default=0))
    if found is not None:
        return found
    resume = storage.resume_point()
    number = None if resume is None else checkpoint_store.batch_number(resume)
    if number is not None and number < max(stored, default=0):
        # The newest checkpoints in the storage are damaged: use one in a tier if it is newer than the one found there.
        found = newest_in_tiers(tiers, stored, at_least=number + 1)
    return resume if found is None else found


def stored_batches(storage: RunStorage) -> list[int]:
    """Return the batches of the checkpoints in a run's storage, newest first; a collective."""
    return from_rank_zero(lambda: checkpoint_store.read_with_retries(storage.list_batches), storage.place)


def newest_in_tiers(tiers: Sequence[NodeTier], stored: Collection[int], *, at_least: int) -> Path | None:
    """Find the newest checkpoint that a tier has complete and intact, and give each node the files that it needs.

    Return its local folder, or None if no tier has such a checkpoint of batch `at_least` or later. A collective.

    Args:
        stored: Batches of the checkpoints in the run's storage. A tier's checkpoint is only used if they include its
            `base`, the newest one when it was saved; a user who deletes the base wants to resume from before it.
    """
    candidates = [(each, tier) for tier in tiers for each in _candidates(tier, stored, at_least)]
    # Try the newest first. Sorting is stable, so for equal batches the fastest tier comes first.
    for candidate, tier in sorted(candidates, key=lambda each: -each[0].batch):
        found = _restore(candidate, tier)
        if found is not None:
            return found
    return None


def _candidates(tier: NodeTier, stored: Collection[int], at_least: int) -> list[_Candidate]:
    """Return the usable checkpoints on any node of a tier, of batch `at_least` or later, newest first; a collective."""
    own: set[_Candidate] = set()
    if tier.owns_folder:
        try:
            for checkpoint in checkpoint_store.list_checkpoints(tier.folder):
                receipt = _own_receipt(tier, checkpoint)
                if receipt is None or receipt['batch'] < at_least:
                    continue
                base = receipt.get('base')
                if base is None or base in stored:
                    own.add(_Candidate(receipt['batch'], receipt['save']))
                else:
                    log.warning(
                        "%s: not used, since ba%d, the checkpoint before it, was deleted from the run's storage",
                        checkpoint,
                        base,
                    )
        except OSError as error:
            log.warning('%s: cannot be read (%s)', tier.folder, error)
    return sorted(set().union(*dist.all_gather_object(own)), reverse=True)


def _own_receipt(tier: NodeTier, checkpoint: Path) -> dict[str, Any] | None:
    """Return this node's receipt of a checkpoint; None if it is missing or damaged, or belongs to another run."""
    try:
        receipt = checkpoint_store.parse_receipt((checkpoint / RECEIPT).read_bytes(), str(checkpoint))
    except (DamagedCheckpoint, OSError) as error:
        log.warning('%s: not used (%s)', checkpoint, error)
        return None
    return receipt if receipt.get('run') == tier.run_id and isinstance(receipt.get('save'), str) else None


def _restore(candidate: _Candidate, tier: NodeTier) -> Path | None:
    """Verify a tier's checkpoint and give each node its files; return the folder, None on failure. A collective."""
    began = time.monotonic()
    checkpoint = tier.folder / checkpoint_name(candidate.batch)
    name = tier.name_of(candidate.batch)
    text, intact, damaged = run_on_each_rank(lambda: _verify_own_files(candidate, tier, checkpoint), name)
    reports = dist.all_gather_object((text, intact, damaged))
    text = next((each for each, _, _ in reports if each), b'')
    damages = [each for _, _, damages in reports for each in damages]
    if not text:
        if dist.get_global_rank() == 0:
            log.warning('%s: not used, no receipt can be read%s', name, f' ({damages[0]})' if damages else '')
        return None
    receipt = checkpoint_store.parse_receipt(text, str(checkpoint))
    # Map the first rank of each node to the node's intact files.
    held = {node[0]: {file for rank in node for file in reports[rank][1]} for node in tier.nodes}
    missing = sorted(set(receipt['files']).difference(*held.values()))
    if missing:
        if dist.get_global_rank() == 0:
            reason = f' ({"; ".join(damages[:3])})' if damages else ''
            log.warning(
                '%s: not used, %d of its %d files are on no node, such as %s%s',
                *(name, len(missing), len(receipt['files']), missing[0], reason),
            )
        return None
    for damage in damages:
        if dist.get_global_rank() == 0:
            log.warning('%s: another node has this file: %s', name, damage)
    needs = dist.all_gather_object(sorted(_needed_files(receipt, tier)))
    transfers = plan_transfers(tier.nodes, needs, held)
    error = run_on_each_rank(lambda: _exchange(checkpoint, tier, text, receipt['files'], transfers), name)
    errors = [each for each in dist.all_gather_object(error) if each]
    if errors:
        if dist.get_global_rank() == 0:
            log.warning('%s: not used, its files could not be copied to all nodes (%s)', name, errors[0])
        return None
    if dist.get_global_rank() == 0:
        size = sum(receipt['files'][each.name].bytes for each in transfers)
        log.info(
            '%s: complete on %d nodes and verified; %d files (%.3g GB) came from other nodes; %.2g s',
            *(name, len(tier.nodes), len(transfers), size / 1e9, time.monotonic() - began),
        )
    return checkpoint


def _verify_own_files(candidate: _Candidate, tier: NodeTier, checkpoint: Path) -> tuple[bytes, list[str], list[str]]:
    """Verify this rank's share of the node's files; return the receipt or b'', the intact files, and error messages."""
    intact: list[str] = []
    damages: list[str] = []
    try:
        text = (checkpoint / RECEIPT).read_bytes()
        receipt = checkpoint_store.parse_receipt(text, str(checkpoint))
    except FileNotFoundError:
        return b'', [], []
    except (DamagedCheckpoint, OSError) as error:
        return b'', [], [str(error)]
    if receipt.get('run') != tier.run_id or receipt.get('save') != candidate.save:
        return b'', [], []
    files: dict[str, FileRecord] = receipt['files']
    node_ranks = tier.node_ranks
    for name in sorted(files)[node_ranks.index(dist.get_global_rank()) :: len(node_ranks)]:
        path = checkpoint / name
        try:
            if path.stat().st_size == files[name].bytes and checkpoint_store.hash_file(path) == files[name]:
                intact.append(name)
            else:
                damages.append(f'{path}: does not match its receipt')
        except FileNotFoundError:  # another node has the file
            pass
        except OSError as error:
            damages.append(f'{path}: {error.strerror}')
    return text, intact, damages


def _needed_files(receipt: dict[str, Any], tier: NodeTier) -> set[str]:
    """Return the files that this rank's node needs so that all of its ranks can load the checkpoint."""
    world_size = dist.get_world_size()
    same_layout = receipt.get('world_size') == world_size and receipt.get('recipe') == recipe_hash(tier)
    # If parallelism.replicas is set, some ranks have written no shards and read those of other ranks.
    writers = {int(found[1]) for name in receipt['files'] if (found := SHARD.match(name))}
    if receipt.get('kind') == 'sharded' and same_layout and writers == set(range(world_size)):
        return set(files_of_rank(receipt, tier.node_ranks))
    # Give the node all files: which shards a rank reads is only known once the model has been built.
    return set(receipt['files'])


def plan_transfers(
    nodes: Sequence[Sequence[int]], needs: Sequence[Collection[str]], held: dict[int, set[str]]
) -> list[_Transfer]:
    """Return the transfers that give each node its missing files, in an order that is equal on all ranks.

    The first rank of each node sends and receives for it; `held` maps that rank to the node's intact files. If several
    nodes have a file, they take turns sending it.
    """
    transfers: list[_Transfer] = []
    for node in nodes:
        wanted = {name for rank in node for name in needs[rank]} - held[node[0]]
        for name in sorted(wanted):
            holders = [rank for rank in held if name in held[rank]]
            transfers.append(_Transfer(name, holders[len(transfers) % len(holders)], node[0]))
    return transfers


def _exchange(
    checkpoint: Path, tier: NodeTier, receipt: bytes, files: dict[str, FileRecord], transfers: Sequence[_Transfer]
) -> str:
    """Send and receive this rank's files; return a description of the first error, or an empty string."""
    rank = dist.get_global_rank()
    error = ''

    def note(work: Callable[[], None]) -> None:
        nonlocal error
        try:
            work()
        except (OSError, RuntimeError) as caught:  # a RuntimeError comes from gloo if the other node does not respond
            error = error or f'{checkpoint}: {caught}'

    def prepare() -> None:
        checkpoint.mkdir(exist_ok=True)
        unfinished = checkpoint / f'.{RECEIPT}.unfinished'
        unfinished.write_bytes(receipt)
        os.replace(unfinished, checkpoint / RECEIPT)
        checkpoint_store.remove_unfinished_saves(tier.folder)

    if tier.owns_folder:
        note(prepare)
    for each in transfers:
        path, record = checkpoint / each.name, files[each.name]
        if rank == each.source:
            note(lambda path=path, record=record, to=each.to: send_file(path, record, to, tier.group))
        elif rank == each.to:
            note(lambda path=path, record=record, source=each.source: receive_file(path, record, source, tier.group))
    return error
