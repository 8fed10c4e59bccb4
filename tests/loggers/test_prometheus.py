"""Exported metrics, read with Prometheus' own parser and as JSON."""

import json
import math

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from diffusion.config.load import load
from diffusion.loggers.prometheus import JSONLines, PrometheusFile, exposition
from diffusion.training.train import train


def read(text: str) -> dict[tuple[str, str], float]:
    samples = [sample for family in text_string_to_metric_families(text) for sample in family.samples]
    return {(sample.name, sample.labels['run']): sample.value for sample in samples}


@settings(max_examples=40)
@given(st.text(min_size=1), st.dictionaries(st.from_regex(r'\A[a-z/_0-9]{1,20}\Z'), st.floats()))
def test_prometheus_parses_every_value_for_any_run_name(run, metrics):
    expected = {(f'diffusion_{name.replace("/", "_")}', run): value for name, value in metrics.items()}
    assert read(exposition(run, metrics)) == pytest.approx(expected, rel=0, abs=0, nan_ok=True)


def test_run_exports_its_last_metrics(write_recipe, tmp_path, capfd):
    path = tmp_path / 'metrics' / 'run.prom'
    loggers = {'prometheus_file': {'path': str(path), 'every_seconds': 0.0}, 'json_lines': {'every_seconds': 600.0}}
    train(load(write_recipe(loggers=loggers), ['trainer.max_duration=2ba']))
    found = read(path.read_text())
    assert found['diffusion_batch', 'run'] == 2
    assert 0 < found['diffusion_loss_train_total', 'run'] < 10
    lines = [json.loads(line) for line in capfd.readouterr().out.splitlines() if line.startswith('{"time"')]
    assert [line['batch'] for line in lines] == [1, 2], 'the first and the last batch'
    assert lines[-1]['loss/train/total'] == found['diffusion_loss_train_total', 'run']
    assert lines[-1]['run'] == 'run'
    assert not list(path.parent.glob('.*')), 'no unfinished file is left'


def test_value_that_json_cannot_represent_is_null(capsys):
    JSONLines().export('run', {'batch': 1.0, 'loss': math.nan, 'limit': math.inf})
    line = json.loads(capsys.readouterr().out)
    assert (line['batch'], line['loss'], line['limit']) == (1.0, None, None)


def test_unwritable_folder_does_not_end_training(tmp_path, caplog):
    (tmp_path / 'file').write_text('')
    PrometheusFile(str(tmp_path / 'file' / 'run.prom')).export('run', {'batch': 1.0})
    assert 'run.prom cannot be written' in caplog.text


def test_file_name_that_the_collector_ignores_is_refused():
    with pytest.raises(ValueError, match=r"prometheus_file\.path: 'run\.txt' must end in \.prom"):
        PrometheusFile('run.txt')
