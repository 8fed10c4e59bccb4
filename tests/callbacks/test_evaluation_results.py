"""Results of evaluations elsewhere reach the loggers of the training, once, and change nothing else."""

import json
import re
from unittest.mock import Mock

from faults import Fault, active
from ranks import read_losses
from waiting import wait_until

from diffusion.callbacks import evaluation_results
from diffusion.callbacks.evaluation_results import EvaluationResults
from diffusion.config.load import load
from diffusion.training.train import train


def logged(run) -> list[dict]:
    lines = [json.loads(line) for line in (run / 'metrics.jsonl').read_text().splitlines()]
    found = [{key: line[key] for key in line if key.startswith('evaluation/')} for line in lines]
    return [each for each in found if 'evaluation/batch' in each]


def results(run, batch: int, fid: float, finished: float) -> None:
    content = {'batch': batch, 'metrics': {'fid': fid}, 'finished': finished}
    (run / 'evaluations' / f'ba{batch}.json').write_text(json.dumps(content))


def test_results_are_logged_once_and_the_losses_stay(write_recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(evaluation_results, 'INTERVAL_SECONDS', 600.0)
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
    train(load(path, ['trainer.max_duration=2ba', 'trainer.save_interval=2ba'])).close()
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


def test_results_that_cannot_be_read_are_logged_later_by_one_checkpoint_per_batch(tmp_path, store, monkeypatch, caplog):
    """In the run's folder and at its URL, while the run trains; not again after a restart."""
    monkeypatch.setattr(evaluation_results, 'INTERVAL_SECONDS', 0.01)
    url = store.bucket('bucket') + '/runs/watched'
    (tmp_path / 'evaluations').mkdir()
    results(tmp_path, 2, 31.5, 1.0)
    store.put(f'{url}/evaluations', 'ba1.json', b'{"batch": 1, "metrics": {"fid": 40.0}, "finished": 2.0}')
    callback, again, logger = EvaluationResults(tmp_path, url), EvaluationResults(tmp_path, url), Mock()
    callback.log_now(logger)  # not before the run starts
    with active(tmp_path / 'met', Fault('list', 'evaluations$', 'EIO', times=1)):
        callback.fit_start(Mock(), logger)
        wait_until(lambda: 'runs/watched/evaluations/logged.json' in store.objects('bucket'))
    assert re.search(
        r'evaluations: cannot be read \(.*Input/output error.*\); the results are logged later', caplog.text
    )
    callback.close(Mock(), logger)
    callback._thread.join(30)  # type: ignore[union-attr]
    again.fit_start(Mock(), logger)
    again.close(Mock(), logger)
    again.fit_end(Mock(), logger)
    assert not logger.log_metrics.called
    for count in (1, 2, 2):
        callback.batch_end(Mock(), logger)
        assert [each.args[0]['evaluation/fid'] for each in logger.log_metrics.mock_calls] == [40.0, 31.5][:count]
