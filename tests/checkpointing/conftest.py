"""Runs of the tests of checkpoints."""

from collections.abc import Callable
from pathlib import Path

import pytest
from checkpointing.saved_runs import recipe_writer

from diffusion.config.load import load
from diffusion.training.train import train


@pytest.fixture(scope='module')
def write(tmp_path_factory, tiny_recipe) -> Callable[..., Path]:
    """Function that writes a recipe of 8 batches with averaging and a save after every second."""
    return recipe_writer(tmp_path_factory.mktemp('recipes'), tiny_recipe)


@pytest.fixture(scope='module')
def undisturbed(write) -> Path:
    """Folder of a run in a folder without faults, whose saves block training."""
    recipe = load(write('undisturbed', checkpointing={'asynchronous': False}))
    train(recipe).close()
    return recipe.run_dir
