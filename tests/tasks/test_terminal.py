"""Screens of training and evaluation in terminals of several widths, lines of log files, and printed paths."""

import re

from forkserver import ROOT
from terminal import terminal

from diffusion.config.load import load
from diffusion.storage.local_files import WORKING_FOLDER_VARIABLE
from diffusion.tasks.run_recipe import describe_results

ROW = re.compile(r'\d\d:\d\d:\d\d (INFO|WARNING): \S.*| {9}\S.*|runs/\w+:|  [a-z ]+ {2,}runs/\S+|[a-z]\w+ +\d\.\d{4}')
"""A message, a further line of a message, the list of the run's files, a metric of the evaluation."""
STATUS = re.compile(r'(\[#*\.*\] )?batch \d+ of 12, loss \d\.\d{4}, [\d.]+ (batches/s|s/batch), \d+ s left')


def test_messages_and_progress_of_training_share_no_row(forkserver, write_recipe, pictures, tmp_path):
    grid = {'prompts': ['a red square'], 'every': '6ba', 'num_inference_steps': 1}
    recipe = write_recipe(
        eval_streams={'other': {'local': str(pictures[64]), 'resolution': 32}},
        callbacks={'image_grid': grid},
        evaluators={'retrieval': {'num_captions': 4, 'num_inference_steps': 1, 'num_shown': 4}},
        trainer={'max_duration': '12ba', 'eval_interval': '6ba', 'save_interval': '12ba', 'device': 'cpu'},
    )
    with terminal(80) as (device, screen):
        command = (ROOT / 'run.py', recipe, 'runs_dir=runs')
        process = forkserver.start(*command, output=device, folder=tmp_path, environment={'TERM': 'xterm'})
        assert process.poll(300) is not None
    rows = str(screen).splitlines()
    assert process.status == 0, screen
    assert [row for row in rows if not ROW.fullmatch(row)] == [], screen
    assert rows.count('runs/run:') == 1
    assert not screen.wrapped
    assert max(map(len, screen.last_rows)) < 80
    assert re.search(r'INFO: batch 6, evaluation: loss=\d', str(screen))
    assert re.search(r'INFO: batch 12 of 12, loss \d\.\d{4}, ', str(screen))
    assert any(STATUS.fullmatch(row) for row in screen.last_rows)
    assert 'batch 6, sampling 1 images' in screen.last_rows


def test_results_list_the_files_that_exist(write_recipe, tmp_path, monkeypatch):
    data = tmp_path / 'data'
    streams = {'images': {'local': str(data / '32px'), 'resolution': 32}}
    evaluated = {'held-out': {'local': str(data / 'held-out'), 'resolution': 32}}
    remote = {'far': {'remote': 's3://bucket/far', 'resolution': 32}}
    recipe = load(write_recipe(streams=streams | remote, eval_streams=evaluated))
    run = recipe.run_dir
    for folder in (run / 'images', run / 'ba900', run / 'ba1000', data / '32px', data / 'held-out'):
        folder.mkdir(parents=True)
    assert 'loss.png' not in describe_results(recipe)
    (run / 'loss.png').touch()
    (data / 'captions.txt').touch()
    (data / 'held-out' / 'captions.txt').touch()
    assert describe_results(recipe).splitlines() == [
        f'{run}:',
        f'  newest checkpoint          {run}/ba1000',
        f'  loss curve                 {run}/loss.png',
        f'  image grids                {run}/images',
        f'  captions of the data       {data}/captions.txt',
        f'  captions of the data       {data}/held-out/captions.txt',
    ]
    monkeypatch.setenv(WORKING_FOLDER_VARIABLE, str(tmp_path / 'here'))
    recipe = load(write_recipe(), ['runs_dir=s3://bucket/runs'])
    recipe.run_dir.mkdir(parents=True)
    (recipe.run_dir / 'loss.png').touch()
    there = 's3://bucket/runs/run'
    assert describe_results(recipe) == f'{there}:\n  loss curve                 {there}/loss.png'
