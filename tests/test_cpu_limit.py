"""A test without `slow` that takes too much CPU time fails; what tests share and what is imported does not count."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

TESTS = Path(__file__).parent
CONFTEST = """
from cpu_limit import CpuLimit


def pytest_configure(config):
    config.pluginmanager.register(CpuLimit())
"""
PROGRAM = """
import subprocess, sys, time
import cpu_limit
import pytest

cpu_limit.LIMIT_SECONDS, cpu_limit.TOLERANCE = 0.15, 1.0
cpu_limit.LOOP_SECONDS = 100.0  # as on an idle machine


def spend(seconds=0.2):
    began = time.process_time()
    while time.process_time() - began < seconds:
        pass


@pytest.fixture
def own():
    spend()


@pytest.fixture(scope='module')
def shared():
    spend()


def test_fails_for_its_own_time():
    spend()


def test_fails_for_its_fixture(own):
    pass


def test_fails_for_its_child():
    code = 'import time\\nwhile time.process_time() < 0.25: pass'
    subprocess.run([sys.executable, '-c', code], check=True)


def test_passes_after_a_shared_fixture(shared):
    pass


def test_passes_with_a_fixture_that_it_asks_for_later(request):
    request.getfixturevalue('shared')


def test_passes_while_it_waits():
    time.sleep(0.2)


def test_passes_after_importing_a_library():
    spend()
    sys.modules |= {f'library.part{number}': sys for number in range(200)}


@pytest.mark.slow
def test_passes_marked_slow():
    spend()


@pytest.mark.cpu_seconds(60)
def test_passes_with_a_limit_of_its_own():
    spend()
"""


@pytest.mark.slow
def test_default_test_may_take_little_cpu_time(tmp_path):
    (tmp_path / 'test_program.py').write_text(PROGRAM)
    (tmp_path / 'conftest.py').write_text(CONFTEST)
    (tmp_path / 'pytest.ini').write_text('[pytest]\nmarkers =\n  slow: of the test\n  cpu_seconds: also\n')
    words = [sys.executable, '-m', 'pytest', '-p', 'no:cacheprovider', '-rfE', '--tb=short', '.']
    environ = os.environ | {'PYTHONPATH': str(TESTS), 'PYTEST_DISABLE_PLUGIN_AUTOLOAD': '1'}
    ended = subprocess.run(words, cwd=tmp_path, env=environ, capture_output=True, text=True, check=False)
    failed = [line.split()[1].partition('::')[2] for line in ended.stdout.splitlines() if line.startswith('FAILED')]
    assert failed == ['test_fails_for_its_own_time', 'test_fails_for_its_fixture', 'test_fails_for_its_child']
    assert '6 passed' in ended.stdout
    assert 'the limit without `slow` is 0.15 s. To fix: make it smaller, ' in ended.stdout
