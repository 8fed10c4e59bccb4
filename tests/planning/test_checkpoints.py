"""Size of checkpoints, save intervals, host memory of snapshots, and goodput, also simulated for save strategies."""

import runpy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from diffusion.planning import goodput_simulation
from diffusion.planning.checkpoints import (
    best_interval,
    chosen_interval,
    default_mtbf_hours,
    default_stall_seconds,
    goodput,
    kept_checkpoints,
    observed_mtbf_hours,
    resilience_of,
    sizes_of,
    snapshot_bytes_per_node,
)
from diffusion.planning.goodput_simulation import (
    SHARES,
    Failure,
    SaveStrategy,
    Tier,
    save_strategies,
    simulated_goodput,
)
from diffusion.planning.memory import Setup
from tests.planning.recipes import PHASES, YAMLS, both, phase, write_recipe

PHASE1, PHASE2 = both()


def test_memory_of_snapshots_per_node():
    """All on the first node, or the shards of the node's devices; SD2 has 13.85 GB."""
    total = sizes_of(PHASE2.recipe, PHASE2.model).with_averages
    found = {}
    for words in ('whole', 'sharded', 'sharded replicas=32', 'asynchronous=false'):
        kind, _, replicas = words.partition(' replicas=')
        overrides = [f'checkpointing.{kind}'] if '=' in kind else [f'parallelism.checkpoints={kind}']
        work = phase(PHASES[1], [*overrides, f'parallelism.replicas={replicas or 1}'])
        found[words] = snapshot_bytes_per_node(work, Setup(128, 16, work.recipe.parallelism), gpus_per_node=8)
    # Of 32 replicas, all four shards are on the first node.
    expected = {'whole': total, 'sharded': pytest.approx(total / 16, abs=1), 'sharded replicas=32': total}
    assert found == expected | {'asynchronous=false': 0}


@pytest.mark.parametrize(
    ('checkpoints', 'replicate', 'copies'),
    [('whole', False, 3), ('whole', True, 3), ('sharded', False, 3), ('sharded', True, 5)],
)
def test_memory_of_a_tier_per_node(checkpoints, replicate, copies):
    """A snapshot, and two checkpoints of this node; the shards of its peer twice too."""
    tier = f'checkpointing.tiers.memory.replicate={str(replicate).lower()}'
    work = phase(PHASES[1], [f'parallelism.checkpoints={checkpoints}', tier])
    part = 1 if checkpoints == 'whole' else 16
    total = sizes_of(PHASE2.recipe, PHASE2.model).with_averages
    found = snapshot_bytes_per_node(work, Setup(128, 16, work.recipe.parallelism), gpus_per_node=8)
    assert found == pytest.approx(copies * total / part, abs=copies)


def test_sharded_checkpoints_are_written_by_all_nodes():
    whole = phase(PHASES[1], ['parallelism.checkpoints=whole'])
    assert default_stall_seconds(whole, nodes=16) == pytest.approx(16 * default_stall_seconds(PHASE2, nodes=16))


@settings(max_examples=60)
@given(st.floats(0.1, 300), st.floats(1, 500))
def test_best_interval_is_the_optimum(stall, mtbf_hours):
    mtbf = 3600 * max(mtbf_hours, stall / 60)
    best = best_interval(stall=stall, mtbf=mtbf)

    def at(interval):
        return goodput(interval=interval, stall=stall, restart=300, mtbf=mtbf)

    assert 0 < at(best) < 1
    assert at(best) > max(at(best / 4), at(best * 4))
    assert at(best) >= max(at(best * factor) for factor in (0.5, 0.9, 0.99, 1.01, 1.1, 2))
    assert 0.97 * (2 * stall * mtbf) ** 0.5 - stall < best < (2 * stall * mtbf) ** 0.5  # Young 1974


def test_interval_in_batches_is_between_one_batch_and_the_run(tmp_path):
    found = resilience_of(PHASE1, images_per_second=11_600, nodes=16, mtbf_hours=396, stall_seconds=10)
    assert found.interval_seconds == best_interval(stall=10, mtbf=396 * 3600)
    assert found.interval_batches == round(found.interval_seconds * 11_600 / 2048)
    assert found.recipe_interval_seconds == pytest.approx(10_000 * 2048 / 11_600)
    assert found.recipe_goodput is not None and found.recipe_goodput < found.goodput
    often = resilience_of(PHASE1, images_per_second=1.0, nodes=1, mtbf_hours=0.001, stall_seconds=1e-3)
    assert often.interval_batches == 1
    short = phase(write_recipe(tmp_path))
    at_end = resilience_of(short, images_per_second=100.0, nodes=1, mtbf_hours=1000, stall_seconds=60)
    assert at_end.interval_batches == 80
    assert at_end.recipe_interval_seconds is None, 'the default interval is in epochs'


def test_chosen_interval_is_the_best_one_within_bounds():
    assert chosen_interval(stall=8, mtbf=3 * 3600) == best_interval(stall=8, mtbf=3 * 3600)
    assert chosen_interval(stall=8, mtbf=5000 * 3600) == 3600  # at most an hour of work is lost
    assert chosen_interval(stall=0.01, mtbf=3600) == 60
    assert best_interval(stall=1000, mtbf=1) == pytest.approx(1), 'at most the time between failures'
    assert chosen_interval(stall=300, mtbf=3600) == 6000  # saves take at most 5% of the time


def test_expected_failures_scale_from_llama_3_and_yield_to_those_of_the_run():
    assert default_mtbf_hours(16_384) == pytest.approx(3.1, abs=0.05)
    assert (prior := default_mtbf_hours(128)) == pytest.approx(396, abs=1)
    assert observed_mtbf_hours(prior_hours=prior, failures=0, hours=0) == pytest.approx(prior)
    assert observed_mtbf_hours(prior_hours=prior, failures=0, hours=48) > prior
    assert observed_mtbf_hours(prior_hours=prior, failures=4, hours=24) == pytest.approx(48 / 4.06, rel=1e-2)
    # A cluster that fails several times a day, and then as often as expected.
    assert observed_mtbf_hours(prior_hours=2, failures=12, hours=24) == pytest.approx(2)


@pytest.mark.parametrize('interval', ['9s', '9sec', '9m', '9min', '1.5h', 'auto'])
def test_intervals_in_time_are_planned(tmp_path, interval):
    work = phase(write_recipe(tmp_path, trainer={'max_duration': '100ba', 'save_interval': interval}))
    found = resilience_of(work, images_per_second=100.0, nodes=1, mtbf_hours=10, stall_seconds=5)
    seconds = {'9s': 9, '9sec': 9, '9m': 540, '9min': 540, '1.5h': 5400, 'auto': chosen_interval(stall=5, mtbf=36_000)}
    assert found.recipe_interval_seconds == seconds[interval]


@pytest.mark.parametrize(
    ('words', 'count'),
    [
        ([], 55),
        (['trainer.save_num_checkpoints_to_keep=2'], 3),
        (['checkpointing.keep={last: 2, daily: 3, every: 100000ba}'], 2 + 3 + 5 + 1),
        (['checkpointing.keep={last: 100}'], 55),
        (['trainer.save_interval=1h', 'checkpointing.keep={hourly: 24}'], 26),
        (['trainer.save_interval=1ep'], None),
        (['trainer.save_interval=1ep', 'checkpointing.keep={hourly: 24}'], 26),
    ],
)
def test_storage_of_checkpoints_follows_the_rules_that_keep_them(words, count):
    work = phase(PHASES[0], words)
    found = resilience_of(work, images_per_second=11_600, nodes=16, mtbf_hours=396)
    kept_at_most = kept_checkpoints(work, found, sizes_of(work.recipe, work.model))
    if count is None:
        assert kept_at_most is None
    else:
        assert kept_at_most is not None and kept_at_most.count == count
        assert kept_at_most.bytes == pytest.approx(count * 10.39e9, rel=0.001)


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
    simulated = simulated_goodput(synchronous(interval, stall), mtbf=mtbf, restart=restart)
    assert simulated == pytest.approx(closed, abs=0.003)


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


def test_tables_and_gains_in_the_documentation_are_those_of_the_benchmark():
    main = runpy.run_path(str(YAMLS.parent / 'benchmarks' / 'plans.py'))
    page = (YAMLS.parent / 'docs/planning.md').read_text()
    for rows in (main['goodput_rows'](), main['speedrun_rows'](main['load_gpus']())):
        assert '\n'.join(rows) in page
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
