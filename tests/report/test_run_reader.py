"""Reading of one run's files in any state, and of many runs; size of pages."""

import csv
import json
import math
import re
import time
from pathlib import Path
from unittest.mock import Mock

import pytest
from synthetic_run import BEGIN, PROMPTS, append_metrics, write_attempts, write_run, write_sheet, write_status

from diffusion.errors import ExternalError, UserError
from diffusion.planning.gpus import load_gpus
from diffusion.report import metric_reader, report_source, run_parts
from diffusion.report.page import json_text
from diffusion.report.report_source import RunsSource, TableSource, _kind, page_data, runs_in, written_report
from diffusion.report.run_parts import RunCost, batch_hours, gpu_of_product, read_evaluations, run_cost
from diffusion.report.run_reader import RunContent, RunReader
from diffusion.report.sample_sheets import evenly_chosen
from diffusion.runs.attempts import Attempt
from diffusion.runs.run_lock import hold_run_lock
from diffusion.storage.places import LocalPlace


def read(run: Path | str, **options: object) -> RunContent:
    return RunReader(str(run), image_bytes=500_000, **options).read()  # type: ignore[arg-type]


@pytest.fixture
def run(tmp_path) -> Path:
    return write_run(tmp_path / 'sd2')


def test_everything_of_a_run_is_read(run):
    content = read(run)
    status = content.status
    assert (content.name, status.state, status.batch, status.total_batches) == ('sd2', 'ended', 400, 1000)
    assert len(content.series['loss/train/total'].steps) == 400, 'the repeated batches count once'
    assert [each['batch'] for each in content.evaluations] == [100, 200, 300, 400]
    assert content.evaluations[0]['metrics']['fid'] > 10 and len(content.evaluations[0]['guidance']) == 9
    row = content.evaluations[3]['guidance'][4]
    assert (row['method'], row['sampler'], row['shift']) == ('interval low=0.1 high=0.8', 'ddim', None)
    assert row['intervals'] == {'geneval_hf': pytest.approx([0.475, 0.545])}
    assert [sheet.batch for sheet in content.images.sheets] == [100, 200, 300, 400]
    assert [figure['caption'] for figure in content.images.sheets[0].figures] == PROMPTS
    assert [each['batch'] for each in content.checkpoints] == [400, 300, 200, 100]
    assert [each['pinned'] for each in content.checkpoints] == [False, False, True, False]
    assert [each['place'] for each in content.saves] == ['storage of the run', 'memory of the nodes']
    values = [[each[key] for each in content.saves] for key in ('saves', 'last_batch', 'mean_seconds', 'failed')]
    assert values == [[7, 7], [350, 350], [21, 1.5], [0, 0]]
    change = {'time': '2026-11-18T10:00:00+00:00', 'key': 'optimizer.weight_decay', 'change': '0.1 -> 0.01'}
    assert content.changes == [change | {'batch': 200}] and content.notes == []


def test_cost_is_that_of_the_attempts_and_of_the_batches_left(run):
    cost = read(run).cost
    attempts = [(each['end'] - each['begin']) / 3600 for each in read(run).status.attempts]
    assert cost.device_hours == pytest.approx(128 * sum(attempts))
    assert cost.price == 2.95 and cost.price_source.startswith('h100-sxm, ')
    seconds = (read(run).status.attempts[1]['last_at'] - read(run).status.attempts[1]['first_at']) / 200
    assert cost.hours_left == pytest.approx(600 * seconds / 3600)
    assert vars(read(run, price=1.5).cost).items() >= {'price': 1.5, 'price_source': '--price'}.items()


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
    assert batch_hours(records[:1]) is None
    many = [record(BEGIN, BEGIN + at, at - 1, BEGIN + at - 1, at, BEGIN + at) for at in range(1, 1000)]
    many += [record(BEGIN, BEGIN + 1000, True, BEGIN + 999, 2000, BEGIN - 1)]
    batches, hours = batch_hours(many) or ([], [])
    assert len(batches) == 400 and [*batches[:3], batches[-1]] == [0, 3, 5, 999]
    assert hours == [round(batch / hour, 6) for batch in batches]


def test_a_run_without_results_or_without_a_batch(tmp_path):
    content = read(write_run(tmp_path / 'plain', evaluations=False, sheets=0))
    assert (content.evaluations, content.images.sheets, content.notes) == ([], [], [])
    run = tmp_path / 'new'
    run.mkdir()
    with pytest.raises(UserError, match='none of the files of a run .* give the folder or URL of a run'):
        read(run)
    (run / 'recipe.yaml').write_text('name: new\ntrainer: {max_duration: 100ba}\n')
    content = read(run)
    assert (content.status.state, content.status.batch, content.series) == ('starting', None, {})
    assert any('No metrics.jsonl' in note for note in content.notes)
    for text, note in (('', 'No recipe.yaml: the run has not begun to train.'), ('[', 'recipe.yaml is not YAML that')):
        (run / 'recipe.yaml').write_text(text)
        assert any(each.startswith(note) for each in read(run).notes)


def test_length_in_epochs_is_that_of_the_status(run):
    (run / 'recipe.yaml').write_text('trainer: {max_duration: 3ep}')
    write_status(run, 400, 1234)
    status = read(run).status
    assert (status.state, status.total_batches, status.duration) == ('ended', 1234, '3ep')


def test_time_left_and_end_of_a_running_run_are_current(run):
    write_status(run, 400, 1000)
    with hold_run_lock(run, {}):
        content, now = read(run), time.time()
    assert content.status.state == 'running' and content.cost.hours_left == pytest.approx(600 * 0.5 / 3600)
    first, last = (each['end'] for each in content.status.attempts)
    assert first < BEGIN + 1000 and now - 60 < last <= now


def test_metrics_that_are_cut_damaged_or_not_finite_are_notes(run, monkeypatch):
    append_metrics(run, {'step': 400, 'loss/train/total': math.nan}, {'step': 401, 'loss/train/total': math.inf})
    with (run / 'metrics.jsonl').open('a') as file:
        file.write('no JSON\n{"step": 402, "loss/tr')
    content = read(run)
    assert content.status.last_loss is not None and math.isfinite(content.status.last_loss)
    text = '\n'.join(content.notes)
    assert 'loss/train/total: 2 values are NaN or infinite; the first one is NaN, at batch 400.' in text
    assert '1 lines are damaged' in text and 'last line is not complete' in text
    monkeypatch.setattr(metric_reader, 'MAX_SERIES', 3)
    note = f'metrics.jsonl: {len(content.series) - 3} of its metrics were left out, since it has very many.'
    assert note in read(run).notes


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


@pytest.mark.parametrize('content', [b'{', b'{"metrics": 3}'])
def test_a_result_file_that_is_none_is_a_note(run, content):
    (run / 'evaluations' / 'ba300.json').write_bytes(content)
    found = read(run)
    assert [each['batch'] for each in found.evaluations] == [100, 200, 400]
    assert found.notes == ['evaluations/ba300.json is not a file of results, so this evaluation is missing here.']


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


def test_damaged_receipts_and_images_are_notes(run, monkeypatch):
    (run / 'ba100' / 'receipt.json').write_text('{}')
    (run / 'ba200' / 'receipt.json').unlink()
    (run / 'images' / 'ba000100.png').write_bytes(b'no image')
    content = read(run)
    states = {400: ('complete', False), 300: ('complete', False), 200: ('incomplete', True), 100: ('damaged', False)}
    assert {each['batch']: (each['state'], each['pinned']) for each in content.checkpoints} == states
    assert [sheet.batch for sheet in content.images.sheets] == [200, 300, 400]
    assert len(content.notes) == 3
    (run / 'ba150.damaged').mkdir()
    monkeypatch.setattr(run_parts, 'MAX_CHECKPOINTS', 3)
    content = read(run)
    assert content.notes[0] == 'Of 4 checkpoints, the newest 3 are shown.'
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
    reader.read()
    append_metrics(run, {'step': 400, 'loss/train/total': 0.5})
    assert reader.read().status.batch == 401
    (run / 'metrics.jsonl').write_text(json.dumps({'step': 3, 'loss/train/total': 0.25}) + '\n')
    assert [*reader.read().series['loss/train/total'].values] == [0.25], 'the file was replaced'


def test_a_run_in_a_bucket_reads_the_same(run, store):
    url = store.upload(run, 'runs')
    in_bucket, in_folder = read(url), read(run)
    assert in_bucket.series == in_folder.series and in_bucket.evaluations == in_folder.evaluations
    assert in_bucket.checkpoints == in_folder.checkpoints and in_bucket.images == in_folder.images
    assert in_bucket.hours == in_folder.hours and in_bucket.recipe == in_folder.recipe


def test_a_bucket_that_fails_is_an_error_and_a_part_that_fails_a_note(run, store):
    url = store.upload(run, 'runs')
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
    assert len(many['layer3']['x']) == 2000 and len(many['layer3']['mx']) == 1000
    assert max(few['layer3']['y']) == 2999 * 3 and few['layer3']['count'] == 2960
    json.dumps([few, many], allow_nan=False)
    assert json_text({'a': [math.nan, 1.5], 'b': (math.inf,)}) == '{"a":[null,1.5],"b":[null]}'
    page = page_data([content])['runs'][0]
    assert [each['reason'] for each in page['attempts']] == ['preempted', 'completed']
    assert (page['lost'], page['hours'][1]) == ({'preempted': 350.0}, [0.016667, 0.034722, 0.038889])


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
    (tmp_path / 'b' / 'report.html').touch()
    assert [written_report(str(tmp_path), name) for name in 'ab'] == [None, './b/report.html']
    table = TableSource(str(tmp_path), price=2.0, link=lambda name: None)
    rows = {row['name']: row for row in table.read().data['rows']}
    assert rows['a']['batch'] == 40 and rows['a']['dollars'] == pytest.approx(2 * rows['a']['device_hours'])
    assert re.fullmatch(r'validation loss \d[.\d]* \(ba\d+\)', rows['a']['evaluation'])
    assert (rows['a']['state'], rows['a']['kind'], rows['a']['link']) == ('ended, completed', 'good', None)
    assert rows['a']['loss'] == pytest.approx(RunReader(str(tmp_path / 'a')).read().status.last_loss)
    metrics = json.loads((tmp_path / 'b/evaluations/ba40.json').read_text())['metrics']
    assert rows['b']['evaluation'] == f'fid {metrics["fid"]:.4g}, clip_score {metrics["clip_score"]:.4g} (ba40)'
    causes = ('done', 'crash', None, 'preempted', 'stopped')
    assert [_kind('ended', cause) for cause in causes] == ['good', 'bad', 'plain', 'plain', 'plain']
    assert [_kind(state, 'done') for state in ('running', 'silent', 'starting')] == ['good', 'bad', 'plain']

    monkeypatch.setattr(RunReader, 'read', Mock(side_effect=UserError('gone')))
    data = table.read().data
    assert data['rows'] == [] and data['notes'] == ['gone', 'gone']
