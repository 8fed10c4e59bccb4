"""Simulated goodput of save strategies, against the closed form."""

import runpy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusion.planning import goodput_simulation
from diffusion.planning.checkpoints import best_interval, chosen_interval, goodput
from diffusion.planning.goodput_simulation import (
    SHARES,
    Failure,
    SaveStrategy,
    Tier,
    save_strategies,
    simulated_goodput,
)
from tests.planning.recipes import YAMLS

HOUR = 3600.0


def synchronous(interval: float, stall: float) -> SaveStrategy:
    return SaveStrategy('synchronous', interval, stall, (Tier('durable', Failure.CLUSTER, lag=0.0, restore=0.0),))


def goodputs(*, stall=60.0, restart=240.0, mtbf, **keywords):
    strategies = save_strategies(stall=stall, restart=restart, mtbf=mtbf, **keywords)
    return {each.name: simulated_goodput(each, mtbf=mtbf, restart=restart) for each in strategies}


@settings(max_examples=40, deadline=None)
@given(st.floats(0.5, 300), st.floats(0, 900), st.floats(0.25, 3), st.floats(1, 500))
def test_synchronous_saves_agree_with_the_closed_form(stall, restart, factor, mtbf_hours):
    mtbf = max(mtbf_hours * HOUR, 10 * stall)
    interval = factor * best_interval(stall=stall, mtbf=mtbf)
    closed = goodput(interval=interval, stall=stall, restart=restart, mtbf=mtbf)
    assert simulated_goodput(synchronous(interval, stall), mtbf=mtbf, restart=restart) == pytest.approx(
        closed, abs=0.003
    )


def test_tiers_gain_only_by_frequent_failures_that_spare_memory(monkeypatch):
    found = [*goodputs(mtbf=3 * HOUR, recipe_interval=1800).values()]
    assert found == sorted(found) and found[-1] - found[-2] > 0.005
    rare = goodputs(mtbf=396 * HOUR)
    assert rare['tiers'] - rare['asynchronous'] < 0.0005, 'on 128 GPUs tiers add nothing'
    monkeypatch.setattr(goodput_simulation, 'SHARES', {Failure.CLUSTER: 1.0})
    goodput_simulation._draw_failures.cache_clear()
    only = goodputs(mtbf=3 * HOUR)
    goodput_simulation._draw_failures.cache_clear()
    assert only['tiers'] == pytest.approx(only['asynchronous'], abs=1e-12)


def test_a_save_begins_after_the_one_before_is_complete():
    """Save a checkpoint that takes 20 min to write, in a cluster that fails every half hour."""
    strategies = {each.name: each for each in save_strategies(stall=1200, restart=300, mtbf=HOUR / 2)}
    assert strategies['asynchronous'].interval == 1200
    tiers = strategies['tiers']
    for tier in tiers.tiers:
        assert tier.every * (tiers.interval + tiers.stall) >= tier.lag


def test_gaps_are_exponential_and_kinds_have_their_shares():
    drawn = goodput_simulation._draw_failures(goodput_simulation.FAILURES)
    gaps = sorted(gap for gap, _ in drawn)
    assert sum(gaps) / len(gaps) == pytest.approx(1, abs=0.005)
    assert gaps[len(gaps) // 2] == pytest.approx(0.6931, abs=0.005)
    assert sum(gap**2 for gap in gaps) / len(gaps) == pytest.approx(2, abs=0.05)
    for kind, share in SHARES.items():
        assert sum(each is kind for _, each in drawn) / len(drawn) == pytest.approx(share, abs=0.02)


def test_table_in_the_documentation_is_that_of_the_benchmark():
    main = runpy.run_path(str(YAMLS.parent / 'benchmarks' / 'plans.py'))
    page = (YAMLS.parent / 'docs/planning.md').read_text()
    assert '\n'.join(main['goodput_rows']()) in page
    often, rare = (goodputs(mtbf=hours * HOUR, recipe_interval=1800) for hours in (3, 386))
    half_hour = rare['synchronous (recipe)']
    hourly = goodput(interval=chosen_interval(stall=60, mtbf=386 * HOUR), stall=60, restart=240, mtbf=386 * HOUR)
    for gain, words in (
        (rare['synchronous'] - half_hour, 'the best one instead of half an hour is worth {:.1f}%'),
        (hourly - half_hour, 'saves at least every hour, {:.1f}%'),
        (rare['asynchronous'] - rare['synchronous'], 'Saves in the background are worth another {:.1f}%'),
        (often['tiers'] - often['asynchronous'], 'gain {:.1f}% more on thousands of GPUs'),
        (180 / (3 * HOUR), 'The other 180 s are {:.1f}% of the time'),
    ):
        assert words.format(100 * gain) in ' '.join(page.split())
