"""Saving and loading of checkpoints that can be resumed on any number of devices with any parallelism strategy."""

import contextlib
import logging
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Literal

from composer.callbacks import CheckpointSaver
from composer.core import Event, State, Time
from composer.loggers import Logger
from composer.utils import dist, reproducibility

from diffusion.checkpointing.background_save import BackgroundSave, pause_for_training
from diffusion.checkpointing.checkpoint_writer import SaveFailed, SaveInProgress, collect
from diffusion.checkpointing.rank_agreement import raise_on_all_ranks, run_on_each_rank
from diffusion.checkpointing.run_storage import RunStorage, run_storage
from diffusion.checkpointing.save_policy import FailedSaves, check_interval, make_room_after, timed_interval
from diffusion.checkpointing.sharded_state import present
from diffusion.checkpointing.snapshot import SnapshotBuffers, StateTensors, reserve_on_all_ranks
from diffusion.checkpointing.tiers.node_tier import NodeTier, open_tiers
from diffusion.checkpointing.tiers.tier_restore import find_resume_point, stored_batches
from diffusion.checkpointing.tiers.tier_saves import TierSaves
from diffusion.checkpointing.trainer_state import load_checkpoint
from diffusion.config.checkpointing import KeepConfig, TiersConfig
from diffusion.config.checkpointing_checks import runs_dir_problem
from diffusion.config.declarations import constrained
from diffusion.data.epoch_position import is_last_batch
from diffusion.errors import UserError
from diffusion.runs import run_lock

log = logging.getLogger(__name__)

LAST_SAVE_PAUSES_SECONDS = (2.0, 8.0, 20.0, 30.0)
"""Pauses between the tries of a required save: the save at the end of the run, a save before the run stops, or the last
save that may be tried after others have failed."""
SLOW_SECONDS = 1.0
"""If a save waits longer than this for the previous one, the log says that the save interval is too short."""

Outcome = Literal['saved', 'failed', 'made room']


class Checkpointer(CheckpointSaver):
    """Callback that saves checkpoints atomically (`checkpoint_store`) and resumes from one.

    If any rank has a storage fault, such as a full disk, the save fails on all ranks: the unfinished checkpoint is
    removed, the metric `checkpoint/failed_saves` is incremented, and training continues until the next save. Some saves
    are required: the third after two failures in a row, the save at the end of training, and a save before the run
    stops. These are retried for a minute, and the run ends if they still fail. Composer uses this callback instead of
    creating its own CheckpointSaver.

    An `asynchronous` save hardly blocks training. Weights, optimizer state and averages are copied to host memory
    during the next batch's forward and backward pass, which does not change them. A thread writes the copy, and at a
    later batch all ranks agree that it is complete and publish it. Only one save runs at a time; the next waits for it.
    Training is blocked during the last save, saves before the run stops, and saves without enough memory for a copy.

    Args:
        storage: The run's folder, on a file system that all nodes share, or its URL in an object store, or an open
            `RunStorage`.
        save_interval: A Composer time string, a time such as `10m`, or `auto`, which chooses the interval from the
            duration of saves and the run's failures. The end of training is always saved.
        keep: Checkpoints to keep (`retention`); None keeps all.
        sharded: If True, each rank writes its shards of model, optimizer and weight averages, which requires FSDP2;
            otherwise rank 0 writes them unsharded. Both formats can be read by any number of ranks with any strategy.
        asynchronous: If True, training continues while a checkpoint is written.
        resume: Checkpoint to resume from; None starts a new run. `auto` finds the run's newest undamaged checkpoint
            when training is set up, and rank 0 holds the run's lock until the Trainer is closed, so that no other job
            saves to the same place.
        recipe_text: The resolved recipe, saved in each checkpoint as recipe.yaml; empty for a run without a recipe.
        on_failed_save: Called on rank 0 with the message of each failed save.
        tiers: Additional storage for recent checkpoints on the nodes: a `TiersConfig`, or pairs of an open `NodeTier`
            and its save interval, fastest first.

    Raises:
        UserError: An argument is not valid.
    """

    # This is a subclass of Composer's CheckpointSaver, since the Trainer looks for one by type and asks it when to
    # save. The saving itself is replaced: Composer 0.32.1 writes directly to the final name without flushing, so a
    # process killed during a save leaves a truncated file.

    @constrained
    def __init__(
        self,
        storage: str | Path | RunStorage,
        *,
        save_interval: str | int | Time = '1ep',
        keep: KeepConfig | None = None,
        sharded: bool = False,
        asynchronous: bool = False,
        resume: Path | Literal['auto'] | None = None,
        recipe_text: str = '',
        on_failed_save: Callable[[str], None] = lambda message: None,
        tiers: TiersConfig | Sequence[tuple[NodeTier, str]] = (),
    ) -> None:
        check_interval(save_interval)
        if resume is not None and resume != 'auto' and not isinstance(resume, Path):
            path = f', Path({resume!r})' if isinstance(resume, str) else ''
            raise UserError(
                f"resume: {resume!r} is not a checkpoint; use 'auto' for the run's newest one, the pathlib.Path of a "
                f'checkpoint{path}, or None'
            )
        if isinstance(storage, str | Path):
            if (problem := runs_dir_problem(str(storage))) is not None:
                raise UserError(f'storage: {problem}')
            storage = run_storage(storage)
        elif not hasattr(storage, 'resume_point'):
            raise UserError(f'storage: {storage!r} is not a folder or a URL, such as runs/own or s3://bucket/runs/own')
        self.storage = storage
        self._timed = timed_interval(save_interval, self.storage.place)
        interval, folder = self._timed or save_interval, str(self.storage.folder)
        super().__init__(folder, '{batch}', None, None, None, interval, overwrite=True)  # no remote files, no links
        self.tmp_dir_for_symlink.cleanup()  # only used for uploads, which this class does not do
        self.keep = keep
        self.sharded = sharded
        self.resume = None if resume == 'auto' else resume
        self._opens = resume == 'auto'
        self._lock = contextlib.ExitStack()
        self.recipe_text = recipe_text
        self.failed_saves = FailedSaves(on_failed_save)
        self._random_state: list[dict[str, Any]] | None = None
        self._buffers = SnapshotBuffers() if asynchronous else None
        self._running: BackgroundSave | None = None
        self._write_seconds: float | None = None
        self._said_slow = False
        self._has_memory = False
        self._chosen_tiers = tiers
        self._tiers = TierSaves((), sharded=sharded, recipe_text=recipe_text, place=self.storage.place)

    @property
    def is_saving(self) -> bool:
        return self._running is not None

    @property
    def snapshot_bytes(self) -> int:
        return 0 if self._buffers is None else self._buffers.nbytes

    def init(self, state: State, logger: Logger) -> None:
        if self._opens:
            with raise_on_all_ranks(self.storage.place):
                if dist.get_global_rank() == 0:
                    self._lock.enter_context(run_lock.hold_run_lock(self.storage.place))
        if not self.storage.run_id:
            self.storage.open()
        tiers = self._chosen_tiers
        newest = max(stored_batches(self.storage), default=None) if tiers else None
        if isinstance(tiers, TiersConfig):
            tiers = open_tiers(tiers, self.storage.run_id, self.recipe_text, begun=newest is not None)
        if self._opens:
            self.resume = find_resume_point(self.storage, [tier for tier, _ in tiers])
        self._tiers = TierSaves(tiers, sharded=self.sharded, recipe_text=self.recipe_text, place=self.storage.place)
        self._tiers.stored(newest)
        self.storage.remove_unfinished()

    def before_load(self, state: State, logger: Logger) -> None:
        if self.resume is None:
            return
        # For a checkpoint from a tier, the node already has all files. It is temporary, so do not list it as saved.
        from_storage = self.resume.parent == self.storage.folder
        fetch = self.storage.fetch if from_storage else present
        self._random_state = load_checkpoint(state, logger, self.resume, fetch)
        if from_storage:
            self.last_checkpoint_batch = state.timestamp.batch
            self.saved_checkpoints.append(str(self.resume))
        log.info('resumed from %s', self.resume)

    # Noise and timesteps come from counter-based generators keyed by sample ID; torch's generator is for layers that
    # draw from it, such as dropout. Composer 0.32.1 restores that generator only if the Trainer's own load_path is set.
    # Loaders draw from the generator when they start. For a checkpoint within an epoch, the state is therefore restored
    # at the first batch, after the loader has started; for one from the end of an epoch, before the next epoch's loader
    # starts.
    def epoch_start(self, state: State, logger: Logger) -> None:
        self._restore_random_state()

    def batch_start(self, state: State, logger: Logger) -> None:
        self._restore_random_state()
        self._start_copies()

    def epoch_end(self, state: State, logger: Logger) -> None:
        # This only restores a state that was saved after an epoch's last batch; `batch_start` restores all others.
        self._restore_random_state()

    def before_dataloader(self, state: State, logger: Logger) -> None:
        self._start_copies()  # copy while the batch is loaded

    def after_train_batch(self, state: State, logger: Logger) -> None:
        # End the copies here: Composer runs this event after the backward pass and before the optimizer's step.
        if self._running is not None:
            self._running.end_copy()
        self._tiers.end_copy()

    # Composer's saver keeps its list of saved checkpoints in this state; this class lists the run's folder instead.
    def state_dict(self) -> dict[str, Any]:
        return {}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        pass

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        self._save_at_interval(state, logger, Event.BATCH_CHECKPOINT)
        # Allocate the snapshots' memory after the first batch, which creates the optimizer's state, instead of at the
        # first save: the kernel takes longer to provide new memory than a snapshot takes to fill it, and insufficient
        # memory is reported early.
        if self._buffers is not None and not self._has_memory and not is_last_batch(state):
            self._has_memory = True
            if self._running is None:
                self._allocate(state)
        can_save = self._running is None and self.last_checkpoint_batch != state.timestamp.batch
        self._tiers.after_batch(state, logger, self._buffers, can_save=can_save)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        self._save_at_interval(state, logger, Event.EPOCH_CHECKPOINT)

    def iteration_checkpoint(self, state: State, logger: Logger) -> None:
        self._save_at_interval(state, logger, Event.ITERATION_CHECKPOINT)

    def fit_end(self, state: State, logger: Logger) -> None:
        # Save again if the running save fails, since a custom save interval may not include the end of training.
        if self._running is not None and self._finish_running(logger) != 'saved':
            self._save_checkpoint(state, logger)
        super().fit_end(state, logger)
        self._tiers.clear()

    def close(self, state: State, logger: Logger) -> None:
        # A save is still running here only after a training error. The ranks can no longer agree, so nothing is
        # published. The thread stops at its next write, and the next start removes its files.
        if self._running is not None:
            log.warning('%s: not saved, since the run ended while it was being written', self._running.save.name)
            self._running.save.abandon()
            self._running = None
        self._tiers.close()
        self._lock.close()

    def save_in_time(self, state: State, logger: Logger, notice_seconds: float | None) -> None:
        """Save a checkpoint before the run stops; a collective. `save_now` calls this.

        `choose_when_stopping` decides if a running save is abandoned, or completed before or instead of the new one.

        Args:
            notice_seconds: Seconds until this process is killed; None if it will not be killed, or if unknown on this
                rank.
        """
        self._tiers.abandon()
        running = self._running
        if running is not None and running.batch != state.timestamp.batch:
            choice = running.choose(notice_seconds, self._write_seconds)
            if choice == 'replace':
                self._running = None
                running.abandon()
            elif choice == 'finish' and self._finish_running(logger) == 'saved':
                return
        self._save_checkpoint(state, logger)
        self._tiers.clear()

    def _restore_random_state(self) -> None:
        """Restore the checkpoint's random state, once, if it was saved by the same number of ranks."""
        states, self._random_state = self._random_state, None
        if states is not None and len(states) == dist.get_world_size():
            reproducibility.load_rng_state(states)

    def finish_save(self, logger: Logger) -> None:
        """Complete and publish a running background save, but do not start another one; a collective."""
        if self._running is not None:
            self._finish_running(logger)

    def _start_copies(self) -> None:
        if self._running is not None:
            self._running.start_copy()
        self._tiers.start_copy()

    def _save_at_interval(self, state: State, logger: Logger, event: Event) -> None:
        """Save a checkpoint if one is due. Training continues after a failed save, unless the save is required."""
        made_room = False
        if self._running is not None and self._running.poll(state):
            made_room = self._finish_running(logger) == 'made room'
        due = self.save_interval(state, event) and self.last_checkpoint_batch != state.timestamp.batch
        if self._running is not None and self._running.batch == state.timestamp.batch:
            due = False
        # If a save failed on a full disk and room has been made, repeat the save now instead of at the next interval.
        if not due and not made_room:
            return
        self._tiers.make_way(logger)
        last = is_last_batch(state)
        if self._running is not None and not last:
            made_room = self._wait_for_running(logger) == 'made room'
        if last or self.failed_saves.next_is_last:
            self._save_checkpoint(state, logger)
            return
        try:
            self._try_to_save(state, logger, in_background=True, made_room=made_room)
        except SaveFailed as error:
            self.failed_saves.continue_after(error, logger)

    def _save_checkpoint(self, state: State, logger: Logger) -> None:
        """Save a checkpoint that the run needs, with retries; a collective, which Composer and `save_now` call too."""
        if self._running is not None:
            self._finish_running(logger)
            if self.last_checkpoint_batch == state.timestamp.batch:
                return
        for pause in (*LAST_SAVE_PAUSES_SECONDS, None):
            try:
                self._try_to_save(state, logger)
                return
            except SaveFailed as error:
                if pause is None:
                    newest = self.saved_checkpoints[-1] if self.saved_checkpoints else 'none'
                    raise self.failed_saves.end_after(error, logger, newest) from error
                if dist.get_global_rank() == 0:
                    log.warning('%s; trying again in %g s', error, pause)
                time.sleep(pause)

    def _try_to_save(
        self, state: State, logger: Logger, *, in_background: bool = False, made_room: bool = False
    ) -> None:
        """Save now or start a background save; on a full disk, make room and retry unless `made_room`. A collective."""
        began = time.monotonic()
        try:
            save = self._write(state, in_background=in_background)
        except SaveFailed as error:
            if made_room or not make_room_after(error, self.storage, self.keep, state.timestamp.batch.value):
                raise
            made_room = True
            save = self._write(state, in_background=in_background)
        if save.published:
            self._record(save, state.timestamp.batch, logger, began=began)
            return
        batch, stall = state.timestamp.batch, time.monotonic() - began
        self._running = BackgroundSave(save, batch, stall_seconds=stall, pause=pause_for_training())
        self._running.after_making_room = made_room

    def _write(self, state: State, *, in_background: bool) -> SaveInProgress:
        """Save a checkpoint, or only take the snapshot for a background save; a collective."""
        buffers = self._buffers if in_background else None
        save = SaveInProgress(
            state, self.storage, sharded_tensors=self.sharded, recipe_text=self.recipe_text, buffers=buffers
        )
        if not save.has_snapshot:
            if in_background:
                self._buffers = None  # memory does not suffice for snapshots, so do not try again
            run_on_each_rank(save.write, save.name)
            save.publish()
        return save

    def _allocate(self, state: State) -> None:
        """Allocate the memory for snapshots before the first snapshot, if there is enough; a collective."""
        assert self._buffers is not None
        # Keep `collected` alive until `place` returns: `tensors` identifies the tensors by address.
        collected = collect(state, self.storage.work_folder(state.timestamp.batch.value), sharded_tensors=self.sharded)
        tensors = StateTensors(collected.written)
        if reserve_on_all_ranks(self._buffers, tensors):
            self._buffers.place(tensors.views)
            self._buffers.prepare()
        else:
            self._buffers = None

    def _wait_for_running(self, logger: Logger) -> Outcome:
        """Complete the background save before the next one, and log once if that takes long."""
        running, began = self._running, time.monotonic()
        assert running is not None
        outcome = self._finish_running(logger)
        waited = time.monotonic() - began
        if waited > SLOW_SECONDS and not self._said_slow and dist.get_global_rank() == 0:
            self._said_slow = True
            message = (
                '%s: took %.3g s, longer than the save interval, so training waited %.3g s for it. To fix: a longer '
                'trainer.save_interval, or faster storage'
            )
            log.warning(message, running.save.name, running.elapsed_seconds(), waited)
        return outcome

    def _finish_running(self, logger: Logger) -> Outcome:
        """Complete and publish the running save; return `saved`, `failed`, or `made room` for a retry. A collective."""
        running, self._running = self._running, None
        assert running is not None
        began = time.monotonic()
        running.wait()
        try:
            running.save.publish()
        except SaveFailed as error:
            if not running.after_making_room and make_room_after(error, self.storage, self.keep, running.batch.value):
                return 'made room'
            self.failed_saves.continue_after(error, logger)
            return 'failed'
        self._record(running.save, running.batch, logger, began=began - running.stall_seconds)
        return 'saved'

    def _record(self, save: SaveInProgress, batch: Time, logger: Logger, *, began: float) -> None:
        """Record a published checkpoint and remove old ones; training has been blocked since `began`. A collective."""
        self._write_seconds = save.write_seconds
        # Set this only after the save: `save_now` does not save a batch that is recorded here.
        self.last_checkpoint_batch = batch
        self.saved_checkpoints.append(save.name)
        self.failed_saves.succeeded()
        self._tiers.stored(batch.value)
        if dist.get_global_rank() == 0 and self.keep is not None:
            try:
                self.storage.prune(self.keep)
            except OSError as error:  # the next save tries again
                log.warning('%s: old checkpoints are not removed (%s)', self.storage.place, error)
        stall_seconds = time.monotonic() - began
        if self._timed is not None:
            self._timed.saved(stall_seconds, save.total_seconds)
        logger.log_metrics({'checkpoint/stall_seconds': stall_seconds, 'checkpoint/save_seconds': save.total_seconds})
