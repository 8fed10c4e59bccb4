"""Reading of one run's files in any state, and of many runs; size of pages."""

import csv
import json
import math
import re
import time
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
from golden import check_golden, readable_json
from synthetic_run import BEGIN, KINDS, PROMPTS, append_metrics, write_attempts, write_run, write_sheet, write_status

from diffusion.errors import ExternalError, UserError
from diffusion.planning.gpus import load_gpus
from diffusion.report import metric_reader, report_source, run_parts
from diffusion.report.page import json_text
from diffusion.report.report_source import RunsSource, TableSource, _kind, page_data, runs_in, written_report
from diffusion.report.run_parts import RunCost, batch_hours, gpu_of_product, read_evaluations, run_cost
from diffusion.report.run_reader import RunContent, RunReader, looks_like_a_run
from diffusion.report.sample_sheets import evenly_chosen
from diffusion.runs.attempts import Attempt
from diffusion.runs.run_lock import hold_run_lock
from diffusion.storage.places import Listing, LocalPlace


def read(run: Path | str, **options: object) -> RunContent:
    return RunReader(str(run), image_bytes=500_000, **options).read()  # type: ignore[arg-type]


@pytest.fixture
def run(tmp_path) -> Path:
    return write_run(tmp_path / 'sd2')


def shown(value: Any) -> Any:
    """Return data of a page with rounded numbers, and without what differs between machines."""
    if isinstance(value, dict):
        hidden = {'generated', 'last_activity', 'published', 'run', 'newest_checkpoint'}
        hidden |= {'key'} if 'width' in value else set()  # the hash of an image
        return {key: shown(each) for key, each in value.items() if key not in hidden}
    if isinstance(value, list | tuple):
        return [*map(shown, value)]
    return value if not isinstance(value, float) else round(value) if 1e6 < value < 1e12 else float(f'{value:.6g}')


def test_data_of_a_run_of_several_runs_and_of_a_table_are_the_reviewed_ones(tmp_path):
    rates = {'sd2': 0.003, 'other': 0.005}
    run, other = (
        write_run(tmp_path / name, batches=40, sheets=2, prompts=PROMPTS[:2], lr=lr) for name, lr in rates.items()
    )
    faults = {'step': 38, 'checkpoint/failed_saves': 2.0, 'checkpoint/disk_failed_saves': 1.0}
    append_metrics(run, faults, {'step': 40, 'loss/train/total': math.nan}, {'step': 41, 'loss/train/total': math.inf})
    with (run / 'metrics.jsonl').open('a') as file:
        file.write('no JSON\n{"step": 42, "loss/tr')
    for name in ('ba7', 'ba15.damaged'):
        (run / name).mkdir()
    (run / 'ba30' / 'receipt.json').write_text('{}')
    receipt = (run / 'ba20' / 'receipt.json').read_text()
    (run / 'ba20' / 'receipt.json').write_text(receipt.replace('128', '"many"', 1))
    (run / 'images' / 'ba000020.png').write_bytes(b'no image')
    results = json.loads((run / 'evaluations' / 'ba40.json').read_text())
    results['guidance'].reverse()  # the values of the checkpoint are those of the last setting
    for batch, text in ((20, '{'), (30, '{"metrics": 3}'), (40, json.dumps(results))):
        (run / 'evaluations' / f'ba{batch}.json').write_text(text)
    content = read(run)
    data = page_data([content, read(other, price=1.5)])
    first, second = data.pop('runs')
    for name, curve in first['series'].items():  # the ends of curves
        ends = [f'{curve["x"][end]}: {curve["y"][end]:.4g}' for end in (0, -1)]
        first['series'][name] = [*ends, *(curve[key] for key in curve if key not in 'xy')]
    assert [each['batch'] for each in first['evaluations']] == [10, 40]
    del first['evaluations'][0]
    first['notes'].sort()
    examples = first['evaluations'][0]['examples']['geneval_hf']
    assert examples.keys() == KINDS.keys()
    first['evaluations'][0]['examples'] = examples['counting']
    table = TableSource(str(tmp_path), price=None, link=lambda name: f'{name}.html').read().data
    data |= {name: second[name] for name in ('cost', 'sheets', 'checkpoints', 'notes')}
    data['better'] = dict(sorted(data['better'].items()))
    found = {'run': first, 'comparison': data, 'table': table}
    texts = {f'{name}.txt': f'{readable_json(shown(each))}\n' for name, each in found.items()}
    check_golden(Path(__file__).parent / 'golden' / 'pages', texts)


def test_devices_of_an_earlier_version_are_those_of_the_receipts(run):
    write_attempts(run, 400, devices=None, gpu='')
    cost = read(run).cost
    assert cost.devices == 128 and cost.device_hours is not None and cost.price is None
    for receipt in run.glob('ba*/receipt.json'):
        receipt.unlink()
    assert read(run).cost.device_hours is None


def test_a_cpu_costs_nothing_and_attempts_may_differ_in_devices():
    attempts = [Attempt(0, 0.0, 3600.0, devices=8), Attempt(1, 4000.0, 7600.0, devices=4, gpu='cpu')]
    cost = run_cost(attempts, world_sizes=[], hours_left=2.0, price=None)
    assert (cost.device_hours, cost.device_hours_left, cost.price, cost.price_source) == (12.0, 8.0, None, '')
    assert run_cost([], world_sizes=[4, 8], hours_left=2.0, price=None) == RunCost(4, '', None, 2.0, 8.0)


@pytest.mark.parametrize(
    ('product', 'name'),
    [
        ('NVIDIA A100-SXM4-80GB', 'a100-80gb'),
        ('NVIDIA A100-PCIE-40GB', 'a100-40gb'),
        ('NVIDIA H100 80GB HBM3', 'h100-sxm'),
        ('NVIDIA H100 PCIe', 'h100-pcie'),
        ('NVIDIA GeForce RTX 4090', 'rtx-4090'),
        ('Tesla V100-SXM2-16GB', 'v100-16gb'),
        ('a100-40gb', 'a100-40gb'),
        ('NVIDIA A100', None),
    ],
)
def test_product_names_of_the_driver_lead_to_known_gpus(product, name):
    found = gpu_of_product(product, load_gpus())
    assert (found and found.name) == name


def test_hours_exclude_time_between_attempts_and_count_repeated_batches_once():
    def record(begin: float, at: float, first: int | None, first_at: float, last: int | None, last_at: float) -> dict:
        return {'begin': begin, 'at': at, 'first': first, 'first_at': first_at, 'last': last, 'last_at': last_at}

    hour = 3600.0
    records = [
        record(BEGIN, BEGIN, None, 0.0, None, 0.0),
        record(BEGIN, BEGIN + 2 * hour, 0, BEGIN + hour, 100, BEGIN + 2 * hour),
        {'begin': 'x'},
        record(BEGIN + 50 * hour, BEGIN + 52 * hour, 80, BEGIN + 51 * hour, 180, BEGIN + 52 * hour),
    ]
    assert batch_hours(records) == ([0, 80, 180], [1.0, 3.0, 4.0])
    assert batch_hours(records[:1]) is None and batch_hours(records[:2]) == ([0, 100], [1.0, 2.0])
    many = [record(BEGIN, BEGIN + at, at - 1, BEGIN + at - 1, at, BEGIN + at) for at in range(1, 1000)]
    many += [record(BEGIN, BEGIN + 1000, True, BEGIN + 999, 2000, BEGIN - 1)]
    many += [record(BEGIN, BEGIN + 1000, -1, BEGIN + 999, 2**53, BEGIN + 1000)]
    batches, hours = batch_hours(many) or ([], [])
    assert len(batches) == 400 and [*batches[:3], batches[-1]] == [0, 3, 5, 999]
    assert hours == [round(batch / hour, 6) for batch in batches]


def test_a_run_without_results_or_without_a_batch(tmp_path):
    content = read(write_run(tmp_path / 'plain', evaluations=False, sheets=0))
    assert (content.evaluations, content.images.sheets, content.notes) == ([], [], [])
    run = tmp_path / 'new'
    run.mkdir()
    (run / 'recipe.yaml').write_text('name: new\ntrainer: {max_duration: 100ba}\n')
    content = read(run)
    assert (content.status.state, content.status.batch, content.series) == ('starting', None, {})
    assert any('No metrics.jsonl' in note for note in content.notes)
    for text, note in (('', 'No recipe.yaml: the run has not begun to train.'), ('[', 'recipe.yaml is not YAML that')):
        (run / 'recipe.yaml').write_text(text)
        assert any(each.startswith(note) for each in read(run).notes)


def test_length_in_epochs_is_that_of_the_status(run):
    (run / 'recipe.yaml').write_text('trainer: {max_duration: 3ep}')
    for total, hours in ((399, 0), (1234, 834 * 0.525 / 3600)):
        write_status(run, 400, total)
        content = read(run)
        assert (content.status.total_batches, content.status.duration) == (total, '3ep')
        assert content.cost.hours_left == pytest.approx(hours)


def test_time_left_and_end_of_a_running_run_are_current(run):
    write_status(run, 400, 1000)
    with hold_run_lock(run, {}):
        content, now = read(run), time.time()
    assert content.status.state == 'running' and content.cost.hours_left == pytest.approx(600 * 0.5 / 3600)
    first, last = (each['end'] for each in content.status.attempts)
    assert first < BEGIN + 1000 and now - 60 < last <= now


def test_examples_are_small_images_of_the_last_evaluation_and_only_files_of_the_run(run):
    path = run / 'evaluations' / 'ba400.json'
    results = json.loads(path.read_text())
    named = results['guidance'][0]['examples']['geneval_hf']
    named['counting']['worst'][0]['file'] = '../../../secret.png'
    (run.parent / 'secret.png').write_bytes((run / 'images' / 'ba000400.png').read_bytes())
    path.write_text(json.dumps(results))
    damaged = f'{results["guidance"][0]["folder"]}/{named["colors"]["best"][1]["file"]}'
    (run / damaged).write_bytes(b'cut')
    content = read(run)
    assert content.evaluations[3]['intervals']['geneval_hf'][''] == pytest.approx([0.475, 0.545])
    assert [len(each['examples']) for each in content.evaluations] == [0, 0, 0, 1]
    examples = content.evaluations[3]['examples']['geneval_hf']
    assert len(examples['counting']['worst']) == 2 and examples['position']['worst'][0]['why'] == '1 of 2 dog found'
    assert examples['position']['worst'][0]['image']['key'] in content.images.encoded
    assert any(note.startswith(f'{damaged}: images of the worst and best prompts') for note in content.notes)

    small = RunReader(str(run), image_bytes=30_000).read()
    both = small.evaluations[3]['examples']['geneval_hf'].values()
    shown = [each['image'] for kind in both for each in (*kind['worst'], *kind['best']) if each.get('image')]
    assert 0 < len(shown) < 35 and {each['width'] for each in shown} == {64}
    assert sum(map(len, small.images.encoded.values())) < 35_000

    results['guidance'][0]['examples'] = {'clip_score': named, 'fid': named}
    path.write_text(json.dumps(results))
    assert [*read(run).evaluations[3]['examples']] == ['clip_score'], 'without benchmarks, those of one metric'


def test_results_with_strange_values_show_what_can_be_shown(run):
    metrics = {'fid': 'low', 'kid': float('nan'), 'cmmd': 0.5, 'x': 10**400}
    row = {'guidance_scale': 1, 'metrics': {'cmmd': 0.5}, 'folder': 3, 'intervals': {'cmmd': {'': [1, 'x'], 'a': 3}}}
    row['examples'] = {'cmmd': {'a': {'worst': 3}, 'b': [], 'c': {'best': [None, {'file': 'x.png'}]}}, 'kid': 3}
    strange = {
        'metrics': metrics,
        'guidance': [3, {'guidance_scale': None}, row, {'guidance_scale': 2, 'intervals': 3}],
    }
    (run / 'evaluations' / 'ba300.json').write_text(json.dumps(strange))
    found = read_evaluations(LocalPlace(run), [])[2]
    assert [row['intervals'] for row in found['guidance']] == [{'cmmd': None}, {}]
    assert (found['metrics'], found['intervals'], found['images']) == ({'cmmd': 0.5}, {'cmmd': {}}, None)
    assert found['examples'] == {'cmmd': {kind: {'worst': [], 'best': []} for kind in 'abc'}}


def test_metrics_and_checkpoints_beyond_their_limits_are_notes(run, monkeypatch):
    (run / 'ba150.damaged').mkdir()
    monkeypatch.setattr(run_parts, 'MAX_CHECKPOINTS', 4)
    content = read(run)
    assert content.notes == []
    left_out = f'metrics.jsonl: {len(content.series) - 3} of its metrics were left out, since it has very many.'
    monkeypatch.setattr(run_parts, 'MAX_CHECKPOINTS', 3)
    monkeypatch.setattr(metric_reader, 'MAX_SERIES', 3)
    content = read(run)
    assert content.notes == [left_out, 'Of 4 checkpoints, the newest 3 are shown.']
    assert [each['batch'] for each in content.checkpoints] == [400, 300, 200, 150]


def test_images_fit_into_their_bytes_with_the_first_and_the_last(tmp_path):
    run = write_run(tmp_path / 'many', sheets=0)
    for batch in range(0, 600, 50):
        write_sheet(run, batch, PROMPTS, noise=batch < 550)  # the last one is smaller than the others
    found = RunReader(str(run), image_bytes=100_000).read().images
    assert sum(map(len, found.encoded.values())) <= 100_000
    assert found.total == 12 and 2 < len(found.sheets) < 12
    assert (found.sheets[0].batch, found.sheets[-1].batch) == (0, 550)
    assert evenly_chosen([3, 5, 9], 1) == [9] and evenly_chosen([3, 5, 9], 2) == [3, 9]
    write_sheet(run, 600, PROMPTS[:3], side=160, noise=True)
    (run / 'images' / 'ba000600.png').rename(run / 'samples.png')
    found = RunReader(str(run), image_bytes=100_000).read().images
    assert found.generated and {each['images'][0]['width'] for each in found.generated.figures} == {96}
    assert sum(map(len, found.encoded.values())) <= 100_000


def test_secrets_in_a_recipe_are_hidden(run):
    secret = 'hf_' + 'A1b2C3d4E5' * 4
    text = (run / 'recipe.yaml').read_text()
    (run / 'recipe.yaml').write_text(text + f'loggers:\n  wandb:\n    api_key: {secret}\n')
    content = read(run)
    assert secret not in content.recipe and content.recipe.endswith('api_key: <hidden>\n')


def test_a_second_read_adds_what_is_new(run):
    reader = RunReader(str(run))
    assert reader.read().images.total == 0, 'images are read only if they have a place'
    append_metrics(run, {'step': 400, 'loss/train/total': 0.5})
    assert reader.read().status.batch == 401
    (run / 'metrics.jsonl').write_text(json.dumps({'step': 3, 'loss/train/total': 0.25}) + '\n')
    assert [*reader.read().series['loss/train/total'].values] == [0.25], 'the file was replaced'


def test_a_run_in_a_bucket_reads_the_same_unless_it_fails_or_a_part_does(run, store):
    url = store.upload(run, 'runs')
    in_bucket, in_folder = read(url), read(run)
    for part in ('series', 'evaluations', 'checkpoints', 'images', 'hours', 'recipe'):
        assert getattr(in_bucket, part) == getattr(in_folder, part)
    store.fail('GET metrics.jsonl', 403)
    content = read(url)
    assert content.evaluations and any(note.startswith('metrics.jsonl could not be read') for note in content.notes)
    store.fail('GET', 503)
    with pytest.raises(ExternalError, match='cannot be read'):
        read(url)


def test_huge_page_has_fewer_points(tmp_path, monkeypatch):
    run = write_run(tmp_path / 'run', batches=2000, evaluations=False, sheets=0)
    source = RunsSource([str(run)])
    size = len(source.write())
    monkeypatch.setattr(report_source, 'MAX_BYTES', size - 30_000)
    assert len(source.write()) < size - 30_000
    monkeypatch.setattr(report_source, 'MAX_BYTES', 1000)
    with pytest.raises(UserError, match='would have more than 0 MB; compare fewer runs'):
        source.write()


def test_points_are_shared_by_the_curves(tmp_path):
    run = write_run(tmp_path / 'run', batches=40, evaluations=False, sheets=0)
    for step in range(40, 3000):
        append_metrics(run, {'step': step} | {f'layer{n}': float(step * n) for n in range(30)})
    content = RunReader(str(run)).read()
    few, many = (page_data([content], total_points=points)['runs'][0]['series'] for points in (10_000, 1_000_000))
    assert sum(len(each['x']) + len(each.get('mx', ())) for each in few.values()) < 12_000
    assert (len(few['layer3']['x']), len(few['layer3']['mx'])) == (216, 108)
    assert len(many['layer3']['x']) == 2000 and len(many['layer3']['mx']) == 1000
    assert max(few['layer3']['y']) == 2999 * 3 and few['layer3']['count'] == 2960
    json.dumps([few, many], allow_nan=False)
    assert json_text({'a': [math.nan, 1.5], 'b': (math.inf,)}) == '{"a":[null,1.5],"b":[null]}'


def test_published_scores_have_sources_and_stand_beside_their_metric(tmp_path):
    with open(report_source.PUBLISHED, encoding='utf-8', newline='') as file:
        rows = list(csv.DictReader(file))
    for row in rows:
        assert row['source'].startswith('https://') and row['prompts'] in ('original', 'rewritten', 'not stated')
        assert 0 < float(row['score']) < {'GenEval': 1, 'DPG-Bench': 100}[row['benchmark']]
    assert len({(row['benchmark'], row['model']) for row in rows}) == len(rows)
    evaluated, other = (write_run(tmp_path / name, batches=40, evaluations=name == 'a', sheets=0) for name in 'ab')
    published = page_data([RunReader(str(evaluated)).read()])['published']
    assert [(each['model'], each['score']) for each in published['geneval_hf']][1] == ('Qwen-Image with RL', 0.91)
    assert report_source.published_scores({'dpg/Qwen3-VL'})['dpg/Qwen3-VL'][0]['model'] == 'Qwen-Image'
    assert page_data([RunReader(str(other)).read()])['published'] == {}


def test_runs_are_found_and_one_that_fails_is_a_note(tmp_path, monkeypatch):
    for name in ('b', 'a'):
        write_run(tmp_path / name, batches=40, evaluations=name == 'b', sheets=0)
    (tmp_path / 'notes' / 'bats').mkdir(parents=True)
    assert runs_in(str(tmp_path)) == ['a', 'b']
    assert [looks_like_a_run(Listing({}, {name})) for name in ('ba1', 'bats', 'no10')] == [True, False, False]
    (tmp_path / 'b' / 'report.html').touch()
    assert [written_report(str(tmp_path), name) for name in 'ab'] == [None, './b/report.html']
    table = TableSource(str(tmp_path), price=2.0, link=lambda name: None)
    rows = {row['name']: row for row in table.read().data['rows']}
    assert rows['a']['dollars'] == pytest.approx(2 * rows['a']['device_hours'])
    assert re.fullmatch(r'validation loss \d[.\d]* \(ba\d+\)', rows['a']['evaluation'])
    causes = ('done', 'crash', None, 'preempted', 'stopped')
    assert [_kind('ended', cause) for cause in causes] == ['good', 'bad', 'plain', 'plain', 'plain']
    assert [_kind(state, 'done') for state in ('running', 'silent', 'starting')] == ['good', 'bad', 'plain']

    results = tmp_path / 'b/evaluations/ba40.json'
    results.write_text(
        json.dumps(json.loads(results.read_text()) | {'metrics': {}, 'losses': {'loss': 0.4, 'late': 0.25, 'x': 1}})
    )
    write_attempts(tmp_path / 'b', 40, devices=None)
    for receipt in (tmp_path / 'b').glob('ba*/receipt.json'):
        receipt.unlink()
    write_status(tmp_path / 'a', 40, 1000)
    with hold_run_lock(tmp_path / 'a', {}):
        a, b = TableSource(str(tmp_path), price=2.0, link=lambda name: None).read().data['rows']
    assert (a['state'], a['kind'], b['dollars'], b['evaluation']) == (
        'running',
        'good',
        None,
        'loss 0.4, late 0.25 (ba40)',
    )

    monkeypatch.setattr(RunReader, 'read', Mock(side_effect=UserError('gone')))
    data = table.read().data
    assert data['rows'] == [] and data['notes'] == ['gone', 'gone']
