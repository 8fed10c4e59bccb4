"""A checkpoint at once, whatever the interval: what a run does that has to stop."""

from composer.callbacks import CheckpointSaver
from composer.core import State
from composer.loggers import Logger


def save_now(state: State, logger: Logger) -> str | None:
    """Save a checkpoint that a run can resume from, unless this batch has one; call it on every rank.

    Returns:
        Where it is, or None if the run saves none.
    """
    savers = [callback for callback in state.callbacks if isinstance(callback, CheckpointSaver)]
    saver = next((saver for saver in savers if not saver.weights_only), None)
    if saver is None:
        return None
    if saver.last_checkpoint_batch != state.timestamp.batch:
        saver._save_checkpoint(state, logger)
    if saver.remote_uploader is not None and saver.remote_file_name is not None:
        # The local copy is in a temporary folder.
        return saver.remote_file_name.format(state)
    # Composer's saver keeps the paths on the ranks that write.
    return str(saver.saved_checkpoints[-1]) if saver.saved_checkpoints else saver.filename.format(state)
