"""The benchmarks run, at a size that says nothing about seconds; what they count is what they should."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / 'benchmarks'

Rows = dict[str, list[str]]


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Rows]:
    """Run `python benchmarks/<name>.py <words>` and read the rows of its tables: first cell -> the others."""

    def run(name: str, *words: str) -> Rows:
        path = str(BENCHMARKS / f'{name}.py')
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        monkeypatch.setattr(sys, 'argv', [path, *words])
        runpy.run_path(path, run_name='__main__')
        lines = [line[2:-2].split(' | ') for line in capsys.readouterr().out.splitlines() if line.startswith('| ')]
        return {cells[0]: cells[1:] for cells in lines}

    return run


def test_ema_allocates_nothing_before_its_start_and_in_updates(rows):
    table = rows('ema', '1', '1')

    assert len(table) == 6
    assert table['allocated during an update, MiB'][0] == table['held before the start, MiB'][0] == '0.0'
    assert table['allocated during an update, MiB'][2] == '0 and 3 of the model'
    assert table['held after the start, MiB'][2] == '1 and 1 of the model'


def test_noise_counts_draws(rows):
    table = rows('noise', '1', '1')

    assert table['256 px'][0] == '8192'
    # 42 of Philox, moving words included, and 1.5 of Box and Muller; the single numbers of a sample hardly count.
    assert float(table['256 px'][1]) / 8192 == pytest.approx(43.8, rel=0.01)
    assert {'keyed draws', 'A100 80GB, 256 px', 'H200, 512 px'} <= set(table)
