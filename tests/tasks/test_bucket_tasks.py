"""Checkpoints of a run in an object store, named by its URL and without its working folder."""

import json
import shutil

import pytest
from checkpointing.run_folders import write
from object_store import Store

from diffusion.checkpointing.checkpoint_lookup import find_checkpoint
from diffusion.cli import main
from diffusion.config.load import load
from diffusion.exit_codes import USAGE_ERROR
from diffusion.storage import object_store
from diffusion.storage.local_files import WORKING_FOLDER_VARIABLE, working_folder
from diffusion.tasks import run_recipe
from diffusion.tasks.argument_checks import CheckpointOptions, EvaluationOptions, evaluation_recipe
from diffusion.training.train import train


@pytest.fixture
def small_run(store: Store, tmp_path, monkeypatch) -> str:
    """URL of a run with checkpoints of batches 2 and 4 that have no model."""
    monkeypatch.setenv(WORKING_FOLDER_VARIABLE, str(tmp_path / 'here'))
    monkeypatch.chdir(tmp_path)
    url = f'{store.bucket("bucket")}/runs/run'
    for batch in (2, 4):
        for path in write(tmp_path, batch).iterdir():
            store.put(f'{url}/ba{batch}', path.name, path.read_bytes())
    return url


@pytest.mark.slow
def test_tasks_take_the_url_of_a_run(store, write_recipe, pictures, tmp_path, monkeypatch, capsys):
    """The run was trained on another machine."""
    monkeypatch.setenv(WORKING_FOLDER_VARIABLE, str(tmp_path / 'trained'))
    streams = {'small': {'local': str(pictures[32]), 'resolution': 32}}
    path = write_recipe(algorithms={'post_hoc_ema': {'every': '2ba'}}, eval_streams=streams)
    runs_dir = f'runs_dir={store.bucket("bucket")}/runs'
    recipe = load(path, [runs_dir, 'trainer.max_duration=4ba', 'trainer.save_interval=2ba'])
    train(recipe).close()
    shutil.rmtree(tmp_path / 'trained')
    monkeypatch.setenv(WORKING_FOLDER_VARIABLE, str(tmp_path / 'here'))
    monkeypatch.chdir(tmp_path)
    run = recipe.run_place
    assert main(['generate', run, 'a cat', '--steps', '1', '--out', 'images']) == 0
    assert [path.suffix for path in (tmp_path / 'images').iterdir()] == ['.png']
    assert main(['export', f'{run}/ba2', '--out', 'average', '--ema-width', '0.1']) == 0
    assert (tmp_path / 'average' / 'model_index.json').is_file()
    assert '(batch 2)' in (tmp_path / 'average' / 'README.md').read_text()
    capsys.readouterr()
    assert run_recipe.main([str(path), 'task=evaluate', runs_dir]) == 0
    assert f' {run}/evaluations/ba4.json\n' in capsys.readouterr().out
    metrics = json.loads(store.objects('bucket')['runs/run/evaluation.json'])
    assert metrics['weights'] == 'training' and len(metrics) > 1
    assert {path.name for path in working_folder(run, 'downloads').glob('ba*')} == {'ba2', 'ba4'}


def test_wrong_url_is_a_mistake(small_run, tmp_path, capsys):
    for name in ('ba3', 'other', 'ba2/state.pt'):
        assert main(['export', f'{small_run}/{name}', '--out', 'exported']) == USAGE_ERROR
        message = f'error: checkpoint: {small_run}/{name} is not a checkpoint or a run ('
        assert message in capsys.readouterr().err.replace('\n', ' ')
    assert not (tmp_path / 'exported').exists()


def test_url_of_a_checkpoint_is_evaluated_as_its_run(small_run, store, write_recipe):
    images = {'a': {'local': 'x', 'resolution': 32}}
    store.put(small_run, 'recipe.yaml', write_recipe(eval_streams=images, runs_dir='runs', name='old').read_bytes())
    for place in (small_run, f'{small_run}/latest', f'{small_run}/ba2'):
        recipe = evaluation_recipe(CheckpointOptions(place), EvaluationOptions())
        assert (recipe.runs_dir, recipe.name, recipe.task) == ('s3://bucket/runs', 'run', 'evaluate')


def test_checkpoint_is_downloaded_once(small_run, store):
    newest = find_checkpoint(small_run)
    assert newest == working_folder(small_run, 'downloads') / 'ba4'
    before = len(store.requests)
    assert find_checkpoint(small_run) == newest
    assert not [request for request in store.requests[before:] if 'state.pt' in request], 'the copy is used again'


def test_newest_checkpoint_that_is_removed_during_its_download(small_run, store, monkeypatch):
    download = object_store.download

    def removed_meanwhile(url, path, **settings):
        for name in ('receipt.json', 'state.pt'):
            store.delete(f'{small_run}/ba4', name)
        return download(url, path, **settings)

    monkeypatch.setattr(object_store, 'download', removed_meanwhile)
    assert find_checkpoint(small_run).name == 'ba2'
