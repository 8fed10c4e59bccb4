"""The slowest rank is logged with its factor, although the batches of all ranks take equally long."""

import pytest

from diffusion.callbacks.stragglers import HostTimer, slowest
from diffusion.loggers.metrics_file import read_metrics


def test_slowest_rank_is_compared_with_the_median():
    assert slowest([1.0, 1.0, 3.0, 1.0]) == (2, 3.0)
    assert slowest([2.0, 1.0]) == (0, 2.0)
    assert slowest([0.0, 0.0]) == (0, 1.0)


def test_host_timer_ignores_a_stop_without_a_start(monkeypatch):
    now = iter([1.0, 4.0, 10.0, 10.5])
    monkeypatch.setattr('diffusion.callbacks.stragglers.time.perf_counter', lambda: next(now))
    timer = HostTimer()
    timer.start()
    timer.stop()
    timer.stop()
    timer.start()
    timer.stop()
    assert timer.take() == 3.5 and timer.take() == 0.0


@pytest.mark.slow
def test_slow_rank_is_logged(ranks, write_recipe, tmp_path):
    # Under FSDP2 the ranks would wait for the slow one in every block, so only the time before the first one counts.
    ranks.run(2, write_recipe(imports=['tests.slow_rank'], parallelism={'strategy': 'fsdp2'}))
    metrics = read_metrics(tmp_path / 'runs' / 'run' / 'metrics.jsonl')
    assert list(metrics['straggler/slowest_rank']) == [4, 8]
    assert metrics['straggler/slowest_rank'][8] == 1.0
    assert metrics['straggler/slowest_factor'][8] > 1.2
