"""Stopping in good order when the machines are taken away: SIGTERM or SIGUSR1, a checkpoint, exit status 75."""

import logging
import os
import signal
import threading
from types import FrameType
from typing import Any

import torch
from composer.core import Callback, State
from composer.devices import Device
from composer.loggers import Logger
from composer.utils import dist

from diffusion.callbacks.save_now import save_now
from diffusion.exit_codes import Preempted

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGUSR1)


class Preemption(Callback):
    """On SIGTERM or SIGUSR1 at any rank, all ranks end the batch, save a checkpoint and raise `Preempted`.

    The signal may come during a batch, an evaluation or a save. A run that ends with this batch ends as usual. From
    the start of training the signals do nothing else, and in a process that was told to stop they never do again: so
    neither a second one, nor a launcher that tells the other ranks when the first has gone, ends a save or an upload.
    """

    def __init__(self) -> None:
        self.signal = 0
        """The signal that this process was sent, or 0."""
        self._process = os.getpid()
        self._earlier: dict[int, Any] = {}

    def fit_start(self, state: State, logger: Logger) -> None:
        if threading.current_thread() is not threading.main_thread():
            log.warning('this process cannot be told to stop: only the main thread may handle signals')
            return
        self._process = os.getpid()
        for number in SIGNALS:
            earlier = signal.signal(number, self._note)
            if earlier != self._note:
                self._earlier[number] = earlier

    def batch_start(self, state: State, logger: Logger) -> None:
        # PyTorch has a handler from when it starts the first workers of a loader.
        handler = signal.getsignal(signal.SIGCHLD)
        if self._earlier and callable(handler) and handler != self._child_ended:
            self._earlier[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, self._child_ended)

    def batch_checkpoint(self, state: State, logger: Logger) -> None:
        # After the evaluation of this batch, if it had one, and before Composer's CheckpointSaver, which comes last.
        self._stop_if_told(state, logger)

    def epoch_checkpoint(self, state: State, logger: Logger) -> None:
        # An evaluation at the end of an epoch can be long, and so can the wait for the next epoch's first batch.
        self._stop_if_told(state, logger)

    def post_close(self) -> None:
        # Uploads have been waited for, at the end of training. A program that goes on can be ended again; one that was
        # told to stop is ending.
        if self.signal or threading.current_thread() is not threading.main_thread():
            return
        for number, earlier in self._earlier.items():
            if signal.getsignal(number) in (self._note, self._child_ended):
                signal.signal(number, earlier)

    def _stop_if_told(self, state: State, logger: Logger) -> None:
        number = loudest(self.signal, state.device)
        if not number or is_over(state):
            return
        saved = save_now(state, logger)
        if self._earlier:
            for each in SIGNALS:
                # Not only noted: Python gives its own handlers up some time before the process ends, ignored signals
                # stay ignored.
                signal.signal(each, signal.SIG_IGN)
        what = (
            f'{saved} is saved, the same command goes on from there'
            if saved
            else 'nothing is saved, for want of a save_folder'
        )
        raise Preempted(f'stopped at batch {state.timestamp.batch.value} on {signal.Signals(number).name}; {what}')

    def _note(self, number: int, frame: FrameType | None) -> None:
        if os.getpid() == self._process:
            # The earlier handler is not called: it is Composer's, which exits at once. (MLFlowLogger's SIGTERM handler
            # is one of its monitor, a process of its own.)
            self.signal = number
            return
        # A child that was forked while training, such as a loader's worker, has no batch to finish.
        earlier = self._earlier[number]
        if callable(earlier):
            earlier(number, frame)

    def _child_ended(self, number: int, frame: FrameType | None) -> None:
        try:
            self._earlier[signal.SIGCHLD](number, frame)
        except RuntimeError as error:
            # A scheduler may signal the whole process group. The loader's workers die of it, and PyTorch raises that in
            # the middle of a batch, which does not need them any more. (Where one is needed, the loader finds out.)
            if 'killed by signal: Terminated' not in str(error):
                raise


def loudest(number: int, device: Device) -> int:
    """The highest of the ranks' signals, the same on every rank."""
    if dist.get_world_size() == 1:
        return number
    # On the ranks' own device, since Composer's process group for GPUs (NCCL) takes nothing else. This waits for no
    # computation: Composer has just waited for the loss, which comes after the batch's last kernel.
    numbers = device.tensor_to_device(torch.tensor([number]))
    dist.all_reduce(numbers, reduce_operation='MAX')
    return int(numbers.item())


def is_over(state: State) -> bool:
    """Whether training ends with this batch."""
    end = state.max_duration
    assert end is not None
    if state.timestamp >= end:
        return True
    # At BATCH_CHECKPOINT the clock has not counted the epoch yet.
    last_of_epoch = state.timestamp.batch_in_epoch.value == state.dataloader_len
    return last_of_epoch and state.timestamp.to_next_epoch() >= end
