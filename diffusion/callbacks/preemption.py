"""Graceful stop: on SIGTERM, SIGUSR1, SIGHUP or Ctrl-C save a checkpoint and raise `Preempted` (exit status 75).

Also contains the immediate save that this and other callbacks make before a run stops.
"""

import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol, runtime_checkable

import torch
from composer.callbacks import CheckpointSaver
from composer.core import Callback, State
from composer.devices import Device
from composer.loggers import Logger
from composer.utils import dist

from diffusion.compatibility.private_names import private_attribute
from diffusion.data.epoch_position import is_last_batch
from diffusion.exit_codes import INTERRUPTED, Preempted
from diffusion.models.host_copy import HostCopy
from diffusion.runs.environment import worker_notice_seconds
from diffusion.runs.stop_signals import STOP_SIGNALS, RepeatedInterrupt, SignalThread, describe_loss, handled_signals

log = logging.getLogger(__name__)

NOT_SAVED = 'nothing is saved: there is no save_folder'


class Preemption(Callback):
    """Callback that stops a run when any rank receives a signal: finish the batch, save, and raise `Preempted`.

    The signals are SIGTERM, SIGUSR1, SIGHUP (the terminal was closed) and SIGINT (Ctrl-C). SIGHUP and SIGINT stay
    ignored if the process was started with them ignored, for example by nohup. All ranks raise together. The signal may
    arrive during a batch, an evaluation or a save. After the last batch, training ends normally. A second Ctrl-C ends
    the process immediately with status 130 and a message that says which batches are lost.
    """

    # During training, signals only set a flag, and a process that has received one ignores all further ones. Otherwise
    # a second signal would kill a save or an upload: launchers signal the remaining ranks once one has exited.

    def __init__(self) -> None:
        self.signal = 0
        """The signal that this process has received, or 0 if none."""
        self.on_interrupt: Callable[[str], None] = lambda loss: None
        """Called with a description of the lost batches before a second Ctrl-C ends the process."""
        self._signaled_at = 0.0
        self._process = os.getpid()
        self._previous_handlers: dict[int, Any] = {}
        self._answer: HostCopy | None = None
        self._interrupts = RepeatedInterrupt()
        self._state: State | None = None
        self._first_batch = 0
        self._thread: SignalThread | None = None

    def fit_start(self, state: State, logger: Logger) -> None:
        if threading.current_thread() is not threading.main_thread():
            log.warning('preemption signals are not handled: training does not run in the main thread')
            return
        self._process = os.getpid()
        self._state, self._first_batch = state, state.timestamp.batch.value
        if self._thread is None:
            self._thread = SignalThread(self._act_on_interrupt)
            self._thread.start()
        for number in handled_signals():
            previous = signal.signal(number, self._handle_signal)
            # At a second call of fit(), `previous` is this callback's own handler; keep the original one.
            if previous != self._handle_signal:
                self._previous_handlers[number] = previous

    def batch_start(self, state: State, logger: Logger) -> None:
        # Look for PyTorch's SIGCHLD handler in every batch: it is only installed when the first loader starts workers.
        handler = signal.getsignal(signal.SIGCHLD)
        if self._previous_handlers and callable(handler) and handler != self._handle_child_exit:
            self._previous_handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, self._handle_child_exit)

    def after_train_batch(self, state: State, logger: Logger) -> None:
        # Exchange signals between ranks here, and read the result at the end of the batch: Composer waits for the
        # device in between, so this exchange costs no extra wait. A signal that arrives later is found at the end of
        # the next batch.
        self._answer = highest_signal(self.signal, state.device) if dist.get_world_size() > 1 else None

    def eval_end(self, state: State, logger: Logger) -> None:
        self._answer = None  # the evaluation may have taken long, so ask all ranks for signals again

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        # Stop at this event: it comes after the batch's evaluation, if any, and before Composer's CheckpointSaver,
        # which is always the last callback.
        self._stop_if_signaled(state, logger)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        # Also stop here, before the next batch: the evaluation at the end of an epoch and the wait for the next epoch's
        # first batch can both be long.
        self._stop_if_signaled(state, logger)

    def post_close(self) -> None:
        if self._thread is not None and threading.current_thread() is threading.main_thread():
            self._thread.stop()
            self._thread = None
        # Uploads have finished before post_close. If the process continues, it must react to signals again, so restore
        # the handlers. If it was signaled, it is exiting and keeps ignoring signals.
        if self.signal or threading.current_thread() is not threading.main_thread():
            return
        for number, previous in self._previous_handlers.items():
            if signal.getsignal(number) in (self._handle_signal, self._handle_child_exit):
                signal.signal(number, previous)

    def _stop_if_signaled(self, state: State, logger: Logger) -> None:
        """Save a checkpoint and raise Preempted if any rank has received a signal; a collective."""
        answer, self._answer = self._answer, None
        if answer is None and dist.get_world_size() > 1:
            answer = highest_signal(self.signal, state.device)
        number = self.signal if answer is None else answer.read()[0]
        if not number or is_last_batch(state):
            return
        saved = save_now(state, logger, notice_seconds=self._notice_left())
        if self._previous_handlers:
            for each in (number for number in STOP_SIGNALS if number != signal.SIGINT):
                # SIGINT keeps its handler: a second Ctrl-C must still end a hanging upload. The others get SIG_IGN,
                # because Python removes its own handlers some time before the process exits, while ignored signals stay
                # ignored.
                signal.signal(each, signal.SIG_IGN)
        outcome = f'{saved} is saved, the same command resumes from it' if saved else NOT_SAVED
        by_user = number == signal.SIGINT
        cause = 'Ctrl-C' if by_user else signal.Signals(number).name
        raise Preempted(f'stopped at batch {state.timestamp.batch.value} on {cause}; {outcome}', by_user=by_user)

    def _notice_left(self) -> float | None:
        notice = worker_notice_seconds(os.environ)
        return None if notice is None or not self.signal else notice - (time.monotonic() - self._signaled_at)

    def _handle_signal(self, number: int, frame: FrameType | None) -> None:
        """Record the signal for the end of the batch; in a forked child process, call the previous handler."""
        if os.getpid() == self._process:
            # Do not call the previous handler: it is Composer's, which exits immediately. (MLFlowLogger's SIGTERM
            # handler runs in its monitor, a separate process.)
            if not self.signal:
                self._signaled_at = time.monotonic()
            self.signal = number
            return
        # A child process forked during training, such as a loader worker, inherits this handler but has no batch to
        # finish, so it calls the previous handler. Ctrl-C and closing the terminal signal all processes of the
        # terminal, and a child ignores them: the parent still needs the child to finish the batch.
        if number in (signal.SIGINT, signal.SIGHUP):
            return
        previous = self._previous_handlers[number]
        if callable(previous):
            previous(number, frame)

    def _act_on_interrupt(self, number: int) -> None:
        """Announce the save on the first Ctrl-C, and end this process on the second; runs in a separate thread."""
        if number != signal.SIGINT or self._state is None:
            return
        repeated = self._interrupts.is_repeated()
        loss = describe_loss(self._state.timestamp.batch.value, self._saved_batch(self._state))
        if repeated:
            if dist.get_global_rank() == 0:
                print(f'ended by a second Ctrl-C: {loss}', file=sys.stderr, flush=True)
            try:
                self.on_interrupt(loss)
            finally:
                os._exit(INTERRUPTED)
        if dist.get_global_rank() == 0:
            log.warning(
                'saving a checkpoint after this batch; press Ctrl-C again to end at once without saving (then %s)', loss
            )

    def _saved_batch(self, state: State) -> int:
        savers = [each for each in state.callbacks if isinstance(each, CheckpointSaver) and not each.weights_only]
        # `_first_batch` counts as saved too: the run started with its checkpoint, or with batch 0.
        batches = [each.last_checkpoint_batch.value for each in savers if each.last_checkpoint_batch is not None]
        return max([*batches, self._first_batch])

    def _handle_child_exit(self, number: int, frame: FrameType | None) -> None:
        """Call PyTorch's SIGCHLD handler, but ignore its error for a worker killed by SIGTERM."""
        try:
            self._previous_handlers[signal.SIGCHLD](number, frame)
        except RuntimeError as error:
            # A scheduler may signal the whole process group, which kills the loader's workers. PyTorch's SIGCHLD
            # handler would then raise in the middle of a batch that no longer needs the workers. (If a worker is
            # needed, the loader detects that it is gone.)
            if 'killed by signal: Terminated' not in str(error):
                raise


def highest_signal(number: int, device: Device) -> HostCopy:
    """Return the highest signal number that any rank has received, 0 if none, as HostCopy of int [1]; a collective."""
    # Move the number to the GPU, if there is one: NCCL does not reduce CPU tensors.
    numbers = device.tensor_to_device(torch.tensor([number]))
    dist.all_reduce(numbers, reduce_operation='MAX')
    return HostCopy(numbers)


@runtime_checkable
class SavesInTime(Protocol):
    """Interface of checkpoint savers that save in the background and choose which saves a stopping run completes."""

    def save_in_time(self, state: State, logger: Logger, notice_seconds: float | None) -> None: ...

    def finish_save(self, logger: Logger) -> None: ...


def save_now(state: State, logger: Logger, *, notice_seconds: float | None = None) -> str | None:
    """Save a checkpoint immediately, unless this batch already has one; a collective.

    Returns the path or remote name of the newest checkpoint, or None if the run saves no resumable checkpoints.
    `notice_seconds` is the time until this process is killed, None if unknown on this rank. If there is only time to
    complete a running background save, the newest checkpoint is that of an earlier batch.
    """
    # A saver that only saves weights does not count: a run cannot resume from its files.
    savers = [callback for callback in state.callbacks if isinstance(callback, CheckpointSaver)]
    saver = next((saver for saver in savers if not saver.weights_only), None)
    if saver is None:
        return None
    # Call the saver's private method: its public caller, Trainer.save_checkpoint_to_save_folder, is not available here.
    if saver.last_checkpoint_batch != state.timestamp.batch:
        if isinstance(saver, SavesInTime):
            saver.save_in_time(state, logger, notice_seconds)
        else:
            private_attribute(saver, '_save_checkpoint')(state, logger)
    if saver.remote_uploader is not None and saver.remote_file_name is not None:
        # The local path would be useless: it points into a temporary folder.
        return saver.remote_file_name.format(state)
    # Composer's saver knows the paths only on ranks that write; the others format the file name.
    return str(saver.saved_checkpoints[-1]) if saver.saved_checkpoints else saver.filename.format(state)
