"""A run whose recipe uses secrets by `${oc.env:...}`: no file of it has their values, and it is usable without them."""

from pathlib import Path
from typing import ClassVar

import pytest
from composer.loggers import LoggerDestination

from diffusion.config import registry
from diffusion.config.load import RecipeError, load
from diffusion.tasks.evaluate import evaluate
from diffusion.tasks.export import export
from diffusion.training.train import train

SECRET = 'vq8-Z1-not-to-be-seen'


class Recorder(LoggerDestination):
    """Logger that keeps its key and the hyperparameters that Composer logs."""

    hyperparameters: ClassVar[dict] = {}
    keys: ClassVar[list] = []

    def __init__(self, api_key: str = '', options: dict | None = None) -> None:
        self.keys.append((api_key, options))

    def log_hyperparameters(self, hyperparameters):
        self.hyperparameters.update(hyperparameters)


def test_secret_is_used_and_in_no_file(write_recipe, tmp_path, monkeypatch):
    monkeypatch.setitem(registry.TARGETS['logger'], 'recorder', Recorder)
    monkeypatch.setenv('KEY', SECRET)
    monkeypatch.setenv('LENGTH', '2')
    path = write_recipe(loggers={'metrics_file': None, 'recorder': {'api_key': '${oc.env:KEY}'}})
    overrides = ['loggers.recorder.options={url: "https://user:${oc.env:KEY}@host/x"}', 'trainer.auto_log_hparams=true']
    overrides += ['trainer.max_duration=${oc.env:LENGTH}ba']
    with pytest.raises(RecipeError, match='trainer.max_duration: would be logged by trainer.auto_log_hparams'):
        load(path, overrides)
    overrides[2] = 'trainer.max_duration=2ba'
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
