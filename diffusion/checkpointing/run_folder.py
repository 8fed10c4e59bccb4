"""Lookup of a run's checkpoints and recipe, without importing torch: a wrong path is reported within a second."""

import logging
import os
from pathlib import Path

from diffusion.checkpointing.checkpoint_download import download_checkpoint
from diffusion.checkpointing.checkpoint_store import LATEST, RECIPE, STATE, batch_number, list_checkpoints
from diffusion.errors import UserError
from diffusion.storage.places import is_url

log = logging.getLogger(__name__)


def find_checkpoint(place: str | Path) -> Path:
    """Return the path of the checkpoint at `place`: a folder of this library, or a file of Composer's own saver.

    Args:
        place: Path or URL of a checkpoint, or of a run or its `latest` to use the newest checkpoint, which is the one
            that the run would resume from. A checkpoint in an object store is downloaded.

    Raises:
        UserError: There is no such checkpoint; the message lists the existing ones.
    """
    if is_url(place):
        return download_checkpoint(str(place))
    path = Path(place)
    run = path.parent if path.name == LATEST and path.is_symlink() else path
    if run.is_dir() and batch_number(run) is None and (newest := list_checkpoints(run)[:1]):
        link = run / LATEST
        # A kill between two steps of a save, or a copy of the run, can leave a link that dangles or names an older one.
        if link.is_symlink() and os.readlink(link) != newest[0].name:
            log.warning('%s points to %s, but the newest is %s, which is used', link, os.readlink(link), newest[0])
        return newest[0]
    for choice in (path, path / LATEST):
        if choice.is_file() or (choice / STATE).is_file():
            return choice.parent / choice.readlink() if choice.is_symlink() else choice
    folder = path if path.is_dir() else path.parent
    present = [checkpoint.name for checkpoint in list_checkpoints(folder)] if folder.is_dir() else []
    found = f'{folder} contains {", ".join(present[:4])}' if present else f'{folder} contains no checkpoint'
    raise UserError(f'checkpoint: {place} is not a checkpoint or a run ({found}); check the path')


def run_of_checkpoint(checkpoint: Path) -> Path:
    """Return the folder of the run that a checkpoint belongs to: the folder above, or the one above that.

    The latter is for files of Composer's own saver in a folder of their own.
    """
    folder = checkpoint.resolve().parent
    return next((parent for parent in (folder, folder.parent) if (parent / RECIPE).is_file()), folder)


def recipe_of_checkpoint(checkpoint: Path) -> Path:
    """Return the path of the resolved recipe that a checkpoint was trained with: its own, or that of its run.

    Raises:
        UserError: There is no recipe in the checkpoint, in the folder above it or in the folder above that.
    """
    for recipe in (checkpoint / RECIPE, run_of_checkpoint(checkpoint) / RECIPE):
        if recipe.is_file():
            return recipe
    folder = checkpoint.resolve().parent
    raise UserError(f'{checkpoint}: there is no {RECIPE} next to it; copy the {RECIPE} of its run to {folder}')
