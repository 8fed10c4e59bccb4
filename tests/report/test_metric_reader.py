"""Reading of metrics.jsonl in any state, and downsampling of its curves."""

import json
import math
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusion.report.metric_reader import MAX_SERIES, MetricReader, averages, downsample

LOSS = 'loss/train/total'


def read(*lines: object) -> MetricReader:
    reader = MetricReader()
    reader.feed(b''.join((line if isinstance(line, bytes) else json.dumps(line).encode()) + b'\n' for line in lines))
    return reader


def values(reader: MetricReader, name: str = LOSS) -> dict[int, float]:
    series = reader.series[name]
    assert [*series.steps] == sorted({*series.steps})
    return dict(zip(series.steps, series.values, strict=True))


def test_values_are_those_that_were_logged():
    lines = [{'step': step, LOSS: 1 / (step + 1), 'other': -step} for step in range(20)]
    reader = read(*lines, {'step': 20, 'metrics/eval/loss': 1e-9}, {'step': 5, 'single': 7})
    assert values(reader) == {step: 1 / (step + 1) for step in range(20)}
    assert values(reader, 'other') == {step: -step for step in range(20)}
    assert (values(reader, 'metrics/eval/loss'), values(reader, 'single')) == ({20: 1e-9}, {5: 7})


@settings(max_examples=25, deadline=None)
@given(st.lists(st.integers(0, 200), max_size=6))
def test_parts_give_the_same_as_the_whole(cuts):
    content = b''.join(b'{"step": %d, "loss/train/total": %d.5}\n' % (step, step) for step in range(10))
    whole, parts = MetricReader(), MetricReader()
    whole.feed(content)
    edges = [0, *sorted(cuts), len(content)]
    for low, high in pairwise(edges):
        parts.feed(content[low:high])
    assert values(parts) == values(whole) and parts.position == len(content)


def test_a_cut_last_line_is_read_once_it_is_complete():
    reader = MetricReader()
    reader.feed(b'{"step": 0, "loss/train/total": 1.0}\n{"step": 1, "loss/tr')
    assert reader.has_unfinished_line and values(reader) == {0: 1.0}
    reader.feed(b'ain/total": 0.5}\n')
    assert not reader.has_unfinished_line and values(reader) == {0: 1.0, 1: 0.5}
    assert reader.broken_lines == 0


def test_damaged_lines_are_counted_and_left_out():
    damaged = (b'\xff\xfe', b'{"step": 1', b'[1]', b'{"a": ' * 100_000)
    reader = read({'step': 0, LOSS: 1.0}, *damaged, {'step': 2, LOSS: 0.5})
    assert values(reader) == {0: 1.0, 2: 0.5} and reader.broken_lines == 4


@pytest.mark.parametrize('step', [None, 'a', True, -1, 1e300, 2**53])
def test_lines_without_a_batch_are_left_out(step):
    assert not read({'step': step, LOSS: 1.0}).series


def test_nan_and_infinity_are_kept_apart():
    lines = [{'step': 0, LOSS: 1.0}, {'step': 1, LOSS: math.nan}, {'step': 2, LOSS: math.inf, 'x': -math.inf}]
    reader = read(*lines, b'{"step": 3, "y": 1e999}')
    assert values(reader) == {0: 1.0}
    assert reader.series[LOSS].nonfinite == [(1, 'NaN'), (2, 'infinite')]
    assert reader.series['x'].nonfinite_count == reader.series['y'].nonfinite_count == 1
    many = read(*({'step': step, LOSS: math.nan} for step in range(25))).series[LOSS]
    assert (len(many.nonfinite), many.nonfinite_count) == (20, 25)
    many.cut(10)
    assert (len(many.nonfinite), many.nonfinite_count) == (10, 10)


def test_a_resumed_run_replaces_the_batches_that_it_repeats():
    first = [{'step': step, LOSS: 1.0} for step in range(10)] + [{'step': 4, 'metrics/eval/loss': 0.4}]
    first += [{'step': 8, 'metrics/eval/loss': 0.8}, {'step': 9, 'x': math.nan}]
    reader = read(*first, *({'step': step, LOSS: 2.0} for step in range(4, 7)))
    assert values(reader) == dict.fromkeys(range(4), 1.0) | dict.fromkeys(range(4, 7), 2.0)
    assert values(reader, 'metrics/eval/loss') == {4: 0.4}, 'the evaluation of the checkpoint stays'
    assert reader.series['x'].nonfinite_count == 0


def test_metrics_of_time_are_skipped_and_those_beyond_the_limit_named():
    reader = read({'step': 1, 'time/batch': 1.0, 'time/sample': 8.0}, {'step': 2, 'time/batch': 2.0, 'mine': 3.0})
    assert [*reader.series] == ['mine']
    reader = read({'step': 0} | {f'layer{index}': 1.0 for index in range(MAX_SERIES + 7)})
    assert len(reader.series) == MAX_SERIES and len(reader.dropped) == 7


def test_points_of_a_short_curve():
    steps, values = range(0, 20, 2), [0.0, 7, 1, 4, 1, 5, 9, 2, 6, 0]
    assert downsample(steps, values, 10) == ([*steps], values)
    assert downsample(steps, values, 6) == ([0, 2, 4, 12, 14, 18], [0, 7, 1, 9, 2, 0]), 'extremes of two parts'
    assert averages(steps, values, 3) == ([2, 8, 15], [8 / 3, 10 / 3, 17 / 4])


curves = st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=300)


@settings(max_examples=80, deadline=None)
@given(curves, st.integers(4, 80))
def test_extremes_and_ends_stay_and_the_limit_holds(values, limit):
    steps = [3 * index for index in range(len(values))]
    x, y = downsample(steps, values, limit)
    assert len(x) <= max(limit, 4)
    assert x == sorted({*x})
    assert all(values[step // 3] == value for step, value in zip(x, y, strict=True)), 'points are those of the curve'
    assert (min(y), max(y)) == (min(values), max(values))
    assert (x[0], x[-1]) == (steps[0], steps[-1])


@settings(max_examples=40, deadline=None)
@given(curves, st.integers(1, 50))
def test_averages_of_equal_parts_have_the_average_of_the_curve(values, count):
    x, y = averages(range(len(values)), values, count)
    assert len(x) == min(count, len(values)) and x == sorted({*x})
    if len(values) % len(y) == 0:
        assert sum(y) / len(y) == pytest.approx(sum(values) / len(values), abs=1e-3)
