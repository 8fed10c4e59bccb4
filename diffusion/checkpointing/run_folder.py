"""Lookup of a run's checkpoints and recipe. It imports no torch, so that a wrong path is reported within a second."""

from pathlib import Path

from diffusion.checkpointing.checkpoint_store import LATEST, STATE, list_checkpoints
from diffusion.errors import UserError

RECIPE = 'recipe.yaml'
"""Name of the resolved recipe's file in the run's folder."""


def find_checkpoint(place: str | Path) -> Path:
    """Return the path of the checkpoint at `place`: a folder of this library, or a file of Composer's own saver.

    Args:
        place: Path of a checkpoint, or a run's folder to use the latest checkpoint.

    Raises:
        UserError: There is no such checkpoint; the message lists the existing ones.
    """
    path = Path(place)
    for choice in (path, path / LATEST):
        if choice.is_file() or (choice / STATE).is_file():
            return choice.parent / choice.readlink() if choice.is_symlink() else choice
    folder = path if path.is_dir() else path.parent
    present = [checkpoint.name for checkpoint in list_checkpoints(folder)] if folder.is_dir() else []
    found = f'{folder} contains {", ".join(present[:4])}' if present else f'{folder} contains no checkpoint'
    raise UserError(f'checkpoint: {place} is not a checkpoint or a run ({found}); check the path')


def recipe_of_checkpoint(checkpoint: Path) -> Path:
    """Return the path of the resolved recipe of the run that a checkpoint belongs to.

    Raises:
        UserError: There is no recipe in the checkpoint's folder or the folder above.
    """
    folder = checkpoint.resolve().parent
    recipe = next((parent / RECIPE for parent in (folder, folder.parent) if (parent / RECIPE).is_file()), None)
    if recipe is None:
        raise UserError(f'{checkpoint}: there is no {RECIPE} next to it; copy the {RECIPE} of its run to {folder}')
    return recipe
