"""A run whose recipe uses secrets by `${oc.env:...}`: no file of it has their values, and it is usable without them."""

from pathlib import Path
from typing import Any, ClassVar

import pytest
from composer.loggers import LoggerDestination

from diffusion.config import registry
from diffusion.config.load import RecipeError, load, to_yaml
from diffusion.data.image_text import ImageTextDataset
from diffusion.errors import UserError
from diffusion.tasks.evaluate import evaluate
from diffusion.tasks.export import export
from diffusion.training.resume import compare_with_checkpoint
from diffusion.training.train import build_trainer, train

SECRET = 'vq8-Z1-not-to-be-seen'


class Recorder(LoggerDestination):
    """Logger that keeps its key and the hyperparameters that Composer logs."""

    hyperparameters: ClassVar[dict] = {}
    keys: ClassVar[list] = []

    def __init__(self, api_key: str = '', options: dict | None = None) -> None:
        self.keys.append((api_key, options))

    def log_hyperparameters(self, hyperparameters):
        self.hyperparameters.update(hyperparameters)


class Private(ImageTextDataset):
    """Dataset with a key of its own, as one that asks a service for captions would have."""

    keys: ClassVar[list] = []

    def __init__(self, *args: Any, key: str = '', **keywords: Any) -> None:
        super().__init__(*args, **keywords)
        self.keys.append(key)


@pytest.mark.slow
def test_secret_of_a_dataset_is_in_no_checkpoint_and_may_be_replaced(write_recipe, tmp_path, monkeypatch):
    monkeypatch.setitem(registry.TARGETS['dataset'], 'private', Private)
    path = write_recipe(dataset={'name': 'private', 'key': '${oc.env:KEY}'})
    monkeypatch.setenv('KEY', SECRET)
    train(load(path, ['trainer.max_duration=1ba'])).close()
    assert SECRET.encode() not in (tmp_path / 'runs' / 'run' / 'ba1' / 'state.pt').read_bytes()
    monkeypatch.setenv('KEY', 'another')
    build_trainer(load(path, ['trainer.autoresume=true'])).close()
    assert Private.keys[-1] == 'another'


def test_variable_with_the_value_that_the_recipe_had_is_no_change(write_recipe, tmp_path, monkeypatch, caplog):
    caplog.set_level('INFO', logger='diffusion')
    path = write_recipe()
    saved = tmp_path / 'runs' / 'run' / 'recipe.yaml'
    saved.parent.mkdir(parents=True)
    saved.write_text(to_yaml(load(path, ['model.objective={prediction_type: epsilon}'])))
    target = 'model.objective={prediction_type: "${oc.env:TARGET}"}'
    monkeypatch.setenv('TARGET', 'epsilon')
    assert not compare_with_checkpoint(load(path, [target]), saved.parent / 'ba2').changes
    assert 'are not compared on resume: model.objective.prediction_type' in caplog.text
    monkeypatch.setenv('TARGET', 'sample')
    with pytest.raises(UserError, match=r'prediction_type: epsilon in the checkpoint, \$\{oc.env:TARGET\} now'):
        compare_with_checkpoint(load(path, [target]), saved.parent / 'ba2')


class Failing(LoggerDestination):
    """Logger whose client quotes the address with the password when it cannot connect."""

    def __init__(self, uri: str) -> None:
        self.uri = uri

    def fit_start(self, state, logger):
        raise ConnectionError(f'cannot connect to {self.uri}')


def test_secret_in_an_error_is_not_recorded(write_recipe, tmp_path, monkeypatch):
    monkeypatch.setitem(registry.TARGETS['logger'], 'failing', Failing)
    monkeypatch.setenv('KEY', SECRET)
    recipe = load(write_recipe(loggers={'failing': {'uri': 'https://user:${oc.env:KEY}@host'}}))
    with pytest.raises(ConnectionError, match=SECRET):
        train(recipe)
    record = (tmp_path / 'runs' / 'run' / 'attempts.jsonl').read_text()
    assert 'ConnectionError: cannot connect to https://user:${oc.env:KEY}@host' in record and SECRET not in record


def test_secret_is_used_and_in_no_file(write_recipe, tmp_path, monkeypatch):
    monkeypatch.setitem(registry.TARGETS['logger'], 'recorder', Recorder)
    monkeypatch.setenv('KEY', SECRET)
    monkeypatch.setenv('LENGTH', '2')
    path = write_recipe(loggers={'metrics_file': None, 'recorder': {'api_key': '${oc.env:KEY}'}})
    overrides = ['loggers.recorder.options={url: "https://user:${oc.env:KEY}@host/x"}', 'trainer.auto_log_hparams=true']
    overrides += ['trainer.max_duration=${oc.env:LENGTH}ba']
    with pytest.raises(RecipeError, match='trainer.max_duration: would be logged by trainer.auto_log_hparams'):
        load(path, overrides)
    overrides[2] = 'trainer.max_duration=1ba'
    train(load(path, overrides)).close()
    assert Recorder.keys == [(SECRET, {'url': f'https://user:{SECRET}@host/x'})]
    assert Recorder.hyperparameters
    assert SECRET not in str(Recorder.hyperparameters)
    run = tmp_path / 'runs' / 'run'
    files = [file for file in run.rglob('*') if file.is_file()]
    assert {'recipe.yaml', 'metrics.jsonl', 'state.pt'} <= {file.name for file in files}
    assert not [file for file in files if SECRET.encode() in file.read_bytes()]
    assert 'api_key: ${oc.env:KEY}' in (run / 'recipe.yaml').read_text()

    monkeypatch.delenv('KEY')
    monkeypatch.chdir(tmp_path)
    export(run, 'out')
    assert Path('out', 'model_index.json').exists()
    saved = ['task=evaluate', 'eval_streams=${streams}', 'trainer.device=cpu']
    assert evaluate(load(run / 'recipe.yaml', saved))
    with pytest.raises(RecipeError, match='loggers.recorder.api_key: needs the environment variable KEY'):
        load(run / 'recipe.yaml')
