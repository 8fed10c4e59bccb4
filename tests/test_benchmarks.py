"""Benchmarks run at a tiny size, where times mean nothing, and their counts are checked."""

import runpy
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

BENCHMARKS = Path(__file__).parents[1] / 'benchmarks'

Rows = dict[str, list[str]]
ADDED = ('tf32', 'fused_optimizer', 'flash_attention', 'conv_benchmark', 'channels_last', 'low_precision_norms')


@pytest.fixture
def rows(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Callable[..., Rows]:
    """Function that runs `python benchmarks/NAME.py WORDS` and returns the rows of its tables by their first cell."""

    def run(name: str, *words: str) -> Rows:
        path = str(BENCHMARKS / f'{name}.py')
        monkeypatch.syspath_prepend(str(BENCHMARKS))
        monkeypatch.setattr(sys, 'argv', [path, *words])
        runpy.run_path(path, run_name='__main__')
        lines = [line[2:-2].split(' | ') for line in capsys.readouterr().out.splitlines() if line.startswith('| ')]
        return {cells[0]: cells[1:] for cells in lines}

    return run


def test_ema_allocates_nothing_before_its_start_or_during_updates(rows):
    table = rows('ema', '1', '1')

    assert len(table) == 6
    assert table['allocated during an update, MiB'][0] == table['held before the start, MiB'][0] == '0.0'
    assert table['allocated during an update, MiB'][2] == '0 and 3 of the model'
    assert table['held after the start, MiB'][2] == '1 and 1 of the model'


@pytest.mark.slow
def test_overhead_benchmark_compares_the_trainer_with_plain_loops(rows):
    table = rows('overhead', '25', '2')

    assert {'Trainer', 'bare PyTorch loop', "trainer as in diffusers' example"} <= set(table)
    # The overhead itself is for the benchmark to measure. That the stages add up does not depend on the speed.
    assert float(table['sum of stages over independently measured time, %'][0]) == pytest.approx(100, abs=5)
    assert 30 < int(table['stage changes per step'][0]) < 100
    assert 'total share of the step, %' in table


@pytest.mark.slow
def test_step_benchmark_has_a_row_per_part(rows):
    table = rows('step', '--pixels', '256', '--steps', '1', '--warmup', '1', '--millions', '1')

    names = [name for name in table if name.startswith('+ ')]
    assert table['plain'][4] == '1.00'
    assert names == [f'+ {part}' for part in ADDED]


def test_muon_benchmark_counts_fewer_operations_in_batches(rows):
    table = rows('muon', '1', '1')

    names = ('Muon in batches', 'Muon, one matrix at a time', 'AdamW, fused')
    batched, loop, adamw = (int(table[name][0]) for name in names)
    assert 4 * batched < loop
    assert adamw < 10
    assert table[names[0]][2] == table[names[2]][3] == '1.00'


def test_noise_benchmark_counts_operations_per_draw(rows):
    table = rows('noise', '1', '1')

    assert table['256 px'][0] == '8192'
    # 42 for Philox, including moves of words, and 1.5 for Box-Muller; the per-sample draws are negligible.
    assert float(table['256 px'][1]) / 8192 == pytest.approx(43.8, rel=0.01)
    assert {'keyed draws', 'A100 80GB, 256 px', 'H200, 512 px'} <= set(table)


@pytest.mark.slow
def test_loader_benchmark_compares_with_the_published_loader_and_a_loop(rows):
    table = rows('loader', '32', '1')

    loaders = ('published loader', 'our loader', 'bare loop')
    assert [name for name in table if ' px, ' in name] == [
        f'{side} px, {name}' for side in (256, 512) for name in loaders
    ]
    assert all(float(cells[0]) > 0 for name, cells in table.items() if ' px, ' in name)
    assert 'times the published' in table['512 px, our loader'][3]


@pytest.mark.slow
def test_startup_benchmark_has_a_row_per_size(rows):
    table = rows('startup', '0.1')

    epoch, *_, shared = table['0.1 M']
    assert epoch == 'all'
    assert 0.8 <= float(shared) < 20  # 8 bytes per sample temporarily, and little else


def test_tread_benchmark_counts_fewer_flops(rows):
    table = rows('tread', '8', '64', '8', '1')

    assert 0.5 < float(table['TREAD over all tokens'][1]) < 1
