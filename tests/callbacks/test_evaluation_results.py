"""Results of evaluations elsewhere reach the loggers of the training, once, and change nothing else."""

import json

import pytest
from ranks import read_losses

from diffusion.callbacks import evaluation_results
from diffusion.config.load import load
from diffusion.training.train import train

TWO_BATCHES = ['trainer.max_duration=2ba', 'trainer.save_interval=2ba']


def logged(run) -> list[dict]:
    lines = [json.loads(line) for line in (run / 'metrics.jsonl').read_text().splitlines()]
    found = [{key: line[key] for key in line if key.startswith('evaluation/')} for line in lines]
    return [each for each in found if 'evaluation/batch' in each]


def results(run, batch: int, fid: float, finished: float) -> None:
    content = {'batch': batch, 'metrics': {'fid': fid}, 'finished': finished}
    (run / 'evaluations' / f'ba{batch}.json').write_text(json.dumps(content))


@pytest.mark.parametrize('how', [pytest.param('while it trains', marks=pytest.mark.slow), 'at the end'])
def test_results_are_logged_once_and_the_losses_stay(write_recipe, tmp_path, monkeypatch, how):
    monkeypatch.setattr(evaluation_results, 'INTERVAL_SECONDS', 0.02 if how == 'while it trains' else 600.0)
    train(load(write_recipe('plain', small=True), ['trainer.max_duration=4ba'])).close()
    path = write_recipe('watched', small=True)
    run = tmp_path / 'runs' / 'watched'
    (run / 'evaluations').mkdir(parents=True)
    results(run, 2, 31.5, 1.0)
    results(run, 1, 40.0, 2.0)
    for name, text in {
        'ba3': '{"batch": 3, "metr',
        'ba4': '{"batch": 4}',
        'run': '{"batch": 5, "metrics": {"fid": 1}}',
    }.items():
        (run / 'evaluations' / f'{name}.json').write_text(text)
    train(load(path, TWO_BATCHES)).close()
    first = [{'evaluation/batch': 1, 'evaluation/fid': 40.0}, {'evaluation/batch': 2, 'evaluation/fid': 31.5}]
    assert logged(run) == first
    assert json.loads((run / 'evaluations' / 'logged.json').read_text()) == {'ba1.json': 2.0, 'ba2.json': 1.0}

    # A run that resumes logs what is new, and what was evaluated again.
    results(run, 2, 31.0, 3.0)
    results(run, 4, 20.0, 4.0)
    train(load(path, ['trainer.max_duration=4ba'])).close()
    second = [{'evaluation/batch': 2, 'evaluation/fid': 31.0}, {'evaluation/batch': 4, 'evaluation/fid': 20.0}]
    assert logged(run) == first + second
    assert read_losses(run) == read_losses(tmp_path / 'runs' / 'plain')


@pytest.mark.slow
def test_results_of_a_run_in_a_bucket_are_logged_once(write_recipe, store, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation_results, 'INTERVAL_SECONDS', 600.0)
    monkeypatch.setenv('DIFFUSION_WORKING_FOLDER', str(tmp_path))
    store.bucket('bucket')
    path = write_recipe('watched', runs_dir='s3://bucket/runs', small=True)
    result = b'{"batch": 1, "metrics": {"fid": 7.5}, "finished": 1.0}'
    store.put('s3://bucket/runs/watched/evaluations', 'ba1.json', result)
    recipe = load(path, TWO_BATCHES)
    train(recipe).close()
    assert logged(recipe.run_dir) == [{'evaluation/batch': 1, 'evaluation/fid': 7.5}]
    train(load(path, ['trainer.max_duration=4ba'])).close()
    assert len(logged(recipe.run_dir)) == 1
