"""`diffusion report`: paths of pages, mistakes, buckets, and what it imports."""

from pathlib import Path

import pytest
from commands import modules_of, output_of, refusal
from synthetic_run import write_run

from diffusion.cli import main
from diffusion.report.run_parts import recipe_differences

FOREIGN = {'torch', 'composer', 'streaming', 'transformers', 'diffusers', 'torchvision', 'matplotlib'}


@pytest.fixture
def runs(tmp_path, monkeypatch) -> Path:
    monkeypatch.chdir(tmp_path)
    for index in range(2):
        write_run(tmp_path / 'runs' / f'run-{index}', batches=80, evaluations=False, sheets=1)
    return tmp_path / 'runs'


@pytest.mark.parametrize(
    ('words', 'path'),
    [
        (['runs/run-0'], 'runs/run-0/report.html'),
        (['runs/run-0', 'runs/run-1'], 'report.html'),
        (['runs'], 'runs/report.html'),
        (['runs/run-0', '--out', 'a/b.html'], 'a/b.html'),
    ],
)
def test_page_is_written_and_its_path_printed(runs, capsys, words, path):
    assert output_of(capsys, 'report', *words) == f'{path}\n'
    assert (runs.parent / path).read_text().startswith('<!DOCTYPE html>')


def test_a_table_links_to_the_pages_of_runs_only_from_the_folder_of_the_runs(runs, capsys):
    for words in (['runs/run-1'], ['runs'], ['runs', '--out', 'other.html']):
        output_of(capsys, 'report', *words)
    for path, count in ((runs / 'report.html', 1), (Path('other.html'), 0)):
        assert path.read_text().count('./run-1/report.html') == count
    assert './run-0/' not in (runs / 'report.html').read_text()


@pytest.mark.parametrize(
    ('words', 'text'),
    [
        (['runs/run-9'], "runs/run-9 is not a folder; did you mean 'runs/run-"),
        (['runs/run-0/images'], 'is neither a run nor a folder with runs; give the folder or URL of a run'),
        (['runs/run-1', 'runs/run-0', 'runs/run-0/'], 'error: report: runs/run-0 is given twice; give each run once'),
        (['runs/run-0', 'runs'], 'none of the files of a run (metrics.jsonl, attempts.jsonl, checkpoints); give the'),
        (['runs/run-0', '--out', 'runs'], '--out: runs is a folder; give the path of a file, such as runs/report.html'),
        (['runs/run-0', '--out', 'runs/run-0/recipe.yaml/x.html'], 'recipe.yaml is not a folder; choose another path'),
    ],
)
def test_mistakes_are_one_message_with_a_way_out(runs, capsys, words, text):
    error = refusal(capsys, 'report', *words)
    assert text in error and error.startswith('error: ') and 'Traceback' not in error


@pytest.mark.parametrize('words', [['--price', 'free'], ['--price', '-1'], ['--port', '70000'], ['--port', 'x']])
def test_options_are_checked(capsys, words):
    assert f'argument {words[0]}: ' in refusal(capsys, 'report', 'runs', *words)


@pytest.mark.slow
def test_runs_in_a_bucket(runs, store, capsys):
    url = store.upload(runs, 'runs')
    assert output_of(capsys, 'report', f'{url}/run-0') == 'run-0-report.html\n'
    output_of(capsys, 'report', url, '--out', 'all.html')
    assert 'run-1' in Path('all.html').read_text()
    store.fail('GET', 503)
    assert main(['report', f'{url}/run-0']) == 1
    assert 'cannot be read' in capsys.readouterr().err


@pytest.mark.slow
def test_nothing_of_torch_is_imported(runs):
    loaded = modules_of('from diffusion.cli import main; assert main(["report", "runs/run-0"]) == 0')
    assert 'PIL' in loaded
    assert not loaded & FOREIGN


def test_differences_of_recipes_are_by_key():
    first = 'name: a\nmodel: {name: sd2, depth: 3}\noptimizer: {betas: [0.9, 0.99]}\n'
    second = 'name: b\nmodel: {name: sd2, depth: 4}\noptimizer: {betas: [0.9, 0.99]}\nema: null\n'
    assert recipe_differences([first, second, 'no: [yaml']) == [
        {'key': 'model.name', 'values': ['sd2', 'sd2', None]},
        {'key': 'model.depth', 'values': ['3', '4', None]},
        {'key': 'optimizer.betas', 'values': ['[0.9, 0.99]', '[0.9, 0.99]', None]},
        {'key': 'ema', 'values': [None, 'null', None]},
    ]
