"""Screens of a terminal: messages and the status line never share a row, and no row is wrapped."""

import logging
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
from terminal import Screen, terminal

from diffusion.loggers import status_line
from diffusion.loggers.status_line import StatusLine, WrappingFormatter

ROOT = Path(__file__).parents[2]
START = """
import logging, sys, warnings
from diffusion.loggers import status_line
from diffusion.tasks.run_recipe import configure_logging

configure_logging()
log = logging.getLogger('diffusion')
"""
MESSAGE = r'\d\d:\d\d:\d\d (INFO|WARNING): \S'


def see(program: str, **variables: str) -> Screen:
    """Run a Python program in a terminal to its end, and return the screen."""
    with terminal(80) as (device, screen), device.open('wb') as file:
        environ = os.environ | {'TERM': 'xterm', 'PYTHONPATH': str(ROOT)} | variables
        subprocess.run([sys.executable, '-c', START + program], env=environ, stdout=file, stderr=file, timeout=60)
    return screen


def test_messages_of_all_kinds_appear_above_the_status_line():
    program = """
status_line.show('batch 1')
log.info('logged')
status_line.show('batch 2')
print('printed')
print('printed in', 'parts', sep='\\n')
warnings.warn('warned')
logging.getLogger('other').error('by another library')
sys.stderr.writelines(['one\\n', 'two\\n'])
status_line.show('batch 3')
raise ValueError('uncaught')
"""
    # Python 3.13 shows the lines of a program that was given as an argument.
    expected = r"""\d\d:\d\d:\d\d INFO: logged
printed
printed in
parts
<string>:\d+: UserWarning: warned
(?:  warnings.warn\('warned'\)
)?\d\d:\d\d:\d\d ERROR: by another library
one
two
Traceback \(most recent call last\):
  File "<string>", line \d+, in <module>
(?:    raise ValueError\('uncaught'\)
)?ValueError: uncaught
"""
    screen = see(program)
    assert re.fullmatch(expected, str(screen)), screen
    assert {'batch 1', 'batch 2', 'batch 3'} <= set(screen.last_rows)


@pytest.mark.parametrize('leave', [True, pytest.param(False, marks=pytest.mark.slow)])
def test_progress_bar_of_another_library_replaces_the_status_line(leave):
    screen = see(f"""
from tqdm import tqdm
status_line.show('batch 1')
for _ in tqdm(range(3), leave={leave}, mininterval=0, ncols=40):
    status_line.show('batch 2')
log.info('logged')
""")
    rows = str(screen).splitlines()
    assert len(rows) == 1 + leave, rows
    assert re.match(MESSAGE + 'ogged$', rows[-1]), rows
    assert not leave or re.match(r'100%.*\]$', rows[0])


def test_status_and_messages_are_as_wide_as_the_terminal(monkeypatch):
    columns = iter([40, 0])
    monkeypatch.setattr(os, 'get_terminal_size', lambda descriptor: os.terminal_size((next(columns), descriptor)))
    line = StatusLine(cast(Any, sys.__stderr__))
    assert [line.columns(), line.columns()] == [39, 79]
    monkeypatch.setattr(os, 'get_terminal_size', Mock(side_effect=OSError))
    assert line.columns() == 79
    monkeypatch.setattr(status_line, 'columns', lambda: 39)
    record = logging.LogRecord('a', logging.INFO, 'a.py', 1, 'many words ' * 6 + 'path/' * 8, None, None)
    expected = '00:00:00 many words many words many\n         words many words many words\n         many words'
    found = WrappingFormatter('00:00:00 %(message)s').format(record)
    assert found == f'{expected}\n         {"path/" * 8}'


@pytest.mark.slow
def test_no_terminal_no_control_characters(tmp_path):
    program = START + "assert not status_line.install(); status_line.show('status'); log.info('word ' * 30)"
    result = subprocess.run([sys.executable, '-c', program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert re.fullmatch(MESSAGE + 'ord .*\n', result.stderr), 'one line, however long'
    dumb = see("assert not status_line.install(); status_line.show('status'); log.info('logged')", TERM='dumb')
    assert re.fullmatch(MESSAGE + 'ogged\n', str(dumb))


@pytest.mark.parametrize('term', ['xterm', pytest.param('dumb', marks=pytest.mark.slow)])
def test_control_characters_of_a_file_name_are_escaped(term):
    screen = see(r"log.warning('%s: not an image', '\x1b]0;title\x07\x1b[2J\u202ename')", TERM=term)
    assert r'WARNING: \x1b]0;title\x07\x1b[2J\u202ename: not an image' in str(screen)


def test_only_rank_zero_shows_a_status_line():
    screen = see("status_line.show('status'); log.warning('logged')", RANK='1')
    assert 'status' not in screen.last_rows and 'logged' in str(screen)
