"""Immediate checkpoint for a run that has to stop, regardless of the save interval."""

from typing import Protocol, runtime_checkable

from composer.callbacks import CheckpointSaver
from composer.core import State
from composer.loggers import Logger

from diffusion.compatibility.private_names import private_attribute


@runtime_checkable
class SavesInTime(Protocol):
    """A saver that may have a save in the background, and chooses what to finish in the time that is left."""

    def save_in_time(self, state: State, logger: Logger, notice_seconds: float | None) -> None: ...

    def finish_save(self, logger: Logger) -> None: ...


def save_now(state: State, logger: Logger, *, notice_seconds: float | None = None) -> str | None:
    """Save a checkpoint immediately, unless this batch already has one; a collective, which every rank must call.

    Args:
        notice_seconds: Seconds until this process is killed; None if it is not, or not known on this rank.

    Returns:
        The path or remote name of the newest checkpoint: that of this batch, or an earlier one if the time suffices
        only to finish a save in the background. None if the run does not save resumable checkpoints.
    """
    # A saver of weights only does not count: a run cannot resume from its files.
    savers = [callback for callback in state.callbacks if isinstance(callback, CheckpointSaver)]
    saver = next((saver for saver in savers if not saver.weights_only), None)
    if saver is None:
        return None
    # This method is private; its public caller, Trainer.save_checkpoint_to_save_folder, is not available to callbacks.
    if saver.last_checkpoint_batch != state.timestamp.batch:
        if isinstance(saver, SavesInTime):
            saver.save_in_time(state, logger, notice_seconds)
        else:
            private_attribute(saver, '_save_checkpoint')(state, logger)
    if saver.remote_uploader is not None and saver.remote_file_name is not None:
        # The local path would be useless: it is in a temporary folder.
        return saver.remote_file_name.format(state)
    # Composer's saver has the paths only on the ranks that write; the others format the file name.
    return str(saver.saved_checkpoints[-1]) if saver.saved_checkpoints else saver.filename.format(state)
