"""Immediate checkpoint for a run that has to stop, regardless of the save interval."""

from composer.callbacks import CheckpointSaver
from composer.core import State
from composer.loggers import Logger


def save_now(state: State, logger: Logger) -> str | None:
    """Save a checkpoint immediately, unless this batch already has one; a collective, which every rank must call.

    Returns:
        The checkpoint's path or remote name, or None if the run does not save resumable checkpoints.
    """
    # A saver of weights only does not count: a run cannot resume from its files.
    savers = [callback for callback in state.callbacks if isinstance(callback, CheckpointSaver)]
    saver = next((saver for saver in savers if not saver.weights_only), None)
    if saver is None:
        return None
    # The private method: its public caller, Trainer.save_checkpoint_to_save_folder, is not available to callbacks.
    if saver.last_checkpoint_batch != state.timestamp.batch:
        saver._save_checkpoint(state, logger)
    if saver.remote_uploader is not None and saver.remote_file_name is not None:
        # Not the local path: it is in a temporary folder.
        return saver.remote_file_name.format(state)
    # Composer's saver has the paths only on the ranks that write; the others format the file name.
    return str(saver.saved_checkpoints[-1]) if saver.saved_checkpoints else saver.filename.format(state)
