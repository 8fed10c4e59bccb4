"""Runs whose home is an object store: they save, resume, fall back and end as runs in a folder do."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from object_store import Store
from ranks import Ranks, read_losses

from diffusion.checkpointing.checkpoint_weights import weights_of
from diffusion.checkpointing.run_folder import find_checkpoint
from diffusion.config.load import load
from diffusion.storage.working_folder import WORKING_FOLDER_VARIABLE
from diffusion.training.train import train


@pytest.fixture(scope='module')
def write(tmp_path_factory, tiny_recipe) -> Callable[..., Path]:
    """Function that writes a recipe of 8 batches with a save after every second, and returns its path."""
    root = tmp_path_factory.mktemp('bucket-runs')

    def write_recipe(name: str, runs_dir: str = str(root / 'runs'), **sections: Any) -> Path:
        content = tiny_recipe(root, name=name, **sections) | {'runs_dir': runs_dir}
        content['model']['block_out_channels'] = [32]
        content['trainer'] |= {'save_interval': '2ba'}
        path = root / f'{name}.yaml'
        path.write_text(yaml.safe_dump(content))
        return path

    return write_recipe


@pytest.fixture(scope='module')
def undisturbed(write) -> Path:
    recipe = load(write('undisturbed'))
    train(recipe).close()
    return recipe.run_dir


@pytest.fixture
def bucket(store: Store, tmp_path, monkeypatch) -> str:
    """URL of an empty bucket; the working folders of runs are in the test's folder."""
    monkeypatch.setenv(WORKING_FOLDER_VARIABLE, str(tmp_path / 'node0'))
    return store.bucket('bucket')


def test_run_trains_and_resumes(write, undisturbed, bucket, store, tmp_path, monkeypatch, caplog):
    path = write('plain', f'{bucket}/runs')
    train(load(path, ['trainer.max_duration=4ba'])).close()
    assert {'runs/plain/ba4/receipt.json', 'runs/plain/ba4/state.pt', 'runs/plain/latest'} <= store.objects('bucket').keys()
    monkeypatch.setenv(WORKING_FOLDER_VARIABLE, str(tmp_path / 'node1'))
    train(load(path)).close()
    print(sorted(store.objects('bucket')))
    assert read_losses(load(path).run_dir) == read_losses(undisturbed)
