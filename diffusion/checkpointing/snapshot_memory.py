"""Agreement of all ranks to allocate memory for snapshots, if every node has enough."""

import logging
import os

from composer.utils import dist

from diffusion.checkpointing.snapshot import SnapshotBuffers, StateTensors
from diffusion.config.byte_sizes import bytes_text
from diffusion.runs import environment
from diffusion.storage.host_memory import available_memory

log = logging.getLogger(__name__)

SPARE_FRACTION = 0.1
"""Fraction of a node's available memory that snapshots leave free."""


def reserve_on_all_ranks(buffers: SnapshotBuffers, tensors: StateTensors) -> bool:
    """Allocate memory for a snapshot on every rank, or on none and return False; a collective."""
    machine = environment.machine_name(os.environ)
    need, available = tensors.nbytes, available_memory()
    missing = max(0, need - buffers.nbytes)
    figures = dist.all_gather_object((machine, missing, available))
    if not any(each for _, each, _ in figures):
        return True
    needs = {name: sum(each for place, each, _ in figures if place == name) for name, _, _ in figures}
    for name, _, free in figures:
        if free is not None and needs[name] > (1 - SPARE_FRACTION) * free:
            if dist.get_global_rank() == 0:
                log.warning(
                    'saves block training: a snapshot needs %s of memory on %s, where %s are available. To fix: '
                    'lower loader.num_workers or loader.prefetch_factor, or set checkpointing.asynchronous: false',
                    *(bytes_text(needs[name]), name, bytes_text(free)),
                )
            return False
    return all(dist.all_gather_object(buffers.reserve(need, pinned=tensors.on_gpu)))


def has_room_on_all_nodes(needed_bytes: int) -> bool:
    """Return True if every node has memory for what its ranks need, and keeps some free; a collective."""
    machine = environment.machine_name(os.environ)
    figures = dist.all_gather_object((machine, needed_bytes, available_memory()))
    needs = {name: sum(each for place, each, _ in figures if place == name) for name, _, _ in figures}
    return all(free is None or needs[name] <= (1 - SPARE_FRACTION) * free for name, _, free in figures)
