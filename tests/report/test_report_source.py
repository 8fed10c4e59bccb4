"""Size of pages, and reading of many runs."""

import json
import re
from unittest.mock import Mock

import pytest
from synthetic_run import append_metrics, write_run

from diffusion.errors import UserError
from diffusion.report import report_source
from diffusion.report.report_source import RunsSource, TableSource, page_data, runs_in
from diffusion.report.run_reader import RunReader


def test_huge_page_has_fewer_points(tmp_path, monkeypatch):
    run = write_run(tmp_path / 'run', batches=2000, evaluations=False, sheets=0)
    source = RunsSource([str(run)])
    size = len(source.write())
    monkeypatch.setattr(report_source, 'MAX_BYTES', size - 30_000)
    assert len(source.write()) < size - 30_000
    monkeypatch.setattr(report_source, 'MAX_BYTES', 1000)
    with pytest.raises(UserError, match='compare fewer runs'):
        source.write()


def test_points_are_shared_by_the_curves(tmp_path):
    run = write_run(tmp_path / 'run', batches=40, evaluations=False, sheets=0)
    for step in range(40, 3000):
        append_metrics(run, {'step': step} | {f'layer{n}': float(step * n) for n in range(30)})
    content = RunReader(str(run)).read()
    few, many = (page_data([content], total_points=points)['runs'][0]['series'] for points in (10_000, 1_000_000))
    assert sum(len(each['x']) + len(each.get('mx', ())) for each in few.values()) < 12_000
    assert len(many['layer3']['x']) == 2000 and len(many['layer3']['mx']) == 1000
    assert max(few['layer3']['y']) == 2999 * 3 and few['layer3']['count'] == 2960
    json.dumps([few, many], allow_nan=False)


def test_runs_are_found_and_one_that_fails_is_a_note(tmp_path, monkeypatch):
    for name in ('b', 'a'):
        write_run(tmp_path / name, batches=40, evaluations=False, sheets=0)
    (tmp_path / 'notes').mkdir()
    assert runs_in(str(tmp_path)) == ['a', 'b']
    table = TableSource(str(tmp_path), price=2.0, link=lambda name: None)
    rows = {row['name']: row for row in table.read().data['rows']}
    assert rows['a']['batch'] == 40 and rows['a']['dollars'] == pytest.approx(2 * rows['a']['device_hours'])
    assert re.fullmatch(r'validation loss \d[.\d]* \(ba\d+\)', rows['a']['evaluation'])
    assert rows['a']['state'] == 'ended, completed'
    assert rows['a']['loss'] == pytest.approx(RunReader(str(tmp_path / 'a')).read().status.last_loss)

    monkeypatch.setattr(RunReader, 'read', Mock(side_effect=UserError('gone')))
    data = table.read().data
    assert data['rows'] == [] and data['notes'] == ['gone', 'gone']
