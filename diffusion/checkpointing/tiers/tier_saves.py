"""Saves to the nodes' tiers, between saves to the run's storage."""

import logging
import time
from collections.abc import Callable, Sequence

from composer.core import Event, State
from composer.loggers import Logger
from composer.utils import dist
from composer.utils.misc import create_interval_scheduler

from diffusion.checkpointing.background_save import BackgroundSave
from diffusion.checkpointing.checkpoint_writer import SaveFailed, SaveInProgress
from diffusion.checkpointing.rank_agreement import run_on_each_rank
from diffusion.checkpointing.save_policy import TimedInterval, timed_interval
from diffusion.checkpointing.snapshot import SnapshotBuffers, has_room_on_all_nodes
from diffusion.checkpointing.tiers.node_tier import EXCHANGE_FAILED, NodeTier
from diffusion.data.epoch_position import is_last_batch

log = logging.getLogger(__name__)

MAX_FAILED_SAVES = 3
"""Number of consecutive failed saves to a tier after which the run continues without it."""


class _Schedule:
    def __init__(self, tier: NodeTier, interval: str, place: str) -> None:
        self.tier = tier
        self.timed: TimedInterval | None = timed_interval(interval, place)
        self.is_due: Callable[[State, Event], bool] = self.timed or create_interval_scheduler(interval)
        self.failed_in_a_row = 0
        self.pending = False
        """True if a save is due but has to wait for another save."""


class TierSaves:
    """Saves to the nodes' tiers. All methods are collectives unless noted.

    Only one save runs at a time, and none during a save to the run's storage. A failed save is only reported, since the
    run does not depend on its tiers.
    """

    def __init__(self, tiers: Sequence[tuple[NodeTier, str]], *, sharded: bool, recipe_text: str, place: str) -> None:
        self._schedules = [_Schedule(tier, interval, place) for tier, interval in tiers]
        self._dropped: list[NodeTier] = []
        self._sharded, self._recipe_text = sharded, recipe_text
        self._running: tuple[_Schedule, BackgroundSave] | None = None
        self._gives_up = False
        """True if the running save must be removed once its threads have ended."""

    def after_batch(self, state: State, logger: Logger, buffers: SnapshotBuffers | None, *, can_save: bool) -> None:
        """Publish a completed save; start one that is due if `can_save`, that is, if no other save needs `buffers`."""
        for each in self._schedules:
            each.pending = (each.is_due(state, Event.BATCH_CHECKPOINT) or each.pending) and not is_last_batch(state)
        if self._running is not None and self._running[1].poll(state):
            self._finish(logger)
        due = next((each for each in self._schedules if each.pending), None)
        if due is None or self._running is not None or not can_save:
            return
        due.pending = False
        self._save(due, state, logger, buffers)

    def start_copy(self) -> None:
        """Start copying the snapshot of the running save; not a collective."""
        if self._running is not None:
            self._running[1].start_copy()

    def end_copy(self) -> None:
        """Wait until the snapshot is copied, since the optimizer changes the weights next; not a collective."""
        if self._running is not None:
            self._running[1].end_copy()

    def make_way(self, logger: Logger) -> None:
        """Publish the running save if it is complete, otherwise give it up.

        A save to the run's storage needs the memory of this save's snapshot, and training should not wait. The thread
        may continue to exchange files for a while; no other save to a tier starts until it ends.
        """
        if self._running is None or self._gives_up:
            return
        running = self._running[1]
        if running.is_written():
            self._finish(logger)
            return
        self._gives_up = True
        running.save.abandon()
        if dist.get_global_rank() == 0:
            log.info('%s: given up, since a save to the storage of the run is due', running.save.name)

    def abandon(self) -> None:
        if self._running is not None:
            (_, running), self._running = self._running, None
            running.abandon()
            self._gives_up = False

    def stored(self, batch: int | None) -> None:
        """Record the batch of the newest checkpoint in the run's storage, and clear dropped tiers; not a collective."""
        for each in self._schedules:
            each.tier.base = batch
        # Dropped tiers kept their checkpoints until now, since those may have been the newest.
        while self._dropped:
            tier = self._dropped.pop()
            tier.clear()
            tier.close()

    def clear(self) -> None:
        """Remove the checkpoints in all tiers; called when the run no longer needs them."""
        self.abandon()
        if tiers := self._all_tiers():
            dist.barrier()
            for tier in tiers:
                tier.clear()

    def close(self) -> None:
        """Stop the running save after a training error, when the ranks can no longer agree; not a collective."""
        if self._running is not None:
            self._running[1].save.abandon()
            self._running = None
        for tier in self._all_tiers():
            tier.close()

    def _all_tiers(self) -> list[NodeTier]:
        return [*(each.tier for each in self._schedules), *self._dropped]

    def _finish(self, logger: Logger) -> None:
        """Publish the completed save, or remove it if it was given up."""
        assert self._running is not None
        (schedule, running), self._running = self._running, None
        if self._gives_up:
            self._gives_up = False
            running.save.discard()
            return
        self._publish(schedule, running.save, logger, time.monotonic() - running.stall_seconds)

    def _save(self, schedule: _Schedule, state: State, logger: Logger, buffers: SnapshotBuffers | None) -> None:
        """Start a save to a tier, or save synchronously if memory does not suffice for a snapshot."""
        began = time.monotonic()
        try:
            tier = schedule.tier
            save = SaveInProgress(
                state, tier, sharded_tensors=self._sharded, recipe_text=self._recipe_text, buffers=buffers
            )
            needed = tier.kept_bytes(dist.all_gather_object(save.progress.total_bytes))
            if tier.name == 'memory' and not has_room_on_all_nodes(needed):
                save.discard()
                self._drop(schedule, 'its checkpoints do not fit into the memory of a node')
                return
            if save.has_snapshot:
                running = BackgroundSave(save, state.timestamp.batch, stall_seconds=time.monotonic() - began)
                self._running = (schedule, running)
                return
            run_on_each_rank(save.write, save.name)
        except SaveFailed as error:
            self._failed(schedule, error, logger)
            return
        self._publish(schedule, save, logger, began)

    def _publish(self, schedule: _Schedule, save: SaveInProgress, logger: Logger, began: float) -> None:
        try:
            save.publish()
        except SaveFailed as error:
            self._failed(schedule, error, logger)
            return
        schedule.failed_in_a_row = 0
        stall_seconds = time.monotonic() - began
        if schedule.timed is not None:
            schedule.timed.saved(stall_seconds, save.total_seconds)
        prefix = f'checkpoint/{schedule.tier.name}'
        logger.log_metrics({f'{prefix}_stall_seconds': stall_seconds, f'{prefix}_save_seconds': save.total_seconds})

    def _failed(self, schedule: _Schedule, error: SaveFailed, logger: Logger) -> None:
        schedule.failed_in_a_row += 1
        logger.log_metrics({f'checkpoint/{schedule.tier.name}_failed_saves': schedule.failed_in_a_row})
        if dist.get_global_rank() == 0:
            log.warning('%s; training continues', error)
        # The ranks may have hit different faults but must make the same decision.
        if any(dist.all_gather_object(error.errno == EXCHANGE_FAILED)):
            self._drop(schedule, 'the exchange of files between nodes has failed')
        elif schedule.failed_in_a_row == MAX_FAILED_SAVES:
            self._drop(schedule, f'{MAX_FAILED_SAVES} saves in a row have failed')

    def _drop(self, schedule: _Schedule, reason: str) -> None:
        """Continue without a tier; its last checkpoint stays until the run's storage has a newer one."""
        if dist.get_global_rank() == 0:
            log.warning('%s: no longer used in this run, %s', schedule.tier.place, reason)
        self._schedules.remove(schedule)
        self._dropped.append(schedule.tier)
