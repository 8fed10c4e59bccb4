"""Screens of training and evaluation in terminals of several widths, and the lines of log files."""

import re

from forkserver import ROOT
from terminal import terminal

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
